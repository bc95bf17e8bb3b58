"""Running a command, a profiler's or one of ours, and passing on what it prints."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    exit_code: int
    output: str
    """What it and its children printed, both streams together."""


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
