"""One test from setup to its report: device memory, ranges, verdicts."""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.devices.protocol import Device, DeviceError, Unsupported
from pytest_gpumem.measuring.benchmark import Conductor, Plan
from pytest_gpumem.measuring.bound import BadCall, Kernels, NoSuchKernel
from pytest_gpumem.measuring.staging import BadWork
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.measuring.works import Works
from pytest_gpumem.memory.buffers import Arena, BadBuffer
from pytest_gpumem.memory.l2 import BadWindow, PersistingStream, Thrashing, persisting
from pytest_gpumem.memory.pinned import PinnedCap
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.plugin.fixtures import BENCHMARK_FIXTURE, TEST_FIXTURE
from pytest_gpumem.plugin.gpu_benchmark import GpuBenchmark
from pytest_gpumem.plugin.hooks import OVERSUBSCRIBES, marks_of
from pytest_gpumem.plugin.judging import PROPERTY, ROWS, TEST, explained, judge_test, unmeasured
from pytest_gpumem.plugin.l2_sweeping import L2Sweeps
from pytest_gpumem.plugin.replay import NotOurTimer, Replay, attach_timer, check_timer
from pytest_gpumem.plugin.result import NoTraffic
from pytest_gpumem.printable import printable
from pytest_gpumem.ranges import phase
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.schema import row_to_json
from pytest_gpumem.reporting.failure import report
from pytest_gpumem.settings import SettingsError, marker_keywords, marker_limits, marker_overrides
from pytest_gpumem.units import QuantityError

if TYPE_CHECKING:
    from pytest_gpumem.plugin.session import GpuSession


_PACKAGE = Path(__file__).resolve().parent.parent


def where(traceback: TracebackType | None, test_file: Path, root: Path) -> str:
    """`file:line: ` of the user's own line that led to an error; empty if there is none."""
    found = ""
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        theirs = file.is_relative_to(root) and "site-packages" not in file.parts and not file.is_relative_to(_PACKAGE)
        if file == test_file or theirs:
            shown = file.relative_to(root) if file.is_relative_to(root) else file
            found = f"{shown}:{traceback.tb_lineno}: "
        traceback = traceback.tb_next
    return found


ROWS_ATTRIBUTE = "gpumem_rows"
"""Attribute of a report that carries the rows, samples included, to the process that has them: from an xdist worker or a forked child."""

MISTAKES = (BadCall, NoSuchKernel, BadBuffer, BadWindow, BadWork, NoTraffic, NotOurTimer, SettingsError, QuantityError, DeviceError)
"""Errors whose message is made for the user: shown with the line that led to them instead of a traceback through this package."""


STREAM_KEYWORDS = tuple(p.name for p in signature(persisting).parameters.values() if p.kind is Parameter.KEYWORD_ONLY)
"""Keywords of `persisting_stream`."""


def uses(item: pytest.Item, fixture: str) -> bool:
    """Whether a test uses one of our fixtures, by origin: only ours depend on the private ones."""
    return fixture in getattr(item, "fixturenames", ())


