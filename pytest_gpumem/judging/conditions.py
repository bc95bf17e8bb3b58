"""Whether a measurement can be judged: its conditions, its time and its interval. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpumem.judging.finding import basis
from pytest_gpumem.judging.slowdown import WIDEST
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import LimitResult
from pytest_gpumem.units import counted, format_share, format_time

NOTHING_RAN = 1.5
"""Latency over `floor` up to which nothing ran between two events."""
BUSY = 0.25  # share of the looks at which other work may keep the device busy; choice


def unreliable(measurement: Measurement) -> Iterator[str]:
    """Yield why a measurement cannot be judged."""
    yield from conditions(measurement)
    yield from doubts(measurement)


def conditions(measurement: Measurement) -> Iterator[str]:
    """Yield the conditions of the machine that forbid a judgement."""
    if measurement.profiled:
        yield "a profiler was attached"
    last = measurement.conditions[1]  # those before it are of samples that were discarded
    if last.throttle_reasons:
        clock = ""
        if last.sm_clock_hz is not None:
            clock = f" at {last.sm_clock_hz / 1e6:.0f} MHz"
        yield f"throttled at the last samples ({', '.join(last.throttle_reasons)}{clock})"
    during = measurement.during
    if measurement.discarded >= len(measurement.samples):
        reasons = "" if during is None else f" ({', '.join(during.throttle_reasons or ())})"
        taken = counted(measurement.discarded, "sample")
        yield f"{taken} taken under throttling{reasons}, {len(measurement.samples)} left"
    others = [seen.other_processes or 0 for seen in measurement.conditions]
    if during is not None:
        others.append(during.other_processes or 0)
    if max(others):
        yield f"{counted(max(others), 'other process')} on the device"
    if measurement.launches_wait:
        yield "CUDA_LAUNCH_BLOCKING is set, so that every launch waits for the device"
    if measurement.busy > BUSY:
        busy = format_share(measurement.busy)
        yield f"other work kept the device busy at {busy} of the looks between the samples"


def doubts(measurement: Measurement) -> Iterator[str]:
    """Yield why a measured time may not be that of the work."""
    if not measurement.work_seen:
        yield "no work was seen on the timed stream: the time may be the host's alone"
    if measurement.latency <= NOTHING_RAN * measurement.floor:
        yield (
            f"{format_time(measurement.latency)} is hardly longer than two events with nothing "
            f"between ({format_time(measurement.floor)}), as if nothing was launched on the timed "
            "stream"
        )


def too_wide(measurement: Measurement) -> LimitResult | None:
    """Return the finding about a latency that is hardly known."""
    noise = measurement.noise
    if noise is None or noise <= WIDEST:
        return None
    reason = (
        f"the 95 % interval is ± {format_share(noise)} of the latency, {basis(measurement)}: "
        "too wide to pass; measure more placements"
    )
    return LimitResult("", Outcome.UNDECIDED, Code.NOISY, reason)
