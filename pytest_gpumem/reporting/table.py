"""The table of results, as plain text of a given width. ASCII only, so that any terminal and log shows it."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from io import StringIO

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.migrations import kernel_formula, sentences
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.traffic import Finding, account
from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.reporting.cells import HEADINGS, Cells, access_interval, cells_of, names_of, sectors
from pytest_gpumem.units import format_share

# Only a rule under the heading.
_RULE = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)

_STYLES = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.SUSPECT: "yellow",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.UNRELIABLE: "yellow",
    Outcome.NO_BASELINE: "cyan",
}

_GAP = 2
_LEAST_NAME = 16
_TELLING_NAME = 28
"""Columns that a name gets before anything else gives way."""

_UNBOUNDED = 1000
"""Columns given to rich, so that it never cuts a figure: the widths are worked out here."""


def table(rows: Sequence[Row], facts: DeviceFacts, *, width: int, colour: bool, notes: bool = True) -> str:
    """The table and the sentences under it, without a trailing line break.

    A column in which no row has a figure is left out, and so are `of peak` and, beside changes, `noise` where names would get too
    short. `of peak` has a figure only where `Measurement.share_of_peak` has one. Names go without their file where they are unique
    without it, and are shortened in the middle if need be; figures never are, and the table gets wider than `width` where they alone
    need more.

    Args:
        rows: in the order in which they are shown.
        facts: the device that was measured.
        width: columns of the terminal.
        colour: with ANSI escape sequences.
        notes: spell out what each measurement notes, else only how many there are; under a name, sectors of a request that are not
            coalesced, and the interval of a latency per access.
    """
    if not rows:
        return ""
    cells = [cells_of(row, facts, name) for row, name in zip(rows, names_of(rows), strict=True)]
    usual = Counter((row.measurement.mode, row.measurement.sampler) for row in rows if row.measurement is not None).most_common(1)
    usual_how = usual[0][0] if usual else None
    shown = [column for column in range(len(HEADINGS)) if any(cell.figures[column] for cell in cells)]

    # Before names get too short to tell tests apart: first the share of the peak goes, then, beside changes, the
    # noise, then verdicts break into two lines.
    longest = max(len(cell.name) for cell in cells)
    changes = any(cell.change for cell in cells)
    for dispensable in ("of peak", "noise") if changes else ("of peak",):  # a change has an interval of its own
        full = _figures_width(cells, shown) + max(len(cell.verdict) for cell in cells) + _GAP
        if width - full < min(longest, _TELLING_NAME):
            shown = [column for column in shown if HEADINGS[column] != dispensable]
    broken = width - _figures_width(cells, shown) - max(len(cell.verdict) for cell in cells) - _GAP < min(longest, _TELLING_NAME)
    verdicts = [cell.verdict.replace(", simulated", "\nsimulated") if broken else cell.verdict for cell in cells]
    verdict_width = max(len(line) for verdict in [*verdicts, "verdict"] for line in verdict.splitlines())
    name_width = max(_LEAST_NAME, min(longest, width - _figures_width(cells, shown) - verdict_width - _GAP))

    drawn = ruled()
    drawn.add_column("test", no_wrap=True)
    for column in shown:
        drawn.add_column(HEADINGS[column], justify="right", no_wrap=True)
    drawn.add_column("verdict", no_wrap=True)
    for row, cell, verdict in zip(rows, cells, verdicts, strict=True):
        name = Text(shortened(cell.name, name_width))
        if row.measurement is not None:
            for line in _beside(row.measurement, usual_how, notes):
                name.append(f"\n  {line}", style="dim")
        figures = [Text(cell.figures[column]) for column in shown]
        drawn.add_row(name, *figures, Text(verdict, style=_STYLES[Outcome.FAIL if row.failed else cell.outcome]))

    text = [drawn_as_text(drawn, width, colour)]
    text += _sentences(rows, facts, usual_how, width, notes)
    return "\n".join(text)


def _beside(measurement: Measurement, usual: tuple[str, str] | None, notes: bool) -> list[str]:
    """What stands under a name: how it was measured where that is unusual and, with the notes, figures that have no column."""
    how = (measurement.mode, measurement.sampler)
    lines = [", ".join(how)] if how != usual else []
    return lines + [line for line in (sectors(measurement), access_interval(measurement)) if line and notes]


def _figures_width(cells: Sequence[Cells], shown: Sequence[int]) -> int:
    return sum(max(len(HEADINGS[c]), *(len(cell.figures[c]) for cell in cells)) + _GAP for c in shown)


def shortened(name: str, width: int) -> str:
    """`name` in at most `width` characters: the middle goes, and of the rest two thirds are the end, which tells tests apart."""
    if len(name) <= width:
        return name
    end = (width - 3) * 2 // 3
    return f"{name[: width - 3 - end]}...{name[-end:]}"


def ruled() -> Table:
    """An empty table with nothing but a rule under its heading."""
    return Table(box=_RULE, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="bold", collapse_padding=True)


def drawn_as_text(drawn: Table, width: int, colour: bool) -> str:
    """A table as lines without trailing blanks, wider than `width` where its figures need more."""
    console = Console(
        file=StringIO(),
        width=max(width, _UNBOUNDED),
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _sentences(rows: Sequence[Row], facts: DeviceFacts, usual: tuple[str, str] | None, width: int, notes: bool) -> list[str]:
    """What a reader needs besides the figures: how they were taken, and the reason of every verdict that is not a pass."""
    text = []
    if usual is not None:
        others = any(r.measurement is not None and (r.measurement.mode, r.measurement.sampler) != usual for r in rows)
        how = f"{usual[0]}, sampler {usual[1]}{' where not said otherwise' if others else ''}"
        text.append(f"{how}; noise is half of the 95 % interval over placements")
    resolvable = [row.verdict.comparison.resolvable for row in rows if row.verdict.comparison is not None]
    if resolvable:
        best, worst = format_share(min(resolvable)), format_share(max(resolvable))
        span = best if best == worst else f"{best} to {worst}, by test"
        text.append("change is against the baseline, in its interval (99.9 % below, 99 % above)")
        text.append(f"smallest slow-down that could be resolved: {span}")
    for what, count in Counter(what for row in rows for what in row.changed).items():
        text.append(f"changed since the baseline: {what} ({count} of {len(rows)})")
    slower = [r for r in rows if r.verdict.comparison is not None and r.verdict.comparison.low > 0 and r.limits.max_regression is None]
    if slower:
        text.append(f"SLOWER than the baseline, but held to no max_regression: {len(slower)} of {len(rows)}")
    for row in rows:
        if row.verdict.outcome not in (Outcome.PASS, Outcome.NO_BASELINE):
            text.append(f"{row.verdict.outcome.value} {row.key}: {row.verdict.reason}")
    noted = []
    for row in rows:
        if row.measurement is None:
            continue
        noted += [f"note {row.key}: {note}" for note in row.measurement.notes]
        if row.measurement.migrations is not None:
            noted += [f"kernel {row.key}: {kernel_formula(row.measurement)}"]
            noted += [f"pages {row.key}: {sentence}" for sentence in sentences(row.measurement.migrations)]
        said = account(row.measurement, facts)
        if said is not None and said.notable:
            # A wrong declaration makes the bandwidth in the table wrong: that is no note.
            (text if said.finding is Finding.WRONG else noted).append(f"traffic {row.key}: {said.sentence}")
    if notes:
        text += noted
    elif noted:
        text.append(f"{len(noted)} note{'s' * (len(noted) > 1)} on how it was measured; -v shows {'them' if len(noted) > 1 else 'it'}")
    if without := sum(row.verdict.outcome is Outcome.NO_BASELINE for row in rows):
        text.append(f"NO BASELINE: {without} of {len(rows)}; --gpumem-save accepts this run's rows into the baseline")
    return [line for sentence in text for line in wrapped(sentence, width)]


def wrapped(sentence: str, width: int) -> list[str]:
    """A sentence in lines of at most `width` characters where its words allow it, further lines indented."""
    # A number stays with its percent sign; an id is never cut, so that it can be copied.
    kept = sentence.replace(" %", "\N{NO-BREAK SPACE}%")
    lines = textwrap.wrap(kept, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
