"""The figures of a checkout."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import house
import pytest
from committing import git

DOCS = Path(__file__).parents[3] / "docs"

FILES = {
    "pytest_gpumem/__init__.py": '"""Docs."""\nfrom __future__ import annotations\n',
    "pytest_gpumem/plugin/state.py": (
        "class GpuSession:\n    def __init__(self):\n        self.rows = []\n        self.lost: str | None = None\n"
    ),
    "pytest_gpumem/plugin/hooks.py": (
        "class Hooks:\n    def pytest_sessionfinish(self):\n        one, self._session.rows = 1, [Verdict('PASS')]\n"
        "    @hookimpl(tryfirst=True)\n    def pytest_configure(self):\n        self.lost = is_worker\n"
    ),
    "pytest_gpumem/room/l2_sweep.py": (
        "class Hooks:\n    def run(self, row):\n        return replace(row, verdict=None)\n"
        "def pytest_command(session):\n    session.lost = ''\n"
    ),
    "tests/test_one.py": "def test_one() -> None:\n    pass\n",
    "docs/a/page.md": "three words here\n<!-- generated: x -->\n| a table |\n<!-- end of generated -->\n```sh\na command\n```\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    pytest.importorskip("ruff", reason="ruff is of the extra dev")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_figures_of_tracked_files(checkout: Path) -> None:
    (checkout / "pytest_gpumem" / "untracked.py").write_text("x = 1\n")
    found = house.counted(checkout)
    assert found["modules"] == 3
    assert (
        found["hooks"],
        found["hooks with tryfirst or trylast"],
        found["implementations of pytest_sessionfinish"],
    ) == (2, 1, 1)
    assert (
        found["attributes of the session's state"],
        found["of these assigned from outside"],
    ) == (2, 1)
    assert found["functions that make or replace a verdict"] == 2
    assert (
        found["modules that know of xdist"],
        found["modules outside its own that know of l2-sweep"],
    ) == (1, 0)
    assert found["class names used for different things"] == 1
    assert (found["words of docs"], found["of these written by hand, without code"]) == (20, 3)


def test_long_lines_do_not_make_the_package_smaller(checkout: Path) -> None:
    before = house.formatted_bytes(checkout)
    state = checkout / "pytest_gpumem" / "plugin" / "state.py"
    state.write_text(
        state.read_text().replace("self.rows = []", "self.rows = [one.name for one in range(3)]")
    )
    longer = house.formatted_bytes(checkout)
    state.write_text(
        state.read_text().replace(
            "[one.name for one in range(3)]",
            "[\n            one.name\n            for one in range(3)\n        ]",
        )
    )
    assert before < longer == house.formatted_bytes(checkout)


def test_complexity_counts_what_branches() -> None:
    function = ast.parse(
        "def f(a):\n    if a and a > 1 or not a:\n        return [b for b in a if b]\n    return 1 if a else 2\n"
    ).body[0]
    assert house.complexity(function) == 1 + 1 + 2 + 2 + 1


def test_the_files_of_an_addition_are_those_of_past_commits(checkout: Path) -> None:
    for number in range(2):
        for name in (
            f"kernels/k{number}.cu",
            f"pytest_gpumem/k{number}.py",
            "docs/a/page.md",
            *["pytest_gpumem/plugin/state.py"] * number,
        ):
            (checkout / name).parent.mkdir(exist_ok=True)
            with (checkout / name).open("a") as file:
                file.write(f"k{number} = {number}\n")
        git(checkout, "add", ".")
        git(checkout, "commit", "-q", "-m", f"add {number}")
    found = house.additions(checkout)
    assert found["files touched to add a kernel (median of 5)"] == "2.5"  # two, and three
    assert found["files touched to add a limit (median of 5)"] == "-"


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by their names alone, so a second one of a name stops the collection of all tests."""
    names = Counter(path.name for path in (Path(__file__).parents[3] / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_documentation_stays_short() -> None:
    """Words that somebody wrote by hand; tables and sessions that code writes do not count."""
    words = {
        page.relative_to(DOCS).as_posix(): house.words_by_hand(page.read_text(encoding="utf-8"))
        for page in DOCS.rglob("*.md")
    }
    assert words["ci.md"] <= 1_500
    gate = ("gate.md", "duet.md", "explanation/judging.md")
    assert sum(words[page] for page in gate) <= 1_745, {page: words[page] for page in gate}
    assert sum(words.values()) <= 22_000, sorted(
        words.items(), key=lambda page: page[1], reverse=True
    )[:10]
