"""Exclusive use of a GPU: workers, or two sessions, would time each other's kernels."""

from __future__ import annotations

import json
import os
import re
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_runtime_path

from pytest_gpumem.devices.protocol import DeviceError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.settings import WORKERS_RUN

PATIENCE = 3.0  # seconds before a message
REPEAT = 60.0  # seconds between messages
LIMIT = 600.0  # seconds of waiting for the same test
_POLL = 0.5


class LockUnusable(DeviceError):
    """The lock cannot be used."""


class GpuBusy(LockUnusable):
    """Another process uses the GPU for too long."""


@contextmanager
def exclusive(
    facts: DeviceFacts,
    tell: Callable[[str], None],
    *,
    test: str | None = None,
    limit: float,
) -> Iterator[None]:
    """Wait until no other process uses a GPU, and lock it. A device without a UUID has no lock.

    `tell`: prints a line. `test`: named to others. `limit`: seconds of waiting for the same test.
    Raises `LockUnusable`; `GpuBusy`: the wait reached the limit.
    """
    if facts.uuid is None:
        yield
        return
    path = lock_file(facts.uuid)
    lock, holder = FileLock(path), path.with_suffix(".json")
    gpu = f"{printable(facts.name)} ({facts.uuid})"
    try:
        _acquire(lock, holder, gpu, tell, limit)
        holder.write_text(
            json.dumps({"pid": os.getpid(), "test": test, "run": os.environ.get(WORKERS_RUN)})
        )
    except OSError as error:
        lock.release()
        raise LockUnusable(f"the lock {path} cannot be used: {error.strerror or error}") from None
    try:
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _acquire(
    lock: FileLock, holder: Path, gpu: str, tell: Callable[[str], None], limit: float
) -> None:
    begun = since = due = time.monotonic()
    last_user = _user(holder)
    while True:
        try:
            lock.acquire(timeout=min(_POLL, PATIENCE, limit))
            return
        except Timeout:
            now, user = time.monotonic(), _user(holder)
        if user != last_user:  # the wait for another test begins
            since, last_user = now, user
        if now - since >= limit:
            waited = f"for {limit:.0f} s of waiting" if limit else "and was not waited for again"
            raise GpuBusy(f"{gpu} is in use {waited}: {user} measures on it")
        # Workers of a run wait all the time.
        patience = REPEAT if user.startswith("worker") else PATIENCE
        if now >= max(due, begun + patience):
            due = now + REPEAT
            tell(
                f"gpumem: waiting for {gpu}: {user} measures on it; gives up in "
                f"{since + limit - now:.0f} s; the lock is {lock.lock_file}"
            )


def _user(holder: Path) -> str:
    try:
        written = json.loads(holder.read_text(encoding="utf-8", errors="replace"))
        test = f" ({written['test']})" if written["test"] else ""
        of_this_run = written.get("run") == os.environ.get(WORKERS_RUN, "")
        return printable(f"{'worker' if of_this_run else 'process'} {written['pid']}{test}")
    except (OSError, ValueError, TypeError, KeyError):  # it has just begun, or has just ended
        return "another process"


def lock_file(uuid: str) -> Path:
    """The lock of a GPU. Raises `LockUnusable`: others can replace it."""
    folder = Path()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a missing XDG_RUNTIME_DIR
            folder = user_runtime_path("gpumem", appauthor=False)
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        why = _not_ours(folder.lstat(), folder.parent.stat())
        if why is None:
            folder.chmod(0o700)
            path = folder / f"{re.sub('[^A-Za-z0-9.-]', '_', uuid)}.lock"
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))
            return path
        place = str(folder)
    except OSError as error:
        place, why = error.filename or str(folder), f"cannot be used: {error.strerror or error}"
    raise LockUnusable(f"the GPU's lock: {place} {why}; set XDG_RUNTIME_DIR to a folder of yours")


def _not_ours(folder: os.stat_result, parent: os.stat_result) -> str | None:
    if not hasattr(os, "getuid"):
        return None
    if not stat.S_ISDIR(folder.st_mode):
        return "is no folder"
    if folder.st_uid != os.getuid():
        return f"belongs to another user ({folder.st_uid})"
    if parent.st_mode & 0o002 and not parent.st_mode & stat.S_ISVTX:
        return "lies in a folder that other users can write to"
    return None
