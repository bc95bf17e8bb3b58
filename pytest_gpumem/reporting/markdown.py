"""A run as Markdown for a pull request's comment or a job's summary. Names of tests cannot break
out of it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from pytest_gpumem.judging.finding import mark
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.conclusion import Run, run_lines
from pytest_gpumem.reporting.row import FINE, RowView, attention, headings_of, views, worst_first
from pytest_gpumem.reporting.table import counts_text
from pytest_gpumem.reporting.terminal import header
from pytest_gpumem.units import counted

LIMIT = 60_000  # characters of a page: GitHub refuses a comment of more than 65 536
MOST = 50  # rows that are shown unfolded
WIDTH = 100  # columns of preformatted text, which does not wrap by itself
_REASONS = 20_000  # characters of a page that the reasons may take


def page(run: Run) -> str:
    rows, facts = printable((list(run.rows), run.facts))
    parts = [f"### gpumem: {escaped(facts.name)}{mark(facts.simulated)}"]
    if facts.simulated:
        parts.append(f"> **No GPU is measured:** times come from a model of {escaped(facts.name)}.")
    lines = run_lines(run, WIDTH)
    if lines:
        parts.append(preformatted(lines, _REASONS))
    if not rows:
        return "\n\n".join([*parts, "Nothing was measured."]) + "\n"
    parts.append(f"**{counts_text(rows)}**")
    shown = views(worst_first(rows), facts)
    parts.append(table([view for view in shown if attention(view.row) < FINE][:MOST]))
    parts.append(folded("How it was measured", preformatted(header(facts, run.settings))))
    # 200: the heading and the last sentence of what is folded
    room = LIMIT - len("\n\n".join(parts)) - 200
    parts.append(folded(f"All rows ({len(rows)})", table(shown, room)))
    return "\n\n".join(parts) + "\n"


def table(shown: Sequence[RowView], room: int = LIMIT) -> str:
    """Rows as a table of at most `room` characters, with the number of rows that do not fit."""
    if not shown:
        return ""
    headings = headings_of(shown)
    lines = [f"| test | {' | '.join([*headings, 'verdict'])} |"]
    lines.append(f"|---|{'--:|' * len(headings)}---|")
    rows = []
    for view in shown:
        cells = [escaped(text) for text in view.texts(headings)]
        verdict = f"{view.verdict}{mark(view.simulated)}"
        if not view.outcome.quiet:
            verdict = f"**{verdict}**"
        name = f"<code>{escaped(view.name)}</code>"
        rows.append(f"| {' | '.join([name, *cells, verdict])} |")
    fitting, left = _fitting(rows, room - sum(len(line) for line in lines))
    lines += fitting
    if left:
        lines += ["", f"{counted(left, 'further row')} did not fit."]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """A line of text in which neither Markdown, HTML, mentions (`@somebody`), references (`#1`) nor
    links mean anything."""
    # A character reference is the character itself, and no markup (CommonMark 0.31, 2.5).
    line = " ".join(printable(text).split())
    return re.sub(r"[^\w .,]|_", lambda match: f"&#{ord(match[0])};", line)


def preformatted(lines: Iterable[str], room: int = LIMIT) -> str:
    texts = [html.escape(printable(line)) for line in lines]
    fitting, left = _fitting(texts, room)
    if left:
        fitting.append(f"{left} more did not fit")
    return "\n".join(["<pre>", *fitting, "</pre>"])


def _fitting(texts: Sequence[str], room: int) -> tuple[list[str], int]:
    """The first texts that take at most `room` characters, and the number of the others."""
    taken = 0
    for index, text in enumerate(texts):
        taken += len(text) + 1
        if taken > room:
            return list(texts[:index]), len(texts) - index
    return list(texts), 0


def folded(heading: str, body: str) -> str:
    return f"<details><summary>{heading}</summary>\n\n{body}\n\n</details>"
