"""Processes of Python that are forked from one which has imported pytest, NumPy and the package: they start in a third of the time."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, process
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import default_plugins

SERVER = multiprocessing.get_context("forkserver")
OTHERS = (
    "pytest execnet.gateway_io numpy.ma numpy.random rich.console rich.text email.parser"
    " unittest pdb readline jinja2"
)
SERVER.set_forkserver_preload(
    OTHERS.split()
    + [f"_pytest.{name}" for name in default_plugins if name != "pytester_assertions"]
    + ["forkserver_requests", "nvtx", "pytest_gpumem.cli", "forked_plugins"]
    + [f"pytest_gpumem.{name}" for name in ("devices.simulated.device", "measuring.stopping")]
    + [
        f"pytest_gpumem.reporting.{name}"
        for name in ("conclusion", "details", "table", "html", "markdown")
    ]
    + ["pytest_gpumem.runs.processes"]
    + ["pytest_gpumem.baselines.verdicts", "pytest_gpumem.memory.l2_leftovers"]
    + [
        f"pytest_gpumem.plugin.{name}"
        for name in ("start", "repeating", "benchmark_call", "hooks", "rows", "results")
    ]
)
if not getattr(
    multiprocessing.current_process(), "_inheriting", False
):  # as `multiprocessing.spawn` tells a process that it starts
    # Before a test moves the temporary folder: the path of a socket has 107 characters at most.
    multiprocessing.util.get_temp_dir()
HERE = str(Path(__file__).parent)
"""Where another process finds this module."""

COMMAND = "from pytest_gpumem.cli import main; main()"
"""The program of `gpumem`."""
PYTEST = "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.main())"
"""The program of `pytest`."""
WORKER = "import sys;exec(eval(sys.stdin.readline()))"
"""The program of a worker of xdist."""


def can_be_forked(words: Sequence[str]) -> bool:
    """True if `python WORDS` needs no interpreter of its own: pytest, this package's command, a worker or a script."""
    first, *more = words[words[:1] == ["-u"] :] or [""]
    return first.endswith(("-mpytest", ".py")) or [first, *more[:1]] in (
        ["-m", "pytest"],
        *(["-c", one] for one in (COMMAND, PYTEST, WORKER)),
    )


class _Descriptors:
    """Descriptors of this process, each with its number in the other one."""

    def __init__(self, numbers: Mapping[int, int]) -> None:
        self._numbers = numbers

    def __reduce__(self) -> Any:
        return list, ([(DupFd(own), number) for number, own in self._numbers.items()],)


def _forked(
    words: list[str],
    environment: dict[str, str],
    folder: str,
    descriptors: Sequence[tuple[Any, int]],
    own_group: bool,
    ready: Connection,
) -> None:
    """Do what `python WORDS` does in this folder, once the descriptors are here."""
    if own_group:
        os.setsid()
    taken = [(one.detach(), number) for one, number in descriptors]
    ready.send(None)
    ready.close()
    _become(words, environment, folder, taken)


def _become(
    words: list[str],
    environment: dict[str, str],
    folder: str,
    descriptors: Sequence[tuple[int, int]],
) -> None:
    gc.freeze()  # what is imported by now stays
    gc.set_threshold(20_000, 20, 20)
    above = 1 + max(
        number for _, number in descriptors
    )  # so that no copy has the number of another descriptor
    moved = [(fcntl.fcntl(one, fcntl.F_DUPFD, above), number) for one, number in descriptors]
    for source, number in moved:
        os.dup2(source, number)
        os.close(source)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if not can_be_forked(words):
        os.execv(sys.executable, [sys.executable, *words])
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]  # the one that forked this process
    subprocess.Popen = Popen  # type: ignore[misc]
    installed = [
        path
        for path in sys.path
        if any(Path(path).is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))
    ]
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    # What Python makes by the descriptors and the environment that it finds.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    tempfile.tempdir = None
    first, *more = words[words[:1] == ["-u"] :]
    if first.startswith("-m"):
        name, *arguments = [*filter(None, [first[2:]]), *more]
        sys.argv = [name, *arguments]
        sys.path.insert(0, folder)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *more[1:]]
        sys.path.insert(0, "")
        exec(more[0], {"__name__": "__main__"})
    else:
        sys.argv = [first, *more]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


