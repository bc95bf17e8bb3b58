"""Adoption: a call of pytest-benchmark's `benchmark` is measured on the GPU too, once it was timed.

That gives a row, and an entry `NAME[gpu]` beside the host's. It fails no test and changes no
result: what cannot be measured is named in the summary. The methods of pytest-benchmark's class are
wrapped, so that other names of the fixture, `pedantic` and `weave` work alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_gpumem.devices.errors import Unsupported
from pytest_gpumem.plugin.entries import is_pytest_benchmarks
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, keywords_of, uses, uses_benchmark
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.workers import Workers
from pytest_gpumem.printable import printable
from pytest_gpumem.ranges import MEASURE, phase
from pytest_gpumem.settings import Settings, of_test
from pytest_gpumem.units import counted

SHOWN = 5  # benchmarks that a line names


def adopts(item: pytest.Item, settings: Settings) -> bool:
    """True if the GPU is measured where the test calls `benchmark`. Raises `SettingsError`."""
    if not uses_benchmark(item) or uses(item, BENCHMARK_FIXTURE):
        return False
    return of_test(settings, keywords_of(item)).adopt


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
        session = self._session
        timed = uses_benchmark(item) and not uses(item, BENCHMARK_FIXTURE)
        if timed and session.is_open and session.lost_in is None:
            benchmarks = getattr(item.config, "_benchmarksession", None)
            if benchmarks is not None and not benchmarks.disabled:
                # The host times launches without what earlier passes added.
                session.device.counters.detach()
                session.harness.forget_floors()
        try:
            yield
        finally:
            self._item = None

    def teardown(self, item: pytest.Item) -> None:
        benchmark = getattr(item, "funcargs", {}).get("benchmark")
        if benchmark is None or self._called or is_pytest_benchmarks(benchmark):
            return  # the ordinary fixture, not called, has nothing to adopt
        if adopts(item, self._session.settings):
            self._note_reason(item, "another plugin, such as CodSpeed, has the fixture")

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(fixture: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            item = self._item
            if item is None:
                return method(fixture, *args, **kwargs)
            name = phase(self._session.names.unique(item.nodeid), MEASURE)
            with self._session.ranges.range(name):
                result = method(fixture, *args, **kwargs)
            benchmarks = getattr(item.config, "_benchmarksession", None)
            # A test may run a session of its own in this process.
            if fixture._logger is getattr(benchmarks, "logger", None):
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
        if not in_use:
            session.without_gpu.add(item.nodeid)
            return
        from pytest_gpumem.plugin.benchmark_call import BenchmarkCall, measure

        try:
            if not measure(session, item, fixture, BenchmarkCall(arguments)):
                session.without_gpu.add(item.nodeid)
        except pytest.exit.Exception:
            raise
        except Unsupported as reason:
            self._note_reason(item, str(reason))
        except (Exception, pytest.skip.Exception, pytest.fail.Exception) as error:
            first_line = str(error).partition("\n")[0]
            self._note_reason(item, f"{type(error).__name__}: {first_line}")

    def _note_reason(self, item: pytest.Item, reason: str) -> None:
        self._reasons.setdefault(printable(reason), []).append(item.nodeid)

    def _lines(self) -> Iterator[str]:
        session = self._session
        if session.is_part:
            return
        if session.rows:
            from pytest_gpumem.plugin.rows import rows_of_table

            left_out = len(session.rows) - len(rows_of_table(session))
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
            yield f"{benchmarks} did no work on the GPU: not judged by the session's limits"
