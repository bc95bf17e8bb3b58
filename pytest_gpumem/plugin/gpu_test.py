"""The device side of one test, from the setup of its fixtures until their teardown."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from inspect import signature
from typing import Any

import pytest

from pytest_gpumem.devices.protocol import OWN_CONTEXT, ContextLost, Device
from pytest_gpumem.measuring.bound import BadCall, Kernels
from pytest_gpumem.measuring.conductor import Conductor
from pytest_gpumem.measuring.plan import Plan
from pytest_gpumem.measuring.works import Works
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import PersistingStream, Thrashing, persisting
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.memory.window_request import window_request
from pytest_gpumem.plugin.entries import Entries
from pytest_gpumem.plugin.marks import marks_of
from pytest_gpumem.plugin.result import Extra
from pytest_gpumem.plugin.session import TEST, GpuSession
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.settings import marker_keywords, of_marker, of_test
from pytest_gpumem.units import did_you_mean


class GpuTest:
    """A test that uses our fixtures. `close` frees everything that was allocated through it."""

    def __init__(self, item: pytest.Item, session: GpuSession) -> None:
        """Raises what opening the device raises."""
        self.item, self.session = item, session
        keywords = marker_keywords(marks_of(item))
        self.limits = session.limits(item)
        self.settings = of_test(session.settings, keywords)
        self.range_name = session.names.unique(item.nodeid)
        self.device: Device = session.device
        if session.watch is not None:
            session.watch.fresh()
        self.exit = ExitStack()  # closed at the test's end, after its memory is freed
        if self.device.elsewhere() != OWN_CONTEXT:
            self.exit.enter_context(self.device.current())
        self.arena = Arena(
            self.device,
            zlib.crc32(item.nodeid.encode(errors="surrogatepass")),
            oversubscribes=bool(of_marker(keywords, "oversubscribe")),
        )
        self.memory = Memory(self.arena)
        self.works = Works(self.memory)
        self.streams: list[PersistingStream] = []  # the test's persisting streams
        self.measurements: list[tuple[Measurement, Limits]] = []
        """Measurements so far, each with its limits."""
        self.extra: dict[str, Extra] = {}  # further figures of each measurement, by its label
        self.entries: Entries | None = None  # of pytest-benchmark
        self.subtest_failed = False  # the body goes on, and pytest fails the test at its end
        self.judged = False  # the body has ended: nothing more is measured
        self.wrong: str | None = None
        """The first result that was wrong: the test fails by it even if it catches the error."""
        item.stash[TEST] = self

    @property
    def kernels(self) -> Kernels:
        return self.session.kernels

    @property
    def conductor(self) -> Conductor:
        return self.session.conductor

    @contextmanager
    def spending(self) -> Iterator[Plan]:
        """The plan of a measurement; limits its time, and charges it to a total budget."""
        session = self.session
        begun, plan = self.device.now(), self._plan()
        limit: AbstractContextManager[None] = nullcontext()
        timeout = self.settings.timeout
        # A profiler may take much longer.
        if timeout and not session.ranges.tool_attached():
            deadline: Any = session.config.pluginmanager.getplugin("gpumem-deadline")
            limit = deadline.limit(self.item, plan.budget + timeout)
        try:
            with limit:
                yield plan
        finally:
            if session.ledger is not None:
                session.ledger.took(self.device.now() - begun)

    def _plan(self) -> Plan:
        """The plan with the smaller of its own budget and its share of the total."""
        settings, budgets = self.settings, list[float]()
        if settings.budget is not None:
            budgets.append(settings.budget)
        if self.session.ledger is not None:
            budgets.append(self.session.ledger.share(self.item.nodeid))
        return Plan(
            settings.mode, settings.sampler, settings.placements, settings.precision, min(budgets)
        )

    @contextmanager
    def persisting_stream(self, buffer: Any, **options: Any) -> Iterator[PersistingStream]:
        """A stream whose access-policy window lies on `buffer`, or on the array that
        `device_buffer(..., like=)` made. Arguments and errors as `memory.l2.persisting`.

        Warns of `Thrashing` if hit ratios x bytes exceed the set-aside, unless `allow_thrash=True`.
        Raises `BadCall`: nothing was measured on the stream in the block, such as without
        `stream=`; or an unknown keyword.
        """
        keywords = list(signature(window_request).parameters)[2:]
        for name in options:
            if name not in keywords:
                hint = did_you_mean(name, keywords) or f"; accepted are {', '.join(keywords)}"
                raise BadCall(f"persisting_stream() has no keyword {name!r}{hint}")
        allocation = self.arena.find(buffer)
        window = persisting(self.device, buffer if allocation is None else allocation, **options)
        with window as stream:
            self.streams.append(stream)
            if stream.thrashing is not None:
                self.item.warn(Thrashing(stream.thrashing))
            yield stream
            if not stream.used:
                raise BadCall(
                    "nothing was measured on this persisting_stream: pass stream= to gpu_benchmark"
                )

    def close(self) -> None:
        """Free everything, and close the persisting streams whose blocks were never left."""
        # What a lost context held went with it.
        with self.exit, suppress(ContextLost), self.device.current():
            if self.device.gone() is not None:
                return  # everything went with the context that was opened
            try:
                for stream in reversed(self.streams):
                    if not stream.closed:
                        stream.close()
                        if self.session.watch is not None:
                            self.session.watch.forgotten(stream)
            finally:
                try:
                    self.works.close()
                finally:
                    self.arena.close()
