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


def test_the_users_arguments_come_after_the_commands_and_before_what_it_relies_on(
    tmp_path: Path,
) -> None:
    command = pytest_command(
        ["-k", "fast"],
        options=["--gpumem-device=cuda"],
        tests=["a.py::test_x"],
        results=tmp_path / "r.json",
    )
    assert command[:3] == [sys.executable, "-u", "-m"]
    assert command[3:] == [
        *(
            "pytest",
            "--gpumem",
            "--gpumem-device=cuda",
            "-p",
            ONLY_PLUGIN,
            "--gpumem-only",
            "a.py::test_x",
        ),
        *("-k", "fast", "a.py::test_x", f"--benchmark-json={tmp_path / 'r.json'}"),
    ]
    assert pytest_command(["a.py"], python="python3") == [
        "python3",
        "-u",
        "-m",
        "pytest",
        "--gpumem",
        "a.py",
    ]
    assert ONLY_PLUGIN in pytest_command(tests=[])


def test_what_is_off_in_a_part_and_in_a_run_that_saves_nothing() -> None:
    assert {"save", "report", "processes", ANNOUNCE} <= switched_off(for_a_part({}))
    assert switched_off(for_a_run({})) == {"save", ANNOUNCE}
    assert for_a_part({"HOME": "/x"})["HOME"] == "/x"


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("-n4", "-n"),
        ("--numprocesses=4", "--numprocesses"),
    ],
)
def test_the_option_of_a_word(argument: str, name: str) -> None:
    assert name_of(argument) == name


def start(child: Background, program: str) -> None:
    child.start(
        [sys.executable, "-c", program, str(child.reads), str(child.writes)],
        os.environ,
        child.folder,
    )


def test_a_process_in_the_background_answers() -> None:
    child = Background()
    try:
        start(child, ECHO)
        child.tell(["a"])
        assert child.hear(60) == {"heard": ["a"]}
        assert child.last_output() == "said"
        assert os.getpgid(child.pid) == child.pid
    finally:
        child.close()
    assert not child.folder.exists()
    child.close()


def test_a_process_that_ended_hears_nothing_and_says_why() -> None:
    child = Background()
    try:
        start(child, "import sys; print('the cause'); sys.exit(3)")
        assert child.wait(60) == 3
        child.tell({"tests": []})
        assert child.hear(60) is None
        assert child.last_output() == "the cause"
    finally:
        child.close()


def test_lines_come_one_by_one_and_the_last_of_a_process_that_left_another_one_behind_is_its_end() -> (
    None
):
    """The process that it leaves keeps the pipe open."""
    child = Background()
    try:
        program = "import os, sys; os.set_inheritable(int(sys.argv[2]), True); "
        program += 'os.write(int(sys.argv[2]), b\'{"one": 1}\\n{"two": 2}\\n{\'); '
        program += "os.fork() or __import__('threading').Event().wait()"
        start(child, program)
        assert [child.hear(60), child.hear(60), child.hear(60)] == [{"one": 1}, {"two": 2}, None]
        assert child.wait(60) == 0
    finally:
        os.killpg(child.pid, 9)
        child.close()


def test_a_process_that_does_not_answer_is_ended() -> None:
    child = Background()
    try:
        start(child, "import threading; threading.Event().wait()")
        assert child.hear(0.01) is None
        assert child.wait(60) == -9
    finally:
        child.close()


def test_run_passes_on_each_line_and_keeps_both_streams() -> None:
    program = "import os, sys; print(os.environ['WORD'], flush=True); print('aside', file=sys.stderr); sys.exit(3)"
    seen: list[str] = []
    finished = child.run([sys.executable, "-c", program], {"WORD": "said"}, seen.append)
    assert finished.exit_code == 3
    assert seen == ["said", "aside"]
    assert finished.output == "said\naside\n"


def test_a_command_is_shown_as_a_shell_takes_it() -> None:
    assert child.shown(["ncu", "a b", "x=(1)"]) == "ncu 'a b' 'x=(1)'"
