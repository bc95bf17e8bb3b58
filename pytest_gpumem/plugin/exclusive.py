"""Exclusive use of GPUs: workers, or two sessions, would time each other's kernels."""

from __future__ import annotations

import os
import re
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from msgspec.structs import replace
from platformdirs import user_runtime_path

from pytest_gpumem.devices.protocol import PLENTY, DeviceError, Unsupported
from pytest_gpumem.plugin.marks import (
    KERNELS_FIXTURE,
    PEER_FIXTURE,
    TEST_FIXTURE,
    keywords_of,
    uses,
)
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.settings import of_marker

PATIENCE = 15.0  # seconds before a message: workers of a run wait all the time
REPEAT = 60.0  # seconds between messages
LIMIT = 600.0  # seconds of waiting for the same test
_POLL = 0.5


class LockUnusable(DeviceError):
    """The lock cannot be used."""


class GpuBusy(LockUnusable):
    """Another process uses the GPU for too long."""


class ExclusiveFeature(Feature):
    """Gives a test with our fixtures its GPUs for itself."""

    name = "exclusive use"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._limit = LIMIT  # 0 after a wait that reached it: others fail at once
        self._last_line = -REPEAT  # when it was printed, on the monotonic clock

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Afterwards, give back the memory that is kept, unless the next test measures with it."""
        try:
            yield
        finally:
            session = self._session
            unless_free = 1.0
            if nextitem is not None and uses(nextitem, TEST_FIXTURE):
                unless_free = 0.0 if uses(nextitem, KERNELS_FIXTURE) else PLENTY
            if unless_free and session.is_open and session.lost_in is None:
                with suppress(DeviceError):  # a capture is open; the next measurement tries again
                    session.device.memory.make_room(unless_free=unless_free)

    @contextmanager
    def use(self, item: pytest.Item) -> Iterator[None]:
        """Wait for the GPUs of a test: one, two with `peer_buffer`, or as many as its marker says.
        Raises `LockUnusable`; `Unsupported`: the test needs more GPUs than there are.
        """
        session = self._session
        gpus, facts = session.chosen.gpus, session.facts
        if not gpus and facts.uuid is not None:
            gpus = (facts.uuid,)
        count = of_marker(keywords_of(item), "gpus")
        there = max(1, len(gpus))
        if count is not None and count > there:
            raise Unsupported(
                f"the test needs {count} GPUs (gpus={count}); this process sees {there}"
            )
        count = count or (2 if uses(item, PEER_FIXTURE) else 1)
        test = f"{item.nodeid} in {session.config.rootpath}"
        with ExitStack() as stack:
            # All in one order: two tests that each have a GPU of the other's would wait for ever.
            for uuid in sorted(gpus[:count]):
                gpu = replace(facts, uuid=uuid)
                try:
                    stack.enter_context(exclusive(gpu, self._tell, test=test, limit=self._limit))
                except GpuBusy:
                    self._limit = 0.0
                    raise
            yield

    def _tell(self, line: str) -> None:
        """Print a line past pytest's capture; one a minute, however many tests wait."""
        now = time.monotonic()
        if now - self._last_line >= REPEAT:
            self._last_line = now
            capture = self._session.config.pluginmanager.getplugin("capturemanager")
            with nullcontext() if capture is None else capture.global_and_fixture_disabled():
                print(f"\n{line}", file=sys.stderr, flush=True)


@contextmanager
def exclusive(
    facts: DeviceFacts, tell: Callable[[str], None], *, test: str, limit: float
) -> Iterator[None]:
    """Wait until no other process uses a GPU, and lock it. A device without a UUID has no lock.

    `tell`: prints a line. `test`: named to others. `limit`: seconds of waiting for the same test.
    Raises `LockUnusable`, or `GpuBusy` at the limit.
    """
    if facts.uuid is None:
        yield
        return
    path = lock_file(facts.uuid)
    lock, holder = FileLock(path), path.with_suffix(".txt")
    gpu = f"{printable(facts.name)} ({facts.uuid})"
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
                waited = (
                    f"for {limit:.0f} s of waiting" if limit else "and was not waited for again"
                )
                raise GpuBusy(f"{gpu} is in use {waited}: {user} measures on it")
            if now - begun >= PATIENCE:
                tell(
                    f"gpumem: waiting for {gpu}: {user} measures on it; gives up in "
                    f"{since + limit - now:.0f} s; the lock is {path}"
                )
        holder.write_text(f"process {os.getpid()} ({test})", encoding="utf-8", errors="replace")
    except OSError as error:
        lock.release()
        raise LockUnusable(f"the lock {path} cannot be used: {error.strerror or error}") from None
    try:
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _user(holder: Path) -> str:
    with suppress(OSError):  # it has just begun, or has just ended
        return printable(holder.read_text(encoding="utf-8", errors="replace")) or "another process"
    return "another process"


def lock_file(uuid: str) -> Path:
    """The lock of a GPU. Raises `LockUnusable`: others can replace it."""
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
        raise LockUnusable(f"the GPU's lock: {trouble}; set XDG_RUNTIME_DIR to a folder of yours")
    return path
