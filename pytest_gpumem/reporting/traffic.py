"""Declared and counted traffic side by side, as plain text of a given width."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from pytest_gpumem.judging.traffic import Account, Agreement, account, size
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Counted, Measurement, Traffic
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.columns import Columns, Line, wrapped
from pytest_gpumem.reporting.row_facts import names_of
from pytest_gpumem.units import format_share

_NOT_COUNTED = "not counted"
_STYLES = {Agreement.AGREES: "green", Agreement.WRONG: "bold red", Agreement.EXCESS: "yellow"}
_FIGURES = ("declared read + written", "DRAM read + written", "difference", "asked of L2")


def table(rows: Sequence[Row], facts: DeviceFacts, *, width: int, colour: bool) -> str:
    """One line for each measurement, and a sentence for each whose figures differ, without a trailing line break. ASCII only.

    Args:
        rows: in the order in which they are shown.
        facts: the device that was counted on.
        width: columns of the terminal.
        colour: with ANSI escape sequences.
    """
    rows = printable(rows)
    lines, sentences = list[Line](), list[str]()
    for row, name in zip(rows, names_of(rows), strict=True):
        found = account(row.measurement, facts) if row.measurement is not None else None
        result = found.finding.value if found is not None else _NOT_COUNTED
        style = _STYLES.get(found.finding, "") if found is not None else ""
        lines.append(Line(name, _figures(row.measurement, found), Text(result, style=style)))
        if found is None or found.notable:
            sentences.append(f"{result} {row.key}: {found.sentence if found is not None else _why_not(row)}")
    drawn = Columns("test", _FIGURES, "the count says", lines).drawn(width, colour)
    return "\n".join([drawn, *(line for sentence in sentences for line in wrapped(sentence, width))])


def _figures(measurement: Measurement | None, found: Account | None) -> tuple[str, str, str, str]:
    if measurement is None:
        return "", "", "", ""
    difference = "" if found is None or found.difference is None else format_share(found.difference, sign=True)
    return _declared(measurement.traffic), _counted(measurement.counted), difference, _asked(measurement.counted)


def _declared(traffic: Traffic | None) -> str:
    if traffic is None:
        return "-"
    if traffic.declared is not None:
        return f"{size(traffic.declared)} moved"
    return f"{size(traffic.reads)} + {size(traffic.writes)}"


def _counted(counted: Counted | None) -> str:
    return f"{size(counted.reads)} + {size(counted.writes)}" if counted is not None else "-"


def _asked(counted: Counted | None) -> str:
    if counted is None or counted.l2_reads is None or counted.l2_writes is None:
        return "-"
    return f"{size(counted.l2_reads)} + {size(counted.l2_writes)}"


def _why_not(row: Row) -> str:
    if row.measurement is None:
        return row.verdict.reason
    return "no kernel ran in its measured launches on the test's own thread; copies and memsets are not counted"
