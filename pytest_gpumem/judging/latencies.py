"""The latencies of processes, corrected for launch overhead, and their means. Pure."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Comparison

WIDEST = 0.5
"""Largest part of a latency in doubt, by half its 95 % interval or by overhead; choice."""


class Reading(NamedTuple):
    """One process's measurement."""

    latency: float  # seconds: the mean of the medians of its placements
    overhead: float | None  # seconds of launch overhead in `latency`; None if unknown


def readings(measurement: Measurement) -> list[Reading]:
    """Return the reading of each process of a run; the first process comes first."""
    processes = [Reading(statistics.fmean(measurement.counting), measurement.overhead)]
    for repeat in measurement.further:
        latency = statistics.fmean(measurement.counting_of(repeat.medians))
        processes.append(Reading(latency, repeat.overhead))
    return processes


def corrected_latencies(processes: Sequence[Reading]) -> list[float]:
    """Return latencies in seconds, corrected to the mean launch overhead of all processes.

    They stay as they are if an overhead is unknown, or a correction exceeds `WIDEST` of a latency.
    """
    latencies, overheads = [], []
    for process in processes:
        latencies.append(process.latency)
        if process.overhead is not None:
            overheads.append(process.overhead)
    if len(overheads) < len(latencies):
        return latencies
    common = statistics.fmean(overheads)
    corrected = []
    for latency, overhead in zip(latencies, overheads, strict=True):
        value = latency + common - overhead
        if value <= (1 - WIDEST) * latency:
            return latencies
        corrected.append(value)
    return corrected


def corrected_logs(runs: Sequence[Sequence[Reading]]) -> list[list[float]]:
    """Return the logarithms of each run's latencies, all corrected to the same launch overhead."""
    processes = list[Reading]()
    for run in runs:
        processes += run
    corrected = corrected_latencies(processes)
    logs, begin = [], 0
    for run in runs:
        end = begin + len(run)
        logs.append([math.log(latency) for latency in corrected[begin:end]])
        begin = end
    return logs


def mean_latency(runs: Sequence[Measurement]) -> float:
    """Return seconds: the geometric mean over the runs of a row, each the mean of its processes."""
    if len(runs) == 1 and not runs[0].further:
        return runs[0].latency
    logs = corrected_logs([readings(run) for run in runs])
    return math.exp(statistics.fmean(statistics.fmean(run) for run in logs))


def base_latency(measurement: Measurement, comparison: Comparison) -> float:
    """Return seconds: the latency that a row was compared with."""
    # A change of 1e-16 and less is -1 as a float.
    return mean_latency([measurement]) / max(1 + comparison.delta, sys.float_info.epsilon)
