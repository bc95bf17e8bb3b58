"""The record of `evidence.py`: each change beside its base, and its table."""

from __future__ import annotations

from typing import Any

import pytest
from evidence import changes, digests, disagreeing

from pytest_gpumem.records.schema import to_plain
from pytest_gpumem.records.what_ran import Step, StepKind, what_ran


def row(label: str, code: str | None) -> dict[str, Any]:
    ran = what_ran(
        [Step(StepKind.KERNEL, "work", code=code)], {}, not_watched=None if code else "unknown code"
    )
    return {"label": label, "what_ran": to_plain(ran)}


ROWS = {
    "test_a[x][base]": row("base", "a"),
    "test_a[x][-O1]": row("-O1", "b"),
    "test_a[x][a comment, same]": row("a comment, same", "a"),
    "test_b[alone]": row("alone", None),
}


def test_each_row_is_compared_with_the_base_of_its_test() -> None:
    found = changes(ROWS)
    assert {key: (one["same"], one["wanted_same"]) for key, one in found.items()} == {
        "test_a[x][-O1]": (False, False),
        "test_a[x][a comment, same]": (True, True),
    }
    assert found["test_a[x][-O1]"]["differences"] == ["kernel work: other machine code"]
    assert digests(ROWS)["test_b[alone]"] is None


def launched(argument: str, code: str = "a") -> dict[str, Any]:
    """A session with one row, whose kernel has this argument."""
    ran = what_ran([Step(StepKind.KERNEL, "work", code=code, arguments=(argument,))], {})
    return {"rows": {"test_a": {"what_ran": to_plain(ran)}}}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["00000001"] * 6, {}),
        (
            ["00000001", "00000002", "00000003", "00000002", "00000004", "00000001"],
            {},
        ),  # padding, which differs in each run
        (["00000001"] * 3 + ["00000002"] * 3, {"test_a": True}),
        (["00000001", "00000002"], {}),  # fewer than a run
    ],
)
def test_a_row_agrees_if_runs_of_three_processes_ran_the_same(
    arguments: list[str], found: dict[str, bool]
) -> None:
    assert disagreeing([launched(one) for one in arguments]) == found


def test_other_code_is_told_from_other_arguments() -> None:
    assert disagreeing([*[launched("00000001")] * 5, launched("00000001", "b")]) == {
        "test_a": False
    }
    assert disagreeing([*[launched("00000001")] * 5, {"rows": {}}]) == {"test_a": False}