class Popen(subprocess.Popen[Any]):
    """Forks processes of this interpreter, and starts other programs as ever."""

    _process: Any = None

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec: Any,
        close: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        start: Any,
        flags: Any,
        shell: Any,
        *more: Any,
    ) -> None:
        if (
            isinstance(args, str)
            or shell
            or os.fspath(args[0]) != sys.executable
            or not can_be_forked([*map(str, args[1:])])
        ):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec, close, pass_fds, cwd, env, start, flags, shell, *more
            )
            return
        stdin, _, _, stdout, _, stderr = pipes = more[:6]
        standard = {
            number: number if own == -1 else own
            for number, own in enumerate((stdin, stdout, stderr))
        }
        descriptors = _Descriptors({**standard, **{number: number for number in pass_fds}})
        ready, tell = SERVER.Pipe(duplex=False)
        environment = dict(os.environ if env is None else env)
        own_group = more[11]  # start_new_session
        given = (
            [*map(str, args[1:])],
            environment,
            os.fspath(cwd or Path.cwd()),
            descriptors,
            own_group,
            tell,
        )
        self._process = SERVER.Process(target=_forked, args=given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [*sys.path, HERE])
            patch.setenv(
                "PYTHONPATH", HERE, prepend=os.pathsep
            )  # of the server, if this is its first process
            # A signal between would leave a process of which nobody knows.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            try:
                self._process.start()
                tell.close()
                ready.recv()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        process._children.discard(self._process)  # type: ignore[attr-defined]  # a Popen is not waited for at the end
        self.pid, self._child_created = self._process.pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *arguments: Any, **named: Any) -> int | None:
        if self._process is None:
            return super()._internal_poll(*arguments, **named)  # type: ignore[misc,no-any-return]
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._process is None:
            return super()._try_wait(flags)  # type: ignore[misc,no-any-return]
        code = self._process._popen.poll(flags)
        return (0, 0) if code is None else (self.pid, code << 8 if code >= 0 else -code)


CLIENT = """#!{python} -IS
import _socket, posix, sys
with_server = _socket.socket(_socket.AF_UNIX)
with_server.connect({address!r})
words = [*{words!r}, *sys.argv[1:]]
told = b"\\0\\0".join(b"\\0".join(part) for part in (
    [posix.getcwd().encode()], [word.encode() for word in words], [k + b"=" + v for k, v in posix.environ.items()]
))
descriptors = b"".join(one.to_bytes(4, sys.byteorder) for one in range(3))
with_server.sendmsg([len(told).to_bytes(8, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
with_server.sendall(told)
posix._exit(int.from_bytes(with_server.recv(1), "big"))
"""
"""A program that asks the server of `programs` to fork a process in its place."""


def _serve(listener: socket.socket) -> None:
    parent, keepers = multiprocessing.parent_process(), 0
    assert parent is not None
    while parent.sentinel not in wait([listener, parent.sentinel]):
        client, _ = listener.accept()
        while keepers and os.waitpid(-1, os.WNOHANG)[0]:
            keepers -= 1
        if os.fork() == 0:
            length, descriptors, _, _ = socket.recv_fds(client, 8, 3)
            told = client.makefile("rb").read(int.from_bytes(length, "big"))
            (folder,), words, variables = (
                part.decode().split("\0") for part in told.split(b"\0\0")
            )
            environment = dict(variable.split("=", 1) for variable in variables)
            job = multiprocessing.get_context("fork").Process(
                target=_become,
                args=(
                    words,
                    environment,
                    folder,
                    [(own, number) for number, own in enumerate(descriptors)],
                ),
            )
            job.start()
            job.join()
            code = job.exitcode or 0
            client.sendall(bytes([code if code >= 0 else 128 - code]))
            os._exit(0)
        keepers += 1
        client.close()


@contextmanager
def programs(folder: Path) -> Iterator[None]:
    """Programs `python`, `pytest` and `gpumem` in this folder, for scripts of a shell."""
    address = os.path.join(multiprocessing.util.get_temp_dir(), f"programs-{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        server = SERVER.Process(target=_serve, args=(listener,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", HERE, prepend=os.pathsep)
            server.start()
    for name, words in (("python", ()), ("pytest", ("-c", PYTEST)), ("gpumem", ("-c", COMMAND))):
        (folder / name).write_text(
            CLIENT.format(python=sys.executable, address=address, words=words)
        )
        (folder / name).chmod(0o755)
    try:
        yield
    finally:
        server.terminate()
        server.join()
        os.unlink(address)
