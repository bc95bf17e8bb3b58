"""The processes that commands start, and those of an experiment, which measure one at a time.

The pytest of a side, `SCRIPT`, collects once, and forks each process before any call of CUDA.
"""

from __future__ import annotations

import json
import os
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest_gpumem
from pytest_gpumem.outcomes import Exit, FileError, NoAnswer, UserError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import document_from_json
from pytest_gpumem.runs.worktree import LAST_CHARACTERS, Side, environment_of, moved_word
from pytest_gpumem.settings import EVIDENCE, OF_A_RUN, SWITCHED_OFF

BASE, HEAD = "base", "head"
SCRIPT = Path(pytest_gpumem.__file__).resolve().parent / "plugin" / "experiment_process.py"
WORK_SECONDS = 3600.0  # to collect the tests or to measure, without an answer
END_SECONDS = 60.0  # to end after the last answer
RAN = (Exit.FINE, Exit.FAILED, Exit.NO_TESTS)  # pytest's exit codes of a session that ended well
ONLY_PLUGIN = "pytest_gpumem.plugin.profiling"
"""Part of the plugin that runs selected tests alone. Its name: this package is below the plugin."""


# pytest and other commands


def pytest_command(
    arguments: Iterable[str] = (),
    *,
    options: Iterable[str] = (),
    tests: Sequence[str] | None = None,
    results: Path | None = None,
    python: str = sys.executable,
) -> list[str]:
    """The command line of a pytest with `--gpumem`. `arguments` win over `options`.

    `tests`: node ids of the only tests to run; empty or None: all that the arguments select.
    `results`: the file for `--benchmark-json`.
    """
    # Unbuffered, so that its lines come in the order in which they and a profiler's are printed.
    command = [python, "-u", "-m", "pytest", "--gpumem", *options]
    if tests is not None:
        command += ["-p", ONLY_PLUGIN]
        for test in tests:
            command += ["--gpumem-only", test]
    command += [*arguments, *(tests or ())]
    if results is not None:
        command.append(f"--benchmark-json={results}")
    return command


