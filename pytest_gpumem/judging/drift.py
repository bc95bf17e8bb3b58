"""Changes of the device since the baseline, shown by control kernels that run no code of the project under test.

The suite's median does not serve: it hides a change that makes every test slower. A row follows the control that the same part of the
device bounds; rows bound by neither DRAM nor L2 follow none. No record shows that a row follows its control one to one, so no row is
corrected by it. A verdict stands only if it holds for a row that follows and for one that does not. So it is with the SM clock, for rows
that no bandwidth bounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_gpumem.judging.finding import Finding, change, find
from pytest_gpumem.judging.screen import LOWER
from pytest_gpumem.judging.spread import (
    FARTHEST,
    PRIOR,
    Variance,
    moderated,
    placement_spread,
    process_spread,
    squares_around_mean,
)
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.units import format_share, format_time

BOUND = 0.5  # least share of the peak of a row that DRAM bounds; a hot row of no more than this share of L2 is bound by L2; choice
LIMITS = {"dram": 0.02, "l2": 0.04, "latency": 0.015}
"""Largest change of a control with which rows that follow it are judged. Cards whose latencies of DRAM differ by more are variants of a
card; recorded: L2 of an unchanged H100 up to 3.4 % apart (ci/records/nvidia-h100/control_noise.json), H200 variants 3.7 % apart."""
KINDS = {"dram": "a read of DRAM", "l2": "a read of L2", "latency": "an access to DRAM"}
CLOCK = "clock"  # a drift that no control shows: that of the SM clock
CLOCKS_APART = 0.01  # least difference, as a share, of clocks that do not agree; choice: one step of 15 MHz is less


@dataclass(frozen=True)
class Drift:
    """The change of a control kernel since the baseline; slower is positive."""

    log: float  # log-ratio
    variance: Variance  # variance of `log` for an unchanged device
    kind: str  # the control: a key of `KINDS`, or `CLOCK`
    whose: str = ""  # in words, whether this card changed or others are different; empty if unknown

    @property
    def share(self) -> float:
        """The change as a share."""
        return math.expm1(self.log)

    @property
    def too_large(self) -> bool:
        """True if no row that follows the control can be judged. A row takes no more than the clock's change by it."""
        return (
            self.kind != CLOCK
            and abs(self.log) > self.variance.reach(LOWER)
            and abs(self.share) > LIMITS[self.kind]
        )

    def doubt(self, found: str) -> Finding:
        """The finding that this change forbids a judgement; `found` is the judgement without it."""
        control = (
            "a cycle of the SM clock"
            if self.kind == CLOCK
            else f"{KINDS[self.kind]} that runs no code of the project"
        )
        figures = {
            "control": control,
            "share": change(self.share),
            "whose": self.whose,
            "finding": found,
        }
        return find(Outcome.UNDECIDED, "device changed", Code.CONDITIONS, **figures)


def control_of(measurement: Measurement, facts: DeviceFacts) -> str | None:
    """The bandwidth that a measurement follows, "dram" or "l2"; None if something else bounds it, or the peak is unknown."""
    if measurement.moved_bytes is None or not _on_device(measurement):
        return None
    if not facts.dram_peak or (measurement.bandwidth or 0.0) < BOUND * facts.dram_peak:
        return None
    if measurement.mode != "hot":
        return "dram"
    return (
        "l2"
        if measurement.footprint is not None and measurement.footprint <= BOUND * facts.l2_bytes
        else None
    )


def _on_device(measurement: Measurement) -> bool:
    """False for a time of the host or of the link to it."""
    return measurement.sampler not in ("host", "plain") and (
        measurement.moved_bytes is None or not measurement.moved_bytes.link
    )


