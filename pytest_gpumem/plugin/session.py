"""The state of a session with `--gpumem`: its device, its baseline and its rows."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.baselines.acceptances import Acceptances
from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.devices.protocol import (
    ContextLost,
    Device,
    DeviceError,
    Footprints,
    HoldExpired,
)
from pytest_gpumem.judging.expectations import Selection, stricter_limits
from pytest_gpumem.judging.verdict import with_verdict
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.plugin.marks import marks_of
from pytest_gpumem.plugin.workers import is_part
from pytest_gpumem.printable import printable
from pytest_gpumem.ranges import Names, Ranges
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import DID_NOT_RUN, LimitResult, Omission, Row, key_of
from pytest_gpumem.settings import (
    EVIDENCE,
    EXPERIMENT,
    FURTHER_PROCESS,
    Settings,
    marker_keywords,
    marker_limits,
    merge_limits,
    switched_off,
)

if TYPE_CHECKING:
    from pytest_gpumem.measuring.bound import Kernels
    from pytest_gpumem.measuring.conductor import Conductor
    from pytest_gpumem.measuring.plan import Ledger
    from pytest_gpumem.memory.l2_leftovers import L2Watch
    from pytest_gpumem.runs.processes import ProcessRecord


PASSED, FAILED, SKIPPED, XFAILED, XPASSED = "passed", "failed", "skipped", "xfailed", "xpassed"
"""How a test ends. The rows of a passed test alone may enter a baseline."""
BY_LIMITS_ATTRIBUTE = "_gpumem_by_limits"
"""Attribute of a failed report, and of the exception that it is of: the verdicts of the test's rows
fail it, not an assertion or an error.

Of an exception it is the line of pytest's short summary, which begins with the figure.
"""

COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""How a session ends that collected all it was to collect, and ran it."""
ROWS_ATTRIBUTE = "gpumem_rows"
"""Attribute of a report that carries the rows, samples included, to the process that has them: from
a worker or a forked child."""


def exit_code(code: int, *, failed: bool) -> int:
    """The exit code of a session that ends with `code`: that of failed tests if it failed, unless
    it ends with another error."""
    fine = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return int(pytest.ExitCode.TESTS_FAILED) if failed and fine else code