def switch_off(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return variables for a pytest in which some options have their defaults in any case."""
    off = [environment.get(SWITCHED_OFF, ""), *names]
    return {**environment, SWITCHED_OFF: ",".join(off)}


def for_a_part(environment: Mapping[str, str], *, evidence: bool = False) -> dict[str, str]:
    """Variables of a pytest without the options of a whole run, such as those that save.

    `evidence`: it records what a launch runs.
    """
    names = list(OF_A_RUN)
    if not evidence:
        names.append(EVIDENCE)
    return switch_off(environment, names)


def ending(code: int) -> str:
    """How a command with this code did: "ended with exit code 7", "ended by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"ended by signal {-code}"


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    echo: Callable[[str], object] = str,
    *,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a folder. Raises `NoAnswer`: it cannot be started.

    Return its code and, as `stdout`, the output and errors of it and its children.
    `echo`: gets each line at once.
    """
    lines = []
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise NoAnswer(f"{command[0]} cannot be started: {error.strerror}") from None
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            echo(line.rstrip("\n"))
            lines.append(line)
    return subprocess.CompletedProcess(command, process.returncode, "".join(lines))


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], errors: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A pytest with this process's terminal, inside the block. An exception there ends it.

    `errors`: file for its standard error, which is printed once it has ended.
    """
    sys.stdout.flush()
    with (
        errors.open("wb") as file,
        subprocess.Popen(command, env=dict(environment), stderr=file) as process,
    ):
        try:
            yield process
        except BaseException:
            process.kill()
            print(flush=True)  # ends its line of progress
            raise
    sys.stderr.write(errors.read_text(errors="replace"))


# Experiments


class ForkServer:
    """A pytest that collects once, forks at each request, and ends with this one."""

    def __init__(
        self,
        command: Sequence[str],
        job: Mapping[str, Any],
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
    ) -> None:
        # In a session of its own: Ctrl-C does not reach it.
        self._log, self._seen = log, 0
        self._socket, other = socket.socketpair()
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        words = json.dumps({**job, "socket": other.fileno()})
        with other, log.open("wb", buffering=0) as output:
            self._process = subprocess.Popen(
                [*command, words],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid

    def output(self) -> str:
        """Return what it printed since the last call."""
        output = self._log.read_bytes()
        since, self._seen = self._seen, len(output)
        return output[since:].decode(errors="replace").strip()

    def tell(self, value: object) -> None:
        """Send it a line. Does nothing if it has ended: its output says why."""
        with suppress(OSError):
            self._lines.write(json.dumps(value) + "\n")
            self._lines.flush()

    def hear(self, timeout: float) -> dict[str, Any] | None:
        """Return its next line; None if it ended, as it does after `timeout` seconds."""
        self._socket.settimeout(timeout)
        while True:
            try:
                line = self._lines.readline()
            except OSError:  # it said nothing in time, or broke off
                self._kill()
                return None
            if not line:
                return None
            with suppress(ValueError):  # a process crashed within this line
                return dict(json.loads(line))

    def wait(self, timeout: float) -> int:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._process.wait()

    def close(self) -> None:
        """End it and its children, if it still runs."""
        if self._process.poll() is None:
            self._kill()
            self._process.wait()
        with suppress(OSError):  # an unsent line to a process that has ended
            self._lines.close()
        self._socket.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


@dataclass
class ProcessRecord:
    side: str  # `BASE` or `HEAD`
    pair: int = 1
    attempt: int = 1  # more if it was repeated
    name: str = ""  # for messages, such as "base (revision main)"
    utc: str = ""  # when it was requested, ISO 8601
    seconds: float = 0.0
    """From then to its end, with the collection of the first process of a side."""
    pid: int = 0
    error: str | None = None  # how its session broke off; None if it came to its end
    device: DeviceFacts | None = None  # None where nothing was measured
    settings: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)  # by key
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By node id of each test that did not pass: "failed" or "skipped", and why."""
    texts: dict[str, str] = field(default_factory=dict)  # of failed tests, the whole text
    finished: set[str] = field(default_factory=set)  # node ids of tests that it reported to the end
    failed_as_a_whole: str | None = None
    """The last words of a session that failed, and no test of it did."""
    words: dict[str, Any] = field(default_factory=dict)  # what it said of its session

    def failure_of(self, nodeid: str) -> str | None:
        if nodeid in self.texts:
            return f"{self.name}: {nodeid}\n{self.texts[nodeid]}"
        if self.error is not None and nodeid not in self.finished:
            return f"{self.name} {self.error}, before it reported this test"
        return None

    def read(self, parent: ForkServer, until: set[str], seconds: float) -> None:
        """Read lines until one has a word of `until`, or no more come."""
        while not self.words.keys() & until:
            line = parent.hear(seconds)
            if line is None:
                return
            if "finished" in line:
                self.finished.add(line["finished"])
            elif "nodeid" not in line:
                self.words.update(line)
            elif line["nodeid"] not in self.texts:  # else it follows from the first failure
                self.outcomes[line["nodeid"]] = line["outcome"], line["why"]
                if line["outcome"] == "failed":
                    self.texts[line["nodeid"]] = line["text"]

    def take_end(self, output: str) -> None:
        """Take how the session ended, and its rows. `output`: what the process printed."""
        words = self.words
        strays = words.get("strays")
        if strays:
            raise UserError(
                f"{self.name} ran code of the other side: {strays[0]}; --base-python names an "
                "environment that holds BASE"
            )
        code = words.get("exit")
        if code in (Exit.INTERNAL_ERROR, Exit.USAGE) and "pid" not in words:
            raise UserError(f"{self.name}: pytest ended with {code}: {_errors(output)}")
        if code not in RAN:
            how = ending(words["ended"] if code is None else code)
            self.error = f"{how}: {_errors(output)}"
        elif code == Exit.FAILED and not self.texts:
            self.failed_as_a_whole = output[-LAST_CHARACTERS:]
        if code is None or "results" not in words:  # no test measured
            return
        try:
            document = document_from_json(words["results"])
        except FileError as error:
            raise UserError(
                f"{self.name} wrote results of another version of this plugin: {error}"
            ) from None
        self.device, self.settings = document.device, document.settings
        self.rows = {row.key: row for row in document.rows}


class Processes:
    """The processes of an experiment. A side imports nothing of the other."""

    def __init__(
        self,
        sides: Mapping[str, Side],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        evidence: bool = False,
        say: Callable[[str], object] = str,
    ) -> None:
        """Start none yet. `evidence`: as of `for_a_part`."""
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
        self,
        side: str,
        tests: Sequence[str] | None = None,
        *,
        pair: int = 1,
        attempt: int = 1,
        name: str = "",
    ) -> ProcessRecord:
        """Let a process measure, and wait for its end.

        `tests`: node ids, of those that the first process of the side had; None: all.
        Raises `UserError`: pytest refused, or a side imported modules of the other.
        """
        utc = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        name = name or f"{side} ({self._sides[side].title})"
        record = ProcessRecord(side, pair, attempt, name, utc)
        begun = time.perf_counter()
        if side not in self._parents:
            self._parents[side] = self._start(side, tests)
        parent = self._parents[side]
        parent.tell(tests)
        record.read(parent, {"exit", "ended"}, WORK_SECONDS)
        record.read(parent, {"ended"}, END_SECONDS)
        words = record.words
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
        record.take_end(parent.output())
        return record

    def _start(self, name: str, tests: Sequence[str] | None) -> ForkServer:
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
