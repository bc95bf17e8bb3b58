"""How commands are run, how they start pytest, and processes that wait in the background."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pytest_gpumem.runs import child
from pytest_gpumem.runs.child import (
    ONLY_PLUGIN,
    Background,
    for_a_part,
    for_a_run,
    name_of,
    pytest_command,
    replace_this_process,
    run_here,
)
from pytest_gpumem.settings import ANNOUNCE, switched_off

ECHO = """
import json, os, sys
reads, writes = map(int, sys.argv[1:])
print("said", flush=True)
with os.fdopen(reads) as told, os.fdopen(writes, "w") as say:
    for line in told:
        say.write(json.dumps({"heard": json.loads(line)}) + "\\n")
        say.flush()
"""


def test_the_users_arguments_come_after_the_commands_and_before_what_it_relies_on(tmp_path: Path) -> None:
    command = pytest_command(["-k", "fast"], options=["--gpumem-device=cuda"], tests=["a.py::test_x"], results=tmp_path / "r.json")
    assert command[:3] == [sys.executable, "-u", "-m"]
    assert command[3:] == [
        *("pytest", "--gpumem", "--gpumem-device=cuda", "-p", ONLY_PLUGIN, "--gpumem-only", "a.py::test_x"),
        *("-k", "fast", "a.py::test_x", f"--benchmark-json={tmp_path / 'r.json'}"),
    ]
    assert pytest_command(["a.py"], python="python3") == ["python3", "-u", "-m", "pytest", "--gpumem", "a.py"]
    assert ONLY_PLUGIN in pytest_command(tests=[])


def test_what_is_off_in_a_part_and_in_a_run_that_saves_nothing() -> None:
    assert {"save", "report", "processes", ANNOUNCE} <= switched_off(for_a_part({}))
    assert switched_off(for_a_run({})) == {"save", "record"}
    assert switched_off(for_a_run({}, announces=False)) == {"save", "record", ANNOUNCE}
    assert for_a_part({"HOME": "/x"})["HOME"] == "/x"


@pytest.mark.parametrize(("argument", "name"), [("-n4", "-n"), ("-n", "-n"), ("--numprocesses=4", "--numprocesses"), ("-k", "-k")])
def test_the_option_of_a_word(argument: str, name: str) -> None:
    assert name_of(argument) == name


def start(child: Background, program: str, *, own_group: bool = True) -> None:
    child.start([sys.executable, "-c", program, str(child.reads), str(child.writes)], os.environ, child.folder, own_group=own_group)


@pytest.mark.parametrize("own_group", [True, False])
def test_a_process_in_the_background_answers(own_group: bool) -> None:
    child = Background()
    try:
        start(child, ECHO, own_group=own_group)
        child.tell(["a"])
        assert child.hear(60) == {"heard": ["a"]}
        assert child.last_output() == "said"
        assert (os.getpgid(child.pid) == child.pid) is own_group
    finally:
        child.close()
    assert not child.folder.exists()
    child.close()


def test_a_process_that_ended_hears_nothing_and_says_why() -> None:
    child = Background()
    try:
        start(child, "import sys; print('the cause'); sys.exit(3)")
        assert child.wait() == 3
        child.tell({"tests": []})
        assert child.hear(60) is None
        assert child.last_output() == "the cause"
    finally:
        child.close()


def test_a_process_that_does_not_answer_is_ended() -> None:
    child = Background()
    try:
        start(child, "import threading; threading.Event().wait()")
        assert child.hear(0.01) is None
        assert child.wait(60) == -9
    finally:
        child.close()


def test_in_this_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here([sys.executable, "-c", "print('seen'); raise SystemExit(5)"], os.environ) == 5
    assert capfd.readouterr().out == "seen\n"


def test_a_process_becomes_another() -> None:
    program = f"import os; from {replace_this_process.__module__} import replace_this_process as become; "
    program += "become([__import__('sys').executable, '-c', 'raise SystemExit(7)'], os.environ)"
    assert run_here([sys.executable, "-c", program], os.environ) == 7


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
