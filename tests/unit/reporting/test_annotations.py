"""Workflow commands of GitHub Actions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.concerns import MOST, Place, workflow_commands

Make = Callable[..., Row]


def test_a_failure_is_an_error_on_the_tests_line(make_row: Make) -> None:
    rows = [make_row("t.py::t", Outcome.FAIL, reason="slower: +3 %, margin 1 %"), make_row("t.py::u", Outcome.UNDECIDED, reason="maybe")]
    assert workflow_commands(rows, {"t.py::t": Place("sub/t.py", 12)}) == [
        "::error file=sub/t.py,line=12,title=gpumem%3A FAIL::FAIL t.py::t: slower: +3 %25, margin 1 %25",
        "::warning title=gpumem%3A UNDECIDED::UNDECIDED t.py::u: maybe",
    ]


@pytest.mark.parametrize("hostile", ["a\n::error::b", "a\r::set-output name=x::b", "a%0A::error::b", "a\x85::stop-commands::b", "a\u2028b"])
def test_nothing_in_a_name_or_path_begins_a_command_of_its_own(make_row: Make, hostile: str) -> None:
    nodeid = f"t.py::t[{hostile}]"
    (line,) = workflow_commands([make_row(nodeid, Outcome.FAIL, reason=hostile)], {nodeid: Place(f"x,line=1::{hostile}.py", 3)})
    assert line.splitlines() == [line]
    # The runner takes the first "::" behind the command's properties as their end.
    properties, _, message = line.removeprefix("::error ").partition("::")
    assert [one.partition("=")[0] for one in properties.split(",")] == ["file", "line", "title"]
    assert message.startswith("FAIL t.py::t[a")
    assert "%0A" not in message


def test_no_more_than_github_shows(make_row: Make) -> None:
    rows = [make_row(f"t.py::t{n}", Outcome.FAIL) for n in range(MOST + 1)] + [make_row("t.py::s", Outcome.UNDECIDED)]
    lines = workflow_commands(rows, {})
    assert [line.startswith("::error") for line in lines] == [True] * MOST + [False]
    assert lines[MOST - 1] == "::error title=gpumem::2 further ones are in the summary of the run"
