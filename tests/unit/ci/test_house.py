"""The figures of a checkout."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import house
from committing import git

FILES = {
    "pytest_gpumem/__init__.py": '"""Docs."""\nfrom __future__ import annotations\n',
    "pytest_gpumem/units.py": "MIB = 2**20\n",
    "pytest_gpumem/room/low.py": "from pytest_gpumem.units import MIB\n\ndef half() -> int:\n    return MIB // 2\n",
    "pytest_gpumem/room/high.py": "from pytest_gpumem import units\nfrom pytest_gpumem.room import low\n",
    "tests/test_one.py": "def test_one() -> None:\n    pass\n",
    "docs/a/page.md": "three words here\n",
    "docs/architecture.md": "## Add a kind\n\n1. `a.py`: it.\n2. `b.py` and `c.py`: how, if it differs.\n3. `d.py` or `e.py`: both.\n",
}


def test_figures_of_tracked_files(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    (tmp_path / "pytest_gpumem" / "untracked.py").write_text("x = 1\n")
    found = house.counted(tmp_path)
    assert (found["modules with code"], found["rooms"]) == (3, 1)
    assert (found["lines of the package"], found["lines of tests"], found["words of docs"]) == (9, 2, 23)
    assert found["modules with exactly one importer"] == 1
    assert house.single_importers(tmp_path) == {"pytest_gpumem.room.low": "pytest_gpumem.room.high"}  # units has two
    assert house.additions(tmp_path) == {"files touched to add a kind": "2 to 4"}


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by their names alone, so a second one of a name stops the collection of all tests."""
    names = Counter(path.name for path in (Path(__file__).parents[3] / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_functions_are_named_by_their_class() -> None:
    tree = ast.parse("def a():\n    def inner(): ...\nclass B:\n    def __init__(self): ...\n    def c(self): ...\n")
    assert list(house.functions(tree)) == ["a", "B.c"]


def test_a_name_suggests_the_room_whose_other_modules_have_its_words() -> None:
    every = [
        ("Cause.sentence", "p.explain.a"),
        ("sentence_of_cause", "p.explain.b"),
        ("Buffer.free", "p.memory.a"),
        ("cause", "p.memory.b"),
    ]
    assert house.words("CudaL2.set_window") == ["cuda", "l2", "set", "window"]
    assert house.suggestions(every) == ["explain", "explain", "memory", "explain"]
