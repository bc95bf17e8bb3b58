"""The state of a session with `--gpumem`: its device, its baseline and its rows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.errors import ContextLost, DeviceError, HoldExpired
from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.plugin.marks import keywords_of
from pytest_gpumem.plugin.workers import is_part, plain_base
from pytest_gpumem.printable import printable
from pytest_gpumem.ranges import Names, Ranges
from pytest_gpumem.records import key_of
from pytest_gpumem.settings import (
    ACCEPTS,
    ANNOUNCE,
    EVIDENCE,
    EXPERIMENT,
    FURTHER_PROCESS,
    Settings,
    marker_limits,
    merge_limits,
    switched_off,
)

if TYPE_CHECKING:
    from pytest_gpumem.baselines.references import Baseline
    from pytest_gpumem.devices.protocol import Device, Footprints
    from pytest_gpumem.judging.expectations import Selection
    from pytest_gpumem.measuring.bound import Kernels
    from pytest_gpumem.measuring.harness import Harness
    from pytest_gpumem.memory.l2_leftovers import L2Watch
    from pytest_gpumem.records.device import DeviceFacts
    from pytest_gpumem.records.limits import Limits
    from pytest_gpumem.records.row import How, Omission, Row
    from pytest_gpumem.runs.processes import ProcessRecord


BY_LIMITS_ATTRIBUTE = "_gpumem_by_limits"
"""Attribute of a report that fails by the verdicts of its rows, and of its exception: there it is
the line of pytest's short summary, which begins with the figure."""
NO_FIXTURE_SIMULATED = "a simulated device counts only the buffers of fixtures"


class Ledger:
    """The time that is left of a total budget. Tests that have not ended share it equally."""

    def __init__(self, total: float, tests: Iterable[str]) -> None:
        """`total`: seconds for all measurements together. `tests`: those that measure."""
        self.total = total
        self.spent = 0.0  # seconds used so far
        self._waiting = set(tests)

    def share(self, test: str) -> float:
        """Seconds of sampling for a measurement that is about to begin; at least 1 ms."""
        tests = len(self._waiting | {test})
        return max((self.total - self.spent) / tests, 1e-3)

    def ended(self, test: str) -> None:
        """Leave the time that a test did not use to the others: it measures nothing more."""
        self._waiting.discard(test)


