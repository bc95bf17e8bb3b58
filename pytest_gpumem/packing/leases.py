"""The memory of one GPU, shared out among the processes of one user by a file.

The file has its whole length from the start: no later write needs room on the disk. What a process had that has ended counts no longer.
The lock, of flock(2), ends with its process: a scheduler looks at the file several times for each test.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

LENGTH = 12 << 10  # bytes of a file: the leases of more than a hundred processes
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
    held: int = 0  # bytes between its tests
    share: int = 0  # bytes that its test may take beyond them
    state: str = IDLE  # one of `STATES`
    ticket: int = 0  # of one that waits: lower ones are first

    @property
    def nbytes(self) -> int:
        return self.held + self.share


def running(pid: int) -> Process:
    """A process by its number. It starts at -1 if there is none, or if it has ended and nobody has asked how."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return Process(pid, -1)
    state, *more = text.rpartition(")")[
        2
    ].split()  # the name before it, in brackets, may hold anything
    return Process(pid, -1 if state in "ZX" else int(more[18]))


def alive(process: Process) -> bool:
    """True while a process runs."""
    return running(process.pid) == process and process.start >= 0


class Gpu(NamedTuple):
    """A GPU, with a file of leases. Each method raises `LeaseError`."""

    path: Path  # of the file
    name: str = ""
    room: Callable[[], int] = lambda: 0  # bytes that leases may have, all together
    alive: Callable[[Process], bool] = alive

    def leases(self) -> list[Lease]:
        """Those of the processes that live."""
        with self.locked() as leases:
            return [*leases.values()]

    def free(self) -> int:
        """Bytes that no lease has."""
        return self.room() - sum(lease.nbytes for lease in self.leases())

    def put(self, process: Process, **changes: object) -> None:
        """Change what a process has, whatever others have. One that holds nothing and does nothing has no lease."""
        with self.locked() as leases:
            leases[process] = leases.get(process, Lease(process))._replace(**changes)  # type: ignore[arg-type]

    @contextmanager
    def locked(self) -> Iterator[dict[Process, Lease]]:
        """The leases of the processes that live, which nobody else changes meanwhile. What the block changes is written."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _lock(file)
                lines = os.pread(file, LENGTH, 0).decode("ascii", "replace").splitlines()
                found = [
                    lease
                    for lease in map(_lease, lines)
                    if lease is not None and self.alive(lease.process)
                ]
                leases = {lease.process: lease for lease in found}
                yield leases
                if [*leases.values()] != found or os.fstat(file).st_size < LENGTH:
                    _write(file, leases.values())
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may have the file too
                os.close(file)
        except OSError as error:
            raise LeaseError(
                f"the leases of the GPU, {self.path}, cannot be used: {error.strerror or error}"
            ) from None


def _lock(file: int) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(f"another process has locked them for {PATIENCE:.0f} s") from None
            time.sleep(0.001)


def _write(file: int, leases: Iterable[Lease]) -> None:
    lines = (
        " ".join(map(str, (*lease.process, *lease[1:])))
        for lease in leases
        if lease.held or lease.state != IDLE
    )
    if len(text := "\n".join(lines)) > LENGTH:
        raise OSError("too many processes hold leases")
    if os.pwrite(file, text.ljust(LENGTH).encode("ascii"), 0) < LENGTH:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lease(line: str) -> Lease | None:
    """The lease that a line holds; None if it holds none, or anything else."""
    try:
        pid, start, held, share, state, ticket = line.split()
        return (
            Lease(Process(int(pid), int(start)), int(held), int(share), state, int(ticket))
            if state in STATES
            else None
        )
    except ValueError:
        return None


def take(gpus: Iterable[Gpu], process: Process, share: int, *, alone: bool) -> bool:
    """Give a process its share for a test on several GPUs at once; False if one of them leaves too little. Raises `LeaseError`."""
    rooms = {
        gpu: gpu.room() for gpu in sorted(gpus)
    }  # in one order: two that each hold one would wait for ever
    with ExitStack() as stack:
        found = [(stack.enter_context(gpu.locked()), room) for gpu, room in rooms.items()]
        if not all(_fits(leases, process, share, room, alone=alone) for leases, room in found):
            return False
        for leases, _ in found:
            leases[process] = leases.get(process, Lease(process))._replace(
                share=share, state=ALONE if alone else RUNS
            )
    return True


def _fits(
    leases: Mapping[Process, Lease], process: Process, share: int, room: int, *, alone: bool
) -> bool:
    own = leases.get(process, Lease(process))
    others = [lease for lease in leases.values() if lease.process != process]
    turn = (own.ticket if own.state == WAITS else math.inf, process)
    if any(
        lease.state == ALONE or (lease.state == WAITS and (lease.ticket, lease.process) < turn)
        for lease in others
    ):
        return False
    if alone:
        return all(lease.state != RUNS for lease in others)
    return own.held + share + sum(lease.nbytes for lease in others) <= room
