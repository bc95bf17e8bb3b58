"""The innermost line of the user's code, and its path."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from pytest_gpumem.devices import user_lines
from pytest_gpumem.devices.user_lines import innermost, owner_of, shown_path

LIBRARY = f"{sysconfig.get_path('purelib')}/torch/nn/functional.py"
STANDARD = f"{sysconfig.get_path('stdlib')}/contextlib.py"
OURS = str(Path(user_lines.__file__).parent.parent / "plugin" / "running.py")


def file_of(*files: str) -> str:
    """The file of the innermost line of a stack."""
    return innermost([(file, 1, "f") for file in files])[0]


def test_a_suite_that_is_installed_is_the_users_code_where_there_is_no_other() -> None:
    assert owner_of(LIBRARY) == owner_of(STANDARD) == "library"
    assert owner_of("<frozen importlib._bootstrap>") is None
    assert file_of("<string>", LIBRARY, OURS) == LIBRARY


def test_what_started_pytest_is_no_part_of_the_way(tmp_path: Path) -> None:
    script, test = str(tmp_path / "run.py"), str(tmp_path / "test_it.py")
    pytests = f"{sysconfig.get_path('purelib')}/_pytest/python.py"
    assert file_of(LIBRARY, test, pytests, OURS, pytests, script) == test
    assert file_of(OURS, pytests, script) == ""


def test_paths_are_the_same_on_every_machine(tmp_path: Path) -> None:
    assert shown_path(str(tmp_path / "src" / "a.py"), tmp_path) == "src/a.py"
    assert shown_path(LIBRARY, tmp_path) == "torch/nn/functional.py"
    assert shown_path(str(tmp_path / "venv" / "site-packages" / "b" / "c.py"), tmp_path) == "b/c.py"
    assert shown_path("/elsewhere/d.py", tmp_path) == "/elsewhere/d.py"
