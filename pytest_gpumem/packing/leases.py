"""The memory of one GPU, shared out among the processes of one user by a file.

The file has a line of fixed length for each process, and has its whole length from the start: no later write needs room on the disk. What
a process held that has ended counts no longer. The file is locked by flock(2), which ends with the process: a scheduler looks at it several
times for each test.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

LINES = 128  # processes that can hold leases on one GPU
_LENGTH = 96  # of a line, in bytes
PATIENCE = 10.0  # seconds of waiting for the file, which others lock for less than a millisecond

IDLE, RUNS, ALONE, WAITS = STATES = ("idle", "runs", "alone", "waits")
"""Between tests; in a test, beside others or alone on the GPU; before a test for which the GPU is being cleared."""


class LeaseError(Exception):
    """The file cannot be used. One line with the path and the reason."""


class Process(NamedTuple):
    """A process, also where its number is used again."""

    pid: int
    start: int  # when it started, in ticks of the system's clock since boot


class Lease(NamedTuple):
    """What a process has of a GPU's memory."""

    process: Process
    nbytes: int
    state: str = IDLE  # one of `STATES`
    ticket: int = 0  # of one that waits: lower ones are first

    @property
    def busy(self) -> bool:
        """True while a test runs with it."""
        return self.state in (RUNS, ALONE)

    def before(self, other: Lease) -> bool:
        """True if this one waits, and has its turn before the other one."""
        return self.state == WAITS and (other.state != WAITS or (self.ticket, self.process) < (other.ticket, other.process))


def started(pid: int) -> int | None:
    """When a process started; None if there is none, or if it has ended and nobody has asked how."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *more = text.rpartition(")")[2].split()  # the name before it, in brackets, may hold anything
    return None if state in "ZX" else int(more[18])


def this_process(pid: int | None = None) -> Process:
    """This process, or another one that lives."""
    pid = os.getpid() if pid is None else pid
    return Process(pid, started(pid) or 0)


def alive(process: Process) -> bool:
    """True while a process runs."""
    return started(process.pid) == process.start


class Leases:
    """The leases of one GPU."""

    def __init__(self, path: Path, alive: Callable[[Process], bool] = alive) -> None:
        """Raises `LeaseError`: the file can neither be opened nor made."""
        self.path, self._alive = path, alive
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            with self._locked():
                if (missing := LINES * _LENGTH - os.fstat(self._file).st_size) > 0:
                    written = os.pwrite(self._file, b" " * missing, LINES * _LENGTH - missing)
                    if written < missing:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except LeaseError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; leases stay."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def all(self) -> list[Lease]:
        """The leases of the processes that live. Raises `LeaseError`."""
        with self._locked():
            return [*self._read().values()]

    def put(self, lease: Lease) -> None:
        """Write a lease, whatever others have. Raises `LeaseError`."""
        with self._locked():
            self._write(lease)

    def hold(self, process: Process, nbytes: int) -> None:
        """Write what a process holds between tests; nothing if somebody has given it a lease for a test meanwhile. Raises `LeaseError`."""
        with self._locked():
            if all(lease.state == IDLE for lease in self._read().values() if lease.process == process):
                self._write(Lease(process, nbytes))

    def leave(self, process: Process) -> None:
        """Forget a process. Raises `LeaseError`."""
        with self._locked():
            for line, lease in self._read().items():
                if lease.process == process:
                    self._write_line(line, "")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._wait_for_lock()
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        except OSError as error:
            raise self._unusable(error) from None

    def _wait_for_lock(self) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise OSError(f"another process has locked them for {PATIENCE:.0f} s") from None
                time.sleep(0.001)

    def _unusable(self, error: OSError) -> LeaseError:
        return LeaseError(f"the leases of the GPU, {self.path}, cannot be used: {error.strerror or error}")

    def _read(self) -> dict[int, Lease]:
        """The leases of the processes that live, by line."""
        text = os.pread(self._file, LINES * _LENGTH, 0).decode("ascii", "replace").rstrip()
        found = {at // _LENGTH: _lease(text[at : at + _LENGTH]) for at in range(0, len(text), _LENGTH)}
        return {line: lease for line, lease in found.items() if lease is not None and self._alive(lease.process)}

    def _write(self, lease: Lease) -> None:
        taken = self._read()
        line = next((line for line, one in taken.items() if one.process == lease.process), None)
        if line is None:
            line = next((line for line in range(LINES) if line not in taken), None)
        if line is None:
            raise OSError(f"{LINES} processes hold leases")
        self._write_line(line, f"{lease.process.pid} {lease.process.start} {lease.nbytes} {lease.state} {lease.ticket}")

    def _write_line(self, line: int, text: str) -> None:
        os.pwrite(self._file, f"{text:{_LENGTH - 1}}\n".encode("ascii"), line * _LENGTH)


def _lease(line: str) -> Lease | None:
    """The lease that a line holds; None if it holds none, or anything else."""
    try:
        pid, start, nbytes, state, ticket = line.split()
        return Lease(Process(int(pid), int(start)), int(nbytes), state, int(ticket)) if state in STATES else None
    except ValueError:
        return None


def refused(others: Sequence[Lease], wanted: Lease, room: int) -> bool:
    """True if a lease cannot be had beside those of the other processes.
    `wanted`: in the state in which its test is to run; its ticket counts if it has waited.
    `room`: bytes of the GPU that leases may have, all together.
    """
    waited = wanted._replace(state=WAITS if wanted.ticket else wanted.state)
    if any(other.state == ALONE or other.before(waited) for other in others):
        return True
    if wanted.state == ALONE:
        return any(other.busy for other in others)
    return sum(other.nbytes for other in others) + wanted.nbytes > room


def take(wanted: Sequence[tuple[Leases, Lease, int]]) -> bool:
    """Take leases of one process on several GPUs at once, each with the room there; False if one of them cannot be had.
    Raises `LeaseError`.
    """
    with ExitStack() as stack:
        for leases, _, _ in sorted(wanted, key=lambda one: one[0].path):  # in one order: two that each hold one would wait for ever
            stack.enter_context(leases._locked())
        for leases, lease, room in wanted:
            if refused([one for one in leases._read().values() if one.process != lease.process], lease, room):
                return False
        for leases, lease, _ in wanted:
            leases._write(lease)
    return True