class GpuSession:
    """A session. The device is opened at its first use, so never by a controller of workers."""

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
        self.config, self.settings = config, settings
        self.chosen = chosen
        self.store, self.baseline = store, baseline
        self.merged, self.added = merged, added
        self._base = base
        self.is_part = is_part(config)  # another process has the results
        self._pid = os.getpid()
        self.ranges = Ranges()
        self.forks = 0
        """Forks of this process before it has a context, by which later children cannot use the
        GPU: what children do on it is not read."""
        os.register_at_fork(before=partial(_count_fork, weakref.ref(self)))
        self.is_further = FURTHER_PROCESS in os.environ and config.pluginmanager.has_plugin(
            EXPERIMENT
        )
        """True in a further process, whose rows the main process judges."""
        self.further: list[ProcessRecord] = []  # the further processes that have ended
        self.names = Names()
        self.tests: frozenset[str] = frozenset()  # `key_of` of each collected test, without a label
        self.ledger: Ledger | None = None  # of a total budget, after collection
        # Results
        self.rows = Rows()
        self.missing: list[Omission] = []  # what was to be judged, and was not
        self.remarks: list[str] = []  # lines for the summary
        self.broken: dict[str, str] = {}
        """By each feature that raised by mistake: the first error."""
        self.adopted: set[str] = set()
        """Node ids of benchmarks whose GPU figures pytest-benchmark's table shows."""
        self.without_gpu: set[str] = set()  # node ids of benchmarks that use no GPU
        # The device
        self._device: Device | None = None
        self.watch: L2Watch | None = None  # of persisting L2, while the device is open
        self.lost_in: str | None = None  # the node id of the test that lost the device's context
        self.destroyed = False  # a context of ours, by a reset
        self._lost_how = ""  # the error, and where that test is defined
        self.unrun: set[str] = set()  # node ids of the tests that it kept from running

    def remark(self, *lines: str) -> None:
        """Add lines to the summary."""
        self.remarks.extend(lines)

    @property
    def reports_elsewhere(self) -> bool:
        """True in a worker and in a forked child: another process has the rows."""
        return self.is_part or os.getpid() != self._pid

    @property
    def evidence(self) -> bool:
        """True if the session records what each row runs, and lets it settle doubts."""
        return self.watches_streams and EVIDENCE not in switched_off(os.environ)

    @property
    def watches_streams(self) -> bool:
        """True if each row of foreign code is watched for work on streams of its own."""
        return not self.ranges.tool_attached()

    def begin_again(self) -> None:
        """Begin in a process that was forked after collection, to measure."""
        self._pid = os.getpid()

    # Limits

    @property
    def base_name(self) -> str:
        """The revision that a gate compares with, as it was named."""
        return self.settings.baseline_of or "BASE"

    @property
    def in_gate(self) -> bool:
        """True in the screen of a gate, and in its workers."""
        return self._base is not None

    @cached_property
    def base(self) -> Selection | None:
        """What BASE selects, once it is known; None outside of a gate."""
        return None if self._base is None else self._base()

    def limits(self, item: pytest.Item, names: Iterable[str] = tuple(LIMITS)) -> Limits:
        """The limits of a test, or in a gate those of BASE where they demand more.
        `names`: the limits that apply.
        Raises `SettingsError`: a keyword of the marker that cannot be used.
        """
        marker = marker_limits(marker_keywords(marks_of(item)))
        return self.binding_limits(
            item.nodeid, merge_limits(None, marker, self.settings, names), names
        )

    def binding_limits(
        self, nodeid: str, limits: Limits, names: Iterable[str] = tuple(LIMITS)
    ) -> Limits:
        """The limits of a test with these `limits`. `names`: those that apply."""
        test = None if self.base is None else self.base.tests.get(nodeid)
        if test is None:
            return limits
        key = key_of(nodeid, "")
        return stricter_limits(
            limits,
            test.limits,
            names,
            self.base_name,
            lambda limit, value: self.added.allows(key, limit, value),
        )

    # The device

    @property
    def facts(self) -> DeviceFacts:
        return self.chosen.facts

    @property
    def device(self) -> Device:
        """The open device. Raises `DeviceError` if it cannot be opened."""
        if self._device is None:
            from pytest_gpumem.memory.l2_leftovers import L2Watch

            device = self.chosen.open()
            self._device, self.watch = device, L2Watch(device)
        return self._device

    @property
    def is_open(self) -> bool:
        """True if the device is open."""
        return self._device is not None

    @property
    def footprints(self) -> Footprints:
        """The memory of this process on the device, which is opened only if it has to be.
        Raises `DeviceError`: it cannot be opened.
        """
        early = self.chosen.footprints() if self._device is None else None
        return self.device.footprints if early is None else early

    @cached_property
    def kernels(self) -> Kernels:
        from pytest_gpumem.measuring.bound import Kernels

        return Kernels(self.device)

    @cached_property
    def conductor(self) -> Conductor:
        from pytest_gpumem.measuring.conductor import Conductor

        return Conductor(self.device, self.ranges, profiled=self.ranges.tool_attached())

    def make_room(self, *, unless_free: float = 1.0) -> None:
        """Give back the memory that is kept for the next measurement of a kernel of the catalogue.
        `unless_free`: share of the device's memory that, if it is free, lets the kept memory stay.
        """
        if self._device is not None and self.lost_in is None:
            with suppress(DeviceError):  # a capture is open; the next measurement tries again
                self._device.memory.make_room(unless_free=unless_free)

    def wait(self, item: pytest.Item) -> None:
        """Wait for all work of a test whose body or teardown has ended.
        Raises `ContextLost`: the context is lost, and no earlier test lost it.
        Raises `DeviceError`: the device cannot be waited for.
        """
        device = self._device
        if device is None or self.lost_in is not None:
            return
        try:
            reason = device.gone()
            if reason is not None:
                self.remark(
                    f"after {printable(item.nodeid)}, {reason}; the next test that measures opens "
                    "it again"
                )
                self.close()
                return
            device.streams.synchronize()
        except HoldExpired:
            return  # of a measurement, which has discarded the sample
        except ContextLost as error:
            self._lose(item, str(error))
            raise ContextLost(f"at the test's end: {error}") from None
        except DeviceError:
            if not device.streams.end_captures():
                raise
            self.remark(
                f"{printable(item.nodeid)} left the capture of a stream open, which was ended: "
                "later tests would fail by it"
            )
            with suppress(HoldExpired):
                device.streams.synchronize()
            raise DeviceError(
                "the test left the capture of a stream open; it was ended, and its graph dropped"
            ) from None

    def _lose(self, item: pytest.Item, error: str) -> None:
        """Remember the test that lost the context. `error`: of the runtime, or of the call."""
        code = re.search(r"cudaError([A-Z]\w+)", error)
        if code is None:
            what = error.partition(". ")[0]
        else:
            what = re.sub(r"(?<!^)(?=[A-Z])", " ", code[1]).lower()
        file, line, _ = item.location
        place = file if line is None else f"{file}:{line + 1}"
        self.lost_in, self._lost_how = item.nodeid, f"{what}, {place}"

    @property
    def why_unrun(self) -> str:
        """Why no later test runs on the device."""
        test, how = printable(str(self.lost_in)), printable(self._lost_how)
        return f"{DID_NOT_RUN}{test} lost the context ({how})"

    def check_context(self, item: pytest.Item) -> None:
        """Raise `ContextLost` if an earlier test than this one lost the context."""
        if self.lost_in is not None:
            self.unrun.add(item.nodeid)
            raise ContextLost(self.why_unrun)

    def close(self) -> None:
        """Close the device; a second call does nothing. The next use opens it again."""
        device, self._device, self.watch = self._device, None, None
        if device is None:
            return
        conductor: Conductor | None = self.__dict__.pop("conductor", None)
        self.__dict__.pop("kernels", None)
        if device.gone() is not None:
            self.destroyed = True
            device.close()
            return
        # What a lost context held went with it.
        with suppress(Exception if self.lost_in is not None else ContextLost):
            try:
                if conductor is not None:
                    conductor.close()
            finally:
                device.close()


