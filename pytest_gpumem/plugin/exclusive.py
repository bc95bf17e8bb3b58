"""Exclusive use of a GPU: workers, or two sessions, would time each other's kernels.

The lock lies in a folder of the user's own, where nobody else can replace it, or keep it locked.
"""

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

PATIENCE = 3.0  # seconds of waiting until a message names the test that uses the GPU
REPEAT = 60.0  # seconds between two messages, and until the first about a worker of this run
LIMIT = 600.0  # seconds of waiting for the same test
_POLL = 0.5


class LockUnusable(DeviceError):
    """The lock of a GPU cannot be used; one line with the path and the reason."""


class GpuBusy(LockUnusable):
    """A test of another process uses the GPU for too long; one line that names it."""


@contextmanager
def exclusive(
    facts: DeviceFacts,
    tell: Callable[[str], None],
    *,
    test: str | None = None,
    limit: float,
) -> Iterator[None]:
    """Wait until no other process uses the GPU, and lock it; the lock ends with this process.

    `facts`: of the GPU. A device without a UUID belongs to this process alone.
    `tell`: prints a line about a long wait.
    `test`: named to those who wait for this process.
    `limit`: seconds of waiting for the same test.
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
        content = {"pid": os.getpid(), "test": test, "run": os.environ.get(WORKERS_RUN)}
        holder.write_text(json.dumps(content))
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
    begun = since = time.monotonic()
    last_line: float | None = None
    last_seen = _content(holder)
    while True:
        try:
            lock.acquire(timeout=min(_POLL, PATIENCE, limit))
            return
        except Timeout:
            now, seen = time.monotonic(), _content(holder)
        if seen != last_seen:  # another test: the wait for it begins
            since, last_seen = now, seen
        name, of_this_run = _holder(seen)
        if now - since >= limit:
            waited = f"for {limit:.0f} s of waiting" if limit else "and was not waited for again"
            raise GpuBusy(
                f"{gpu} is in use {waited}: {name} measures on it; end that process, or measure later"
            )
        due = begun + PATIENCE
        if last_line is not None or of_this_run:
            due = (last_line or since) + REPEAT
        if now >= due:
            last_line = now
            tell(
                f"gpumem: waiting for {gpu}: {name} measures on it; gives up in "
                f"{since + limit - now:.0f} s; the lock is {lock.lock_file}"
            )


def _content(holder: Path) -> str:
    try:
        return holder.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the holder has just begun, or has just ended
        return ""


def _holder(content: str) -> tuple[str, bool]:
    """The process and the test that use the GPU, and whether they are of this run."""
    try:
        written = json.loads(content)
        test = f" ({written['test']})" if written["test"] else ""
        run = written.get("run")
        of_this_run = run is not None and run == os.environ.get(WORKERS_RUN)
        return printable(f"process {written['pid']}{test}"), of_this_run
    except (ValueError, TypeError, KeyError):
        return "another process", False


def lock_file(uuid: str) -> Path:
    """The lock of a GPU. Raises `LockUnusable`: it cannot be opened, or others could replace it."""
    folder = Path()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # platformdirs warns where XDG_RUNTIME_DIR is not set
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
    """Why other users can replace a folder; None if they cannot."""
    if not hasattr(os, "getuid"):
        return None
    if not stat.S_ISDIR(folder.st_mode):
        return "is no folder"
    if folder.st_uid != os.getuid():
        return f"belongs to another user ({folder.st_uid})"
    if parent.st_mode & 0o002 and not parent.st_mode & stat.S_ISVTX:
        return "lies in a folder that other users can write to"
    return None
