"""The state of a session with `--gpumem`, and of each of its tests: device, baseline, rows, memory. All hooks share it."""

from __future__ import annotations

import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pytest_gpumem.baselines import verdicts
from pytest_gpumem.baselines.acceptances import NONE, Acceptances
from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.devices.protocol import (
    OWN_CONTEXT,
    ContextLost,
    Device,
    DeviceError,
    Footprints,
    HoldExpired,
)
from pytest_gpumem.files import unwritable
from pytest_gpumem.judging.expectations import Selection, held
from pytest_gpumem.judging.limits import relative
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.budget import Ledger, need
from pytest_gpumem.measuring.conductor import Conductor
from pytest_gpumem.measuring.plan import Plan
from pytest_gpumem.measuring.works import Works
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.memory.l2_leftovers import L2Watch
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.plugin.deadline import Deadline
from pytest_gpumem.plugin.entries import Entries
from pytest_gpumem.plugin.exclusive import REPEAT, GpuBusy, exclusive
from pytest_gpumem.plugin.forks import Forks
from pytest_gpumem.plugin.gpus import reserved
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, marks_of, uses
from pytest_gpumem.plugin.reported import Rows
from pytest_gpumem.plugin.result import Extra
from pytest_gpumem.plugin.workers import hands_out, is_part
from pytest_gpumem.printable import printable
from pytest_gpumem.ranges import Names, Ranges
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement, Provenance
from pytest_gpumem.records.row import DID_NOT_RUN, Omission, Row, key_of
from pytest_gpumem.settings import (
    DEFAULT_BUDGET,
    EVIDENCE,
    EXPERIMENT,
    FURTHER_PROCESS,
    Settings,
    SettingsError,
    marker_keywords,
    marker_limits,
    merge_limits,
    of_marker,
    of_test,
    switched_off,
)

if TYPE_CHECKING:
    from pytest_gpumem.runs.processes import ProcessRecord


