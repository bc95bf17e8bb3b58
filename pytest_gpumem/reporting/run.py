"""A run as its reports see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Past, Row
from pytest_gpumem.reporting.conclusion import Conclusion, conclusion_lines, failing_rows, row_lines
from pytest_gpumem.reporting.table import remedies


@dataclass(frozen=True)
class Place:
    """The place where a test is defined."""

    file: str  # path with forward slashes, relative to the repository
    line: int  # from 1 on


@dataclass(frozen=True)
class Run:
    """The rows of a run, and what is known of it besides."""

    rows: Sequence[Row]  # in the order in which they are shown; failed ones too
    facts: DeviceFacts
    settings: Mapping[str, object]  # plain values that the run was taken under, by option
    utc: str = ""  # time of the run, ISO 8601
    revision: str | None = None  # of the code that was measured; None if unknown
    past: Mapping[str, Sequence[Past]] = field(default_factory=dict)
    """By `Row.key`, the saved runs, oldest first."""
    remarks: Sequence[str] = ()  # sentences about the run, such as what decided a gate
    conclusion: Conclusion | None = None  # what it decides; None where only rows are known


def run_lines(run: Run, width: int) -> list[str]:
    """What a run decides and why, as the terminal says it, then its remarks."""
    lines = []
    if run.conclusion is not None:
        lines += conclusion_lines(run.conclusion, width)
    else:
        for row in failing_rows(run.rows):
            lines += row_lines(row)
    for line in run.remarks:
        if line not in lines:
            lines.append(line)
    # The remarks of a gate name the rows without a verdict.
    if run.conclusion is None or not run.conclusion.remarks:
        lines += remedies(run.rows, store=run.conclusion is None)
    return printable(lines)
