"""A command is run to its end, and what it prints is passed on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_gpumem.runs import child


def test_run_passes_on_each_line_and_keeps_both_streams() -> None:
    program = "import os, sys; print(os.environ['WORD'], flush=True); print('aside', file=sys.stderr); sys.exit(3)"
    seen: list[str] = []
    finished = child.run([sys.executable, "-c", program], {"WORD": "said"}, seen.append)
    assert finished.exit_code == 3
    assert seen == ["said", "aside"]
    assert finished.output == "said\naside\n"


def test_how_a_command_ended_names_the_signal() -> None:
    killed = child.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"], {}, print)
    assert [killed.how, child.ending(7), child.ending(-63)] == ["ended by SIGTERM", "exit code 7", "ended by signal 63"]


def test_a_command_runs_in_the_folder_that_is_given_and_one_that_is_none_is_an_error(tmp_path: Path) -> None:
    where = [sys.executable, "-c", "import os; print(os.getcwd())"]
    assert Path(child.run(where, {}, print, folder=tmp_path).output.strip()) == tmp_path.resolve()
    with pytest.raises(OSError, match="absent"):
        child.run([str(tmp_path / "absent")], {}, print)


def test_a_command_is_shown_as_a_shell_takes_it() -> None:
    assert child.shown(["ncu", "a b", "x=(1)"]) == "ncu 'a b' 'x=(1)'"


def test_a_command_is_recorded_without_paths_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        *("/usr/local/cuda/bin/ncu", "--log-file", "/tmp/gpumem-x/ncu.log", sys.executable, "-m", "pytest"),
        *(f"{tmp_path}/tests/test_a.py::test_b[/data/x]", f"--rootdir={tmp_path}/tests", str(tmp_path), "-c", "/dev/null"),
        *("tests/test_c.py", "regex:gpumem@.+.measure/", f"--benchmark-json={tmp_path}/out/r.json"),
    ]
    kept = "ncu --log-file ncu.log python -m pytest"
    kept += " 'tests/test_a.py::test_b[/data/x]' --rootdir=tests . -c /dev/null tests/test_c.py regex:gpumem@.+.measure/"
    assert child.recorded(command, tmp_path) == f"{kept} --benchmark-json=out/r.json"
    monkeypatch.chdir(tmp_path)
    assert child.recorded(command) == child.recorded(command, tmp_path)
