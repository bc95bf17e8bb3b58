"""Adoption: a call of pytest-benchmark's `benchmark` is measured on the GPU too, once it was timed.

That gives a row, and an entry `NAME[gpu]` beside the host's. It fails no test and changes no
result: what cannot be measured is named in the summary. The methods of pytest-benchmark's class are
wrapped, so that other names of the fixture, `pedantic` and `weave` work alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_gpumem.devices.protocol import OWN_CONTEXT, Device, NotCounted
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.plugin.entries import is_pytest_benchmarks
from pytest_gpumem.plugin.gpu_memory import TROUBLE, limited
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, keywords_of, uses, uses_benchmark
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import GpuSession, state_of
from pytest_gpumem.plugin.workers import Workers, benchmarks_are_off
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.row import HOST
from pytest_gpumem.settings import Settings, of_marker, of_test
from pytest_gpumem.units import format_time

if TYPE_CHECKING:
    from pytest_gpumem.plugin.gpu_benchmark import GpuTest

SHOWN = 5  # benchmarks that a line names
BUDGET = 0.3  # seconds for a call, where nobody sets a budget
LOOKS = 6  # calls until two in a row run the same work
EMPTY_LOOKS = 3  # calls without work after which there is none: CUPTI may lose the first records


class CannotAdopt(Exception):
    """A benchmark that has no GPU figure; the message is the reason, empty if it uses no GPU."""


def adopts(item: pytest.Item, settings: Settings) -> bool:
    """True if the GPU is measured where the test calls `benchmark`. Raises `SettingsError`."""
    if not uses_benchmark(item) or uses(item, BENCHMARK_FIXTURE):
        return False
    return of_test(settings, keywords_of(item)).adopt


def rows_of_table(session: GpuSession) -> list[Row]:
    """The rows of this plugin's table: adopted ones if they have a limit or a reference."""
    rows = []
    for row in session.rows:
        adopted = HOST in row.extra
        if not adopted or limited(row.limits, LIMITS) or session.baseline.past(row):
            rows.append(row)
    return rows


