"""Tests packed by their memory, in a worker of pytest-xdist: what each takes, what is given back, and repeats for want of memory."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from _pytest.runner import runtestprotocol

from pytest_gpumem.devices.protocol import DeviceError, Unsupported
from pytest_gpumem.devices.shortage import shortage
from pytest_gpumem.files import write_whole
from pytest_gpumem.packing.jobs import Asked
from pytest_gpumem.packing.leases import IDLE, RUNS, WAITS, Gpu, Lease, LeaseError, running, take
from pytest_gpumem.packing.shares import PAGE, Learnt
from pytest_gpumem.plugin.exclusive import lock_file
from pytest_gpumem.plugin.gpus import reserved
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, uses
from pytest_gpumem.plugin.running import ENDS, Feature
from pytest_gpumem.plugin.state import ROWS, GpuSession
from pytest_gpumem.plugin.workers import given
from pytest_gpumem.settings import SettingsError

FOLDER = "pack"  # what a worker is given: the folder of the run
TAKEN = "gpumem_taken"  # attribute of the last report of a test: a `Taken`
MEASURES = "measures"  # why a test has the GPU to itself
EMPTIED = 32 << 20  # bytes that pools hold unused, from which on they are emptied
GREEDY = 0.7  # part of the free memory: a test that takes more may follow it, such as JAX's preallocation
POLL = 0.05  # seconds between two looks at the leases


class Taken(msgspec.Struct):
    """A test in a worker: with what it began, and what it took."""

    asked: Asked
    lease: Lease
    before: int | None  # bytes that the process held; None: nobody says
    free: int  # bytes that were free, with these
    properties: int  # number of the item's
    short: str = ""  # the phase in which it ran out of memory
    twice: bool = False  # it ran again, alone
    failed: bool = False
    seconds: float = 0.0
    # At its end:
    learnt: Learnt | None = None  # None: nobody says what the process holds
    peak: int = 0  # bytes that the process held at most
    lives: list[str] = []  # fixtures of wider scopes that live
    trouble: str = ""

    @property
    def beside(self) -> bool:
        """True if others may have run beside it."""
        return self.lease.state == RUNS and not self.twice


def leases_file(uuid: str | None, folder: Path) -> Path:
    """The file of a GPU's leases: the user's own, or of this run for a simulated device."""
    return folder / "simulated.leases" if uuid is None else lock_file(uuid).with_suffix(".leases")


def asked_of(item: pytest.Item, session: GpuSession) -> Asked:
    """A test as it was collected, with the group of its marker `xdist_group`."""
    marks = item.iter_markers("xdist_group")
    group = (
        "_".join(
            sorted(
                {
                    str(mark.args[0] if mark.args else mark.kwargs.get("name", "default"))
                    for mark in marks
                }
            )
        )
        or None
    )
    name = (
        item.nodeid.removesuffix(f"@{group}")
        if getattr(session.config.option, "loadgroup", False)
        else item.nodeid
    )
    gpus = 1
    with suppress(SettingsError, Unsupported):  # reported where the marker is read
        gpus = max(1, len(reserved(item, session.chosen)))
    return Asked(
        name,
        group,
        gpus,
        f"takes {gpus} GPUs" if gpus > 1 else MEASURES if uses(item, BENCHMARK_FIXTURE) else "",
    )


class PlaceHolder(pytest.Item):
    """What follows the last test that a worker was sent: no test. The fixtures of that test's file stay meanwhile, if it is known."""

    after: pytest.Item | None = None

    def runtest(self) -> None:
        return

    def listchain(self) -> list[Any]:
        return super().listchain() if self.after is None else [*self.after.listchain()[:-1], self]


