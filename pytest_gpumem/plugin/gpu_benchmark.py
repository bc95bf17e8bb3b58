"""The device side of a test, and the object that the fixture `gpu_benchmark` gives, which takes
measurements and hands back their results."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.protocol import ContextLost, Device, Stream
from pytest_gpumem.judging.limits import counts_steps
from pytest_gpumem.limits import LIMITS, OF_FOOTPRINT, OF_MEASUREMENT, LimitKeywords
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.case import Case, CaseTarget, target_of
from pytest_gpumem.measuring.measure import Plan, measure
from pytest_gpumem.measuring.overlap import overlap_of
from pytest_gpumem.measuring.target import Target, WrongResult
from pytest_gpumem.measuring.works import Work, Works
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import PersistingStream, Thrashing, persisting
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.memory.window_request import window_request
from pytest_gpumem.plugin.entries import Entries
from pytest_gpumem.plugin.gpu_memory import check_label
from pytest_gpumem.plugin.marks import keywords_of
from pytest_gpumem.plugin.result import Extra, Result
from pytest_gpumem.plugin.session import GpuSession, state_of
from pytest_gpumem.ranges import labelled
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.settings import marker_limits, merge_limits, of_marker, of_test
from pytest_gpumem.units import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack

DECLARED = ("moved", "reads", "writes", "check", "reference")
"""Fields of a `Case` that a call of a function may have as keywords."""
KEYWORDS = ("label", "stream", "mode", "count_pages", *DECLARED, *OF_MEASUREMENT)
"""Keywords of a measurement. Others, and those of its parameters, go to the function."""


class GpuTest:
    """A test that uses our fixtures. `close` frees everything that was allocated through it."""

    def __init__(self, item: pytest.Item, session: GpuSession) -> None:
        self.item, self.session = item, session
        keywords = keywords_of(item)
        self.limits = session.limits(item)
        self.settings = of_test(session.settings, keywords)
        self.device: Device = session.device
        if session.watch is not None:
            session.watch.fresh()
        self._exit = ExitStack()  # closed at the test's end, after its memory is freed
        if not self.device.in_own_context():
            self._exit.enter_context(self.device.current())
        self.arena = Arena(
            self.device,
            zlib.crc32(item.nodeid.encode(errors="surrogatepass")),
            oversubscribes=bool(of_marker(keywords, "oversubscribe")),
        )
        self.memory = Memory(self.arena)
        self.streams: list[PersistingStream] = []  # the test's persisting streams
        self.measurements: dict[str, tuple[Measurement, Limits, Extra]] = {}
        """Measurements so far, by their labels, with their limits and further figures."""
        self.entries: Entries | None = None  # of pytest-benchmark
        self.subtest_failed = False  # the body goes on, and pytest fails the test at its end
        self.judged = False  # the body has ended: nothing more is measured
        self.wrong: str | None = None  # the first wrong result, even if the test catches the error
        state_of(item).test = self

    @cached_property
    def works(self) -> Works:
        return Works(self.memory)

    def check_unjudged(self) -> None:
        if self.judged:
            raise BadCall(
                "this test was judged already: measure in its body, not while fixtures are torn "
                "down"
            )

    @contextmanager
    def spending(self) -> Iterator[float]:
        """The seconds of a measurement; limits its time, and charges it to a total budget."""
        session, settings = self.session, self.settings
        begun, budget = self.device.now(), settings.budget or math.inf
        if session.ledger is not None:
            budget = min(budget, session.ledger.share(self.item.nodeid))
        limit: AbstractContextManager[None] = nullcontext()
        if settings.timeout and not session.ranges.tool_attached():  # which may take much longer
            isolation: Any = session.config.pluginmanager.getplugin("gpumem-isolation")
            limit = isolation.limit(self.item, budget + settings.timeout)
        try:
            with limit:
                yield budget
        finally:
            if session.ledger is not None:
                session.ledger.spent += self.device.now() - begun

    @contextmanager
    def persisting_stream(self, buffer: Any, **options: Any) -> Iterator[PersistingStream]:
        """As `memory.l2.persisting`, also for the array that `device_buffer(..., like=)` made.

        Warns of `Thrashing` if hit ratios x bytes exceed the set-aside, unless `allow_thrash=True`.
        Raises `BadCall`: an unknown keyword, or nothing was measured on the stream in the block.
        """
        keywords = list(inspect.signature(window_request).parameters)[2:]
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
                    "nothing was measured on this stream in its block: pass it there, as stream="
                )

    def close(self) -> None:
        """Free everything, and close the persisting streams whose blocks were never left."""
        # What a lost context held went with it.
        with self._exit, suppress(ContextLost), self.device.current(), ExitStack() as stack:
            if self.device.gone() is not None:
                return
            stack.callback(self.arena.close)
            if "works" in vars(self):
                stack.callback(self.works.close)
            for stream in reversed(self.streams):
                if not stream.closed:
                    stream.close()
                    if self.session.watch is not None:
                        self.session.watch.forgotten(stream)


def parameters_of(function: object) -> set[str]:
    """The parameters that a kernel or a function takes by keyword."""
    if isinstance(function, BoundKernel):
        return {parameter.name for parameter in function.kernel.parameters}
    names = set()
    with suppress(TypeError, ValueError):  # a function of an extension
        for name, parameter in inspect.signature(function).parameters.items():  # type: ignore[arg-type]
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                names.add(name)
    return names


class GpuBenchmark:
    """Measures for a test. `label=` names each of several measurements."""

    def __init__(self, test: GpuTest, benchmark: object) -> None:
        self._entries = test.entries = Entries(benchmark)
        self._test = test

    @property
    def stream(self) -> Stream:
        """The stream that this test's work is timed on, for libraries that have no current stream.

        It has `handle`, the `cudaStream_t` as an integer, and on a GPU `__cuda_stream__`. Work with
        `stream=` from `persisting_stream` runs on that stream. For a `Case` it is `memory.stream`.
        """
        return self._test.arena.stream

    def __call__(
        self,
        function: BoundKernel | Work | Callable[..., object],
        /,
        *args: Any,
        label: str | None = None,
        stream: PersistingStream | None = None,
        moved: int | str | None = None,
        reads: Sequence[Any] | None = None,
        writes: Sequence[Any] | None = None,
        check: Callable[[], object] | None = None,
        reference: Callable[[], object] | None = None,
        mode: str | None = None,
        count_pages: bool | None = None,
        **kwargs: Any,
    ) -> Result:
        """Measure a kernel of `gpu_kernels`, work of `gpu_work` or `staged_copy`, or any callable
        that launches on the current stream.

        Args:
            function: what is launched.
            args, kwargs: its arguments. Buffers among them are moved between placements. A keyword
                of this signature or the name of a limit goes to `function` if it has a parameter of
                that name; wrap it in a lambda to use both.
            label: tells this measurement from others of the same test.
            stream: from `persisting_stream`; default: a stream of the test's own.
            moved: compulsory bytes of a launch, in bytes or as "64 MiB"; for callables, where
                `reads` and `writes` do not give it.
            reads, writes: lists of the arrays or buffers that one launch of a callable reads or
                writes, whole.
            check: raises, or returns something false, if the result of a launch of a callable is
                wrong; called before and after timing. Buffers of `writes` that are not in `reads`
                are poisoned before it.
            reference: does on the host what a callable does on a GPU, through the `view()` of the
                buffers; the simulated device runs it.
            mode: state of the cache before each sample, "clean-cold", "dirty-cold" or "hot";
                default: the marker's or the session's.
            count_pages: count page faults and migrations of managed memory in an untimed pass;
                without it where a limit on them needs it.
            limits: limits of this measurement by name, such as `max_latency="12 us"`. They take
                precedence over those of the marker and the session, and None lifts them.
                `max_gpu_page_faults` and `max_migrated` make the test count pages.

        Raises:
            BadCall: arguments do not fit, or the label is missing or was used.
            WrongResult: the result of a launch is not the reference's; no speed is reported.
            Unsupported: the device cannot do it; the test skips with the reason.
        """
        __tracebackhide__ = True
        self._entries.called = True
        parameters = parameters_of(function)
        given: dict[str, Any] = {
            "label": label,
            "stream": stream,
            "mode": mode,
            "count_pages": count_pages,
            "moved": moved,
            "reads": reads,
            "writes": writes,
            "check": check,
            "reference": reference,
        }
        for name in parameters & given.keys():
            # A persisting stream is of the measurement, whatever the function calls its streams.
            if given[name] is not None and not isinstance(given[name], PersistingStream):
                kwargs[name], given[name] = given[name], None
        options = {name: given.pop(name) for name in ("label", "mode", "count_pages")}
        for name in list(kwargs):
            if name in LIMITS and name not in parameters:
                options[name] = kwargs.pop(name)
            elif isinstance(function, BoundKernel) and name not in parameters:
                near = did_you_mean(name, KEYWORDS)
                if near:
                    raise BadCall(f"gpu_benchmark() has no keyword {name!r}{near}")
        declared = {name: value for name, value in given.items() if value is not None}
        make = partial(target_of, function, args, kwargs, arena=self._test.arena, **declared)
        return self.measure(make, **options)

    def case(
        self,
        build: Callable[[Memory], Case],
        *,
        label: str | None = None,
        mode: str | None = None,
        count_pages: bool | None = None,
        **limits: Unpack[LimitKeywords],
    ) -> Result:
        """Measure a `Case`. Keywords as for the call.

        Args:
            build: called with a `Memory` for each placement of the buffers; returns the `Case`.
            label, mode, count_pages, limits: as for the call.
        """
        __tracebackhide__ = True
        self._entries.called = True
        for name in limits:
            if name not in LIMITS:  # one of a footprint is refused with the others
                hint = did_you_mean(name, KEYWORDS)
                if name in DECLARED:
                    hint = ": it is a field of the Case"
                raise BadCall(f"gpu_benchmark.case() has no keyword {name!r}{hint}")
        target = partial(CaseTarget, build, self._test.arena)
        return self.measure(target, label=label, mode=mode, count_pages=count_pages, **limits)

    def measure(
        self,
        make: Callable[[], Target],
        *,
        label: str | None = None,
        mode: str | None = None,
        count_pages: bool | None = None,
        **limits: object,
    ) -> Result:
        """Measure what `make` gives."""
        __tracebackhide__ = True
        test, session, settings = self._test, self._test.session, self._test.settings
        label = self._checked(label)
        for keyword in limits:
            if keyword in OF_FOOTPRINT:
                raise BadCall(
                    f"{keyword} limits the memory of a test, not a measurement: give it to "
                    "@pytest.mark.gpumem or to gpu_memory.watch()"
                )
        merged = merge_limits(marker_limits(limits, "call"), test.limits, session.settings)
        if count_pages not in (None, True, False):
            raise BadCall(f"count_pages={count_pages!r}; accepted are True, False and None")
        target, name = make(), session.names.unique(test.item.nodeid)
        with ExitStack() as stack:
            if label:  # a profiler tells the measurements of one test apart by it
                stack.enter_context(session.ranges.range(labelled(name, label)))
            plan = Plan(
                mode=settings.mode if mode is None else mode,
                sampler=settings.sampler,
                placements=settings.placements,
                precision=settings.precision,
                budget=stack.enter_context(test.spending()),
                pages=bool(count_pages or merged.max_gpu_page_faults or merged.max_migrated),
                # What a launch runs is recorded for the baseline, or for a limit.
                ran=session.evidence or counts_steps(merged),
            )
            harness = session.harness
            try:
                measurement = measure(harness, target, plan, name)
            except WrongResult as error:
                test.wrong = test.wrong or str(error)
                raise
            overlap = None
            if isinstance(target, Work):
                overlap = overlap_of(harness, target, plan, name)
        card = session.facts.uuid
        measurement = replace(measurement, label=label, overlap=overlap, card=card)
        extra = Extra()
        test.measurements[label] = measurement, merged, extra
        return Result(measurement, test.device.facts, extra, self._claim)

    def _claim(self, label: str, other: str, by: float) -> None:
        self._test.check_unjudged()
        measurements = self._test.measurements
        if other not in measurements or other == label:
            known = ", ".join(repr(name) for name in measurements if name != label)
            raise BadCall(
                f"faster_than({other!r}): no other measurement of this test has that label; others "
                f"are {known or 'none'}"
            )
        if not isinstance(by, (int, float)) or not math.isfinite(by) or by < 1:
            raise BadCall(
                f"faster_than(..., by={by!r}); accepted is a factor of 1 or more, such as 20"
            )
        measurement, limits, extra = measurements[label]
        if limits.origin.get("faster_than") == "result":
            raise BadCall(f"faster_than({other!r}): {limits.faster_than} is claimed already")
        origin = {**limits.origin, "faster_than": "result"}
        limits = replace(limits, faster_than=f"{by!r} x {other}", origin=origin)
        measurements[label] = measurement, limits, extra

    def _checked(self, label: str | None) -> str:
        test = self._test
        test.check_unjudged()
        if label is not None:
            check_label(f"label={label!r}", label, test.measurements, test.item)
        elif "" in test.measurements:
            raise BadCall(
                "this test measures a second time without label=; give each one a label= of its own"
            )
        return label or ""
