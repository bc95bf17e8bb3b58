"""The measurement that a stack of ranges stands for, and the error of a report that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pytest_gpumem.ranges import MEASURE, labelled, phase
from pytest_gpumem.records.row import Row


class BadReport(ValueError):
    """A profiler's file cannot be read: one line with the cause and, if there is one, the remedy."""


class RangePlace(NamedTuple):
    """A measurement of a test, by its ranges."""

    test: str  # name of the test's range
    label: str  # label in its range; empty outside of labelled ranges
    measured: bool  # inside of a measured launch


def place_of(ranges: Sequence[str]) -> RangePlace | None:
    """The place in a stack of ranges of the domain `gpumem`; None without any.
    `ranges`: their names, outermost first. The test's own range may be missing, if only a part of it was recorded.
    """
    if not ranges:
        return None
    # The innermost: a test that runs pytest itself has another test's ranges around it.
    measured = [name for name in ranges if name.endswith(f".{MEASURE}")]
    test = measured[-1].removesuffix(f".{MEASURE}") if measured else ranges[0].partition(".")[0]
    prefix = phase(test, "label.")
    label = next((name.removeprefix(prefix) for name in ranges if name.startswith(prefix)), "")
    return RangePlace(test, label, bool(measured))


def place_of_row(row: Row) -> RangePlace:
    """The place of the measured launches of a row."""
    prefix = phase(row.range_name, "label.")
    return RangePlace(
        row.range_name,
        labelled(row.range_name, row.label).removeprefix(prefix) if row.label else "",
        True,
    )
