"""What needs a person's attention in a pipeline: annotations and job summary of GitHub, code quality of GitLab."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pytest_gpumem.files import append_whole
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Code, Outcome


class Level(Enum):
    FAILURE = "failure"
    """The test failed."""
    WARNING = "warning"
    """The test passed, and its verdict is no PASS."""


@dataclass(frozen=True)
class Place:
    """Where a test stands."""

    file: str
    """Path with forward slashes, relative to the repository."""
    line: int
    """From 1 on."""


@dataclass(frozen=True)
class Concern:
    """One row that needs a look."""

    row: Row
    level: Level

    @property
    def name(self) -> str:
        """The verdict; with what else failed the test, where its own verdict does not say so."""
        outcome = self.row.verdict.outcome
        name = outcome.value + (", test failed" if self.row.failed and outcome is not Outcome.FAIL else "")
        return f"{name} (simulated)" if self.row.verdict.simulated else name

    @property
    def sentence(self) -> str:
        """Verdict, row and reason in one line, whatever the reason is made of."""
        return " ".join(f"{self.name} {self.row.key}: {self.row.verdict.reason}".split())


def concerns(rows: Iterable[Row]) -> list[Concern]:
    """What needs a look: failures, then UNDECIDED; within each, the largest slow-down first. A NEW row needs none."""
    found = []
    for row in rows:
        if row.failed or row.verdict.outcome is Outcome.FAIL:
            found.append(Concern(row, Level.FAILURE))
        elif row.verdict.outcome is Outcome.UNDECIDED:
            found.append(Concern(row, Level.WARNING))
    return sorted(found, key=_rank)


def _rank(concern: Concern) -> tuple[bool, float]:
    verdict = concern.row.verdict
    return concern.level is Level.WARNING, -verdict.comparison.delta if verdict.comparison is not None else 0.0


MOST = 10
"""Annotations of each kind that GitHub shows of one step; further ones are dropped without a word."""

_COMMANDS = {Level.FAILURE: "error", Level.WARNING: "warning"}


def workflow_commands(concerns: Sequence[Concern], places: Mapping[str, Place]) -> list[str]:
    """A line for each concern; where there are more than GitHub shows, the last one of a kind says how many are left out.

    Args:
        concerns: worst first.
        places: of tests, by node id; a test without one is annotated on no line.
    """
    lines = []
    for level, command in _COMMANDS.items():
        of_level = [concern for concern in concerns if concern.level is level]
        shown = of_level if len(of_level) <= MOST else of_level[: MOST - 1]
        for concern in shown:
            place = places.get(concern.row.nodeid)
            where = f"file={_property(place.file)},line={place.line}," if place is not None else ""
            lines.append(f"::{command} {where}title={_property(f'gpumem: {concern.name}')}::{_message(concern.sentence)}")
        if left := len(of_level) - len(shown):
            lines.append(f"::{command} title=gpumem::{left} further ones are in the summary of the run")
    return lines


def _message(text: str) -> str:
    """Text that ends no command and begins none: escaped as GitHub's own toolkit does (actions/toolkit, core/src/command.ts)."""
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def code_quality(concerns: Sequence[Concern], places: Mapping[str, Place]) -> str:
    """The report as JSON; an empty array where there is nothing to look at, without which GitLab could not tell what was resolved.

    Args:
        concerns: worst first.
        places: of tests, by node id; a test without one stands on line 1 of its file.
    """
    return json.dumps([_finding(concern, places.get(concern.row.nodeid)) for concern in concerns], indent=1) + "\n"


def _finding(concern: Concern, place: Place | None) -> dict[str, object]:
    row = concern.row
    place = place if place is not None else Place(row.nodeid.partition("::")[0], 1)
    return {
        "description": concern.sentence,
        "check_name": _check(row),
        "fingerprint": fingerprint(row),
        "severity": _severity(concern),
        "location": {"path": place.file, "lines": {"begin": place.line}},
    }


def fingerprint(row: Row) -> str:
    """What makes two findings of different runs the same: the row and its verdict, without figures, which always differ."""
    return hashlib.sha256(f"{_check(row)}\0{row.key}".encode("utf-8", "surrogatepass")).hexdigest()


def _check(row: Row) -> str:
    return f"gpumem {row.verdict.outcome.value}"


def _severity(concern: Concern) -> str:
    if concern.level is Level.FAILURE:
        return "major"
    return "minor" if concern.row.verdict.code is Code.LOOKS_SLOWER else "info"


VARIABLE = "GITHUB_STEP_SUMMARY"
"""Names the file."""
LIMIT = 1 << 20
"""Bytes of that file: of a larger one GitHub shows nothing ("Workflow commands", step isolation and limits)."""


def summarise(text: str, environment: Mapping[str, str]) -> str | None:
    """Append to the summary, where there is one.

    Nobody asked for it in so many words, so where it cannot be written, the run goes on.

    Args:
        text: in Markdown.
        environment: all environment variables.

    Returns:
        Why it was not written, as a sentence; None where it was, or where there is no such file.
    """
    if not (name := environment.get(VARIABLE)):
        return None
    path, text = Path(name), f"{text}\n"
    try:
        there = path.stat().st_size if path.exists() else 0
        if there + len(text.encode()) > LIMIT:
            return f"{VARIABLE}: {path} is nearly full, nothing is added"
        append_whole(path, text)
    except OSError as error:
        return f"{VARIABLE}: cannot write {path}: {error.strerror or error}"
    return None
