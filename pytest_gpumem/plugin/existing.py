"""Benchmarks that exist: uses of pytest-benchmark's `benchmark`, measured on the GPU with `--gpumem-existing=adopt`, and warned about else.

pytest-benchmark calls the function as ever. A benchmark that queued work of the GPU meanwhile is measured as by `gpu_benchmark`, and these
times take the place of the host's. Whatever hinders that leaves the benchmark as it was, with the reason: no test fails here that passes
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, ContextLost, NotCounted, Stream
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.measuring.target import Target, nothing
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.options import ADOPT
from pytest_gpumem.plugin.gpu_benchmark import GpuBenchmark
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, marks_of, uses
from pytest_gpumem.plugin.replay import (
    TIMER_NAME,
    Replay,
    ReplayTimer,
    is_pytest_benchmarks,
    mark_simulated,
)
from pytest_gpumem.plugin.result import Extra
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.state import GpuSession, GpuTest
from pytest_gpumem.plugin.workers import Channel
from pytest_gpumem.printable import printable
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.uses import Activity
from pytest_gpumem.settings import (
    SettingsError,
    marker_keywords,
    marker_limits,
    merge_limits,
    of_marker,
    of_test,
)
from pytest_gpumem.units import format_time

HOST_FIGURE = "host s"  # `Row.extra`: seconds of one call by pytest-benchmark's own clock
CALLS = 6  # calls until two that follow each other run the same
SHOWN = 5  # benchmarks that a line names
ARRAYS = 32  # arrays of a call that are looked at
ENDS = 2**16  # bytes at both ends of an array that are compared
EARLY = "return before the GPU is done; if GPU time is meant: --gpumem-existing=adopt"
LEFT = "are left to the host's clock: "
DRIFTING = "change their own arguments, so that no two calls start alike (not repeatable); pedantic's setup= makes them anew"

Given = tuple[tuple[Any, ...], Mapping[str, Any]]  # arguments of a call


class CannotAdopt(Exception):
    """A benchmark that is left as it is; the message is the reason."""


class ExistingFeature(Feature):
    """Follows the calls of `benchmark`, from where the fixture is set up on."""

    def __init__(self, session: GpuSession, channel: Channel) -> None:
        self._session = session
        channel.carry("existing", self._sends, self._take)
        self._item: pytest.Item | None = None  # the test that runs
        self._said: dict[str, dict[str, None]] = {}
        """The benchmarks that each sentence of the summary is about."""

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        self._item = item
        try:
            yield
        finally:
            self._item = None

    @contextmanager
    def fixture(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        yield
        item = self._item
        if (
            fixturedef.argname == "benchmark"
            and item is not None
            and fixturedef.cached_result
            and not uses(item, BENCHMARK_FIXTURE)
        ):
            self._follow(item, fixturedef.cached_result[0])

    def _sends(self) -> dict[str, list[str]]:
        """What this process says, for the process that has the results."""
        return {what: list(nodeids) for what, nodeids in self._said.items()}

    def _take(self, said: Mapping[str, Sequence[str]]) -> None:
        """Take what another process says."""
        for what, nodeids in said.items():
            for nodeid in nodeids:
                self._say(nodeid, what)

    def _say(self, nodeid: str, what: str) -> None:
        """Say something of a benchmark in the summary, where one line names all of which it holds."""
        remarks, nodeids = self._session.remarks, self._said.setdefault(what, {})
        if (before := _line(what, nodeids)) in remarks:
            remarks.remove(before)
        nodeids[nodeid] = None
        remarks.append(_line(what, nodeids))

    def _follow(self, item: pytest.Item, fixture: Any) -> None:
        try:
            keywords = marker_keywords(marks_of(item))
            adopts, may = (
                of_test(self._session.settings, keywords).existing == ADOPT,
                of_marker(keywords, ADOPT),
            )
        except SettingsError:  # reported where the marker is read
            return
        if may is False or self._session.ranges.tool_attached():
            return
        if not is_pytest_benchmarks(fixture):
            if adopts:
                self._say(item.nodeid, "NOT RUN: another plugin, such as CodSpeed, has the fixture")
            return
        say = partial(self._say, item.nodeid)
        call = (
            _Adoption(item, fixture, self._session, say).call
            if adopts
            else partial(self._look, say)
        )

        def run(
            original: Callable[..., Any],
            describe: Callable[..., _BenchmarkCall],
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            result = call(original, describe, *args, **kwargs)
            _refuse_other_clock(fixture, item.config)
            return result

        fixture._raw = partial(run, fixture._raw, _call)
        fixture._raw_pedantic = partial(run, fixture._raw_pedantic, _pedantic_call)

    def _look(
        self,
        say: Callable[[str], None],
        original: Callable[..., Any],
        _: object,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call, and note whether the GPU is still at work."""
        result = original(*args, **kwargs)
        if self._session.chosen.unfinished():
            say(EARLY)
        return result