class GpuSession:
    """The state of a whole session. The device is opened at its first use, so never in a process that hands out the tests."""

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        chosen: DeviceChoice,
        store: Store,
        baseline: Baseline,
        merged: Acceptances,
        added: Acceptances,
        base: Callable[[], Selection] | None = None,
    ) -> None:
        """`merged`: accepted changes that count: in the screen of a gate those that BASE has too.
        `added`: in the screen of a gate that counts them, those that the change adds.
        `base`: in the screen of a gate, waits for what BASE selects.
        """
        self.config = config
        self.settings = settings
        self.chosen = chosen
        self.store = store
        self.baseline = baseline
        self.merged = merged
        self.added = added
        self._base = base
        self.missing: list[Omission] = []
        """Measurements that the baseline holds and the session lacks; filled at its end."""
        self.remarks: list[str] = []  # lines for the summary
        self.is_part = is_part(config)  # another process has the results
        self.measures = not hands_out(config)  # False where workers measure
        self._pid = os.getpid()
        self.forks = Forks(chosen.unfinished)
        self.ranges = Ranges()
        self.names = Names()
        self.tests: frozenset[str] = frozenset()  # `key_of` of each collected test, without a label
        self.rows = Rows()
        self.adopted: set[str] = set()
        """Node ids of benchmarks whose GPU figures pytest-benchmark's table shows."""
        self.without_gpu: set[str] = set()  # node ids of benchmarks that use no GPU
        self.ledger: Ledger | None = None
        """The total budget, set after collection; None if each measurement has its own."""
        self.further: list[
            ProcessRecord
        ] = []  # the finished further processes of `--gpumem-processes`
        self.is_further = FURTHER_PROCESS in os.environ and config.pluginmanager.has_plugin(
            EXPERIMENT
        )
        """True in a further process, whose rows the main process judges; not in a session that a test of it starts."""
        self.begun = datetime.now(timezone.utc)
        self.watch: L2Watch | None = None  # of persisting L2, while the device is open
        self.lost_in: str | None = None  # the node id of the test that lost the device's context
        self.lost_how = ""  # of that test: the error, and where it is defined
        self.unrun: set[str] = set()  # node ids of the tests that it kept from running
        self.deadline = Deadline(config)
        self._device: Device | None = None
        # when the last line about a wait was printed, on the monotonic clock
        self._announced: float | None = None
        self._waits = True  # False once a wait for the GPU reached its limit

    def collected(self, items: Sequence[pytest.Item]) -> None:
        """Take the tests that are about to run."""
        self.names = Names(item.nodeid for item in items)
        self.tests = frozenset(key_of(item.nodeid, "") for item in items)
        self.open_ledger(items)

    def lacks(self, missing: Iterable[Omission]) -> None:
        """Take what this session did not judge."""
        self.missing.extend(missing)

    def remark(self, *lines: str) -> None:
        """Add lines to the summary."""
        self.remarks.extend(lines)

    def writable(self, flag: str, written: Path) -> Path:
        """A file relative to where pytest was called. Raises `pytest.UsageError`: it cannot be written."""
        path = Path(self.config.invocation_params.dir, written)
        if (why := unwritable(path)) is not None:
            raise pytest.UsageError(f"gpumem: {flag}: cannot write {path}: {why}")
        return path

    @property
    def reports_elsewhere(self) -> bool:
        """True in a worker and in a forked child: another process has the rows, and only reports reach it."""
        return self.is_part or os.getpid() != self._pid

    @property
    def evidence(self) -> bool:
        """True if the session records what each row runs, and lets it settle doubts."""
        return EVIDENCE not in switched_off(os.environ) and not self.ranges.tool_attached()

    @property
    def watches_streams(self) -> bool:
        """True if each row of foreign code is watched for work on streams of its own, in further processes too."""
        return not self.ranges.tool_attached()

    def judged(self, row: Row, siblings: Mapping[str, Measurement]) -> Row:
        """Return the row with its verdict at the test's end.

        `row`: with its measurement and limits.
        `siblings`: measurements of the same test, by label.
        """
        return verdicts.judged(
            self._with_accepted_counts(row),
            self.baseline,
            self.facts,
            siblings=siblings,
            strict=self.settings.strict,
        )

    def screen(self) -> list[Row]:
        """Judge the rows that wait for the session's end; return those that stay undecided."""
        waiting = [row.key for row in self.rows if verdicts.waits(row)]
        self.rows.replace(
            verdicts.screened(
                list(self.rows),
                self.baseline,
                strict=self.settings.strict,
            )
        )
        undecided = []
        for row in self.rows:
            if row.key in waiting and row.verdict.outcome is Outcome.UNDECIDED:
                undecided.append(row)
        return undecided

    def failure_elsewhere(self, nodeid: str) -> str | None:
        """Why a test failed in a further process; None if it did not."""
        return next(
            (why for process in self.further if (why := process.failure_of(nodeid)) is not None),
            None,
        )

    # Limits

    @property
    def base_name(self) -> str:
        """The revision that a gate compares with, as it was named."""
        return self.settings.baseline_of or "BASE"

    def limits(self, item: pytest.Item, names: Iterable[str] = tuple(LIMITS)) -> Limits:
        """The limits of a test: those of its marker and of the session, or in a gate those of BASE where they demand more.
        `names`: the limits that apply.
        Raises `SettingsError`: a keyword of the marker that cannot be used.
        """
        own = merge_limits(
            None, marker_limits(marker_keywords(marks_of(item))), self.settings, names
        )
        return self.held(item.nodeid, own, names)

    def held(self, nodeid: str, own: Limits, names: Iterable[str] = tuple(LIMITS)) -> Limits:
        """The limits to which a test is held that has its `own`. `names`: the limits that apply."""
        if self.base is None or (test := self.base.tests.get(nodeid)) is None:
            return own
        key = key_of(nodeid, "")
        return held(
            own,
            test.limits,
            names,
            self.base_name,
            lambda limit, value: self.added.allows(key, limit, value),
        )

    @property
    def in_gate(self) -> bool:
        """True in the screen of a gate, and in its workers."""
        return self._base is not None

    @cached_property
    def base(self) -> Selection | None:
        """What BASE selects, once it is known; None outside of a gate."""
        return None if self._base is None else self._base()

    def _with_accepted_counts(self, row: Row) -> Row:
        """The row; a limit "base" on a count that somebody accepted is the accepted count."""
        values = dict[str, str | None]()
        for name in relative(row.limits):
            change = self.merged.of(row.key, "limit", name)
            if change is not None:
                values[name] = None if change.value == NONE else change.value
        if not values:
            return row
        origin = {**row.limits.origin, **dict.fromkeys(values, "accepted")}
        return replace(row, limits=replace(row.limits, **values, origin=origin))

    # The device

    @property
    def facts(self) -> DeviceFacts:
        return self.chosen.facts

    @property
    def device(self) -> Device:
        """The open device. Raises `DeviceError` if it cannot be opened."""
        if self._device is None:
            device = self.chosen.open()
            self._device, self.watch = device, L2Watch(device)
        return self._device

    @property
    def is_open(self) -> bool:
        """True if the device is open."""
        return self._device is not None

    @property
    def footprints(self) -> Footprints:
        """The memory of this process on the device, which need not be open. Raises `DeviceError` if it has to be, and cannot be opened."""
        early = self.chosen.footprints() if self._device is None else None
        return self.device.footprints if early is None else early

    def make_room(self, *, unless_free: float = 1.0) -> None:
        """Give back the device memory that is kept for the next measurement of a kernel of the catalogue.
        `unless_free`: share of the device's memory that, if it is free besides, lets the kept memory stay.
        """
        if self._device is not None and self.lost_in is None:
            with suppress(
                DeviceError
            ):  # such as a capture that is still open; the next measurement tries again
                self._device.memory.make_room(unless_free=unless_free)

    @cached_property
    def kernels(self) -> Kernels:
        return Kernels(self.device)

    @cached_property
    def conductor(self) -> Conductor:
        return Conductor(self.device, self.ranges, profiled=self.ranges.tool_attached())

    def begin(self, item: pytest.Item) -> GpuTest:
        """The device side of a test that uses our fixtures; waits while another process measures on the same GPU.

        After one wait that reached its limit, later tests fail at once while the GPU is in use.
        Raises `ContextLost`: an earlier test lost the context.
        Raises `Unsupported`: the test asks for more GPUs than there are.
        """
        if self.lost_in is not None:
            self.unrun.add(item.nodeid)
            raise ContextLost(self.why_unrun)
        with ExitStack() as stack:
            try:
                # All in one order: two tests that each hold a GPU of the other's would wait for ever.
                for uuid in sorted(reserved(item, self.chosen)):
                    stack.enter_context(
                        self._exclusive(f"{item.nodeid} in {self.config.rootpath}", uuid)
                    )
            except GpuBusy:
                self._waits = False
                raise
            test = GpuTest(item, self)
            if self.watch is not None:
                self.watch.fresh()
            test.exit.push(stack.pop_all())
        item.stash[TEST] = test
        return test

    def _lost(self, item: pytest.Item, error: str) -> None:
        """Remember the test that lost the context. `error`: what the runtime said, or the call that did it."""
        file, line, _ = item.location
        named = re.search(r"cudaError([A-Z]\w+)", error)
        what = (
            re.sub(r"(?<!^)(?=[A-Z])", " ", named[1]).lower() if named else error.partition(". ")[0]
        )
        self.lost_in, self.lost_how = (
            item.nodeid,
            f"{what}, {file}" + ("" if line is None else f":{line + 1}"),
        )

    @property
    def why_unrun(self) -> str:
        """Why no later test runs on the device."""
        return f"{DID_NOT_RUN}{printable(str(self.lost_in))} lost the context ({printable(self.lost_how)})"

    def wait(self, item: pytest.Item) -> None:
        """Wait for all work of a test whose body or teardown has ended; remembers the test if the context is lost.
        Raises `ContextLost`: the context is lost, and no earlier test lost it.
        Raises `DeviceError`: the device cannot be waited for.
        """
        if self._device is None or self.lost_in is not None:
            return
        with suppress(HoldExpired):  # that of a measurement, which has discarded the sample
            try:
                reason = self._device.gone()
                if reason is not None:
                    self.remark(
                        f"after {printable(item.nodeid)}, {reason}; the next test that measures opens it again"
                    )
                    self.close()
                    return
                self._device.streams.synchronize()
            except ContextLost as error:
                self._lost(item, str(error))
                raise ContextLost(f"at the test's end: {error}") from None
            except DeviceError:
                if not self._device.streams.end_captures():
                    raise
                self.remark(
                    f"{printable(item.nodeid)} left the capture of a stream open, which was ended: later tests would fail by it"
                )
                self._device.streams.synchronize()
                raise DeviceError(
                    "the test left the capture of a stream open; it was ended, and its graph dropped"
                ) from None

    def close(self) -> None:
        """Close the device; a second call does nothing. The next use opens it again."""
        device, self._device, self.watch = self._device, None, None
        if device is None:
            return
        conductor = self.__dict__.pop("conductor", None)
        self.__dict__.pop("kernels", None)
        if device.gone() is not None:
            device.close()
            return
        # What a lost context held went with it.
        with suppress(Exception if self.lost_in is not None else ContextLost):
            try:
                if conductor is not None:
                    conductor.close()
            finally:
                device.close()

    def _exclusive(self, test: str, uuid: str | None) -> AbstractContextManager[None]:
        """A GPU for this process alone: that of the session, or another one."""
        facts = self.facts if uuid is None else replace(self.facts, uuid=uuid)
        return exclusive(facts, self._announce, test=test, limit=None if self._waits else 0.0)

    def _announce(self, line: str) -> None:
        """Print a line at once, even if pytest captures output; at most one every `REPEAT` seconds, however many tests wait."""
        if self._announced is not None and time.monotonic() - self._announced < REPEAT:
            return
        self._announced = time.monotonic()
        capture = self.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
            print(f"\n{line}", file=sys.stderr, flush=True)

    @property
    def provenance(self) -> Provenance:
        """When and on which device this process measures."""
        return Provenance(self.begun.isoformat(timespec="seconds"), self.facts.uuid)

    # Plans and budgets

    def plan(self, settings: Settings, nodeid: str, label: str) -> Plan:
        """The plan of a measurement that is about to begin. Its budget is the smaller of its own and its share of the total.
        `settings`: of its test.
        """
        budgets = [settings.budget] if settings.budget is not None else []
        if self.ledger is not None:
            budgets.append(self.ledger.share(nodeid, label))
        return Plan(
            settings.mode, settings.sampler, settings.placements, settings.precision, min(budgets)
        )

    def open_ledger(self, items: Iterable[pytest.Item]) -> None:
        """Divide a total budget among the tests that measure, by their cost in the baseline."""
        total = self.settings.total_budget
        if total is None:
            return
        known: dict[str, dict[str, Measurement]] = {}
        for rows in self.baseline.rows.values():
            for row in rows:
                if row.measurement is not None:
                    known.setdefault(row.nodeid, {})[row.label] = row.measurement
        expected = {}
        for item in items:
            if not uses(item, BENCHMARK_FIXTURE):
                continue
            try:
                most = (
                    of_test(self.settings, marker_keywords(marks_of(item))).budget or DEFAULT_BUDGET
                )
            except SettingsError:  # in a worker: the test fails by it, and measures nothing
                continue
            measured = known.get(item.nodeid, {})
            expected[item.nodeid] = {
                label: need(measurement, self.facts, most)
                for label, measurement in measured.items()
            }
        # Each process of the run has its part.
        self.ledger = Ledger(total / self.settings.processes, expected)


