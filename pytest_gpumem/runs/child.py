"""The processes that commands start: the command line, the environment, the output.

No other module of this package starts pytest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpumem.settings import ANNOUNCE, EVIDENCE, OF_A_RUN, switch_off

ONLY_PLUGIN = "pytest_gpumem.plugin.profiling"
"""Part of the plugin that runs selected tests alone. Its name: this package is below the plugin."""


def pytest_command(
    arguments: Iterable[str] = (),
    *,
    options: Iterable[str] = (),
    tests: Sequence[str] | None = None,
    results: Path | None = None,
    python: str = sys.executable,
) -> list[str]:
    """The command line of a pytest with `--gpumem`.

    `arguments`: the user's; they win over `options`, the defaults of the command that starts it.
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


def for_a_part(environment: Mapping[str, str], *, evidence: bool = False) -> dict[str, str]:
    """Variables of a pytest that is a part of a run: options of a whole run are off, such as those
    that save. With `evidence`, it records what a launch runs."""
    names = list(OF_A_RUN)
    if not evidence:
        names.append(EVIDENCE)
    return switch_off(environment, names)


def for_a_run(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a pytest that is a run, saves nothing and writes nothing for GitHub."""
    return switch_off(environment, ["save", ANNOUNCE])


@dataclass(frozen=True)
class CommandResult:
    """A command that has ended."""

    exit_code: int  # negative for the number of the signal that ended it, as `subprocess` has it
    output: str  # the standard output and error of it and its children

    @property
    def how(self) -> str:
        """How it ended: "exit code 7", "ended by SIGKILL"."""
        return ending(self.exit_code)


def ending(code: int) -> str:
    """How a command with this code ended: "exit code 7", "ended by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
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
) -> CommandResult:
    """Run a command to its end in a folder. Raises `OSError`: it cannot be started.

    `echo`: gets each line at once.
    """
    lines = []
    with subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            echo(line.rstrip("\n"))
            lines.append(line)
    return CommandResult(process.returncode, "".join(lines))


@contextlib.contextmanager
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
            raise
    sys.stderr.write(errors.read_text(errors="replace"))


class ForkServer:
    """A pytest that collects once, forks at each request, and ends with this one.

    A socket carries lines of JSON, a log its output.
    """

    def __init__(
        self,
        command: Sequence[str],
        job: Mapping[str, Any],
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
    ) -> None:
        """Start it. Signals of the terminal, such as Ctrl-C, do not reach it.

        `job`: its last argument, as JSON, with the descriptor `socket`.
        """
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
        """What it printed since the last call."""
        output = self._log.read_bytes()
        since, self._seen = self._seen, len(output)
        return output[since:].decode(errors="replace").strip()

    def tell(self, value: object) -> None:
        """Send it a line. Does nothing if it has ended: its output says why."""
        with contextlib.suppress(OSError):
            self._lines.write(json.dumps(value) + "\n")
            self._lines.flush()

    def hear(self, timeout: float) -> dict[str, Any] | None:
        """Return its next line; None if it ended, or had to be ended after `timeout` seconds."""
        self._socket.settimeout(timeout)
        while True:
            try:
                line = self._lines.readline()
            except OSError:  # it said nothing in time, or broke off
                self._kill()
                return None
            if not line:
                return None
            with contextlib.suppress(ValueError):  # a process crashed within this line
                return dict(json.loads(line))

    def wait(self, timeout: float) -> int:
        """Its exit code, as soon as it ends; it is ended after `timeout` seconds."""
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
        with contextlib.suppress(OSError):  # an unsent line to a process that has ended
            self._lines.close()
        self._socket.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
