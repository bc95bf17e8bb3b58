"""A lock for each GPU: workers, or two sessions, would time each other's kernels."""

from __future__ import annotations

import os
import re
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_runtime_path

from pytest_gpumem.devices.errors import DeviceError
from pytest_gpumem.printable import printable

PATIENCE = 15.0  # seconds before a message: workers of a run wait all the time
_POLL = 0.5


@contextmanager
def exclusive(
    uuid: str, name: str, tell: Callable[[str], None], *, test: str, limit: float
) -> Iterator[None]:
    """Wait until no other process uses a GPU, and lock it.

    `limit`: seconds of waiting for the same test.
    Raises `DeviceError`: at the limit, or the lock cannot be used.
    """
    path = lock_file(uuid)
    lock, holder = FileLock(path), path.with_suffix(".txt")
    gpu = f"{printable(name)} ({uuid})"
    begun = since = time.monotonic()
    last_user = _user(holder)
    try:
        while not lock.is_locked:
            with suppress(Timeout):
                lock.acquire(timeout=min(_POLL, PATIENCE, limit))
                continue
            now, user = time.monotonic(), _user(holder)
            if user != last_user:  # the wait for another test begins
                since, last_user = now, user
            if now - since >= limit:
                how = f"for {limit:.0f} s of waiting" if limit else "and was not waited for again"
                raise DeviceError(f"{gpu} is in use {how}: {user} measures on it")
            if now - begun >= PATIENCE:
                tell(
                    f"gpumem: waiting for {gpu}: {user} measures on it; gives up in "
                    f"{since + limit - now:.0f} s; the lock is {path}"
                )
        holder.write_text(f"process {os.getpid()} ({test})", encoding="utf-8", errors="replace")
    except OSError as error:
        lock.release()
        raise DeviceError(f"the lock {path} cannot be used: {error.strerror or error}") from None
    try:
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        lock.release()


def _user(holder: Path) -> str:
    with suppress(OSError):  # it has just begun, or has just ended
        return printable(holder.read_text(encoding="utf-8", errors="replace")) or "another process"
    return "another process"


def lock_file(uuid: str) -> Path:
    """The lock of a GPU. Raises `DeviceError`: others can replace it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a missing XDG_RUNTIME_DIR
        folder = user_runtime_path("gpumem", appauthor=False)
    path = folder / f"{re.sub('[^A-Za-z0-9.-]', '_', uuid)}.lock"
    trouble = None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state, parent = folder.lstat(), folder.parent.stat()
        if not stat.S_ISDIR(state.st_mode):
            trouble = f"{folder} is no folder"
        elif state.st_uid != os.getuid():
            trouble = f"{folder} belongs to another user ({state.st_uid})"
        elif parent.st_mode & 0o002 and not parent.st_mode & stat.S_ISVTX:
            trouble = f"{folder} lies in a folder that other users can write to"
        else:
            folder.chmod(0o700)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        place = error.filename or path
        trouble = f"{place} cannot be used: {error.strerror or error}"
    if trouble is not None:
        raise DeviceError(f"the GPU's lock: {trouble}; set XDG_RUNTIME_DIR to a folder of yours")
    return path
