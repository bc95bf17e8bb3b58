"""A run's results as Markdown for a pull request's comment or a job's summary. Names of tests cannot break out of it."""

from __future__ import annotations

import html
from collections.abc import Iterable

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.concerns import concerns, fails, sentence
from pytest_gpumem.reporting.row_facts import HEADINGS, RowFacts, row_facts, shown_headings
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
        failures = [line for row in shown if fails(row) for line in (sentence(row), *(f"why: {one.strip()}" for one in row.why))]
        parts.append(preformatted([*failures, *remedies(rows)], _REASONS))
        if left := len(found) - len(shown):
            parts.append(f"{left} further rows need a look.")
    parts.append(folded("How it was measured", preformatted(header(facts, run.settings))))
    room = LIMIT - len(_joined(parts)) - 200  # 200: the heading and the last sentence of what is folded
    parts.append(folded(f"All rows ({len(rows)})", table(sorted(lines, key=lambda one: one.outcome.rank), room)))
    return _joined(parts)


def table(rows: Iterable[RowFacts], room: int = LIMIT) -> str:
    """Rows as a table of at most `room` characters, and a sentence about the rows that do not fit."""
    rows = list(rows)
    headings = shown_headings(rows)
    lines = [f"| test | {' | '.join(headings)} | verdict |", f"|---|{'--:|' * len(headings)}---|"]
    length, left = sum(map(len, lines)), 0
    for row in rows:
        verdict = f"{row.verdict}{' (simulated)' if row.simulated else ''}"
        figures = " | ".join(escaped(row.figures[HEADINGS.index(heading)].text) for heading in headings)
        line = f"| {code(row.name)} | {figures} | {verdict if row.outcome is Outcome.PASS else f'**{verdict}**'} |"
        length += len(line) + 1
        if length > room:
            left += 1
        else:
            lines.append(line)
    return "\n".join([*lines, *(["", f"{left} further rows found no place here."] if left else [])])


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
    lines: list[str] = []
    length, left = 0, 0
    for one in sentences:
        more = [html.escape(line) for line in wrapped(printable(one), WIDTH)]
        length += sum(len(line) + 1 for line in more)
        if length > room:
            left += 1
        else:
            lines += more
    return "\n".join(["<pre>", *lines, *([f"{left} further ones found no place here"] if left else []), "</pre>"])


def folded(heading: str, body: str) -> str:
    """A body that opens by a click on its heading."""
    return f"<details><summary>{heading}</summary>\n\n{body}\n\n</details>"


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"
