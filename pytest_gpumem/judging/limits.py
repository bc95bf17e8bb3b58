"""Absolute limits: `min_bandwidth` and `max_latency`, and the peak that no figure can pass.

A figure on the right side of its limit is PASS. On the wrong side it is FAIL if it lies further away than a repetition in another session
may (99 %, one-sided: the margin), else UNDECIDED.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_gpumem.judging.finding import Finding, basis
from pytest_gpumem.judging.spread import of_repetition
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.units import (
    Share,
    format_bytes,
    format_rate,
    format_share,
    format_time,
    parse_bytes,
    parse_rate,
    parse_share,
    parse_time,
)

CONFIDENCE = 0.99
"""That a figure beyond its margin is on the wrong side of its limit."""


def physical(measurement: Measurement, facts: DeviceFacts) -> Iterator[Finding]:
    """A bandwidth above the DRAM peak, where L2 cannot explain it: fewer bytes moved than declared."""
    if measurement.no_share_of_peak(facts) is None and (bandwidth := measurement.bandwidth or 0.0) > facts.peak_bandwidth:
        yield Finding(
            Outcome.FAIL,
            f"the declared traffic is wrong: {format_rate(bandwidth)} is above the device's peak of {format_rate(facts.peak_bandwidth)}",
        )


def absolute(measurement: Measurement, limits: Limits, facts: DeviceFacts) -> Iterator[Finding]:
    """One finding for each absolute limit that is set.

    Raises:
        QuantityError: a limit that cannot be read.
    """
    if limits.max_latency is not None:
        longest = parse_time(limits.max_latency)
        name = f"max_latency {format_time(longest)} ({limits.origin.get('max_latency', 'limit')})"
        yield _against(measurement, format_time(measurement.latency), name, measurement.latency / longest, "above", "below")
    if limits.min_bandwidth is not None:
        yield _bandwidth(measurement, limits.min_bandwidth, limits.origin.get("min_bandwidth", "limit"), facts)
    if limits.min_overlap is not None:
        yield _overlap(measurement, limits.min_overlap, limits.origin.get("min_overlap", "limit"))


def _bandwidth(measurement: Measurement, written: str, origin: str, facts: DeviceFacts) -> Finding:
    least = parse_rate(written)
    bandwidth = measurement.bandwidth
    if bandwidth is None:
        return Finding(Outcome.FAIL, f"min_bandwidth {written} ({origin}) cannot be judged: the traffic is unknown (give `moved=`)")
    name = f"min_bandwidth {written} ({origin})"
    if isinstance(least, Share):
        if (why := measurement.no_share_of_peak(facts)) is not None:
            return Finding(Outcome.FAIL, f'{name} cannot be judged: {why}; give a rate such as "900 GB/s"')
        least = least.value * facts.peak_bandwidth
        name = f"min_bandwidth {format_rate(least)} ({written}, {origin})"
    else:
        name = f"min_bandwidth {format_rate(least)} ({origin})"
    return _against(measurement, format_rate(bandwidth), name, least / bandwidth, "below", "above")


def _overlap(measurement: Measurement, written: str, origin: str) -> Finding:
    least, name, overlap = parse_share(written), f"min_overlap {written} ({origin})", measurement.overlap
    if overlap is None:
        why = "a profiler is attached" if measurement.profiled else "nothing overlaps in it (measure staged_copy or gpu_work.together)"
        return Finding(Outcome.FAIL, f"{name} cannot be judged: {why}")
    hideable, hidden = overlap.hideable, overlap.hidden(measurement.latency)
    if hideable is None or hidden is None:
        rest = f"{format_time(overlap.sequential)} in turn, {format_time(overlap.bound)} at best"
        return Finding(Outcome.FAIL, f"{name} cannot be judged: there is nothing to hide, {rest}")
    ratio = measurement.latency / (overlap.sequential - least * hideable)
    return _against(measurement, f"{format_share(hidden)} of what overlap can hide", name, ratio, "below", "above")


def _against(measurement: Measurement, figure: str, limit: str, ratio: float, wrong: str, right: str) -> Finding:
    """Compare; `ratio` is the measured latency over the longest allowed one."""
    margin = of_repetition(measurement).reach(CONFIDENCE)
    # As a share of the limit that is printed, whichever way the quantity runs.
    distance = format_share(abs(ratio - 1 if wrong == "above" else 1 - 1 / ratio))
    side = wrong if ratio > 1 else right
    sentence = f"{figure} is {side} {limit} by {distance}, margin {format_share(math.expm1(margin))}, {basis(measurement)}"
    if ratio <= 1:
        return Finding(Outcome.PASS, sentence)
    if math.log(ratio) > margin:
        return Finding(Outcome.FAIL, sentence)
    return Finding(Outcome.UNDECIDED, f"{sentence}: too close to call", Code.NOISY)


def paging(measurement: Measurement, limits: Limits) -> Iterator[Finding]:
    """One finding for each of the two limits that is set.

    Raises:
        QuantityError: a limit that cannot be read.
    """
    migrations = measurement.migrations
    counts = migrations.launch if migrations is not None else None
    for limit in ("max_gpu_page_faults", "max_migrated"):
        written = getattr(limits, limit)
        if written is None:
            continue
        name = f"{limit} {written} ({limits.origin.get(limit, 'limit')})"
        if counts is None:
            why = migrations.not_counted if migrations is not None else "no counting pass was taken"
            yield Finding(Outcome.UNDECIDED, f"{name} cannot be judged, not counted: {why}", Code.CONDITIONS)
        elif limit == "max_gpu_page_faults":
            yield _held(_faults(counts), name, counts.gpu_faults, int(written))
        else:
            yield _held(_moved(counts), name, counts.migrated, parse_bytes(written))


def _held(said: str, name: str, value: int, most: int) -> Finding:
    if value > most:
        return Finding(Outcome.FAIL, f"{said}, above {name}")
    return Finding(Outcome.PASS, f"{said}, not above {name}")


def _faults(counts: PageCounts) -> str:
    return f"{counts.gpu_faults} page faults of the GPU in one launch"


def _moved(counts: PageCounts) -> str:
    causes = ", ".join(f"{cause} {format_bytes(nbytes)}" for cause, nbytes in counts.causes.items() if nbytes)
    return f"{format_bytes(counts.migrated)} migrated in one launch" + (f" ({causes})" if causes else "")