class GpuSession:
    """A session. The device is opened at its first use, so never by a controller of workers."""

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        chosen: DeviceChoice,
        place: Path,
        base: str | dict[str, Any] | None,
    ) -> None:
        """`place`: of the baseline. `base`: in the screen of a gate, what BASE selects, or the file
        that will have it.
        """
        self.config, self.settings, self.chosen, self.place = config, settings, chosen, place
        self._base = base
        folders = place, config.rootpath / ".gpumem"  # saved runs, accepted changes
        self.has_past = settings.baseline_of is not None or any(map(os.path.lexists, folders))
        """False if nothing was saved or accepted when the session began."""
        self.is_part = is_part(config)  # another process has the results
        self.ranges = Ranges()
        self.is_further = FURTHER_PROCESS in os.environ and config.pluginmanager.has_plugin(
            EXPERIMENT
        )
        """True in a further process, whose rows the main process judges."""
        self.further: list[ProcessRecord] = []  # the further processes that have ended
        self.names = Names()
        self.tests: frozenset[str] = frozenset()  # `key_of` of each collected test, without a label
        self.ledger: Ledger | None = None  # of a total budget, after collection
        self.rows = Rows()
        self.missing: list[Omission] = []  # what was to be judged, and was not
        self.remarks: list[str] = []  # lines for the summary
        self.broken: dict[str, str] = {}  # by feature that raised by mistake: the first error
        self.without_gpu: set[str] = set()  # node ids of benchmarks that use no GPU
        # The device
        self._device: Device | None = None
        self.watch: L2Watch | None = None  # of persisting L2, while the device is open
        self.lost_in: str | None = None  # the node id of the test that lost the device's context
        self.destroyed = False  # a context of ours, by a reset
        self.why_unrun = ""  # why no later test runs on the device
        self.unrun: dict[str, str] = {}  # by node id of the tests that it kept from running: why

    def remark(self, *lines: str) -> None:
        self.remarks.extend(lines)

    def remark_first(self, topic: str, why: str) -> None:
        """Add a remark unless there is one on this topic."""
        if not any(remark.startswith(f"{topic}: ") for remark in self.remarks):
            self.remark(f"{topic}: {why}")

    @property
    def evidence(self) -> bool:
        """True if what each row runs is recorded."""
        profiled = self.ranges.tool_attached()
        return not profiled and EVIDENCE not in switched_off(os.environ)

    @property
    def announces(self) -> bool:
        """False where verdicts are not final: under a profiler, and in a gate's screen."""
        return ANNOUNCE not in switched_off(os.environ) and not self.ranges.tool_attached()

    @cached_property
    def baseline(self) -> Baseline:
        """Saved rows and accepted changes. Raises `UserError`: a file cannot be used."""
        from pytest_gpumem.baselines.store import Store

        store, base = Store(self.place, self.facts), self.settings.baseline_of
        root, counts_added = self.config.rootpath, ACCEPTS in os.environ
        return store.load_with_acceptances(root, base, counts_added=counts_added)

    # Limits

    @property
    def base_name(self) -> str:
        return self.settings.baseline_of or "BASE"

    @property
    def in_gate(self) -> bool:
        """True in the screen of a gate, and in its workers."""
        return self._base is not None

    @cached_property
    def base(self) -> Selection | None:
        """What BASE selects, once it is known; None outside of a gate."""
        base = plain_base(self._base)
        if base is None:
            return None
        from pytest_gpumem.judging.expectations import Selection

        return msgspec.convert(base, Selection)

    def limits(self, item: pytest.Item, names: Iterable[str] = LIMITS) -> Limits:
        """The limits of a test, or in a gate those of BASE where they demand more."""
        marker = marker_limits(keywords_of(item))
        limits = merge_limits(None, marker, self.settings, names)
        return self.binding_limits(item.nodeid, limits, names)

    def binding_limits(self, nodeid: str, limits: Limits, names: Iterable[str] = LIMITS) -> Limits:
        """The same of a test that has these `limits`."""
        if self.base is None:
            return limits
        accepted = partial(self.baseline.added.allows, key_of(nodeid, ""))
        return self.base.stricter(nodeid, limits, names, self.base_name, accepted)

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
        return self._device is not None

    @property
    def footprints(self) -> Footprints:
        """The memory of this process on the device, which is opened only if it has to be."""
        early = self.chosen.footprints() if self._device is None else None
        return self.device.footprints if early is None else early

    @cached_property
    def kernels(self) -> Kernels:
        from pytest_gpumem.measuring.bound import Kernels

        return Kernels(self.device)

    @cached_property
    def harness(self) -> Harness:
        from pytest_gpumem.measuring.harness import Harness

        return Harness(self.device, self.ranges, profiled=self.ranges.tool_attached())

    def wait(self, item: pytest.Item) -> None:
        """Wait for all work of a test. Raises `ContextLost` if it lost the context."""
        device = self._device
        if device is None or self.lost_in is not None:
            return
        try:
            if device.gone() is not None:
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
                f"{printable(item.nodeid)} left the capture of a stream open, which was ended"
            )
            with suppress(HoldExpired):
                device.streams.synchronize()
            raise DeviceError(
                "the test left the capture of a stream open; it was ended, and its graph dropped"
            ) from None

    def _lose(self, item: pytest.Item, error: str) -> None:
        """Remember the test that lost the context. `error`: of the runtime, or of the call."""
        code = re.search(r"cudaError\w+", error)
        what = error.partition(". ")[0] if code is None else code[0]
        file, line, _ = item.location
        place = file if line is None else f"{file}:{line + 1}"
        self.lost_in = item.nodeid
        self.why_unrun = printable(f"{item.nodeid} lost the context ({what}, {place})")

    def check_context(self, item: pytest.Item) -> None:
        if self.lost_in is not None:
            self.unrun[item.nodeid] = self.why_unrun
            raise ContextLost(f"did not run: {self.why_unrun}")

    def close(self) -> None:
        """Close the device; a second call does nothing. The next use opens it again."""
        device, self._device, self.watch = self._device, None, None
        if device is None:
            return
        harness: Harness | None = self.__dict__.pop("harness", None)
        self.__dict__.pop("kernels", None)
        if device.gone() is not None:
            self.destroyed = True
            device.close()
            return
        # What a lost context held went with it.
        lost = Exception if self.lost_in is not None else ContextLost
        with suppress(lost), ExitStack() as stack:
            stack.callback(device.close)
            if harness is not None:
                stack.callback(harness.close)