def drift_of(
    measurement: Measurement, history: Sequence[Measurement], facts: DeviceFacts
) -> Drift | None:
    """The change of the control that a row follows, from the processes of its history to those of this run; None if unknown."""
    own = measurement.controls
    if own is None or not _on_device(measurement):
        return None
    kind = control_of(measurement, facts) or "latency"

    def read(measurements: Iterable[Measurement]) -> list[float]:
        every = (
            controls
            for one in measurements
            for controls in (one.controls, *(process.controls for process in one.further))
        )
        found = [
            controls for controls in every if controls is not None and controls.source == own.source
        ]
        return [seconds for controls in found if (seconds := getattr(controls, kind)) is not None]

    now = read([measurement])
    drift = between(now, read(history), kind)
    card = _card(measurement)
    if drift is None or card is None:
        return drift
    whose = "; this card is as in its own runs, so other cards of the baseline differ"
    if (
        of_card := between(now, read(past for past in history if _card(past) == card), kind)
    ) is None:
        whose = "; the baseline has no run of this card, and its cards may differ from it"
    elif of_card.too_large:
        whose = f"; against its own runs this card drifted by {change(of_card.share)}"
    return replace(drift, whose=whose)


def clock_drift(
    measurement: Measurement, history: Sequence[Measurement], facts: DeviceFacts
) -> Drift | None:
    """The change of the SM clock, from the median run of a row's history to this one; None if both agree or are unknown, or if a bandwidth
    bounds the row. The code of a test cannot set this clock; if its power lowers it, the driver reports throttling."""
    if not _on_device(measurement) or control_of(measurement, facts) is not None:
        return None
    both = [measurement, *history]
    ran = [
        one.ran_at_hz if isinstance(one.ran_at_hz, float) and one.ran_at_hz > 0 else None
        for one in both
    ]
    # The driver's readings after the samples; before them the device may be idle.
    clocks = ran if None not in ran else [one.conditions[-1].sm_clock_hz or None for one in both]
    own, then = clocks[0], [clock for clock in clocks[1:] if clock is not None]
    if own is None or not then or clocks_agree(own, usual := statistics.median(then)):
        return None
    log = math.log(usual) - math.log(own)
    return Drift(math.copysign(min(abs(log), FARTHEST), log), Variance(0.0, PRIOR), CLOCK)


def clocks_agree(one: float, other: float) -> bool:
    """True if two clocks, in hertz, differ by no more than a step."""
    return abs(one - other) < CLOCKS_APART * max(one, other)


def _card(measurement: Measurement) -> str | None:
    return measurement.provenance.card if measurement.provenance is not None else None


def since_start(kind: str, log: float) -> str | None:
    """The change of a control since the session's start, in words, by its log-ratio; None up to its limit."""
    if (share := abs(math.expm1(log))) <= LIMITS[kind]:
        return None
    return (
        f"the device changed while it was measured: {KINDS[kind]} that runs no code of the project takes {format_share(share)} "
        f"{'longer' if log > 0 else 'less'} than at the start, more than {format_share(LIMITS[kind])}"
    )


def between(now: Sequence[float], then: Sequence[float], kind: str) -> Drift | None:
    """The change of one control between two sets of readings, in seconds, one a process; None if either is empty."""
    if not now or not then:
        return None
    logs, latency = [math.log(seconds) for seconds in then], statistics.fmean(then)
    expected = process_spread(latency) ** 2 + placement_spread(latency) ** 2
    value = moderated(expected, squares_around_mean(logs), len(logs) - 1, PRIOR)
    variance = Variance(value * (1 / len(now) + 1 / len(then)), PRIOR + len(logs) - 1)
    return Drift(
        statistics.fmean(math.log(seconds) for seconds in now) - statistics.fmean(logs),
        variance,
        kind,
    )


def same_variant(measurement: Measurement, past: Measurement) -> bool:
    """False if the two measurements come from cards of known, different variants."""
    own, then = _latency(measurement), _latency(past, like=measurement)
    return own is None or then is None or abs(math.log(own / then)) <= math.log1p(LIMITS["latency"])


def latencies(measurement: Measurement, history: Sequence[Measurement]) -> tuple[str, str]:
    """In words, the DRAM latency of this card and the range of those of the history, which come from other variants."""
    own = _latency(measurement)
    others = sorted(
        then for past in history if (then := _latency(past, like=measurement)) is not None
    )
    assert own is not None
    assert others
    low, high = format_time(others[0]), format_time(others[-1])
    return format_time(own), low if low == high else f"{low} to {high}"


def _latency(measurement: Measurement, like: Measurement | None = None) -> float | None:
    """Seconds of one access to DRAM; None if it was not read, or by another control than that of `like`."""
    controls = measurement.controls
    if controls is None or (
        like is not None and like.controls is not None and like.controls.source != controls.source
    ):
        return None
    return controls.latency