class GpuTest:
    """The device side of one test. `close` frees everything that was allocated through it."""

    def __init__(self, item: pytest.Item, session: GpuSession) -> None:
        self.item = item
        self.session = session
        keywords = marker_keywords(marks_of(item))
        self.limits = session.limits(item)
        self.settings = of_test(session.settings, keywords)
        self.range_name = session.names.unique(item.nodeid)
        self.device: Device = session.device
        self.exit = ExitStack()  # closed at the test's end, after its memory is freed
        if self.device.elsewhere() != OWN_CONTEXT:
            self.exit.enter_context(self.device.current())
        oversubscribes = bool(of_marker(keywords, "oversubscribe"))
        self.arena = Arena(
            self.device,
            zlib.crc32(item.nodeid.encode(errors="surrogatepass")),
            oversubscribes=oversubscribes,
        )
        self.memory = Memory(self.arena)
        self.works = Works(self.memory)
        self.measurements: list[tuple[Measurement, Limits]] = []
        """Measurements so far, each with its limits."""
        self.extra: dict[str, Extra] = {}  # further figures of each measurement, by its label
        self.streams: list[PersistingStream] = []  # the test's persisting streams
        self.entries: Entries | None = None  # of pytest-benchmark
        # a subtest has failed: the body continues, and pytest fails the test at its end
        self.subtest_failed = False
        self.judged = False  # the body has ended: nothing more is measured
        # the first result that was wrong, in words; the test fails by it even if it catches the
        # error
        self.wrong: str | None = None

    @property
    def kernels(self) -> Kernels:
        return self.session.kernels

    @property
    def conductor(self) -> Conductor:
        return self.session.conductor

    @contextmanager
    def spending(self, label: str) -> Iterator[Plan]:
        """The plan of the measurement that is about to begin; charges its time to a total budget, and limits it."""
        begun, nodeid = self.device.now(), self.item.nodeid
        plan = self.session.plan(self.settings, nodeid, label)
        timeout = self.settings.timeout
        limit: AbstractContextManager[None] = nullcontext()
        if timeout and not self.session.ranges.tool_attached():  # a profiler may take much longer
            limit = self.session.deadline.limit(self.item, plan.budget + timeout)
        try:
            with limit:
                yield plan
        finally:
            if self.session.ledger is not None:
                self.session.ledger.took(nodeid, label, self.device.now() - begun)

    def close(self) -> None:
        """Free everything, and close the persisting streams whose blocks were never left. What a lost context held went with it."""
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


SESSION: pytest.StashKey[GpuSession] = pytest.StashKey()
"""On `config.stash`; absent while the plugin is off."""

TEST: pytest.StashKey[GpuTest | None] = pytest.StashKey()
"""On `item.stash`, once a fixture of ours was set up."""

ROWS: pytest.StashKey[list[Row]] = pytest.StashKey()
"""On `item.stash`: the test's rows, once it was judged."""
