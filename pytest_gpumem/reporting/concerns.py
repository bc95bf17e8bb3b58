"""Rows that need a look, for CI services: annotations and job summary of GitHub, code quality of GitLab."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pytest_gpumem.files import append_whole
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.row_facts import verdict_text

MOST = 10  # annotations of each level that GitHub shows of one step; it drops further ones silently
VARIABLE = "GITHUB_STEP_SUMMARY"  # environment variable that names the file of GitHub's job summary
LIMIT = 1 << 20  # bytes of that file; GitHub shows nothing of a larger one ("Workflow commands", step isolation and limits)


class Level(Enum):
    """How much a row needs a look; the value is GitHub's command."""

    FAILURE = "error"  # the test failed
    WARNING = "warning"  # the test passed, and its verdict is UNDECIDED


@dataclass(frozen=True)
class Place:
    """Where a test is defined."""

    file: str  # path with forward slashes, relative to the repository
    line: int  # from 1 on


@dataclass(frozen=True)
class Concern:
    """One row that needs a look."""

    row: Row
    level: Level

    @property
    def name(self) -> str:
        """The verdict, as in `verdict_text`."""
        return verdict_text(self.row)

    @property
    def sentence(self) -> str:
        """Verdict, row and reason in one line."""
        return " ".join(f"{self.name} {self.row.unique_key}: {self.row.verdict.reason}".split())


def concerns(rows: Iterable[Row]) -> list[Concern]:
    """Failures, then UNDECIDED rows; within each, the largest slow-down first. A NEW row needs no look."""
    found = []
    for row in rows:
        if row.failed or row.verdict.outcome is Outcome.FAIL:
            found.append(Concern(row, Level.FAILURE))
        elif row.verdict.outcome is Outcome.UNDECIDED:
            found.append(Concern(row, Level.WARNING))
    return sorted(found, key=_rank)


def _rank(concern: Concern) -> tuple[bool, float]:
    comparison = concern.row.verdict.comparison
    return concern.level is Level.WARNING, -comparison.delta if comparison is not None else 0.0


def workflow_commands(concerns: Sequence[Concern], places: Mapping[str, Place]) -> list[str]:
    """GitHub's annotations: a line for each concern, worst first; a test without a place, by node id, is annotated on no line.
    Where there are more than GitHub shows, the last line of a level counts the rest.
    """
    lines = []
    for level in Level:
        of_level = [concern for concern in concerns if concern.level is level]
        shown = of_level if len(of_level) <= MOST else of_level[: MOST - 1]
        for concern in shown:
            place = places.get(concern.row.nodeid)
            where = f"file={_property(place.file)},line={place.line}," if place is not None else ""
            lines.append(f"::{level.value} {where}title={_property(f'gpumem: {concern.name}')}::{_message(concern.sentence)}")
        if left := len(of_level) - len(shown):
            lines.append(f"::{level.value} title=gpumem::{left} further ones are in the summary of the run")
    return lines


def _message(text: str) -> str:
    """Text that ends no command and begins none, escaped as in GitHub's toolkit (actions/toolkit, core/src/command.ts)."""
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def code_quality(concerns: Sequence[Concern], places: Mapping[str, Place]) -> str:
    """GitLab's code-quality report as JSON. Without concerns it is an empty array, by which GitLab knows what was resolved.
    A test without a place, by node id, is on line 1 of its file.
    """
    return json.dumps([_finding(concern, places.get(concern.row.nodeid)) for concern in concerns], indent=1) + "\n"


def _finding(concern: Concern, place: Place | None) -> dict[str, object]:
    row = concern.row
    place = place if place is not None else Place(row.nodeid.partition("::")[0], 1)
    undecided = "minor" if row.verdict.code is Code.LOOKS_SLOWER else "info"
    return {
        "description": concern.sentence,
        "check_name": _check(row),
        "fingerprint": fingerprint(row),
        "severity": "major" if concern.level is Level.FAILURE else undecided,
        "location": {"path": place.file, "lines": {"begin": place.line}},
    }


def fingerprint(row: Row) -> str:
    """The same for one row and verdict in different runs: without figures, which always differ."""
    return hashlib.sha256(f"{_check(row)}\0{row.unique_key}".encode("utf-8", "surrogatepass")).hexdigest()


def _check(row: Row) -> str:
    return f"gpumem {row.verdict.outcome.value}"


def summarise(text: str, environment: Mapping[str, str]) -> str | None:
    """Append Markdown to GitHub's job summary, if there is one. Gives why it was not written: a run does not fail by it; else None."""
    if not (name := environment.get(VARIABLE)):
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
