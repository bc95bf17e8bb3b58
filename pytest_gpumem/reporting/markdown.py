"""A run's results as Markdown for a pull request's comment or a job's summary. Names of tests cannot break out of it."""

from __future__ import annotations

import html
from collections.abc import Iterable
from itertools import accumulate

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.concerns import concerns, fails, in_brief
from pytest_gpumem.reporting.row_facts import RowFacts, row_facts, shown_headings
from pytest_gpumem.reporting.run import Run
from pytest_gpumem.reporting.summary import counts_text, remedies
from pytest_gpumem.reporting.terminal import header

LIMIT = 60_000  # characters of a page: GitHub refuses a comment of more than 65 536
MOST = 50  # rows that are shown with their reasons
WIDTH = 100  # columns of the reasons, which do not wrap by themselves
_REASONS = 20_000  # characters of a page that the reasons may take


def page(run: Run) -> str:
    """The page: what needs a look with its reasons, then all rows, folded."""
    rows, facts = printable((tuple(run.rows), run.facts))
    parts = [f"### gpumem: {escaped(facts.name)}{' (simulated)' if facts.simulated else ''}"]
    if facts.simulated:
        parts.append(f"> **No GPU is measured:** times come from a model of {escaped(facts.name)}.")
    if run.remarks:
        parts.append(preformatted(run.remarks, _REASONS))
    if not rows:
        return _joined([*parts, "Nothing was measured."])
    parts.append(f"**{counts_text(rows)}**")
    lines = row_facts(rows, facts)
    of_row = {id(one.row): one for one in lines}
    found = concerns(rows)
    if found:
        shown = found[:MOST]
        parts.append(table(of_row[id(row)] for row in shown))
        failures = [line.strip() for row in shown if fails(row) for line in in_brief(row)]
        parts.append(preformatted([*failures, *remedies(rows)], _REASONS))
        if left := len(found) - len(shown):
            parts.append(
                f"{counted(left, 'further row')} {'needs' if left == 1 else 'need'} a look."
            )
    parts.append(folded("How it was measured", preformatted(header(facts, run.settings))))
    # 200: the heading and the last sentence of what is folded
    room = LIMIT - len(_joined(parts)) - 200
    parts.append(
        folded(
            f"All rows ({len(rows)})", table(sorted(lines, key=lambda one: one.outcome.rank), room)
        )
    )
    return _joined(parts)


def table(rows: Iterable[RowFacts], room: int = LIMIT) -> str:
    """Rows as a table of at most `room` characters, and a sentence about the rows that do not fit."""
    rows = list(rows)
    headings = shown_headings(rows)
    above = [f"| test | {' | '.join(headings)} | verdict |", f"|---|{'--:|' * len(headings)}---|"]
    lines = []
    for row in rows:
        verdict = f"{row.verdict}{' (simulated)' if row.simulated else ''}"
        figures = " | ".join(escaped(row.figures[heading].text) for heading in headings)
        lines.append(
            f"| {code(row.name)} | {figures} | {verdict if row.outcome.quiet else f'**{verdict}**'} |"
        )
    fitting, left = _fitting(lines, room - sum(map(len, above)))
    return "\n".join(
        [
            *above,
            *fitting,
            *(["", f"{counted(left, 'further row')} found no place here."] if left else []),
        ]
    )


def code(text: str) -> str:
    """Text in a fixed font, in which neither Markdown nor mentions (`@somebody`), references (`#1`) and links mean anything."""
    return f"<code>{escaped(text)}</code>"


def escaped(text: str) -> str:
    """Text on one line in which no character means anything to Markdown or HTML. GitHub still sees mentions in it: see `code`."""
    # A character reference is the character itself, and no markup (CommonMark 0.31, 2.5).
    line = " ".join(printable(text).split())
    return "".join(one if one.isalnum() or one in " .," else f"&#{ord(one)};" for one in line)


def preformatted(sentences: Iterable[str], room: int = LIMIT) -> str:
    """Sentences, each from a line of its own, in an HTML element within which Markdown means nothing."""
    fitting, left = _fitting(
        (html.escape("\n".join(wrapped(printable(one), WIDTH))) for one in sentences), room
    )
    return "\n".join(
        ["<pre>", *fitting, *([f"{left} more found no place here"] if left else []), "</pre>"]
    )


def _fitting(texts: Iterable[str], room: int) -> tuple[list[str], int]:
    """The first texts that take at most `room` characters, each with a line break, and the number of those after them."""
    texts = list(texts)
    lengths = accumulate(len(text) + 1 for text in texts)
    fitting = [text for text, length in zip(texts, lengths, strict=True) if length <= room]
    return fitting, len(texts) - len(fitting)


def folded(heading: str, body: str) -> str:
    """A body that opens by a click on its heading."""
    return f"<details><summary>{heading}</summary>\n\n{body}\n\n</details>"


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"
