"""Which measurement of which test something belongs to, by the NVTX ranges that are open around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pytest_gpumem.ranges import MEASURE, labelled, phase
from pytest_gpumem.records.row import Row


class Place(NamedTuple):
    """A measurement of a test."""

    test: str
    """Name of the test's range."""
    label: str
    """Label of the measurement as its range has it; empty outside of labelled ranges."""
    measured: bool
    """Whether it is inside of a measured launch."""


def place_of(ranges: Sequence[str]) -> Place | None:
    """The place below a stack of ranges of the domain `gpumem`; None where none is open.

    Args:
        ranges: their names, outermost first. The test's own range may be missing, as where only a part of it was captured.
    """
    if not ranges:
        return None
    # The innermost: a test that runs pytest itself has another test's ranges around it.
    measured = [name for name in ranges if name.endswith(f".{MEASURE}")]
    test = measured[-1].removesuffix(f".{MEASURE}") if measured else ranges[0].partition(".")[0]
    prefix = phase(test, "label.")
    label = next((name.removeprefix(prefix) for name in ranges if name.startswith(prefix)), "")
    return Place(test, label, bool(measured))


def place_of_row(row: Row) -> Place:
    """Where the measured launches of a row are."""
    prefix = phase(row.range_name, "label.")
    return Place(row.range_name, labelled(row.range_name, row.label).removeprefix(prefix) if row.label else "", True)
