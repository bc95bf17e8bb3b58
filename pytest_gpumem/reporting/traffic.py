"""Declared and counted traffic side by side, as plain text of a given width."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from pytest_gpumem.judging.traffic import Account, Finding, account, size
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Counted, Measurement, Traffic
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.cells import names_of
from pytest_gpumem.reporting.drawing import drawn_as_text, ruled, shortened_apart, wrapped
from pytest_gpumem.units import format_share

_NOT_COUNTED = "not counted"
_STYLES = {Finding.AGREES: "green", Finding.WRONG: "bold red", Finding.EXCESS: "yellow"}
_FIGURES = ("declared read + written", "DRAM read + written", "difference", "asked of L2")
_GAP = 2
_LEAST_NAME = 20


def table(rows: Sequence[Row], facts: DeviceFacts, *, width: int, colour: bool) -> str:
    """One line for each measurement, and below it a sentence for each whose figures differ, without a trailing line break.

    Names are shortened in the middle where the figures leave too little of `width`; the figures never are. ASCII only.

    Args:
        rows: in the order in which they are shown.
        facts: the device that was counted on.
        width: columns of the terminal.
        colour: with ANSI escape sequences.
    """
    rows = printable(rows)
    accounts = [None if row.measurement is None else account(row.measurement, facts) for row in rows]
    figures = [_figures(row.measurement, said) for row, said in zip(rows, accounts, strict=True)]
    says = [_NOT_COUNTED if said is None else said.finding.value for said in accounts]
    others = sum(max(len(text) for text in column) + _GAP for column in zip(_FIGURES, *figures, strict=True))
    names = names_of(rows)
    room = max(_LEAST_NAME, width - others - max(map(len, says), default=0) - _GAP)

    drawn = ruled()
    drawn.add_column("test", no_wrap=True)
    for heading in _FIGURES:
        drawn.add_column(heading, justify="right", no_wrap=True)
    drawn.add_column("the count says", no_wrap=True)
    for name, shown, said, words in zip(shortened_apart(names, room), figures, accounts, says, strict=True):
        style = _STYLES.get(said.finding, "") if said is not None else ""
        drawn.add_row(Text(name), *map(Text, shown), Text(words, style=style))
    text = [drawn_as_text(drawn, width, colour)]
    for row, said in zip(rows, accounts, strict=True):
        if said is not None and said.notable:
            text += wrapped(f"{said.finding.value} {row.key}: {said.sentence}", width)
        elif said is None:
            text += wrapped(f"{_NOT_COUNTED} {row.key}: {_why_not(row)}", width)
    return "\n".join(text)


def _figures(measurement: Measurement | None, said: Account | None) -> tuple[str, str, str, str]:
    if measurement is None:
        return "", "", "", ""
    difference = "" if said is None or said.difference is None else format_share(said.difference, sign=True)
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
