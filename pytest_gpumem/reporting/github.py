"""GitHub's annotations and job summary."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_gpumem.files import append_whole
from pytest_gpumem.judging.finding import mark
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.conclusion import row_lines
from pytest_gpumem.reporting.row import FAILING, FINE, attention, verdict_text, worst_first

MOST = 10  # annotations of each level that GitHub shows of a step; it drops further ones silently
VARIABLE = "GITHUB_STEP_SUMMARY"  # names the file of the job summary
LIMIT = 1 << 20  # bytes of that file; GitHub shows nothing of a larger file


def workflow_commands(rows: Iterable[Row], places: Mapping[str, tuple[str, int]]) -> list[str]:
    """GitHub's annotations: a line for each row that needs a look, worst first. The last line of a
    level counts what GitHub does not show. `places`: by node id, what `places_of` returned."""
    levels: dict[str, list[Row]] = {"error": [], "warning": []}
    for row in worst_first(rows):
        if attention(row) < FINE:
            levels["error" if attention(row) == FAILING else "warning"].append(row)
    lines = []
    for level, of_level in levels.items():
        shown = of_level if len(of_level) <= MOST else of_level[: MOST - 1]
        for row in shown:
            lines.append(_annotation(level, row, places.get(row.nodeid)))
        if len(of_level) > len(shown):
            more = f"{len(of_level) - len(shown)} more in the summary of the run"
            lines.append(f"::{level} title=gpumem::{more}")
    return lines


def _annotation(level: str, row: Row, place: tuple[str, int] | None) -> str:
    where = ""
    if place is not None:
        where = f"file={_property(place[0])},line={place[1]},"
    title = _property(f"gpumem: {verdict_text(row)}{mark(row.verdict.simulated)}")
    text = f"{row.key}: {row.verdict.reason}"
    if attention(row) == FAILING:
        name, *reasons = row_lines(row)
        text = f"{name}: {'; '.join(reason.strip() for reason in reasons)}"
    return f"::{level} {where}title={title}::{_message(text)}"


def places_of(root: Path, tests: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Files and lines of tests within the repository, whose folder GITHUB_WORKSPACE may name.
    `tests`: the same below `root`."""
    checkout, places = os.environ.get("GITHUB_WORKSPACE"), {}
    for nodeid, (file, line) in tests.items():
        path, whole = Path(file), Path(os.path.normpath(root / file))
        if checkout and whole.is_relative_to(checkout):
            path = whole.relative_to(checkout)
        places[nodeid] = path.as_posix(), line
    return places


def _message(text: str) -> str:
    """Text that ends no command and begins none, escaped as in actions/toolkit, command.ts."""
    return " ".join(printable(text).split()).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def summarise(text: str, environment: Mapping[str, str]) -> str | None:
    """Append Markdown to GitHub's job summary. Return why it was not written."""
    name = environment.get(VARIABLE)
    if not name:
        return None
    path, text = Path(name), f"{text}\n"
    try:
        before = path.stat().st_size if path.exists() else 0
        if before + len(text.encode()) > LIMIT:
            return f"{VARIABLE}: {path} is nearly full, nothing is added"
        append_whole(path, text)
    except OSError as error:
        return f"{VARIABLE}: cannot write {path}: {error.strerror or error}"
    return None
