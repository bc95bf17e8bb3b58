"""Drift of the device between a baseline and a run, by control kernels that run no code of the project under test.

Not by the suite's median: that would hide a change which makes every test slower. A row's drift is that of the control which is bound
by the same part of the device; rows bound by neither DRAM nor L2 have none. What a drift may be without the device having changed is
known from how processes differ; below that nothing is taken out, far beyond it nothing is judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.verdicts.noise import placement_spread, process_spread
from pytest_gpumem.verdicts.spread import PROCESS_PRIOR, Variance

BOUND = 0.5
"""Share of the DRAM peak from which on a row counts as bound by DRAM or, where it fits in L2, by L2."""
BEYOND_NOISE = 0.999
"""Confidence that a drift is the device's before it is taken out."""
LIMIT = 0.02
"""Drift of a control, as a share, from which on rows of its kind are not judged."""
CONTROL_PLACEMENTS = 2
"""Placements that a reading of a control is over at least."""
KINDS = {"dram": "a read of DRAM", "l2": "a read of L2"}


@dataclass(frozen=True)
class Drift:
    """How much slower a control kernel is than in the baseline."""

    log: float
    """Log-ratio, slower counted up."""
    variance: Variance
    """Of `log`, if the device is as it was."""
    kind: str
    """Which control: a key of `KINDS`."""

    @property
    def beyond_noise(self) -> bool:
        """Whether the device has changed, rather than the reading."""
        return abs(self.log) > self.variance.reach(BEYOND_NOISE)

    @property
    def too_large(self) -> bool:
        """Whether it is too large to be taken out: nobody knows that a row follows the control that far."""
        return self.beyond_noise and abs(math.expm1(self.log)) > LIMIT


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


def between(now: Sequence[float], then: Sequence[float], kind: str) -> Drift | None:
    """The drift of one control from the baseline's readings to this run's, in seconds, one of each process; None without either."""
    if not now or not then:
        return None
    logs = [math.log(seconds) for seconds in then]
    mean, count = statistics.fmean(logs), len(logs)
    latency = statistics.fmean(then)
    expected = process_spread(latency) ** 2 + placement_spread(latency) ** 2 / CONTROL_PLACEMENTS
    squares = math.fsum((log - mean) ** 2 for log in logs)
    freedom = PROCESS_PRIOR + count - 1
    variance = Variance((PROCESS_PRIOR * expected + squares) / freedom, freedom).times(1 / len(now) + 1 / count)
    return Drift(statistics.fmean(math.log(seconds) for seconds in now) - mean, variance, kind)