class GpuTest:
    """What one test has of the device. Everything allocated through it is freed by `close`."""

    def __init__(self, item: pytest.Item, session: GpuSession) -> None:
        self.item = item
        self.session = session
        keywords = marker_keywords(marks_of(item))
        self.limits = marker_limits(keywords)
        self.overrides = marker_overrides(keywords)
        self.range_name = session.names.unique(item.nodeid)
        self.device: Device = session.device
        self.exit = ExitStack()
        """What ends with the test, after its memory is freed."""
        oversubscribes = item.get_closest_marker(OVERSUBSCRIBES) is not None
        settings = session.settings
        cap = PinnedCap(settings.pinned_share, settings.origins.get("pinned_share", "default"))
        self.arena = Arena(self.device, zlib.crc32(item.nodeid.encode(errors="surrogatepass")), cap, oversubscribes=oversubscribes)
        self.memory = Memory(self.arena)
        self.works = Works(self.memory)
        self.taken: list[tuple[Measurement, Limits]] = []
        """Measurements so far, each with its limits."""
        self.l2_sweeps = L2Sweeps(self)
        self._persisting: list[PersistingStream] = []
        self.replay: Replay | None = None
        self.subtest_failed = False
        """A subtest has failed: the body goes on, and pytest fails the test at its end."""
        self.judged = False
        """The body has ended: nothing more is measured."""

    @property
    def kernels(self) -> Kernels:
        return self.session.kernels

    @property
    def conductor(self) -> Conductor:
        return self.session.conductor

    def benchmark(self, benchmark: object) -> GpuBenchmark:
        """What `gpu_benchmark` gives; `benchmark` is pytest-benchmark's fixture."""
        check_timer(self.item, benchmark)
        self.replay = Replay(self.item, benchmark)
        return GpuBenchmark(self)

    @contextmanager
    def persisting_stream(self, buffer: Any, **options: Any) -> Iterator[PersistingStream]:
        """A stream whose access-policy window lies on `buffer`. Arguments and errors as `memory.l2.persisting`.

        `buffer` may also be the array that `device_buffer(..., like=)` made.

        Warns of `Thrashing` where hit ratios x bytes exceed the set-aside, unless with `allow_thrash=True`.

        Raises:
            BadCall: nothing was done on it by the end of the block: a forgotten `stream=` measures no persistence; or a keyword is none.
        """
        for name in options:
            if name not in STREAM_KEYWORDS:
                near = difflib.get_close_matches(name, STREAM_KEYWORDS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"accepted are {', '.join(STREAM_KEYWORDS)}"
                raise BadCall(f"persisting_stream() has no keyword {name!r}; {hint}")
        found = self.arena.find(buffer)
        with self.l2_sweeps.afterwards(), persisting(self.device, buffer if found is None else found, **options) as stream:
            self._persisting.append(stream)
            if (said := stream.thrashing) is not None:
                self.item.warn(Thrashing(said))
            yield stream
            if not stream.used:
                raise BadCall("nothing was measured on this persisting_stream: pass stream= to gpu_benchmark")

    @contextmanager
    def spending(self, label: str) -> Iterator[Plan]:
        """The plan of the measurement that is about to begin; books the time that it takes on a total budget."""
        begun, nodeid = self.device.now(), self.item.nodeid
        try:
            yield self.session.plan(self.overrides, nodeid, label)
        finally:
            if self.session.ledger is not None:
                self.session.ledger.took(nodeid, label, self.device.now() - begun)

    def close(self) -> None:
        """Free everything, and close the persisting streams whose blocks were never left."""
        with self.exit:
            try:
                for stream in reversed(self._persisting):
                    if not stream.closed:
                        stream.close()
                        if self.session.watch is not None:
                            self.session.watch.forgotten(stream)
            finally:
                try:
                    self.works.close()
                finally:
                    self.arena.close()


class RunningHooks:
    """The hooks around a test; registered only with `--gpumem`."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._session.ranges.test(self._session.names.unique(item.nodeid), item.nodeid):
            try:
                return (yield)
            finally:
                # Also of a test that was skipped, whose fixtures were never set up.
                if self._session.ledger is not None:
                    self._session.ledger.ended(item.nodeid)
                item.stash[TEST] = None  # pytest keeps the item to the end, and the test would keep its streams

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        # A rerun of the test starts anew.
        item.user_properties[:] = [p for p in item.user_properties if not p[0].startswith(PROPERTY)]
        item.stash[ROWS] = []
        if uses(item, BENCHMARK_FIXTURE):
            attach_timer(item)
        with self._session.ranges.range(phase(self._session.names.unique(item.nodeid), "setup")):
            try:
                return (yield)
            except Exception as error:
                spoken = _spoken(error, item)
                if spoken is None:
                    raise
                raise spoken from None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            result = yield
        except (KeyboardInterrupt, SystemExit, pytest.exit.Exception):
            raise
        except BaseException as error:  # pytest's own outcomes are no Exceptions
            spoken = _spoken(error, item) or error
            judge_test(item, self._session, spoken)
            if spoken is error:
                raise
            raise spoken from None
        failing = judge_test(item, self._session, None)
        if failing and self._session.further_reports is None:
            facts = self._session.facts
            said = [report(row, facts) for row in failing]
            said += explained(failing, self._session) if self._session.settings.explain else []
            raise pytest.fail.Exception("\n\n".join(said), pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._session.ranges.range(phase(self._session.names.unique(item.nodeid), "teardown")):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        shown = yield
        ours = uses(item, TEST_FIXTURE) or item.stash.get(TEST, None) is not None
        if ours and shown.skipped and not hasattr(shown, "wasxfail") and self._session.settings.strict:
            shown.outcome = "failed"
            shown.longrepr = f"gpumem: --gpumem-strict fails a skip: {call.excinfo.value if call.excinfo else ''}"
        test = item.stash.get(TEST, None)
        if shown.when == "call" and test is not None and not test.judged:
            # The report of a subtest: the body goes on.
            test.subtest_failed = test.subtest_failed or shown.failed
            return shown
        ended = shown.when == "call" or (shown.when == "setup" and not shown.passed)
        if ended and not shown.failed and (why := self._session.failure_elsewhere(item.nodeid)) is not None:
            shown.outcome, shown.longrepr = "failed", why
            vars(shown).pop("wasxfail", None)
        if test is not None and test.replay is not None and (not shown.passed or hasattr(shown, "wasxfail")):
            test.replay.excuse()
        if shown.when == "setup" and shown.failed and uses(item, BENCHMARK_FIXTURE):
            item.stash[ROWS] = [unmeasured(item, self._session, shown.longreprtext)]
        if ended:
            rows = item.stash.get(ROWS, [])
            if self._session.reports_elsewhere:
                setattr(shown, ROWS_ATTRIBUTE, [row_to_json(row) for row in rows])
            else:
                self._session.rows.add(item.nodeid, rows)
        return shown


def _spoken(error: BaseException, item: pytest.Item) -> BaseException | None:
    """What pytest is to see instead of an error of ours: a skip, or a failure in one line with the place; None for other errors."""
    if isinstance(error, Unsupported):
        return pytest.skip.Exception(str(error), _use_item_location=True)
    if isinstance(error, (WrongResult, *MISTAKES)):
        place = printable(where(error.__traceback__, item.path, item.config.rootpath))
        return pytest.fail.Exception(f"{place}{type(error).__name__}: {error}", pytrace=False)
    return None