class PackedFeature(Feature):
    """With `--gpumem-pack`, in a worker: says what each test took, gives it back, and repeats a test for want of memory."""

    def __init__(self, session: GpuSession) -> None:
        self._session, self._config = session, session.config
        self._folder = Path(given(session.config, FOLDER))
        self._me = running(os.getpid())
        self._gpus = [
            Gpu(leases_file(uuid, self._folder))
            for uuid in (session.facts.uuid, *session.chosen.gpus[1:])
        ]
        # bytes that this process holds of its GPU, the first, as it was last read
        self._held: int | None = None
        self._free = 0  # bytes that were free then, with these
        self._fixtures: dict[
            pytest.FixtureDef[Any], int
        ] = {}  # of wider scopes than a test, with the bytes that each held
        self._new: set[pytest.FixtureDef[Any]] = set()  # those that the test has set up
        self._keeper: PlaceHolder | None = None  # under which fixtures stay
        self._last: pytest.Item | None = None
        self._test: Taken | None = None  # that runs
        self._trouble = ""

    # The begin and the end

    def selected(self, session: pytest.Session) -> None:
        """Tell the controller of the tests, before xdist says that they are collected."""
        tests = [asked_of(item, self._session) for item in session.items]
        write_whole(
            self._folder / f"{self._config.workerinput['workerid']}.json", json.dumps(tests)
        )  # type: ignore[attr-defined]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Add the place holders behind the tests, whose ids xdist has sent."""
        self._keeper = PlaceHolder.from_parent(session, name="gpumem-pack")
        session.items += [PlaceHolder.from_parent(session, name="gpumem-pack"), self._keeper]

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        with suppress(DeviceError):  # the first test finds it
            _ = self._session.device
        self._read()
        self._put()
        try:
            yield
        finally:
            self._held = 0
            self._put(share=0, state=IDLE)

    def _read(self) -> None:
        """Read how much this process holds of its GPU."""
        facts = self._session.facts
        found = self._session.chosen.occupancy(facts.uuid or facts.key)
        self._held = None if found is None else found.of.get(os.getpid())
        if found is None or self._held is None:
            self._trouble = "nothing is packed: NVML does not list what processes hold of the GPU, as in some containers"
        else:
            self._free = found.total - found.used + self._held

    def _put(self, gpus: int = 1, **changes: object) -> None:
        """Say how much this process holds of its GPU, and change its leases of the first GPUs."""
        try:
            for gpu in self._gpus[1:gpus]:
                gpu.put(self._me, **changes)
            self._gpus[0].put(self._me, held=self._held or 0, **changes)
        except LeaseError as error:
            self._trouble = str(error)

    # One test

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if isinstance(item, PlaceHolder):
            yield
            return
        self._last, self._new = item, set()
        if nextitem is not None and nextitem is self._keeper:
            self._keeper.after = item
        lease = Lease(self._me)
        with suppress(LeaseError):  # whoever gives it says so
            lease = next((one for one in self._gpus[0].leases() if one.process == self._me), lease)
        asked, properties = asked_of(item, self._session), len(item.user_properties)
        self._test = test = Taken(asked, lease, self._held, self._free, properties)
        try:
            yield
        finally:
            self._test = None
            if nextitem is None or isinstance(nextitem, PlaceHolder):
                self._put(asked.gpus, share=0, state=IDLE)
            elif test.twice:
                self._put(asked.gpus, share=lease.share, state=lease.state)

    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if isinstance(item, PlaceHolder):
            self._rest(item, nextitem)
            return True
        reruns = self._config.pluginmanager.getplugin("rerunfailures")
        if reruns is not None and reruns.get_reruns_count(item) is not None:
            return None  # it repeats the test
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if self._clear(item):
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _rest(self, item: PlaceHolder, nextitem: pytest.Item | None) -> None:
        """Tear down what the test that comes does not need. An error is one of the test before."""
        call = pytest.CallInfo.from_call(
            lambda: item.session._setupstate.teardown_exact(nextitem), "teardown", ENDS
        )
        if isinstance(nextitem, PlaceHolder):  # to give back their memory
            self._read()
            self._put()
        if call.excinfo is not None and self._last is not None:
            vars(item)["_nodeid"] = self._last.nodeid  # xdist compares them
            item.ihook.pytest_runtest_logreport(
                report=pytest.TestReport.from_item_and_call(self._last, call)
            )

    @contextmanager
    def setup(self, item: pytest.Item) -> Iterator[None]:
        self._clear(item)  # for a rerun
        yield

    @contextmanager
    def fixture(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """What a fixture of a wider scope holds is charged to its process while it lives, and to all tests that use it."""
        if fixturedef.scope == "function":
            yield
            return
        self._read()
        before = self._held or 0
        yield
        self._read()
        self._fixtures[fixturedef] = (
            self._held or 0
        ) - before  # with those that it has set up itself
        self._new.add(fixturedef)

    def _sizes(self, fixtures: Iterable[pytest.FixtureDef[Any]]) -> dict[str, int]:
        return {
            f"{one.baseid}::{one.argname}": self._fixtures[one]
            for one in fixtures
            if self._fixtures.get(one, 0) >= PAGE
        }

    def report(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> None:
        if (
            self._test is not None
            and call.excinfo is not None
            and report.failed
            and shortage(call.excinfo.value) is not None
        ):
            self._test.short = call.when

    def _clear(self, item: pytest.Item) -> bool:
        """After a test that ran out of memory beside others, wait until this process has its GPUs to itself, for another run of it; False
        if it had them, or if that is no use."""
        test = self._test
        if (
            test is None
            or not test.short
            or test.twice
            or test.lease.state != RUNS
            or self._session.lost_in is not None
        ):
            return False
        test.twice = True
        if test.short == "setup":  # pytest keeps the error of a fixture that others use
            with suppress(Exception):
                item.session._setupstate.teardown_exact(None)
        del item.user_properties[test.properties :]
        item._report_sections.clear()
        for name in [
            name for name in vars(sys) if name.startswith("last_")
        ]:  # they hold the frames of the test, and with them its memory
            delattr(sys, name)
        gc.collect()
        self._empty(0)
        self._read()
        self._put(test.asked.gpus, share=0, state=WAITS, ticket=time.monotonic_ns())
        try:
            while not take(self._gpus[: test.asked.gpus], self._me, test.lease.share, alone=True):
                time.sleep(POLL)
        except LeaseError as error:
            self._trouble = str(error)
        return True

    def _empty(self, least: int) -> None:
        """Give back what pools hold unused, from so many bytes on."""
        with suppress(DeviceError, RuntimeError):
            if self._session.lost_in is None and self._session.device.footprints.empty(least):
                self._read()

    @contextmanager
    def logged(self, report: pytest.TestReport) -> Iterator[None]:
        if (test := self._test) is not None:
            test.seconds += report.duration
            test.failed = test.failed or report.failed
            if report.when == "teardown" and self._last is not None:
                self._finish(test, self._last)
                setattr(report, TAKEN, msgspec.to_builtins(test))
        yield

    def _finish(self, test: Taken, item: pytest.Item) -> None:
        """Complete what a test took. Its process holds less afterwards."""
        self._read()
        rows = item.stash.get(ROWS, [])
        found = next(
            (row.footprint for row in rows if not row.label and row.footprint is not None), None
        )
        grown = found.needed if found is not None else 0
        kept = (
            sum(use.kept + use.allowed + use.reserved for use in found.uses if use.kind == "device")
            if found is not None
            else 0
        )
        test.lives = [*self._sizes(one for one in self._fixtures if one.cached_result is not None)]
        test.trouble = self._trouble
        info = getattr(item, "_fixtureinfo", None)
        fixtures = (
            {defs[-1] for defs in info.name2fixturedefs.values()} if info is not None else set()
        )
        used, new = self._sizes(fixtures), sum(self._sizes(fixtures & self._new).values())
        if test.before is not None and self._held is not None:
            # What no allocation explains: the code of kernels, and libraries that are not watched.
            grown += max(0, self._held - test.before - max(0, kept) - new)
            alone = (
                "took most of the free memory"
                if grown > GREEDY * test.free and not test.beside
                else ""
            )
            if any(row.measurement is not None for row in rows):
                alone = MEASURES
            test.learnt = Learnt(test.seconds, (grown + sum(used.values()),), used, alone)
            test.peak = test.before + grown + new
        self._empty(EMPTIED)
