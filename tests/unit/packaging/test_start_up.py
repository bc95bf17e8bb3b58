"""What a session costs that measures nothing, and what it leaves in an installation."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from installing import copied, environment, needs_pip, pip

PROGRAM = """
import sys, pytest
assert pytest.main([*sys.argv[1:], "-q", "-p", "no:cacheprovider", "--gpumem-device", "sim", "test_it.py"]) == 0
print(*sys.modules)
"""


def modules_of_a_session(python: Path, folder: Path, *arguments: str) -> set[str]:
    """The modules that a session with one test, which measures nothing, imports."""
    (folder / "test_it.py").write_text("def test_it(): pass\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE" and not name.startswith("PYTEST_")}
    ran = subprocess.run([str(python), "-c", PROGRAM, *arguments], cwd=folder, env=variables, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return set(ran.stdout.splitlines()[-1].split())


@needs_pip
def test_a_session_that_measures_nothing_is_cheap_and_an_uninstall_removes_all(tmp_path: Path) -> None:
    python, site = environment(tmp_path / "venv")
    project = copied(tmp_path / "project")
    pip("--python", str(python), "install", ".", cwd=project)
    names = modules_of_a_session(python, tmp_path, "--gpumem")
    assert "pytest_gpumem.plugin.session" in names
    assert not names & {"scipy", "jinja2", "cupy", "cuda", "numba", "torch"}
    # The package's modules are compiled once, by pip.
    assert not list((site / "pytest_gpumem").rglob("*-pytest-*.pyc"))

    pip("--python", str(python), "uninstall", "-y", "pytest-gpumem", cwd=tmp_path)
    assert not (site / "pytest_gpumem").exists()  # else it would hide the editable install
    pip("--python", str(python), "install", "-e", ".", cwd=project)
    assert "pytest_gpumem.plugin.session" in modules_of_a_session(python, tmp_path, "--gpumem")


def test_assertions_of_tests_are_still_rewritten(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it():\n    left = 1\n    assert left == 2")
    pytester.runpytest_subprocess().stdout.fnmatch_lines(["E*assert 1 == 2"])
