"""One measuring test at a time on each GPU: workers, or two sessions, would time each other's kernels.

The lock lies in a folder of the user's own. In a folder that others can write to, they could put a link in its place, or keep it locked.
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

PATIENCE = 3.0  # seconds of waiting for a GPU after which a message names the process and the test that use it
REPEAT = 60.0  # seconds between two such messages
LIMIT = 600.0  # seconds of waiting for one test of another process, after which the wait ends with an error
_POLL = 0.5  # seconds between two looks at who holds the GPU


class LockUnusable(DeviceError):
    """The lock of a GPU cannot be used; one line with the path and the reason."""


class GpuBusy(LockUnusable):
    """One test of another process uses the GPU for too long; one line that names it."""


@contextmanager
def exclusive(
    facts: DeviceFacts,
    tell: Callable[[str], None] = lambda line: None,
    *,
    test: str | None = None,
    limit: float | None = None,
) -> Iterator[None]:
    """Waits until no other process of this user holds the GPU. A device without a UUID belongs to this process alone.

    The lock ends with the process, however that ends. An interrupt ends the wait.
    `tell`: is given one line that names the holder after `PATIENCE` seconds of waiting, and another every `REPEAT` seconds; for another
    worker of the same run the first line comes after `REPEAT` seconds too.
    `test`: the test that needs the GPU, named to those who wait for it.
    `limit`: seconds of waiting for the same test of the same process; default: `LIMIT`. They begin anew when another test holds it.
    Raises `GpuBusy`: the wait reached the limit.
    Raises `LockUnusable`: the lock or its folder cannot be used.
    """
    if facts.uuid is None:
        yield
        return
    path = lock_file(facts.uuid)
    lock, holder = FileLock(path), path.with_suffix(".json")
    try:
        _acquire(
            lock,
            holder,
            f"{printable(facts.name)} ({facts.uuid})",
            tell,
            LIMIT if limit is None else limit,
        )
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
    now = since = time.monotonic()
    due, seen = now + PATIENCE, _content(holder)
    while True:
        try:
            lock.acquire(timeout=max(0.0, min(_POLL, due - now, since + limit - now)))
            return
        except Timeout:
            now = time.monotonic()
        content = _content(holder)
        name, of_this_run = _named(content)
        if content != seen:
            since, seen = now, content
        elif now - since >= limit:
            waited = f"for {limit:.0f} s of waiting" if limit else "and was not waited for again"
            raise GpuBusy(
                f"{gpu} is in use {waited}: {name} measures on it; end that process, or measure later"
            )
        if now >= due and of_this_run and now < since + REPEAT:
            due = since + REPEAT
        if now >= due:
            due = now + REPEAT
            rest = since + limit - now
            tell(
                f"gpumem: waiting for {gpu}: {name} measures on it; gives up in {rest:.0f} s; the lock is {lock.lock_file}"
            )


def lock_file(uuid: str) -> Path:
    """The lock of a GPU, in a folder that only this user can write to.
    Raises `LockUnusable`: there is no such folder, or the lock cannot be opened.
    """
    folder = Path()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # where XDG_RUNTIME_DIR is not set, platformdirs takes another folder and warns
            folder = user_runtime_path("gpumem", appauthor=False)
        for one in (folder.parent, folder):
            one.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (why := _not_ours(folder)) is not None:
            raise LockUnusable(
                f"the folder of the GPU's lock, {folder}, {why}; set XDG_RUNTIME_DIR to a folder of your own"
            )
        folder.chmod(0o700)
        path = folder / f"{re.sub('[^A-Za-z0-9.-]', '_', uuid)}.lock"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))
    except OSError as error:
        where = error.filename or folder
        raise LockUnusable(
            f"the GPU's lock, {where}, cannot be used: {error.strerror or error}; set XDG_RUNTIME_DIR to a folder of your own"
        ) from None
    return path


def _not_ours(folder: Path) -> str | None:
    """Why other users can replace the folder or its files; None if they cannot."""
    if not hasattr(os, "getuid"):
        return None
    own, parent = folder.lstat(), folder.parent.stat()
    if not stat.S_ISDIR(own.st_mode):
        return "is no folder"
    if own.st_uid != os.getuid():
        return f"belongs to another user ({own.st_uid})"
    if parent.st_uid not in (0, os.getuid()):
        return f"lies in a folder of another user ({parent.st_uid})"
    if parent.st_mode & 0o002 and not parent.st_mode & stat.S_ISVTX:
        return "lies in a folder that other users can write to"
    return None


def _content(holder: Path) -> str:
    try:
        return holder.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the holder has just begun, or has just ended
        return ""


def _named(content: str) -> tuple[str, bool]:
    """The process and the test that hold a GPU, as `exclusive` wrote them; True for another worker of this run, of which nobody needs to
    hear."""
    try:
        written = json.loads(content)
        test = f" ({written['test']})" if written["test"] else ""
        return printable(
            f"process {written['pid']}{test}"
        ), WORKERS_RUN in os.environ and written.get("run") == os.environ[WORKERS_RUN]
    except (ValueError, TypeError, KeyError):
        return "another process", False
