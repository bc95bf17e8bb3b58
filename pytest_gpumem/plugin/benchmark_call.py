"""A call of pytest-benchmark's `benchmark`, measured on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.protocol import OWN_CONTEXT, Device, NotCounted, Unsupported
from pytest_gpumem.measuring.bound import BoundKernel
from pytest_gpumem.measuring.case import target_of
from pytest_gpumem.plugin.footprints import TROUBLE
from pytest_gpumem.plugin.gpu_benchmark import GpuBenchmark, GpuTest
from pytest_gpumem.plugin.marks import keywords_of
from pytest_gpumem.plugin.session import GpuSession, state_of
from pytest_gpumem.plugin.workers import benchmarks_are_off
from pytest_gpumem.records.row import HOST
from pytest_gpumem.settings import of_marker
from pytest_gpumem.units import format_time

BUDGET = 0.3  # seconds for a call, where nobody sets a budget
LOOKS = 6  # calls until two in a row run the same work
EMPTY_LOOKS = 3  # calls without work after which there is none: CUPTI may lose the first records


class BenchmarkCall:
    """A function with its arguments, which a setup may make for each call."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """`arguments`: those of a method of pytest-benchmark, by name."""
        pedantic = "target" in arguments
        self.function = arguments["target" if pedantic else "function_to_benchmark"]
        self.args, self.kwargs = tuple(arguments["args"]), arguments["kwargs"] or {}
        self._setup = arguments.get("setup")
        self._teardown = arguments.get("teardown")  # from pytest-benchmark 5 on
        self.runs_once = False
        if pedantic and self._setup is None and not arguments["warmup_rounds"]:
            self.runs_once = arguments["rounds"] == arguments["iterations"] == 1
        self.restores = self._setup is not None or self._teardown is not None
        self._state = ""  # "ready": its arguments are made, and not used yet; "called": not ended
        self.__name__ = getattr(self.function, "__name__", type(self.function).__name__)

    def prepare(self) -> None:
        if self._state == "ready":
            return
        self.close()
        if self._setup is not None:
            self.args, self.kwargs = self._setup() or (self.args, self.kwargs)
        self._state = "ready"

    def __call__(self) -> object:
        self._state = "called"
        return self.function(*self.args, **self.kwargs)

    def close(self) -> None:
        state, self._state = self._state, ""
        if state and self._teardown is not None:
            self._teardown(*self.args, **self.kwargs)


def measure(session: GpuSession, item: pytest.Item, fixture: Any, call: BenchmarkCall) -> bool:
    """Add a measurement of the call to the test; return whether it uses the GPU.
    Raises `Unsupported`: why it has no figure; and what the call raises.
    """
    keywords = keywords_of(item)
    if benchmarks_are_off(item.config):
        raise Unsupported("pytest-benchmark is off (--benchmark-disable)")
    if call.runs_once and not of_marker(keywords, "adopt"):
        raise Unsupported("pedantic(rounds=1) runs it once; adopt=True of the marker repeats it")
    if session.lost_in is not None:
        raise Unsupported(session.why_unrun)
    if session.device.in_own_context():
        raise Unsupported(f"it runs in {OWN_CONTEXT}")
    is_kernel = isinstance(call.function, BoundKernel) and not call.restores
    notes: list[str] = []
    busy = None  # seconds of the device's work in one call
    if not is_kernel:
        try:
            with closing(call):
                busy = _busy_seconds(session.device, call)
            if not busy:
                return False
        except NotCounted as why:
            notes.append(f"not known whether calls run the same work: {why}")
    request: pytest.FixtureRequest = item._request  # type: ignore[attr-defined]
    test: GpuTest = request.getfixturevalue("_gpumem_test")
    if test.entries is not None:
        raise Unsupported("its test measures with gpu_benchmark")
    if test.settings.origins.get("budget") == "default":
        test.settings = test.settings._replace(budget=BUDGET)
    make = partial(target_of, call, (), {}, arena=test.arena, on_simulated=True)
    if is_kernel:
        make = partial(target_of, call.function, call.args, call.kwargs, arena=test.arena)
    elif call.restores:
        make = partial(make, restore=call.prepare)
    try:
        with closing(call):
            benchmark = GpuBenchmark(test, fixture)
            benchmark.measure(make, mode=keywords.get("mode") or "hot")
            measurement, limits, extra = test.measurements[""]
            peak = _peak_of(session, item, call)
    except BaseException:
        _forget(test)
        raise
    if not measurement.work_seen:
        _forget(test)
        return False
    if measurement.sampler == "host" and busy is not None:
        notes.append(
            "wall time of a call until the GPU is done; its kernels and copies take "
            f"{format_time(busy)}"
        )
    measurement = replace(measurement, notes=(*measurement.notes, *notes))
    test.measurements[""] = measurement, limits, extra
    assert test.entries is not None
    if fixture.stats is not None:
        extra[HOST] = float(fixture.stats.stats.median)
        test.entries.further["adopted"] = True
    if peak is not None:
        test.entries.further["peak_bytes"] = peak
    return True


def _forget(test: GpuTest) -> None:
    test.measurements.clear()
    test.entries, test.wrong = None, None


def _busy_seconds(device: Device, call: BenchmarkCall) -> float:
    """The seconds of the work of a call, once two calls in a row run the same; 0: none."""

    def run() -> None:
        call()
        device.streams.synchronize()

    last: list[tuple[str, int]] = []
    for look in range(1, LOOKS + 1):
        call.prepare()
        device.streams.synchronize()
        with device.footprints.paused():
            spans = device.counters.spans(run)
        work = sorted((span.name, span.grid) for span in spans)  # without times
        if work and work == last:
            return sum(span.end - span.start for span in spans)
        if look >= EMPTY_LOOKS and not work and not last:
            return 0.0
        last = work
    raise Unsupported("calls that follow each other run other work")


def _peak_of(session: GpuSession, item: pytest.Item, call: BenchmarkCall) -> int | None:
    if state_of(item).watched is not None or session.settings.footprint == "off":
        return None
    footprints = session.footprints
    with suppress(*TROUBLE), ExitStack() as stack:
        stack.callback(footprints.stop)
        footprints.start(driver=False)
        call.prepare()
        with closing(footprints.watch()) as watch:
            call()
            session.device.streams.synchronize()
            return watch.read().peak
    return None
