"""GitLab's code-quality report."""

from __future__ import annotations

import json
from collections.abc import Callable

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.concerns import Place, code_quality

Make = Callable[..., Row]


def test_each_finding_has_what_gitlab_asks_for(make_row: Make) -> None:
    rows = [
        make_row("t.py::t", Outcome.FAIL, reason="slower"),
        make_row("t.py::u", Outcome.UNDECIDED, code=Code.LOOKS_SLOWER),
        make_row("t.py::v", Outcome.UNDECIDED, code=Code.CONDITIONS),
    ]
    found = json.loads(code_quality(rows, {"t.py::t": Place("sub/t.py", 12)}))
    fingerprint = found[0].pop("fingerprint")
    assert len(fingerprint) == 64
    assert found[0] == {
        "description": "FAIL t.py::t: slower",
        "check_name": "gpumem FAIL",
        "severity": "major",
        "location": {"path": "sub/t.py", "lines": {"begin": 12}},
    }
    assert [one["severity"] for one in found] == ["major", "minor", "info"]
    assert found[1]["location"] == {"path": "t.py", "lines": {"begin": 1}}


def test_a_fingerprint_is_of_the_row_and_not_of_its_figures(make_row: Make) -> None:
    def fingerprint(*arguments: object, **keywords: object) -> str:
        (one,) = json.loads(code_quality([make_row(*arguments, **keywords)], {}))
        return str(one["fingerprint"])

    slow = fingerprint("t.py::t", Outcome.FAIL, reason="slower: +3 %")
    assert slow == fingerprint("t.py::t", Outcome.FAIL, reason="slower: +4 %")
    others = {
        fingerprint("t.py::t", Outcome.UNDECIDED),
        fingerprint("t.py::t", Outcome.FAIL, label="b"),
        fingerprint("t.py::u", Outcome.FAIL),
    }
    assert len(others - {slow}) == 3


def test_nothing_to_report_is_an_empty_report(make_row: Make) -> None:
    assert code_quality([make_row()], {}) == "[]\n"
