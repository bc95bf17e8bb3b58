"""How commands start pytest, and processes that wait in the background."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

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