def _line(what: str, nodeids: Mapping[str, None]) -> str:
    """The summary's line for one sentence and its benchmarks."""
    count = len(nodeids)
    for plural, singular in (
        ("return ", "returns "),
        ("are ", "is "),
        ("change their", "changes its"),
    ):
        if count == 1 and what.startswith(plural):
            what = singular + what.removeprefix(plural)
    more = f" and {count - SHOWN} more" if count > SHOWN else ""
    return f"{counted(count, 'benchmark')} {what}: {', '.join(list(nodeids)[:SHOWN])}{more}"


class _BenchmarkCall:
    """A function with its arguments, which a setup may make for each call."""

    def __init__(
        self,
        function: Callable[..., object],
        given: Given,
        setup: Callable[[], Given | None] | None = None,
        teardown: Any = None,
    ) -> None:
        self.function, self.given = function, given
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.setup, self._teardown = setup, teardown
        self._made = self._open = False
        """Its arguments are made and not used yet; the teardown of the last call is still to come."""

    def prepare(self, *_: object) -> None:
        """End the last call, and make the arguments of the next, unless they are made."""
        if self._made:
            return
        self.close()
        if self.setup is not None:
            self.given = self.setup() or self.given
        self._made = self._open = True

    def close(self) -> None:
        """End the last call."""
        if self._open and self._teardown is not None:
            self._teardown(*self.given[0], **self.given[1])
        self._made = self._open = False

    def __call__(self) -> object:
        self._made = False
        args, kwargs = self.given
        return self.function(*args, **kwargs)

    @property
    def restores(self) -> bool:
        """True if something comes before or after each call."""
        return self.setup is not None or self._teardown is not None


def _call(function: Callable[..., object], *args: Any, **kwargs: Any) -> _BenchmarkCall:
    return _BenchmarkCall(function, (args, kwargs))


def _pedantic_call(
    target: Callable[..., object],
    args: Any = (),
    kwargs: Any = None,
    setup: Any = None,
    teardown: Any = None,
    **_: object,
) -> _BenchmarkCall:
    return _BenchmarkCall(target, (tuple(args), dict(kwargs or {})), setup, teardown)


class _AdoptionReplay(Replay):
    """pytest-benchmark's entry of an adopted benchmark, which has its times already when the test is judged."""

    _fixture: Any

    def take(self, measured: Measurement, host: float, *, simulated: bool) -> None:
        """Put the times of the GPU in the place of the host's."""
        self.called = True
        fixture, timer, mode = self._fixture, ReplayTimer(), self._fixture._mode
        fixture._add_stats.__self__.remove(fixture.stats)
        fixture._mode, fixture.stats, fixture._timer, fixture.cprofile = None, None, timer, False
        fixture.extra_info[HOST_FIGURE] = host
        if simulated:
            mark_simulated(fixture)
        del fixture._raw_pedantic
        timer.load(measured.samples)
        fixture.pedantic(nothing, rounds=len(measured.samples), iterations=1)
        fixture._mode = mode

    def feed(
        self, label: str, durations: Sequence[float], summary: Mapping[str, Any], *, failed: bool
    ) -> None:
        if label:
            super().feed(label, durations, summary, failed=failed)
            return
        self._fixture.extra_info["gpumem"] = dict(summary)
        self._fixture.has_error = self._fixture.has_error or failed


