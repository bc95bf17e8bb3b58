"""The record of `evidence.py`: each change beside its base, and its table."""

from __future__ import annotations

from typing import Any

from evidence import changes, digests

from pytest_gpumem.records.schema import to_plain
from pytest_gpumem.records.what_ran import Step, StepKind, what_ran


def row(label: str, code: str | None) -> dict[str, Any]:
    ran = what_ran([Step(StepKind.KERNEL, "work", code=code)], {}, not_watched=None if code else "unknown code")
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