@dataclass
class TestReports:
    """What the reports of the last run of a test say.

    They decide whether it passed. An exception at the end of its body does not: a failed
    `unittest.TestCase` raises none, nor does a failed subtest.
    """

    place: tuple[str, int] = ("", 0)  # its file, relative to the root folder, and line
    rows: Sequence[Row] = ()  # as they were judged
    end: How | None = None  # None: no report of its end
    skip: str = ""  # the reason of a skip
    error: bool = False  # it failed by other than the verdicts of its rows

    def take(self, report: pytest.TestReport) -> None:
        """Take a report of a phase, a subtest, or a worker's crash."""
        expected_to_fail = hasattr(report, "wasxfail")
        file, line, _ = report.location
        self.place = file, (line or 0) + 1
        if report.when == "setup":
            # The first report of a run of the test, which may be a rerun.
            self.end, self.error = None, False
        if report.failed:
            self.end = "failed"
            self.error = self.error or not getattr(report, BY_LIMITS_ATTRIBUTE, False)
        elif self.end == "failed":
            return
        elif report.skipped:
            self.end = "xfailed" if expected_to_fail else "skipped"
            if not expected_to_fail and isinstance(report.longrepr, tuple):
                self.skip = report.longrepr[2].removeprefix("Skipped: ")
        elif report.when == "call" and report.passed:
            self.end = "xpassed" if expected_to_fail else "passed"

    def reported(self) -> Iterator[Row]:
        """The rows as all reports so far make them."""
        if not self.rows:
            return
        from pytest_gpumem.judging.finding import without_verdict

        end = self.end or "failed"
        for judged in self.rows:
            row = judged
            if end == "failed":
                row = replace(row, failed=True)
            elif end != "passed":
                if not row.measured_something:
                    continue
                row = replace(without_verdict(row, end), failed=False)
            if self.error:
                row = replace(row, test_error=True)
            yield row


class Rows:
    """The rows in the order in which their tests ended."""

    def __init__(self) -> None:
        self.tests: dict[str, TestReports] = {}  # by node id, those that have a report

    def take(self, report: pytest.TestReport, rows: Sequence[Row] | None) -> TestReports:
        """Take a report of a test, which may have its rows."""
        nodeid = report.nodeid
        test = self.tests.setdefault(nodeid, TestReports())
        if rows is not None:
            test.rows = rows
            self.tests[nodeid] = self.tests.pop(nodeid)  # the last one
        test.take(report)
        return test

    def replace(self, rows: Iterable[Row]) -> None:
        """Take the same rows, judged again."""
        again = {row.key: row.verdict for row in rows}
        for test in self.tests.values():
            test.rows = [replace(row, verdict=again.get(row.key, row.verdict)) for row in test.rows]

    def of(self, nodeid: str) -> Sequence[Row]:
        return self.tests[nodeid].rows if nodeid in self.tests else ()

    @property
    def places(self) -> dict[str, tuple[str, int]]:
        return {nodeid: test.place for nodeid, test in self.tests.items()}

    def __iter__(self) -> Iterator[Row]:
        for test in tuple(self.tests.values()):
            yield from test.reported()

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass
class TestState:
    """What is known of a test that runs."""

    test: Any = None  # the `GpuTest`, once a fixture of ours was set up
    watched: Any = None  # the `WatchedTest`, while memory or waits of the test are read
    rows: list[Row] = field(default_factory=list)  # once it was judged
    attempts: list[list[Row]] = field(default_factory=list)
    """The rows of its earlier attempts, after those of none. A rerun clears no FAIL: the error rate
    of a verdict is that of one attempt."""


_STATE: pytest.StashKey[TestState] = pytest.StashKey()


def state_of(item: pytest.Item) -> TestState:
    return item.stash.setdefault(_STATE, TestState())
