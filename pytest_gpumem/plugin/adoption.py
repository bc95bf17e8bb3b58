"""Adoption: a call of pytest-benchmark's `benchmark` is measured on the GPU too.

pytest-benchmark times the call as always. Then the GPU pass measures the same call on the device.
It gives a row, and an entry `NAME[gpu]` beside the host's in pytest-benchmark's session. The pass
never fails a test and never changes its result: what cannot be measured is named in the summary.

The methods of pytest-benchmark's class are wrapped once for all tests. So other names of the
fixture, fixtures that return the same object, `pedantic` and `weave` work alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.plugin.entries import is_pytest_benchmarks
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, marks_of, uses, uses_benchmark
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import GpuSession
from pytest_gpumem.plugin.workers import Channel
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.settings import (
    Settings,
    marker_keywords,
    of_test,
)

SHOWN = 5  # benchmarks that a line names


def adopts(item: pytest.Item, settings: Settings) -> bool:
    """True if the GPU is measured where the test calls `benchmark`.
    Raises `SettingsError`: its marker cannot be used.
    """
    if not uses_benchmark(item) or uses(item, BENCHMARK_FIXTURE):
        return False
    return of_test(settings, marker_keywords(marks_of(item))).adopt


def rows_of_table(session: GpuSession) -> list[Row]:
    """Return the rows of this plugin's table.
    An adopted row whose entry pytest-benchmark shows needs a limit or a reference for it.
    """
    rows = []
    for row in session.rows:
        if row.nodeid not in session.adopted or _has_limit(row) or session.baseline.past(row):
            rows.append(row)
    return rows


def _has_limit(row: Row) -> bool:
    return any(getattr(row.limits, name) is not None for name in LIMITS)


class AdoptionFeature(Feature):
    """Measures the calls of `benchmark` on the GPU."""

    name = "adoption"

    def __init__(self, session: GpuSession, channel: Channel) -> None:
        self._session = session
        self._item: pytest.Item | None = None  # the test that runs
        self._called = False  # it has called `benchmark`
        self._reasons: dict[str, list[str]] = {}
        """By each reason, the benchmarks that have no GPU figure."""
        channel.carry("adoption", self._state, self._take)

    def _state(self) -> dict[str, Any]:
        """Return what another process needs that has the results."""
        gpu = self._session
        return {
            "adopted": sorted(gpu.adopted),
            "without_gpu": sorted(gpu.without_gpu),
            "reasons": self._reasons,
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        """Take what a worker has seen."""
        self._session.adopted.update(state["adopted"])
        self._session.without_gpu.update(state["without_gpu"])
        for reason, nodeids in state["reasons"].items():
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
            return
        if adopts(item, self._session.settings):
            self._name(item, "another plugin, such as CodSpeed, has the fixture")

    def _wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of pytest-benchmark that is followed by the pass on the GPU."""

        @functools.wraps(method)
        def call(fixture: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            result = method(fixture, *args, **kwargs)
            item = self._item
            if item is None:
                return result
            benchmarks = getattr(item.config, "_benchmarksession", None)
            # A test of a plugin may run a session of its own inside of this process.
            if benchmarks is not None and fixture._logger is benchmarks.logger:
                self._called = True
                self._follow(item, method, fixture, args, kwargs)
            return result

        return call

    def _follow(
        self,
        item: pytest.Item,
        method: Callable[..., Any],
        fixture: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Measure a call on the GPU, or note why that cannot be."""
        session = self._session
        if session.ranges.tool_attached() or not adopts(item, session.settings):
            return
        if not _has_context(session):
            session.without_gpu.add(item.nodeid)
            return
        from pytest_gpumem.plugin.gpu_pass import CannotAdopt, NoGpu, call_of, measure

        try:
            measure(session, item, fixture, call_of(method, fixture, args, kwargs))
        except NoGpu:
            session.without_gpu.add(item.nodeid)
        except pytest.exit.Exception:
            raise
        except CannotAdopt as reason:
            self._name(item, str(reason))
        except (Exception, pytest.skip.Exception, pytest.fail.Exception) as error:
            first_line = str(error).partition("\n")[0]
            self._name(item, f"{type(error).__name__}: {first_line}")

    def _name(self, item: pytest.Item, reason: str) -> None:
        """Name a benchmark in the summary."""
        self._reasons.setdefault(printable(reason), []).append(item.nodeid)

    def _lines(self) -> Iterator[str]:
        """Return the lines of the summary."""
        gpu = self._session
        if gpu.is_part:
            return
        left_out = len(list(gpu.rows)) - len(rows_of_table(gpu))
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
        if gpu.without_gpu:
            yield f"{counted(len(gpu.without_gpu), 'benchmark')} without work on the GPU"


def _has_context(session: GpuSession) -> bool:
    """True if this process uses the device by now."""
    if session.facts.simulated:
        return session.is_open
    return session.chosen.has_context()