class Rows:
    """The rows in the order in which their tests ended. The rows of a test's last run replace those
    of its earlier runs.

    The reports decide whether a test passed. An exception at the end of its body does not: a failed
    `unittest.TestCase` raises none, nor does a failed subtest.
    """

    def __init__(self) -> None:
        # By node id.
        self._rows: dict[str, tuple[Row, ...]] = {}
        self._ends: dict[str, str] = {}
        self._skips: dict[str, str] = {}
        self._errors: set[str] = set()

    def add(self, nodeid: str, rows: Iterable[Row]) -> None:
        """Take the rows of a test that is about to be reported."""
        self._rows.pop(nodeid, None)
        self._rows[nodeid] = tuple(rows)

    def replace(self, rows: Iterable[Row]) -> None:
        """Take the same rows, judged again."""
        again = {row.key: row.verdict for row in rows}
        for nodeid, before in self._rows.items():
            self._rows[nodeid] = tuple(replace(row, verdict=again[row.key]) for row in before)

    def of(self, nodeid: str) -> tuple[Row, ...]:
        """The rows of a test, as they were judged."""
        return self._rows.get(nodeid, ())

    def reported(self, nodeid: str) -> list[Row]:
        """The rows of a test, as all its reports so far make them."""
        rows = []
        for row in self.of(nodeid):
            rows.append(_reported(row, self._ends.get(nodeid)))
        if nodeid in self._errors:
            rows = [replace(row, test_error=True) for row in rows]
        return rows

    def report(self, report: pytest.TestReport) -> None:
        """Take a report of a test: of a phase, a subtest, or a worker's crash."""
        test = report.nodeid
        if report.when == "setup":
            # The first report of a run of the test, which may be a rerun.
            self._ends.pop(test, None)
            self._errors.discard(test)
        if report.failed:
            self._ends[test] = FAILED
            if not getattr(report, BY_LIMITS_ATTRIBUTE, False):
                self._errors.add(test)
            return
        end = _end(report)
        if end is not None and self._ends.get(test) != FAILED:
            self._ends[test] = end
            if end == SKIPPED and isinstance(report.longrepr, tuple):
                self._skips[test] = report.longrepr[2]

    def end(self, nodeid: str) -> str | None:
        """How a test ended; None while it was not reported."""
        return self._ends.get(nodeid)

    def explain(self, nodeid: str) -> str:
        """How a test ended, with the reason of a skip: "skipped (no torch)"."""
        end, reason = self._ends[nodeid], self._skips.get(nodeid, "").removeprefix("Skipped: ")
        return f"{end} ({reason})" if end == SKIPPED and reason else end

    def __iter__(self) -> Iterator[Row]:
        for nodeid in tuple(self._rows):
            yield from self.reported(nodeid)

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows.values())


def _end(report: pytest.TestReport) -> str | None:
    """The outcome of a test by a report that is no failure; None if its phase decides nothing."""
    if report.skipped:
        return XFAILED if hasattr(report, "wasxfail") else SKIPPED
    if report.when != "call" or not report.passed:
        return None
    return XPASSED if hasattr(report, "wasxfail") else PASSED


def _reported(row: Row, end: str | None) -> Row:
    if end == PASSED:
        return row
    if end in (None, FAILED):
        return replace(row, failed=True)
    if row.verdict.code is not Code.CONDITIONS:
        reason = f"the test {end} after this measurement"
        if row.verdict.outcome is Outcome.FAIL:
            reason += f" (FAIL: {row.verdict.reason})"
        row = with_verdict(row, [LimitResult("", Outcome.UNDECIDED, Code.CONDITIONS, reason)])
    return replace(row, failed=False)


def _count_fork(reference: weakref.ref[GpuSession]) -> None:
    session = reference()
    if session is None or session.facts.simulated or session.chosen.has_context():
        return
    session.forks += 1


FORKED = "not read: the test forked"

SESSION: pytest.StashKey[GpuSession] = pytest.StashKey()
"""On `config.stash`; absent while the plugin is off."""

ROWS: pytest.StashKey[list[Row]] = pytest.StashKey()
"""On `item.stash`: the test's rows, once it was judged."""

TEST: pytest.StashKey[Any] = pytest.StashKey()
"""On `item.stash`: the `GpuTest`, once a fixture of ours was set up."""

WATCHED: pytest.StashKey[Any] = pytest.StashKey()
"""On `item.stash`: the `WatchedTest`, while memory or waits of the test are read."""
