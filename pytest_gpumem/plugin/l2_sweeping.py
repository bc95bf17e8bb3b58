"""Persisting streams and sweeps of persisting L2 in a test: the fixtures `persisting_stream` and `l2_sweep`, and `--gpumem-l2-sweep`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import Parameter, signature
from itertools import islice
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from pytest_gpumem.judging.judge import unreliable
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.l2_sweep import sweep
from pytest_gpumem.measuring.sampling import Plan
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.measuring.target_case import Case
from pytest_gpumem.measuring.work import Work
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.l2 import BadWindow, PersistingStream, Thrashing, asked, in_one_line, open_streams, persisting
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.plugin.marks import TEST_FIXTURE, uses
from pytest_gpumem.plugin.result import SweepResult
from pytest_gpumem.plugin.state import GpuSession, GpuTest, SummaryHooks, write_output
from pytest_gpumem.plugin.workers import refuse_workers
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.settings import MODES
from pytest_gpumem.units import did_you_mean, format_bytes

PLACEMENTS = 3  # buffer placements of one setting: the rounds of the confirmation average over more
PRECISION = 0.003  # half-width at which a setting's measuring stops, as a share: a third of the least gain that is recommended
BUDGET = 0.1  # seconds of sampling at each setting; some 30 measurements and their checks stay below 10 s for a kernel of milliseconds
STREAM_KEYWORDS = tuple(p.name for p in signature(asked).parameters.values() if p.kind is Parameter.KEYWORD_ONLY)
"""Keywords of `persisting_stream`."""
FIXTURE = "l2_sweep"
NOTHING = (
    "--gpumem-l2-sweep: nothing was swept; a sweep needs gpu_benchmark with stream= from persisting_stream, a Case with window=, "
    "or the fixture l2_sweep"
)


class L2Sweeps:
    """The persisting streams and the sweeps of one test. The fixture `l2_sweep` is an instance; calling it sweeps."""

    def __init__(self, test: GpuTest) -> None:
        self._test = test
        self._due: list[Callable[[], SweepResult]] = []
        self._seen: dict[tuple[object, ...], object] = {}
        """Finished and waiting sweeps by the identities of their objects; the values keep the objects alive, so that no identity recurs."""
        self._open = 0  # persisting streams of the test that are open

    def __call__(
        self, function: BoundKernel | Callable[..., object], /, *args: Any, window: Any, mode: str | None = None, **kwargs: Any
    ) -> SweepResult:
        """Search for the set-aside and hit ratio at which `function` is fastest with `window` persisting in L2.
        `function`: a kernel of `gpu_kernels`, or any callable that launches on the current stream.
        `args`, `kwargs`: its arguments. Buffers among them are moved between placements. A keyword of this signature does not reach
        `function`; wrap it in a lambda.
        `window`: the buffer under the access-policy window, of device memory.
        `mode`: state of the cache before each sample; default: the marker's or the session's.
        The limit and the persisting lines are as they were found when this returns, also after an error. The map is shown at the
        session's end.
        Raises `BadCall`: arguments do not fit, or a profiler is attached.
        Raises `BadWindow`: the window cannot be one, or a persisting stream is still open.
        Raises `WrongResult`: the result of one launch is not the reference's.
        Raises `Unsupported`: the device has no persisting L2; the test skips with the reason.
        """
        __tracebackhide__ = True
        test = self._test
        if isinstance(function, Work) or not callable(function):
            raise BadCall(f"l2_sweep() takes a kernel of gpu_kernels or a callable, not {in_one_line(function)}")
        buffer = window if isinstance(window, Buffer) else test.arena.find(window)
        if buffer is None:
            raise BadCall(f"window={in_one_line(window)}; it is a buffer that device_buffer made")
        self._check(mode)
        return self._sweep_call(function, args, kwargs, buffer, mode, buffer.nbytes, {})

    def case(self, build: Callable[[Memory], Case], *, mode: str | None = None) -> SweepResult:
        """The same for a `Case` with `window=`, built anew by `build(memory)` for each placement.

        Args and errors as for the short form.
        Raises `BadCall`: the case has no window.
        """
        __tracebackhide__ = True
        test = self._test
        if not callable(build):
            raise BadCall(f"l2_sweep.case() takes a function that is given a memory and returns a Case, not {in_one_line(build)}")
        self._check(mode)
        # Built once for its name and its window, which is not opened: a device has one set-aside.
        target = test.conductor.case(build, arena=test.arena, persisting={"set_aside": "off"})
        try:
            name, stream = target.name, target.window
        finally:
            target.close()
        if stream is None:
            raise BadCall(f"{name}: Case.window is None: there is nothing to make persisting")
        return self._sweep_case(build, name, stream.nbytes, mode)

    def _check(self, mode: str | None) -> None:
        if mode is not None and mode not in MODES:
            raise BadCall(f"mode={mode!r}; accepted are {', '.join(MODES)}")
        if self._test.judged:
            raise BadCall("this test was judged already: sweep in its body, not while fixtures are torn down")
        for stream in open_streams(self._test.device):
            raise BadWindow(
                f"a persisting stream on {stream.buffer!r} is still open, and a device has one set-aside: sweep after its block"
            )

    def _sweep_call(
        self,
        function: BoundKernel | Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        buffer: Buffer,
        mode: str | None,
        nbytes: int,
        options: dict[str, Any],
    ) -> SweepResult:
        """Args as for the fixture, but the bytes under the window, and further arguments of each persisting stream."""
        __tracebackhide__ = True
        test = self._test

        @contextmanager
        def target(setting: dict[str, Any]) -> Iterator[Target]:
            with persisting(test.device, buffer, **setting, **options) as stream:
                yield test.conductor.target(function, args, kwargs, arena=test.arena, stream=stream)

        name = function.name if isinstance(function, BoundKernel) else getattr(function, "__name__", type(function).__name__)
        return self._sweep(target, name, nbytes, mode)

    def _sweep_case(self, build: Callable[[Memory], Case], name: str, nbytes: int, mode: str | None) -> SweepResult:
        __tracebackhide__ = True
        test = self._test
        return self._sweep(
            lambda setting: nullcontext(test.conductor.case(build, arena=test.arena, persisting=setting)), name, nbytes, mode
        )

    def _sweep(
        self, target: Callable[[dict[str, Any]], AbstractContextManager[Target]], name: str, nbytes: int, mode: str | None
    ) -> SweepResult:
        """Search.
        `target`: gives the target of a measurement for the arguments of its persisting stream.
        `mode`: state of the cache before each sample.
        """
        __tracebackhide__ = True
        test = self._test
        device, conductor = test.device, test.conductor
        if conductor.profiled:
            raise BadCall("a profiler is attached: its times say nothing of a set-aside; sweep without it")
        plan = test.session.plan(test.settings, test.item.nodeid, "l2 sweep")
        plan = Plan(mode or plan.mode, plan.sampler, PLACEMENTS, PRECISION, min(plan.budget, BUDGET))
        begun = device.now()
        granted: dict[int, int] = {}
        """The set-aside that the driver granted, by the requested one, if they differ."""
        doubts: list[str] = []
        """The first reason why a measurement is unreliable, of each that is."""

        def measure(set_aside: int, hit_ratio: float) -> tuple[float, float | None]:
            setting: dict[str, Any] = {"set_aside": set_aside, "hit_ratio": hit_ratio} if set_aside else {"set_aside": "off"}
            with target({**setting, "allow_thrash": True}) as one:
                measurement = conductor.measure(one, plan, arena=test.arena, label="", name=test.range_name)
            if measurement.window is not None and measurement.window.set_aside != set_aside:
                granted[set_aside] = measurement.window.set_aside
            doubts.extend(islice(unreliable(measurement), 1))
            return measurement.latency, measurement.half_width

        try:
            found = sweep(measure, device.facts, nbytes, target=name, spent=lambda: device.now() - begun)
        finally:
            if test.session.ledger is not None:
                test.session.ledger.took(test.item.nodeid, "l2 sweep", device.now() - begun)
        if granted:
            least = min(granted)
            note = (
                f"the driver set aside {format_bytes(granted[least])} for a request of {format_bytes(least)}, and another size than "
                f"requested at {len(granted)} of the set-asides: the map shows the requested sizes"
            )
            found = replace(found, notes=(*found.notes, note))
        if doubts:
            note = f"{len(doubts)} measurements of the sweep are unreliable: {doubts[0]}"
            found = replace(found, notes=(*found.notes, note))
        test.session.sweeps.append((test.item.nodeid, found))
        return SweepResult(**asdict(found))

    def later(
        self,
        stream: PersistingStream,
        function: BoundKernel | Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: Any,
    ) -> None:
        """Sweep a measurement's work after its persisting stream is closed: a device has one set-aside."""
        # The same launch on several streams, such as off and persisting, is one sweep.
        name = (function.name, function.blocks) if isinstance(function, BoundKernel) else (id(function), None)
        buffer, nbytes, asked = stream.buffer, stream.nbytes, stream.asked
        options = {
            "miss": "fit" if asked.miss is None else asked.miss.value,
            "where": asked.where,
            "window": asked.nbytes,
            "offset": asked.offset,
        }
        identities = (*map(id, args), *((keyword, id(value)) for keyword, value in kwargs.items()), id(buffer))
        key = (*name, *identities, mode, *options.values())
        if key not in self._seen:
            self._seen[key] = (function, args, kwargs, buffer)
            self._due.append(lambda: self._sweep_call(function, args, kwargs, buffer, mode, nbytes, options))

    def later_case(self, build: Callable[[Memory], Case], name: str, nbytes: int, mode: str | None) -> None:
        """Sweep a case with a window, at once unless a persisting stream is open: a device has one set-aside."""
        key = (id(build), mode)
        if key not in self._seen:
            self._seen[key] = build
            self._due.append(lambda: self._sweep_case(build, name, nbytes, mode))
        self._catch_up()

    @contextmanager
    def persisting_stream(self, buffer: Any, **options: Any) -> Iterator[PersistingStream]:
        """A stream whose access-policy window lies on `buffer`. Arguments and errors as `memory.l2.persisting`.

        `buffer` may also be the array that `device_buffer(..., like=)` made.

        Warns of `Thrashing` if hit ratios x bytes exceed the set-aside, unless with `allow_thrash=True`.
        Raises `BadCall`: the block ended and nothing was measured on the stream, such as without `stream=`; or an unknown keyword.
        """
        test = self._test
        for name in options:
            if name not in STREAM_KEYWORDS:
                hint = did_you_mean(name, STREAM_KEYWORDS) or f"; accepted are {', '.join(STREAM_KEYWORDS)}"
                raise BadCall(f"persisting_stream() has no keyword {name!r}{hint}")
        found = test.arena.find(buffer)
        with self._afterwards(), persisting(test.device, buffer if found is None else found, **options) as stream:
            test.streams.append(stream)
            if (message := stream.thrashing) is not None:
                test.item.warn(Thrashing(message))
            yield stream
            if not stream.used:
                raise BadCall("nothing was measured on this persisting_stream: pass stream= to gpu_benchmark")

    @contextmanager
    def _afterwards(self) -> Iterator[None]:
        """Run the sweeps that wait for the end of the stream, also after a failed assertion, which a sweep may explain."""
        self._open += 1
        try:
            yield
        except AssertionError:
            self._open -= 1
            try:
                self._catch_up()
            except Exception as error:  # must not replace the failure; some errors would even become a skip
                self._test.item.add_report_section("call", "gpumem", f"not swept: {error}")
            raise
        except BaseException:
            self._open -= 1
            raise
        self._open -= 1
        self._catch_up()

    def _catch_up(self) -> None:
        if self._open:  # a device has one set-aside, which the outer stream still holds
            return
        due, self._due = self._due, []
        for take in due:
            take()


