"""Whether the device is as it was for the baseline, by control kernels that run no code of the project under test.

The suite's median would not do: it hides a change that makes every test slower. A row follows the control that is bound by the same part
of the device; rows bound by neither DRAM nor L2 follow none. No record shows that a row follows its control one to one, so nothing is
corrected by it: a verdict stands only if it holds whether the row follows or not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_gpumem.judging.finding import change
from pytest_gpumem.judging.spread import PRIOR, Variance, moderated, placement_spread, process_spread, squares_around_mean
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.units import format_share, format_time

BOUND = 0.5
"""Share of the DRAM peak from which on a row counts as bound by DRAM or, where it fits in L2, by L2."""
BEYOND_NOISE = 0.999
"""Confidence that a control changed."""
LIMIT = 0.02
"""Change of a control, as a share, from which on rows that follow it are not judged at all."""
CONTROL_PLACEMENTS = 2
"""Least placements of a control's reading."""
KINDS = {"dram": "a read of DRAM", "l2": "a read of L2"}


@dataclass(frozen=True)
class Drift:
    """How much slower a control kernel is than for the baseline."""

    log: float
    """Log-ratio, slower counted up."""
    variance: Variance
    """Of `log`, if the device is as it was."""
    kind: str
    """Which control: a key of `KINDS`."""

    @property
    def share(self) -> float:
        """The change as a share, slower counted up."""
        return math.expm1(self.log)

    @property
    def too_large(self) -> bool:
        """True if no row that follows the control can be judged."""
        return abs(self.log) > self.variance.reach(BEYOND_NOISE) and abs(self.share) > LIMIT

    @property
    def sentence(self) -> str:
        """The change in words, without a full stop."""
        return f"the device has changed since the baseline: {KINDS[self.kind]} that runs no code of the project takes {change(self.share)}"


def kind_of(measurement: Measurement, facts: DeviceFacts) -> str | None:
    """The control that a measurement follows, "dram" or "l2"; None where it is bound by something else."""
    if measurement.traffic is None or measurement.traffic.link or measurement.sampler in ("host", "plain"):
        return None
    if (measurement.bandwidth or 0.0) < BOUND * facts.peak_bandwidth:
        return None
    if measurement.mode != "hot":
        return "dram"
    return "l2" if measurement.footprint is not None and measurement.footprint <= facts.l2_bytes / 2 else None


def drift_of(measurement: Measurement, history: Sequence[Measurement], facts: DeviceFacts) -> Drift | None:
    """The device's drift between the history's processes and this run's, for a row of this kind; None where it is not known."""
    kind, own = kind_of(measurement, facts), measurement.controls
    if kind is None or own is None:
        return None

    def read(measurements: Iterable[Measurement]) -> list[float]:
        every = (controls for one in measurements for controls in (one.controls, *(process.controls for process in one.further)))
        found = [controls for controls in every if controls is not None and controls.source == own.source]
        return [seconds for controls in found if (seconds := getattr(controls, kind)) is not None]

    return between(read([measurement]), read(history), kind)


def since_start(kind: str, log: float) -> str | None:
    """How a control changed since the session's start, by its log-ratio; None where rows are judged all the same."""
    if (share := abs(math.expm1(log))) <= LIMIT:
        return None
    return (
        f"the device changed while it was measured: {KINDS[kind]} that runs no code of the project takes {format_share(share)} "
        f"{'longer' if log > 0 else 'less'} than at the start, more than {format_share(LIMIT)}"
    )


def between(now: Sequence[float], then: Sequence[float], kind: str) -> Drift | None:
    """The drift of one control from the baseline's readings to this run's, in seconds, one of each process; None without either."""
    if not now or not then:
        return None
    logs, latency = [math.log(seconds) for seconds in then], statistics.fmean(then)
    expected = process_spread(latency) ** 2 + placement_spread(latency) ** 2 / CONTROL_PLACEMENTS
    value = moderated(expected, squares_around_mean(logs), len(logs) - 1, PRIOR)
    variance = Variance(value * (1 / len(now) + 1 / len(then)), PRIOR + len(logs) - 1)
    return Drift(statistics.fmean(math.log(seconds) for seconds in now) - statistics.fmean(logs), variance, kind)


APART = 0.015
"""Least share by which the latency of DRAM differs between variants: less than half of what was seen."""


def same_variant(measurement: Measurement, past: Measurement) -> bool:
    """True unless the two were measured on cards that are known to be of different variants."""
    own, then = _latency(measurement), _latency(past, like=measurement)
    return own is None or then is None or abs(math.log(own / then)) <= math.log1p(APART)


def other_variant(measurement: Measurement, history: Sequence[Measurement]) -> str:
    """What tells this card from those of the history, all of which are of another variant."""
    own = _latency(measurement)
    others = sorted(then for past in history if (then := _latency(past, like=measurement)) is not None)
    assert own is not None
    assert others
    low, high = format_time(others[0]), format_time(others[-1])
    theirs = low if low == high else f"{low} to {high}"
    return (
        f"the baseline is of another variant of this card, or of another clock: DRAM answers in {format_time(own)} here and in {theirs} "
        "there, and unchanged code takes another time; accept runs of this variant (--gpumem-save), or let gpumem duet decide"
    )


def _latency(measurement: Measurement, like: Measurement | None = None) -> float | None:
    """Seconds of one access to DRAM; None where it was not read, or not as `like` has it."""
    controls = measurement.controls
    if controls is None or (like is not None and like.controls is not None and like.controls.source != controls.source):
        return None
    return controls.latency
