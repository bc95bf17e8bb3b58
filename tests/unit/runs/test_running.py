"""How commands are run, how they start pytest, and processes that wait in the background."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pytest_gpumem.runs import processes
from pytest_gpumem.runs.processes import (
    ONLY_PLUGIN,
    ForkServer,
    for_a_part,
    pytest_command,
)
from pytest_gpumem.settings import ANNOUNCE, switched_off

ECHO = """
import json, socket, sys
lines = socket.socket(fileno=json.loads(sys.argv[1])["socket"]).makefile("rw")
print("said", flush=True)
for line in lines:
    lines.write("{half a line\\n" + json.dumps({"heard": json.loads(line)}) + "\\n")
    lines.flush()
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
    command = pytest_command(["a.py"], python="python3")
    assert command == ["python3", "-u", "-m", "pytest", "--gpumem", "a.py"]
    assert ONLY_PLUGIN in pytest_command(tests=[])


def test_what_is_off_in_a_part() -> None:
    assert {"save", "report", "processes", ANNOUNCE} <= switched_off(for_a_part({}))
    assert for_a_part({"HOME": "/x"})["HOME"] == "/x"


@contextmanager
def started(program: str, folder: Path) -> Iterator[ForkServer]:
    command = [sys.executable, "-c", program]
    with closing(ForkServer(command, {}, os.environ, folder, folder / "log")) as process:
        yield process


def test_a_process_in_the_background_answers(tmp_path: Path) -> None:
    with started(ECHO, tmp_path) as process:
        process.tell(["a"])
        assert process.hear(60) == {"heard": ["a"]}
        assert process.output() == "said"
        assert process.output() == ""
        assert os.getpgid(process.pid) == process.pid


def test_a_process_that_ended_hears_nothing_and_says_why(tmp_path: Path) -> None:
    with started("import sys; print('the cause'); sys.exit(3)", tmp_path) as process:
        assert process.wait(60) == 3
        process.tell({"tests": []})
        assert process.hear(60) is None
        assert process.output() == "the cause"


def test_a_process_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    with started("import threading; threading.Event().wait()", tmp_path) as process:
        assert process.hear(0.01) is None
        assert process.wait(60) == -9


def test_run_passes_on_each_line_and_keeps_both_streams() -> None:
    program = "import os, sys; print(os.environ['WORD'], flush=True); print('aside', file=sys.stderr); sys.exit(3)"
    seen: list[str] = []
    finished = processes.run([sys.executable, "-c", program], {"WORD": "said"}, seen.append)
    assert finished.returncode == 3
    assert seen == ["said", "aside"]
    assert finished.stdout == "said\naside\n"
