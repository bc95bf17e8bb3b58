"""The fresh processes of an experiment, which measure one at a time on the GPU.

The pytest of a side, `SCRIPT`, collects once, and forks each process before any call of CUDA.
"""

from __future__ import annotations

import site
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

import pytest_gpumem
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import SchemaError, document_from_json
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.child import ForkServer, ending, for_a_part
from pytest_gpumem.runs.worktree import LAST_CHARACTERS, Side, environment_of, moved_word

BASE, HEAD = "base", "head"
SCRIPT = Path(pytest_gpumem.__file__).resolve().parent / "plugin" / "experiment_process.py"
WORK_SECONDS = 3600.0  # to collect the tests or to measure, without an answer
END_SECONDS = 60.0  # to end after the last answer
RAN = (Exit.FINE, Exit.FAILED, Exit.NO_TESTS)  # pytest's exit codes of a session that ended well


class Turn(NamedTuple):
    """One process of an experiment."""

    round: int  # number of its pair; with one side, the number of the process
    side: str  # `BASE` or `HEAD`


@dataclass
class ProcessRecord:
    """The record of a process's run."""

    turn: Turn
    attempt: int  # 1, or more if it was repeated
    name: str = ""  # for messages, such as "base (revision main)"
    utc: str = ""  # when it was requested, ISO 8601
    seconds: float = 0.0
    """From then to its end, with the collection of the first process of a side."""
    pid: int = 0
    error: str | None = None  # how its session broke off; None if it came to its end
    device: DeviceFacts | None = None  # None where nothing was measured
    settings: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)  # by key; each placement is its median
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By node id of each test that did not pass: "failed" or "skipped", and why."""
    texts: dict[str, str] = field(default_factory=dict)  # of failed tests, the whole text
    finished: set[str] = field(default_factory=set)  # node ids of tests that it reported to the end
    failed_as_a_whole: str | None = None
    """The last words of a session that failed, and no test of it did."""

    def failure_of(self, nodeid: str) -> str | None:
        """Return why a test failed in this process, or None."""
        if nodeid in self.texts:
            return f"{self.name}: {nodeid}\n{self.texts[nodeid]}"
        if self.error is not None and nodeid not in self.finished:
            return f"{self.name} {self.error}, before it reported this test"
        return None

    def report(self, nodeid: str, outcome: str, why: str, text: str) -> None:
        """Take the report of a test. The first failure is the cause of those that follow."""
        if nodeid not in self.texts:
            self.outcomes[nodeid] = outcome, why
            if outcome == "failed":
                self.texts[nodeid] = text

    def take_end(self, words: Mapping[str, Any], output: str) -> None:
        """Take how the session ended, and its rows. `output`: what the process printed."""
        strays = words.get("strays")
        if strays:
            raise RunError(
                f"{self.name} ran code of the other side: {strays[0]}; --base-python names an "
                "environment that holds BASE"
            )
        code = words.get("exit")
        if code in (Exit.INTERNAL_ERROR, Exit.USAGE) and "pid" not in words:
            raise RunError(f"{self.name}: pytest ended with {code}: {_errors(output)}")
        if code not in RAN:
            how = ending(words["ended"] if code is None else code)
            how = how if how.startswith("ended") else f"ended with {how}"
            self.error = f"{how}: {_errors(output)}"
        elif code == Exit.FAILED and not self.texts:
            self.failed_as_a_whole = output[-LAST_CHARACTERS:]
        if code is None or "results" not in words:  # no test measured
            return
        try:
            document = document_from_json(words["results"])
        except SchemaError as error:
            raise RunError(
                f"{self.name} wrote results of another version of this plugin: {error}"
            ) from None
        self.device, self.settings = document.device, document.settings
        self.rows = {row.key: with_medians(row) for row in document.rows}


class Processes:
    """The processes of an experiment."""

    def __init__(
        self,
        sides: Mapping[str, Side],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        evidence: bool = False,
        say: Callable[[str], object] = str,
    ) -> None:
        """Start none yet. A side imports nothing of the other, also where only one runs.

        `arguments`: of pytest. `evidence`: the processes record what a launch runs.
        """
        self._sides, self._arguments, self._environment = sides, arguments, environment
        self._evidence, self._say = evidence, say
        self._parents: dict[str, ForkServer] = {}  # the pytest that collected, by side
        self._anew: set[str] = set()  # sides whose processes are not forked
        self._temporary = tempfile.TemporaryDirectory(prefix="gpumem-")
        self._folder = Path(self._temporary.name)

    def close(self) -> None:
        """End all processes."""
        while self._parents:
            self._parents.popitem()[1].close()
        self._temporary.cleanup()

    def run(
        self, turn: Turn, tests: Sequence[str] | None, attempt: int = 1, *, name: str = ""
    ) -> ProcessRecord:
        """Let a process measure, and wait for its end.

        `tests`: node ids to run, of those that the first process of the side had; None: all.
        `name`: for messages; empty: that of its side.
        Raises `RunError`: pytest did not accept its arguments or the device, or a side imported
        modules of the other.
        """
        side = turn.side
        utc = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        name = name or f"{side} ({self._sides[side].title})"
        record, words = ProcessRecord(turn, attempt, name, utc), dict[str, Any]()
        begun = time.perf_counter()
        if side not in self._parents:
            self._parents[side] = self._start(side, tests)
        parent = self._parents[side]
        parent.tell(tests)
        _read(parent, record, words, ("exit", "ended"), WORK_SECONDS)
        _read(parent, record, words, ("ended",), END_SECONDS)
        if "ended" not in words:  # it measured itself, or it is lost
            words["ended"] = parent.wait(END_SECONDS)
            del self._parents[side]
            parent.close()
            if not words.keys() & {"anew", "exit"}:
                self._anew.add(side)  # its fork may have hung for a lock of a lost thread
        record.seconds = time.perf_counter() - begun
        record.pid = words.get("pid", parent.pid)
        if "anew" in words and side not in self._anew:
            self._anew.add(side)
            self._say(
                f"{name}: tests use CUDA while they are collected, so processes cannot be "
                f"forked: each starts anew, which takes {words['anew']:.1f} s"
            )
        record.take_end(words, parent.output())
        return record

    def _start(self, name: str, tests: Sequence[str] | None) -> ForkServer:
        """Start the pytest of a side."""
        side = self._sides[name]
        others = [other for key, other in self._sides.items() if key != name]
        # The last of an option counts. One word each: pytest looks for its root folder among all
        # words that are paths.
        empty = self._folder / "no-baseline"
        empty.mkdir(exist_ok=True)
        arguments = [moved_word(word, side, self._sides[HEAD]) for word in self._arguments]
        arguments += [
            f"--gpumem-baseline={empty}",
            f"--benchmark-storage=file://{self._folder}",
            f"--benchmark-json={self._folder / 'unused.json'}",
        ]
        # Packages of this environment are of both sides, also where it lies in a tree.
        roots = [side.folder, side.root, *site.getsitepackages(), site.getusersitepackages()]
        if side.environment is not None:
            roots.append(side.environment)
        job = {
            "tests": tests,
            "lenient": name == BASE,
            "forks": name not in self._anew,
            "cwd": str(side.folder),
            "roots": [str(path) for path in roots],
            "foreign": [str(other.root) for other in others],
            "arguments": ["--gpumem", *arguments],
        }
        variables = for_a_part(self._environment, evidence=self._evidence)
        environment = environment_of(side, others, variables)
        # PyTorch then counts GPUs without CUDA, as `torch.cuda.is_available` of a test file does.
        environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        # Unbuffered: what a process printed before it crashed is its last words.
        command = [side.python, "-u", str(SCRIPT)]
        return ForkServer(command, job, environment, side.folder, self._folder / f"{name}.log")


def _read(
    parent: ForkServer,
    record: ProcessRecord,
    words: dict[str, Any],
    until: Sequence[str],
    seconds: float,
) -> None:
    """Read lines until one has a word of `until`, or no more come."""
    while not any(word in words for word in until):
        line = parent.hear(seconds)
        if line is None:
            return
        if "nodeid" in line:
            record.report(**line)
        elif "finished" in line:
            record.finished.add(line["finished"])
        else:
            words.update(line)


def _errors(output: str) -> str:
    """The last errors that pytest printed, else its last lines."""
    lines, errors = [], []
    for printed in output[-LAST_CHARACTERS:].splitlines():
        line = printed.strip()
        if not line:
            continue
        lines.append(line)
        # pytest's parser names the mistake on the line after its usage, and Python the signal of a
        # crash before its stack.
        begins = line.startswith(("ERROR", "E  ", "Fatal Python error"))
        if (begins and "usage:" not in line) or ": error: " in line:
            error = line.removeprefix("E  ").strip()
            errors.append(error.removeprefix("pytest.main(): error: "))
    return " | ".join((errors or lines)[-3:]) or "it printed nothing"


def with_medians(row: Row) -> Row:
    """Return the row with each placement as its median: all that a comparison takes."""
    if row.measurement is None:
        return row
    placements = tuple((median,) for median in row.measurement.medians)
    return replace(row, measurement=replace(row.measurement, placements=placements))
