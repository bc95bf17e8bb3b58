"""Workflow commands of GitHub Actions: a verdict on the line of its test, in the view of the pull request's changes.

"Workflow commands for GitHub Actions", setting an error message: `::error file={name},line={line},title={title}::{message}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.concerns import Concern, Level, Place

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
