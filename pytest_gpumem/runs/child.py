"""The processes that commands start: the command line, the environment, the output.

No other module of this package starts pytest.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pytest_gpumem.options import OptionRole, of_role
from pytest_gpumem.settings import ANNOUNCE, EVIDENCE, OF_A_RUN, switch_off

ONLY_PLUGIN = "pytest_gpumem.plugin.profiling"
"""Part of the plugin that runs selected tests alone. Its name: this package is below the plugin."""
_LAST_CHARACTERS = 1500  # of a failed process's output that are kept
_PIPE = 65536  # bytes that are read of a pipe at once
WATCHED = 1.0  # seconds between two looks at a process that is watched


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
    saving = [option.name for option in of_role(OptionRole.SAVING)]
    return switch_off(environment, [*saving, ANNOUNCE])


def name_of(argument: str) -> str:
    """The option of a word of a command line, without its value."""
    if argument.startswith("-n") and not argument.startswith("--"):
        return "-n"
    return argument.partition("=")[0]


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
    echo: Callable[[str], object],
    *,
    folder: Path | None = None,
) -> CommandResult:
    """Run a command to its end. Raises `OSError`: it cannot be started.

    `echo`: gets each line that it prints at once.
    `folder`: to run in; None: the working directory.
    """
    lines = []
    try:
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
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from None
    return CommandResult(process.returncode, "".join(lines))


def run_here(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a pytest to its end with this process's terminal; its exit code."""
    sys.stdout.flush()
    return subprocess.run(command, env=dict(environment), check=False).returncode


class Background:
    """A process that gets ready while others measure, and waits for its turn.

    Two pipes carry lines of JSON; a log keeps its output.
    """

    def __init__(self, within: Path | None = None) -> None:
        """Nothing is started yet. `within`: the folder for `folder`; None: the temporary one."""
        self._scratch = tempfile.TemporaryDirectory(prefix="process-", dir=within)
        self.folder = Path(self._scratch.name)  # removed by `close`
        self.results = self.folder / "results.json"  # the file for its `--benchmark-json`
        log = self.folder / "log"
        self._log: IO[str] = log.open("w+", encoding="utf-8", errors="replace")  # `close` closes it
        self.reads, tell = os.pipe()
        heard, self.writes = os.pipe()
        self._tell = os.fdopen(tell, "w", encoding="utf-8")
        self._heard = os.fdopen(heard, "rb", buffering=0)
        self._begun = b""  # a line that has not ended, and lines behind it
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Lock()

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """Start it. Signals of the terminal, such as Ctrl-C, do not reach it.

        `command`: knows the descriptors `reads` and `writes`, which it inherits.
        """
        try:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(self.reads, self.writes),
                start_new_session=True,
            )
        finally:
            os.close(self.reads)
            os.close(self.writes)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def tell(self, value: object) -> None:
        """Send it a line. Does nothing if it has ended: its output says why."""
        with contextlib.suppress(OSError):
            self._tell.write(json.dumps(value) + "\n")
            self._tell.flush()

    def hear(
        self, timeout: float, watch: Callable[[], object] = lambda: None
    ) -> dict[str, Any] | None:
        """Return its next line; None if it ended, or had to be ended after `timeout` seconds.

        `watch`: is called every second meanwhile.
        """
        assert self._process is not None
        until = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._heard, selectors.EVENT_READ)
            while b"\n" not in self._begun:
                # A process that it started may keep the pipe open.
                ended = self._process.poll() is not None
                left = 0.0 if ended else max(0.0, until - time.monotonic())
                if selector.select(min(WATCHED, left)):
                    more = self._heard.read(_PIPE)
                    if not more:
                        return None
                    self._begun += more
                elif ended:
                    return None
                elif time.monotonic() >= until:
                    self._kill()
                    return None
                else:
                    watch()
        line, _, self._begun = self._begun.partition(b"\n")
        try:
            value = json.loads(line)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def wait(self, timeout: float) -> int:
        """Its exit code, as soon as it ends; it is ended after `timeout` seconds."""
        assert self._process is not None
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._process.wait()

    def last_output(self) -> str:
        """The end of what it printed."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read().strip()[-_LAST_CHARACTERS:]

    def close(self) -> None:
        """End it if it still runs, and free what it needed; a second call does nothing.

        A gate closes it while the thread that runs it may do the same.
        """
        with self._closing:
            if self._process is not None and self._process.poll() is None:
                self._kill()
                self._process.wait()
            for stream in (self._tell, self._heard, self._log):
                with contextlib.suppress(OSError):  # an unsent line to a process that has ended
                    stream.close()
            self._scratch.cleanup()

    def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


# Commands in words


def shown(command: Sequence[str]) -> str:
    """A command as a shell takes it."""
    return shlex.join(command)
