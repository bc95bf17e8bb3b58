"""The memory and the time that each test took in earlier sessions of the project."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pytest_gpumem.files import write_whole

LATEST = 3  # sessions that count: the most that a test took is its share
PAGE = 2 << 20  # bytes; the driver gives memory in such pages
_SLOWER = 1.1  # by which factor a session can raise the time of a test: beside others it takes longer than alone


class Learnt(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a test."""

    seconds: float
    grown: tuple[int, ...] = ()
    """Most bytes that the driver gave its process beyond what that held before, fixtures included; of the latest sessions, newest last."""
    fixtures: dict[
        str, int
    ] = {}  # of wider scopes that it uses, with the bytes that each holds while it lives
    alone: str = ""  # why it has the GPU to itself; empty if it has not

    @property
    def share(self) -> int:
        """Bytes that it needs beyond what its process holds without its fixtures, in whole pages. 0: no GPU work."""
        return -(-max(self.grown, default=0) // PAGE) * PAGE

    def after(self, newer: Learnt, *, failed: bool) -> Learnt:
        """What is known after another run. One that failed may have taken less, and ended sooner."""
        grown = (*self.grown, *newer.grown)[-LATEST:]
        if failed:
            return self if newer.share <= self.share else msgspec.structs.replace(self, grown=grown)
        return msgspec.structs.replace(
            newer, grown=grown, seconds=min(newer.seconds, self.seconds * _SLOWER)
        )


class Shares(msgspec.Struct):
    """What is known of a project's tests on GPUs of one model."""

    schema: int = 1
    idle: int = 0
    """Bytes that a process holds between tests: its context, and the code of its kernels."""
    tests: dict[str, Learnt] = {}


def load(path: Path) -> Shares:
    """What a file holds; nothing if there is none, or if another version or a crash wrote it."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Shares)
    except (OSError, msgspec.DecodeError):
        return Shares()
    return found if found.schema == Shares().schema else Shares()


def save(path: Path, session: Shares, learnt: Mapping[str, Learnt]) -> None:
    """Write what a session learnt, beside what others have written meanwhile. Raises `OSError`."""
    session.tests = {**load(path).tests, **learnt}
    write_whole(path, msgspec.json.encode(session))
