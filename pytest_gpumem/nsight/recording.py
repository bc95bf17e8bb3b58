"""The recording of a profiler by test, and the measurement that a stack of ranges stands for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_gpumem.ranges import MEASURE, labelled, phase
from pytest_gpumem.records.profile import Besides, TestProfile
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
    return RangePlace(row.range_name, labelled(row.range_name, row.label).removeprefix(prefix) if row.label else "", True)


@dataclass(frozen=True)
class Recording:
    """The content of one report."""

    profiles: tuple[TestProfile, ...]
    """One for each measurement and process, in the order of the session. A test with work outside of the ranges of its labels has one
    more, without kernels, for that work."""
    outside: Besides = field(default_factory=Besides)  # work outside of all tests
    notes: tuple[str, ...] = ()  # data that the report lacks, and how to record it
    tool: str = ""  # "nsys" or "ncu"
    tool_version: str = ""  # empty if the report does not have it

    def parts(self) -> Iterator[Besides]:
        """All work once: measured launches, the rest of each test, and work outside of tests."""
        for one in self.profiles:
            yield Besides(one.kernels, one.copies, one.memsets)
            yield one.rest
        yield self.outside