class AdoptionFeature(Feature):
    """Measures the calls of `benchmark` on the GPU."""

    name = "adoption"

    def __init__(self, session: GpuSession, workers: Workers) -> None:
        self._session = session
        self._item: pytest.Item | None = None  # the test that runs
        self._called = False  # it has called `benchmark`
        self._reasons: dict[str, list[str]] = {}  # why benchmarks have no GPU figure
        workers.carry("adoption", self._seen, self._take)

    def _seen(self) -> list[Any]:
        return [sorted(self._session.without_gpu), self._reasons]

    def _take(self, seen: list[Any]) -> None:
        without_gpu, reasons = seen
        self._session.without_gpu.update(without_gpu)
        for reason, nodeids in reasons.items():
            self._reasons.setdefault(reason, []).extend(nodeids)

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        try:
            with pytest.MonkeyPatch.context() as patch:
                for name in ("__call__", "pedantic"):
                    method = getattr(BenchmarkFixture, name)
                    patch.setattr(BenchmarkFixture, name, self._wrapped(method))
                yield
        finally:
            self._session.remark(*self._lines())

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        self._item, self._called = item, False
        try:
            yield
        finally:
            self._item = None

    @contextmanager
    def call(self, item: pytest.Item) -> Iterator[None]:
        yield
        benchmark = getattr(item, "funcargs", {}).get("benchmark")
        if benchmark is None or self._called or is_pytest_benchmarks(benchmark):
            return  # the ordinary fixture that was not called has nothing to adopt
        if adopts(item, self._session.settings):
            self._note_reason(item, "another plugin, such as CodSpeed, has the fixture")

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(fixture: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            result = method(fixture, *args, **kwargs)
            item = self._item
            if item is not None:
                benchmarks = getattr(item.config, "_benchmarksession", None)
                # A test of a plugin may run a session of its own inside of this process.
                if benchmarks is not None and fixture._logger is benchmarks.logger:
                    self._called = True
                    bound = inspect.signature(method).bind(fixture, *args, **kwargs)
                    bound.apply_defaults()
                    self._follow(item, fixture, bound.arguments)
            return result

        return call

    def _follow(self, item: pytest.Item, fixture: Any, arguments: Mapping[str, Any]) -> None:
        session = self._session
        if session.ranges.tool_attached() or not adopts(item, session.settings):
            return
        in_use = session.is_open if session.facts.simulated else session.chosen.has_context()
        try:
            if not in_use:
                raise CannotAdopt
            measure(session, item, fixture, BenchmarkCall(arguments))
        except pytest.exit.Exception:
            raise
        except CannotAdopt as reason:
            if str(reason):
                self._note_reason(item, str(reason))
            else:
                session.without_gpu.add(item.nodeid)
        except (Exception, pytest.skip.Exception, pytest.fail.Exception) as error:
            first_line = str(error).partition("\n")[0]
            self._note_reason(item, f"{type(error).__name__}: {first_line}")

    def _note_reason(self, item: pytest.Item, reason: str) -> None:
        self._reasons.setdefault(printable(reason), []).append(item.nodeid)

    def _lines(self) -> Iterator[str]:
        session = self._session
        if session.is_part:
            return
        left_out = len(list(session.rows)) - len(rows_of_table(session))
        if left_out:
            yield (
                f"{counted(left_out, 'adopted benchmark')} without a limit or a baseline: "
                "pytest-benchmark's table has the GPU's times"
            )
        for reason, named in self._reasons.items():
            nodeids = list(dict.fromkeys(named))
            names = ", ".join(nodeids[:SHOWN])
            if len(nodeids) > SHOWN:
                names += f" and {len(nodeids) - SHOWN} more"
            yield f"{counted(len(nodeids), 'benchmark')} not measured on the GPU: {reason}: {names}"
        if session.without_gpu:
            benchmarks = counted(len(session.without_gpu), "benchmark")
            yield f"{benchmarks} did no work on the GPU: no limit of the session is judged"


# The call


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
        """Make the arguments of the next call."""
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


# The pass on the GPU


def measure(session: GpuSession, item: pytest.Item, fixture: Any, call: BenchmarkCall) -> None:
    """Add a measurement of the call to the test. Raises also what the call raises."""
    from pytest_gpumem.measuring.bound import BoundKernel
    from pytest_gpumem.measuring.case import target_of
    from pytest_gpumem.plugin.gpu_benchmark import GpuBenchmark

    keywords = keywords_of(item)
    if benchmarks_are_off(item.config):
        raise CannotAdopt("pytest-benchmark is off (--benchmark-disable)")
    if call.runs_once and not of_marker(keywords, "adopt"):
        raise CannotAdopt("pedantic(rounds=1) runs it once; adopt=True of the marker repeats it")
    if session.lost_in is not None:
        raise CannotAdopt(session.why_unrun)
    if session.device.elsewhere() == OWN_CONTEXT:
        raise CannotAdopt(f"it runs in {OWN_CONTEXT}")
    is_kernel = isinstance(call.function, BoundKernel) and not call.restores
    notes: list[str] = []
    busy = None  # seconds of the device's work in one call
    if not is_kernel:
        try:
            with closing(call):
                busy = _busy_seconds(session.device, call)
        except NotCounted as why:
            notes.append(f"not known whether calls run the same work: {why}")
    request: pytest.FixtureRequest = item._request  # type: ignore[attr-defined]
    test: GpuTest = request.getfixturevalue("_gpumem_test")
    if test.entries is not None:
        raise CannotAdopt("its test measures with gpu_benchmark")
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
            if measurement.work_seen is False:
                raise CannotAdopt
            peak = _peak_of(session, item, call)
    except BaseException:
        test.measurements.clear()
        test.entries, test.wrong = None, None
        raise
    if measurement.sampler == "host" and busy is not None:
        notes.append(
            "wall time of a call until the GPU is done; its kernels and copies take "
            f"{format_time(busy)}"
        )
    measurement = replace(measurement, notes=(*measurement.notes, *notes))
    test.measurements[""] = measurement, limits, extra
    if fixture.stats is not None:
        extra[HOST] = float(fixture.stats.stats.median)
    if peak is not None and test.entries is not None:
        test.entries.further["peak_bytes"] = peak


def _busy_seconds(device: Device, call: BenchmarkCall) -> float:
    """The seconds of the work of a call, once two calls in a row run the same."""

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
            raise CannotAdopt
        last = work
    raise CannotAdopt("calls that follow each other run other work")


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
