"""GitHub's annotations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.markdown import workflow_commands

Make = Callable[..., Row]


def test_a_failure_is_an_error_on_the_tests_line(make_row: Make) -> None:
    rows = [
        make_row("t.py::t", Outcome.FAIL, reason="slower: +3 %, margin 1 %"),
        make_row("t.py::u", Outcome.UNDECIDED, reason="maybe"),
    ]
    assert workflow_commands(rows, Path(), {"t.py::t": ("sub/t.py", 12)}) == [
        "::error file=sub/t.py,line=12,title=gpumem%3A FAIL::FAIL t.py::t: slower: +3 %25, margin 1 %25",
        "::warning title=gpumem%3A UNDECIDED::t.py::u: maybe",
    ]


def test_nothing_in_a_name_or_path_begins_a_command(make_row: Make) -> None:
    for hostile in [
        "a\n::error::b",
        "a\r::set-output name=x::b",
        "a%0A::error::b",
        "a\x85::stop-commands::b",
        "a\u2028b",
    ]:
        nodeid = f"t.py::t[{hostile}]"
        row = make_row(nodeid, Outcome.FAIL, reason=hostile)
        (line,) = workflow_commands([row], Path(), {nodeid: (f"x,line=1::{hostile}.py", 3)})
        assert line.splitlines() == [line], hostile
        # The runner takes the first "::" behind the command's properties as their end.
        words, _, message = line.removeprefix("::error ").partition("::")
        assert [word.partition("=")[0] for word in words.split(",")] == ["file", "line", "title"], (
            hostile
        )
        assert message.startswith("FAIL t.py::t[a"), hostile
        assert "%0A" not in message, hostile
