"""The figures of a row that a history follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pytest_gpumem.judging.screen import mean_latency
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.what_ran import WhatRan


@dataclass(frozen=True)
class Metric:
    """A kind of figure."""

    name: str
    unit: str  # "s", "B", or "" for a count
    exact: bool = True  # unchanged code gives the same figure; False of times


LATENCY = Metric("latency", "s", exact=False)
TRAFFIC = Metric("traffic", "B")

_OF_WHAT_RAN: Mapping[Metric, Callable[[WhatRan], int]] = MappingProxyType(
    {
        Metric("kernels", ""): lambda ran: ran.kernels,
        Metric("copies", ""): lambda ran: ran.copies,
        Metric("copied bytes", "B"): lambda ran: ran.copied_bytes,
        Metric("waits", ""): lambda ran: ran.syncs,
        Metric("registers", ""): lambda ran: ran.registers,
        Metric("spill", "B"): lambda ran: ran.spill,
    }
)
_OF_FOOTPRINT: Mapping[Metric, Callable[[Footprint], int]] = MappingProxyType(
    {
        Metric("peak", "B"): lambda footprint: footprint.peak,
        Metric("kept", "B"): lambda footprint: footprint.kept,
        Metric("reserved", "B"): lambda footprint: footprint.reserved,
        Metric("allocations", ""): lambda footprint: footprint.allocations,
    }
)
METRICS: Mapping[str, Metric] = MappingProxyType({one.name: one for one in (LATENCY, *_OF_FOOTPRINT, *_OF_WHAT_RAN, TRAFFIC)})
"""By name. Of each, a larger one is worse. Bandwidth is `traffic` over `latency`, and changes with them."""


def of_measurement(measurement: Measurement) -> Iterator[tuple[str, float]]:
    """Names and values of a measurement's figures, those that it has."""
    yield LATENCY.name, mean_latency([measurement])
    if measurement.traffic is not None:
        yield TRAFFIC.name, measurement.traffic.total
    if measurement.what_ran is not None and measurement.what_ran.order:
        for metric, value in _OF_WHAT_RAN.items():
            yield metric.name, value(measurement.what_ran)


def of_footprint(footprint: Footprint) -> Iterator[tuple[str, float]]:
    """Names and values of a footprint's figures."""
    for metric, value in _OF_FOOTPRINT.items():
        yield metric.name, value(footprint)
