"""Exclusive use of a session's GPUs, and the memory that is kept for the next test."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.devices.protocol import PLENTY, Unsupported
from pytest_gpumem.plugin import exclusive
from pytest_gpumem.plugin.marks import KERNELS_FIXTURE, PEER_FIXTURE, TEST_FIXTURE, marks_of, uses
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.settings import marker_keywords, of_marker


class ExclusiveFeature(Feature):
    """Gives a test with our fixtures its GPUs for itself."""

    name = "exclusive use"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._gave_up = False  # a wait for a GPU reached its limit
        self._last_line: float | None = None  # when it was printed, on the monotonic clock

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Afterwards, give back the memory that is kept, unless the next test measures with it."""
        try:
            yield
        finally:
            if nextitem is None or not uses(nextitem, TEST_FIXTURE):
                self._session.make_room()
            elif not uses(nextitem, KERNELS_FIXTURE):
                self._session.make_room(unless_free=PLENTY)

    @contextmanager
    def use(self, item: pytest.Item) -> Iterator[None]:
        """Wait for the GPUs of a test. After a wait that reached its limit, others fail at once.
        Raises `LockUnusable`; `Unsupported`: the test needs more GPUs than there are.
        """
        session = self._session
        test = f"{item.nodeid} in {session.config.rootpath}"
        with ExitStack() as stack:
            # All in one order: two tests that each have a GPU of the other's would wait for ever.
            for uuid in sorted(reserved(item, session.chosen)):
                facts = replace(session.facts, uuid=uuid)
                limit = 0.0 if self._gave_up else exclusive.LIMIT
                gpu = exclusive.exclusive(facts, self._announce, test=test, limit=limit)
                try:
                    stack.enter_context(gpu)
                except exclusive.GpuBusy:
                    self._gave_up = True
                    raise
            yield

    def _announce(self, line: str) -> None:
        """Print a line past pytest's capture; one a minute, however many tests wait."""
        now = time.monotonic()
        if self._last_line is not None and now - self._last_line < exclusive.REPEAT:
            return
        self._last_line = now
        capture = self._session.config.pluginmanager.getplugin("capturemanager")
        with nullcontext() if capture is None else capture.global_and_fixture_disabled():
            print(f"\n{line}", file=sys.stderr, flush=True)


def reserved(item: pytest.Item, chosen: DeviceChoice) -> tuple[str, ...]:
    """UUIDs of a test's GPUs: one, two with `peer_buffer`, or as many as its marker says.
    Raises `Unsupported`: the marker needs more than there are.
    """
    count = of_marker(marker_keywords(marks_of(item)), "gpus")
    there = max(1, len(chosen.gpus))
    if count is not None and count > there:
        raise Unsupported(f"the test needs {count} GPUs (gpus={count}); this process sees {there}")
    uuids = chosen.gpus
    if not uuids and chosen.facts.uuid is not None:
        uuids = (chosen.facts.uuid,)
    return tuple(uuids[: max(count or 1, 2 if uses(item, PEER_FIXTURE) else 1)])
