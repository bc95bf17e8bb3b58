"""The pass on the GPU that follows a call of pytest-benchmark's `benchmark`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.protocol import OWN_CONTEXT, NotCounted, Stream
from pytest_gpumem.measuring.bound import BoundKernel
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.plugin.entries import Entries
from pytest_gpumem.plugin.gpu_benchmark import GpuBenchmark
from pytest_gpumem.plugin.gpu_test import GpuTest
from pytest_gpumem.plugin.marks import marks_of
from pytest_gpumem.plugin.session import WATCHED, GpuSession
from pytest_gpumem.plugin.watched_test import TROUBLE
from pytest_gpumem.plugin.workers import benchmarks_are_off
from pytest_gpumem.settings import marker_keywords, of_marker
from pytest_gpumem.units import format_time

BUDGET = 0.3  # seconds for a call, where nobody sets a budget
HOST = "host s"  # `Row.extra`: seconds of one call by pytest-benchmark's clock
LOOKS = 6  # calls until two in a row run the same work
EMPTY_LOOKS = 3  # calls without work after which there is none: CUPTI may lose the first records


class CannotAdopt(Exception):
    """A benchmark that has no GPU figure; the message is the reason."""


class NoGpu(Exception):
    """A benchmark that uses no GPU."""


def measure(session: GpuSession, item: pytest.Item, fixture: Any, call: BenchmarkCall) -> None:
    """Add a measurement of the call to the test.
    Raises `CannotAdopt`, `NoGpu`, or what the call raises.
    """
    if benchmarks_are_off(item.config):
        raise CannotAdopt("pytest-benchmark is off (--benchmark-disable)")
    if call.runs_once and not of_marker(marker_keywords(marks_of(item)), "adopt"):
        raise CannotAdopt("pedantic(rounds=1) runs it once; adopt=True of the marker repeats it")
    if session.lost_in is not None:
        raise CannotAdopt(session.why_unrun)
    if session.device.elsewhere() == OWN_CONTEXT:
        raise CannotAdopt(f"it runs in {OWN_CONTEXT}")
    notes: list[str] = []
    busy = None  # seconds of the device's work in one call
    if call.kernel is None:
        try:
            with closing(call):
                busy = _busy_seconds(session, call)
        except NotCounted as why:
            notes.append(f"not known whether calls run the same work: {why}")
    request: pytest.FixtureRequest = item._request  # type: ignore[attr-defined]
    test: GpuTest = request.getfixturevalue("_gpumem_test")
    if test.entries is not None:
        raise CannotAdopt("its test measures with gpu_benchmark")
    try:
        with closing(call):
            entries = _measured(test, fixture, call)
            if test.measurements[-1][0].work_seen is False:
                raise NoGpu
            peak = _peak_of(session, item, call)
    except BaseException:
        test.measurements.clear()
        test.entries, test.wrong = None, None
        raise
    measurement, limits = test.measurements[-1]
    if measurement.sampler == "host" and busy is not None:
        notes.append(
            "wall time of a call until the GPU is done; its kernels and copies take "
            f"{format_time(busy)}"
        )
    measurement = replace(measurement, notes=(*measurement.notes, *notes))
    test.measurements[-1] = (measurement, limits)
    if fixture.stats is not None:
        test.extra[""][HOST] = float(fixture.stats.stats.median)
        session.adopted.add(item.nodeid)
    if peak is not None:
        entries.further["peak_bytes"] = peak


def _busy_seconds(session: GpuSession, call: BenchmarkCall) -> float:
    """Call until two calls in a row run the same work, and return the seconds of that work.
    Raises `NoGpu`: they run none. Raises `CannotAdopt`: they differ.
    Raises `NotCounted`: the device's work cannot be seen.
    """
    device = session.device

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
            raise NoGpu
        last = work
    raise CannotAdopt("calls that follow each other run other work")


def _measured(test: GpuTest, fixture: Any, call: BenchmarkCall) -> Entries:
    """Measure the call, hot unless the marker says otherwise; return the entries of its test."""
    if test.settings.origins.get("budget") == "default":
        test.settings = test.settings._replace(budget=BUDGET)
    benchmark = GpuBenchmark(test, fixture, adopted=True)
    function, arguments, keywords = call.kernel or (call, (), {})
    target: Target = test.conductor.target(
        function, arguments, keywords, arena=test.arena, on_simulated=True
    )
    if call.restores:

        def prepare(stream: Stream) -> None:
            with test.device.kernels.current_stream(stream):
                call.prepare()

        target = dataclasses.replace(target, prepare=prepare, restores=True)
    mode = marker_keywords(marks_of(test.item)).get("mode") or "hot"
    benchmark._measure(target, "", benchmark._limits({}), mode, None)
    return benchmark._entries


def _peak_of(session: GpuSession, item: pytest.Item, call: BenchmarkCall) -> int | None:
    """Return the bytes that one more call takes, if the memory of the test is not watched."""
    if item.stash.get(WATCHED, None) is not None or session.settings.footprint == "off":
        return None
    footprints = session.footprints
    try:
        footprints.start(driver=False, lines=False)
        try:
            call.prepare()
            with closing(footprints.watch()) as watch:
                call()
                session.device.streams.synchronize()
                footprint = watch.read()
        finally:
            footprints.stop()
    except TROUBLE:
        return None
    return footprint.peak if footprint.watched else None


# The call


class BenchmarkCall:
    """A function with its arguments, which a setup may make for each call."""

    def __init__(
        self,
        function: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        setup: Callable[[], Any] | None = None,
        teardown: Callable[..., object] | None = None,
        *,
        runs_once: bool = False,
    ) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._setup, self._teardown = setup, teardown
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.runs_once = runs_once
        self.restores = setup is not None or teardown is not None
        """Something comes before or after each call."""
        self._is_ready = False  # its arguments are made, and not used yet
        self._needs_teardown = False

    @property
    def kernel(self) -> tuple[BoundKernel, tuple[Any, ...], dict[str, Any]] | None:
        """A kernel of the catalogue with its arguments, if that is what is called."""
        if isinstance(self._function, BoundKernel) and not self.restores:
            return self._function, self._args, dict(self._kwargs)
        return None

    def prepare(self) -> None:
        """End the last call, and make the arguments of the next."""
        if self._is_ready:
            return
        self.close()
        if self._setup is not None:
            self._args, self._kwargs = self._setup() or (self._args, self._kwargs)
        self._is_ready = self._needs_teardown = True

    def __call__(self) -> object:
        self._is_ready = False
        return self._function(*self._args, **self._kwargs)

    def close(self) -> None:
        """End the last call."""
        if self._needs_teardown and self._teardown is not None:
            self._teardown(*self._args, **self._kwargs)
        self._is_ready = self._needs_teardown = False


def call_of(
    method: Callable[..., Any], fixture: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> BenchmarkCall:
    """Return what a method of pytest-benchmark is given to call."""
    bound = inspect.signature(method).bind(fixture, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if "function_to_benchmark" in given:
        return BenchmarkCall(given["function_to_benchmark"], given["args"], given["kwargs"])
    once = given["setup"] is None and given["rounds"] == given["iterations"] == 1
    return BenchmarkCall(
        given["target"],
        tuple(given["args"]),
        given["kwargs"] or {},
        given["setup"],
        given.get("teardown"),  # from pytest-benchmark 5 on
        runs_once=once and given["warmup_rounds"] == 0,
    )
