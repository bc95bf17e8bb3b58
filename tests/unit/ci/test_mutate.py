"""Mutants are the functions of this process with one change each."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FunctionType

import pytest

if sys.version_info < (3, 11):
    pytest.skip("functions have no qualified names in their code", allow_module_level=True)

from mutate import mutants, table

CODE = '''
class Counter:
    def count(self, values, start=0, *, strict=False):
        """Counts."""
        total = start
        for value in (one for one in values if one):
            if value < 2 and not strict:
                total += value
        return total
'''


def test_every_mutant_has_one_change(tmp_path: Path) -> None:
    path = tmp_path / "counter.py"
    path.write_text(CODE)
    space: dict[str, type] = {}
    exec(compile(CODE, str(path), "exec"), space)
    function: FunctionType = vars(space["Counter"])["count"]
    original = {
        name: getattr(function, name) for name in ("__code__", "__defaults__", "__kwdefaults__")
    }

    def counted() -> list[object]:
        return [
            space["Counter"]().count(values, *more)
            for values, more in [((0, 1, 1), ()), ((2, 3), (5,))]
        ]

    assert counted() == [2, 5]
    found = {}
    for one in mutants(path, {(str(path), "Counter.count", 3): [function]}):
        for patched, name, value in one.patches:
            setattr(patched, name, value)
        found[one.line, one.was, one.becomes] = counted()
        for name, value in original.items():
            setattr(function, name, value)
    assert found == {
        (5, "default 0", "1"): [3, 5],
        (5, "strict=False", "True"): [0, 5],
        (6, "if one", ""): [2, 5],
        (7, "if value < 2 and (not strict):", "if not (value < 2 and (not strict)):"): [0, 10],
        (7, "value < 2 and (not strict)", "value < 2 or not strict"): [2, 10],
        (7, "value < 2", "value <= 2"): [2, 7],
        (7, "2", "3"): [2, 7],
        (7, "not strict", "strict"): [0, 5],
        (8, "total += value", "pass"): [0, 5],
        (9, "return total", "return None"): [None, None],
    }


def test_the_table_counts_by_module() -> None:
    unguarded = [
        {"others": None, "now": "test_c"},
        {"others": "test_d", "ended": True},
        {"others": None, "now": None, "ended": False},
    ]
    modules = {
        "a.py": {"mutants": 9, "own": 5, "unguarded": unguarded},
        "b.py": {"mutants": 3, "own": 3, "unguarded": []},
    }
    modules["c.py"] = {"mutants": 0, "own": 0, "unguarded": []}
    _, *lines = table({"modules": modules}).splitlines()
    assert [line.split() for line in lines] == [
        ["a.py", "9", "5", "3", "2", "1", "1", "1"],
        ["b.py", "3", "3", "0", "0", "0", "0", "0"],
        ["all", "12", "8", "3", "2", "1", "1", "1"],
    ]