class SweepHooks(SummaryHooks):
    """Shows the maps at the session's end.
    Raises `pytest.UsageError`: the picture of the maps cannot be written, or the session uses xdist.
    """

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._notes: list[str] = []
        if session.settings.l2_sweep or session.settings.l2_sweep_map is not None:
            refuse_workers(session.config, "--gpumem-l2-sweep and its map draw in the process that measures")
        self._picture = session.output("l2_sweep_map")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        settings = self._session.settings
        origin = settings.origins["l2_sweep_map"]
        # The ini file and the environment may name a file for those sessions that do sweep.
        if settings.l2_sweep or not origin.startswith("--") or session.config.option.collectonly:
            return
        if not any(uses(item, FIXTURE) and uses(item, TEST_FIXTURE) for item in session.items):
            raise pytest.UsageError(
                f"gpumem: {origin} {settings.l2_sweep_map}: nothing would be swept, so there is no map to draw; add --gpumem-l2-sweep, "
                f"or name the fixture {FIXTURE} in a test"
            )

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        gpu = self._session
        if gpu.settings.l2_sweep and not gpu.sweeps and session.config.option.collectonly is False:
            self._notes.append(NOTHING)
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = Exit.NO_VERDICT
        if self._picture is not None and gpu.sweeps:
            from pytest_gpumem.reporting.l2_sweep import l2_svg

            self._notes.append(write_output(session, "--gpumem-l2-sweep-map", self._picture, l2_svg(gpu.sweeps)))

    def summarise(self, writer: pytest.TerminalReporter) -> None:
        if not self._session.sweeps and not self._notes:
            return
        from pytest_gpumem.reporting.l2_sweep import drawn

        width, colour = writer._tw.fullwidth, writer._tw.hasmarkup
        writer.ensure_newline()  # so that the section's heading has no blank line below
        writer.section("gpumem: persisting L2")
        for nodeid, found in self._session.sweeps:
            writer.write_line(drawn(printable(nodeid), printable(found), width=width, colour=colour))
        for note in self._notes:
            for line in wrapped(printable(note), width, indent=""):
                writer.write_line(line)
