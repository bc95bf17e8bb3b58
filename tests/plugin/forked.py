"""Processes of Python that are forked from one which has imported pytest, NumPy and the package: they start in a third of the time."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing.util
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import default_plugins
from execnet.gateway_io import Popen2IO, Popen2IOMaster

from pytest_gpumem.runs import child
from pytest_gpumem.runs.child import Background

SERVER = multiprocessing.get_context("forkserver")
# Nothing whose assertions pytest rewrites, such as its plugins.
SERVER.set_forkserver_preload(
    ["pytest", "execnet.gateway_io", "numpy.ma", "scipy.special", "rich.console", "rich.text", "email.parser", "unittest", "pdb"]
    + [f"_pytest.{name}" for name in default_plugins if name != "pytester_assertions"]
    + [f"pytest_gpumem.{name}" for name in ("devices.simulated.device", "measuring.stopping", "reporting.summary", "reporting.table")]
    + [f"pytest_gpumem.plugin.{name}" for name in ("session", "repeating", "outputs", "gpu_benchmark", "terminal")]
)
if not getattr(multiprocessing.current_process(), "_inheriting", False):  # as `multiprocessing.spawn` tells a process that it starts
    # Before a test moves the temporary folder: the path of a socket has 107 characters at most.
    multiprocessing.util.get_temp_dir()
HIGH = 200
"""A number above those of all descriptors."""


class Forked(ForkServerProcess):
    """As a `subprocess.Popen` of this interpreter, as far as one is needed."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        descriptors: Mapping[int, int],
        *,
        own_group: bool = False,
    ) -> None:
        """Start `python WORDS`. `descriptors`: its own, and which of this process they are."""
        ready, tell = SERVER.Pipe(duplex=False)
        passed = _Descriptors({one: number for number, one in descriptors.items()})
        super().__init__(target=_become, args=(list(words), dict(environment), str(folder), passed, own_group, tell))
        self.start()
        tell.close()
        ready.recv()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return int(self.exitcode)


class _Descriptors:
    """Descriptors of this process, and their numbers in the other one."""

    def __init__(self, numbers: Mapping[int, int]) -> None:
        self._numbers = numbers

    def __reduce__(self) -> Any:
        return dict, ([(DupFd(own), number) for own, number in self._numbers.items()],)


def _become(
    words: list[str], environment: dict[str, str], folder: str, descriptors: Mapping[Any, int], own_group: bool, ready: Connection
) -> None:
    """Do what `python WORDS` does in this folder."""
    gc.freeze()  # what is imported by now stays
    gc.set_threshold(20_000, 20, 20)
    if own_group:
        os.setsid()
    moved = [(fcntl.fcntl(one.detach(), fcntl.F_DUPFD, HIGH), number) for one, number in descriptors.items()]
    ready.send(None)
    ready.close()
    for source, number in moved:
        os.dup2(source, number)
        os.close(source)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    installed = [path for path in sys.path if any(Path(path).is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))]
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    if words[:2] == ["-u", "-m"]:
        sys.argv = words[2:]
        sys.path.insert(0, folder)
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    elif words[:2] == ["-u", "-c"]:
        sys.path.insert(0, "")
        sys.stdin = os.fdopen(os.dup(0))
        exec(words[2], {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


start_new, work_new = Background.start, Popen2IOMaster.__init__


def start(self: Background, command: Sequence[str], environment: Mapping[str, str], folder: Path, *, own_group: bool) -> None:
    if command[0] != sys.executable:
        start_new(self, command, environment, folder, own_group=own_group)
        return
    self._has_group = own_group
    log = self._log.fileno()
    descriptors = {self.reads: self.reads, self.writes: self.writes, 1: log, 2: os.dup(log)}
    self._process = Forked(command[1:], environment, folder, descriptors, own_group=own_group)  # type: ignore[assignment]
    for descriptor in (self.reads, self.writes, descriptors[2]):
        os.close(descriptor)


def run_here(command: Sequence[str], environment: Mapping[str, str]) -> int:
    sys.stdout.flush()
    return Forked(command[1:], environment, Path.cwd(), {1: 1, 2: 2}).wait()


def work(self: Popen2IOMaster, command: list[str], execmodel: Any) -> None:
    if command[0] != sys.executable:
        work_new(self, command, execmodel)
        return
    (reads, tell), (hear, writes) = os.pipe(), os.pipe()
    self.popen = Forked(command[1:], os.environ, Path.cwd(), {0: reads, 1: writes})
    for descriptor in (reads, writes):
        os.close(descriptor)
    Popen2IO.__init__(self, os.fdopen(tell, "wb"), os.fdopen(hear, "rb"), execmodel=execmodel)


def replace_new_processes(patch: pytest.MonkeyPatch) -> None:
    """In the place of this interpreter started anew: further processes, duets, runs of gates, and workers of xdist."""
    patch.setattr(Background, "start", start)
    patch.setattr(child, "run_here", run_here)
    patch.setattr(Popen2IOMaster, "__init__", work)