class _Adoption:
    """One test's use of `benchmark`, measured on the GPU."""

    def __init__(
        self, item: pytest.Item, fixture: Any, session: GpuSession, say: Callable[[str], None]
    ) -> None:
        self._item, self._fixture, self._session, self._say = item, fixture, session, say

    def call(
        self,
        original: Callable[..., Any],
        describe: Callable[..., _BenchmarkCall],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Have pytest-benchmark measure; then measure the GPU, if this process has a context."""
        result = original(*args, **kwargs)
        if self._session.chosen.unfinished() is None:
            return result
        if self._fixture.disabled:
            self._say("NOT RUN: pytest-benchmark is disabled, as by -n or --benchmark-disable")
            return result
        try:
            self._adopt(describe(*args, **kwargs))
        except (ContextLost, pytest.exit.Exception):
            raise
        except CannotAdopt as reason:
            self._say(f"{LEFT}{reason}")
        except Exception as error:
            self._say(
                printable(f"{LEFT}{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            )
        return result

    def _adopt(self, called: _BenchmarkCall) -> None:
        item = self._item
        request: pytest.FixtureRequest = item._request  # type: ignore[attr-defined]
        test: GpuTest = request.getfixturevalue("_gpumem_test")
        replay, before = _AdoptionReplay(item, self._fixture), len(test.measurements)
        try:
            with closing(called):
                repeats = self._repeats(called, test)
                measured = _AdoptionBenchmark(test, replay).measure(called)
                gpu_time = self._gpu_time(called, test) if measured.sampler == "host" else None
            if measured.work_seen is False:
                raise CannotAdopt("no work of the GPU was seen in a call")
        except BaseException:
            del test.measurements[before:]
            raise
        host = float(self._fixture.stats.stats.median)
        notes = (*measured.notes, *self._notes(measured, host, gpu_time), *repeats)
        test.measurements[-1] = (replace(measured, notes=notes), test.measurements[-1][1])
        test.extra[""] = Extra({HOST_FIGURE: host})
        test.replay = replay
        replay.take(measured, host, simulated=self._session.facts.simulated)

    def _notes(self, measured: Measurement, host: float, gpu_time: str | None) -> Iterator[str]:
        yield f"adopted: pytest-benchmark's own time of a call is {format_time(host)}, by the host's clock"
        if gpu_time is not None:
            wall = format_time(measured.latency)
            yield f"wall time {wall} of a call until the GPU is done; GPU time of its kernels and copies {gpu_time}"

    def _gpu_time(self, called: _BenchmarkCall, test: GpuTest) -> str:
        """The time of the kernels and copies of one more call, in words."""

        def call() -> None:
            called()
            test.device.streams.synchronize()

        with test.device.current(), test.device.footprints.paused():
            called.prepare()
            test.device.streams.synchronize()
            try:
                busy = test.device.counters.activity(call).busy
            except NotCounted:
                busy = 0.0
        return format_time(busy) if busy else "not known"

    def _repeats(self, called: _BenchmarkCall, test: GpuTest) -> list[str]:
        """Call until two calls that follow each other run the same; gives notes on what differs or is not known.
        Raises `CannotAdopt`: no two calls do.
        """
        device = test.device

        def call() -> None:
            called()
            device.streams.synchronize()

        last: Activity | None = None
        notes: list[str] = []
        for number in range(CALLS):
            called.prepare()
            device.streams.synchronize()
            before = _content(called, test) if number == 0 else None
            try:
                with device.footprints.paused():
                    seen = device.counters.activity(call)
            except NotCounted as why:
                return [*notes, f"not known whether calls run the same work: {why}"]
            if before is not None and called.setup is None and before != _content(called, test):
                self._say(DRIFTING)
                notes.append(
                    "not repeatable: each call changes its own arguments, and starts from what the last one left"
                )
            if last is not None and _work(seen) == _work(last):
                return notes
            last = seen
        raise CannotAdopt("not repeatable: calls that follow each other run other work")


def _work(seen: Activity) -> set[object]:
    """Return kernels, copies and memsets without their times."""
    return {replace(use, nanoseconds=0) for use in (*seen.kernels, *seen.copies, *seen.memsets)}


class _AdoptionBenchmark(GpuBenchmark):
    """Measures a call of pytest-benchmark's."""

    def __init__(self, test: GpuTest, replay: Replay) -> None:
        self._test, self._replay = test, replay

    def measure(self, called: _BenchmarkCall) -> Measurement:
        """Measure, hot unless the marker says otherwise."""
        test = self._test
        mode = marker_keywords(marks_of(test.item)).get("mode") or "hot"
        target: Target = test.conductor.target(called, (), {}, arena=test.arena, on_simulated=True)
        if called.restores:

            def prepare(stream: Stream) -> None:
                with test.device.kernels.current_stream(stream):
                    called.prepare()

            target = dataclasses.replace(target, prepare=prepare, restores=True)
        limits = merge_limits(marker_limits({}, "call"), test.limits, test.session.settings)
        self._measure(target, "", limits, mode, None)
        return test.measurements[-1][0]


def _content(called: _BenchmarkCall, test: GpuTest) -> list[bytes]:
    """The first and the last bytes of each array that the call is given, or that its function holds."""
    found = []
    for allocation in list(_arrays(called))[:ARRAYS]:
        for begin in {0, max(0, allocation.nbytes - ENDS)}:
            part = test.device.memory.part(allocation, begin, min(ENDS, allocation.nbytes - begin))
            content: np.ndarray[Any, Any] = test.device.content.to_host(part, "u1", part.nbytes)
            found.append(content.tobytes())
    return found


def _arrays(called: _BenchmarkCall) -> Iterator[Allocation]:
    seen: set[int] = set()
    for value in _values([*called.given[0], *called.given[1].values(), *_held(called.function)]):
        allocation = value.allocation if isinstance(value, Buffer) else _of_library(value)
        if (
            allocation is not None
            and allocation.nbytes
            and allocation.address
            and allocation.address not in seen
        ):
            seen.add(allocation.address)
            yield allocation


def _held(function: Any) -> Iterator[Any]:
    """What a function uses without being given it: variables around it and of its module, defaults, and attributes of its object."""
    owner = getattr(function, "__self__", None)
    yield from (
        vars(owner).values()
        if hasattr(owner, "__dict__") and not isinstance(owner, ModuleType)
        else ()
    )
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        yield from function.__defaults__ or ()
        yield from (
            function.__globals__[name]
            for name in function.__code__.co_names
            if name in function.__globals__
        )
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not set yet
                yield cell.cell_contents


def _values(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _values(value)
        elif isinstance(value, dict):
            yield from _values(list(value.values()))
        elif callable(getattr(type(value), "parameters", None)):  # a module of PyTorch
            with suppress(Exception):
                yield from list(value.parameters())
        else:
            yield value


def _of_library(value: Any) -> Allocation | None:
    """The memory of another library's array; None for anything else, and for one with gaps."""
    try:
        interface = (value.detach() if hasattr(value, "detach") else value).__cuda_array_interface__
        nbytes = (
            int(np.prod(interface["shape"], dtype=np.int64))
            * np.dtype(interface["typestr"]).itemsize
        )
        address = int(interface["data"][0])
    except Exception:  # attributes of anybody's objects may raise anything
        return None
    if interface.get("strides") is not None:
        return None
    return Allocation(MemoryKind.DEVICE, nbytes, address, 0)


def _refuse_other_clock(fixture: Any, config: Any) -> None:
    """Refuse to compare times of the GPU with a saved run's times of the host, and the other way round.
    Raises `pytest.fail.Exception`: with `--benchmark-compare`.
    """
    runs: Mapping[str, Mapping[str, Any]] = config._benchmarksession.compared_mapping or {}
    for path, benchmarks in runs.items():
        saved = benchmarks.get(fixture.fullname)
        if saved is None or fixture.stats is None:
            continue
        clock = str(saved.get("options", {}).get("timer"))
        there, here = (
            "GPU" if of_gpu else "host"
            for of_gpu in (clock == TIMER_NAME, isinstance(fixture._timer, ReplayTimer))
        )
        if there != here:
            fixture.has_error = True
            pytest.fail(
                f"gpumem: --benchmark-compare: {path} has times of the {there} for this benchmark (timer {clock}), this run has times "
                f"of the {here}: they do not compare; save a run with the same --gpumem-existing",
                pytrace=False,
            )
