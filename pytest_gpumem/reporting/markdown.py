"""A run as Markdown for a pull request's comment or a job's summary, and GitHub's annotations.

Names of tests cannot break out of it.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytest_gpumem.files import append_whole
from pytest_gpumem.judging.finding import mark
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.conclusion import Run, counts_text, row_lines, run_lines
from pytest_gpumem.reporting.row import (
    FAILING,
    FINE,
    RowView,
    attention,
    headings_of,
    verdict_text,
    views,
    worst_first,
)
from pytest_gpumem.reporting.terminal import header
from pytest_gpumem.units import counted

LIMIT = 60_000  # characters of a page: GitHub refuses a comment of more than 65 536
MOST = 50  # rows that are shown unfolded
WIDTH = 100  # columns of preformatted text, which does not wrap by itself
_REASONS = 20_000  # characters of a page that the reasons may take
SUMMARY = "GITHUB_STEP_SUMMARY"  # names the file of the job summary
LARGEST_SUMMARY = 1 << 20  # bytes of that file; GitHub shows nothing of a larger file
ANNOTATIONS = 10  # of a level that GitHub shows of a step; it drops further ones silently


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
        verdict = f"{view.verdict}{mark(view.row.verdict.simulated)}"
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


# GitHub


def workflow_commands(
    rows: Iterable[Row], root: Path, places: Mapping[str, tuple[str, int]]
) -> list[str]:
    """GitHub's annotations: a line for each row that needs a look, worst first. The last line of a
    level counts what GitHub does not show. `places`: by node id, its file below `root`, and its
    line."""
    levels: dict[str, list[Row]] = {"error": [], "warning": []}
    for row in worst_first(rows):
        if attention(row) < FINE:
            levels["error" if attention(row) == FAILING else "warning"].append(row)
    lines = []
    for level, of_level in levels.items():
        shown = of_level if len(of_level) <= ANNOTATIONS else of_level[: ANNOTATIONS - 1]
        for row in shown:
            lines.append(_annotation(level, row, root, places.get(row.nodeid)))
        if len(of_level) > len(shown):
            more = f"{len(of_level) - len(shown)} more in the summary of the run"
            lines.append(f"::{level} title=gpumem::{more}")
    return lines


def _annotation(level: str, row: Row, root: Path, place: tuple[str, int] | None) -> str:
    where = ""
    if place is not None:
        file, line = place
        path, checkout = Path(os.path.normpath(root / file)), os.environ.get("GITHUB_WORKSPACE")
        if checkout and path.is_relative_to(checkout):
            file = path.relative_to(checkout).as_posix()
        where = f"file={_property(file)},line={line},"
    title = _property(f"gpumem: {verdict_text(row)}{mark(row.verdict.simulated)}")
    text = f"{row.key}: {row.verdict.reason}"
    if attention(row) == FAILING:
        name, *reasons = row_lines(row)
        text = f"{name}: {'; '.join(reason.strip() for reason in reasons)}"
    return f"::{level} {where}title={title}::{_message(text)}"


def _message(text: str) -> str:
    """Text that ends no command and begins none, escaped as in actions/toolkit, command.ts."""
    return " ".join(printable(text).split()).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def summarise(text: str, environment: Mapping[str, str]) -> str | None:
    """Append Markdown to GitHub's job summary. Return why it was not written."""
    name = environment.get(SUMMARY)
    if not name:
        return None
    path, text = Path(name), f"{text}\n"
    try:
        before = path.stat().st_size if path.exists() else 0
        if before + len(text.encode()) > LARGEST_SUMMARY:
            return f"{SUMMARY}: {path} is nearly full, nothing is added"
        append_whole(path, text)
    except OSError as error:
        return f"{SUMMARY}: cannot write {path}: {error.strerror or error}"
    return None
