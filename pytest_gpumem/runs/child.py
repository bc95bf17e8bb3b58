"""Running a command, a profiler's or one of ours, and passing on what it prints."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PYTHON = re.compile(r"python[0-9.]*(\.exe)?")


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    exit_code: int
    """Negative for the number of the signal that ended it, as `subprocess` has it."""
    output: str
    """What it and its children printed, both streams together."""

    @property
    def how(self) -> str:
        """How it ended."""
        return ending(self.exit_code)


def ending(code: int) -> str:
    """How a command with this code ended: "exit code 7", "ended by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"ended by signal {-code}"


def run(command: Sequence[str], environment: Mapping[str, str], echo: Callable[[str], object], *, folder: Path | None = None) -> Finished:
    """Run a command to its end, in `folder` or where this runs; each line that it prints goes to `echo` at once.

    Raises:
        OSError: it cannot be started.
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
    return Finished(process.returncode, "".join(lines))


def shown(command: Sequence[str]) -> str:
    """A command as a shell takes it."""
    return shlex.join(os.fspath(part) for part in command)


def recorded(command: Sequence[str], root: Path | None = None) -> str:
    """A command as a record keeps it, without paths of the machine that it ran on, as a shell takes it.

    Python is `python`; a path below `root` is relative to it; of any other the name stays, of a node id with the test behind it.

    Args:
        command: the program and its arguments; `--option=PATH` is one.
        root: the repository. Default: the working folder.
    """
    here = Path.cwd() if root is None else root

    def kept(part: str) -> str:
        path, colons, test = part.partition("::")
        if not os.path.isabs(path) or path == os.devnull:
            return part
        if _PYTHON.fullmatch(Path(path).name):
            return "python"
        try:
            own = Path(path).relative_to(here).as_posix()
        except ValueError:
            own = Path(path).name
        return f"{own}{colons}{test}"

    def without(part: str) -> str:
        option, equals, value = part.partition("=")
        return f"{option}={kept(value)}" if equals and option.startswith("-") else kept(part)

    return shown([without(os.fspath(part)) for part in command])
