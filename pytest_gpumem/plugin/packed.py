"""Tests packed by their memory, in a worker of pytest-xdist: what each takes, what is given back, and repeats for want of memory."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from pytest_gpumem.devices.protocol import DeviceError
from pytest_gpumem.devices.shortage import shortage
from pytest_gpumem.files import write_whole
from pytest_gpumem.packing.jobs import Asked
from pytest_gpumem.packing.leases import ALONE, IDLE, RUNS, WAITS, Lease, LeaseError, Leases, take, this_process
from pytest_gpumem.packing.shares import PAGE, greedy
from pytest_gpumem.plugin.exclusive import lock_file
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, PEER_FIXTURE, marks_of, uses
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.state import ROWS, GpuSession
from pytest_gpumem.plugin.workers import given
from pytest_gpumem.settings import SettingsError, marker_keywords, of_marker

FOLDER = "pack"  # what a worker is given: the folder of the run
TAKEN = "gpumem_taken"  # attribute of the last report of a test: what it took
EMPTIED = 32 << 20  # bytes that pools hold unused, from which on they are emptied
POLL = 0.05  # seconds between two looks at the leases


def leases_file(uuid: str | None, folder: Path) -> Path:
    """The file of a GPU's leases: the user's own, or of this run for a simulated device."""
    return folder / "simulated.leases" if uuid is None else lock_file(uuid).with_suffix(".leases")


def asked_of(item: pytest.Item, session: GpuSession) -> Asked:
    """A test as it was collected, with the group of its marker `xdist_group`."""
    marks = (mark for mark in item.iter_markers("xdist_group"))
    groups = sorted({str(mark.args[0] if mark.args else mark.kwargs.get("name", "default")) for mark in marks})
    group = "_".join(groups) or None
    name = item.nodeid.removesuffix(f"@{group}") if getattr(session.config.option, "loadgroup", False) else item.nodeid
    gpus = 1
    with suppress(SettingsError):  # reported where the marker is read
        asked = of_marker(marker_keywords(marks_of(item)), "gpus") or 1
        gpus = min(max(asked, 2 if uses(item, PEER_FIXTURE) else 1), max(1, len(session.chosen.gpus)))
    return Asked(name, group, gpus, uses(item, BENCHMARK_FIXTURE))


def _name(fixturedef: pytest.FixtureDef[Any]) -> str:
    return f"{fixturedef.baseid}::{fixturedef.argname}"


class PlaceHolder(pytest.Item):
    """What follows the last test that a worker was sent: no test. With `keeps`, the fixtures of the last test's file stay meanwhile."""

    keeps = False
    after: pytest.Item | None = None  # the test before it

    def runtest(self) -> None:
        return

    def listchain(self) -> list[Any]:
        return [*self.after.listchain()[:-1], self] if self.keeps and self.after is not None else super().listchain()


class PackedFeature(Feature):
    """With `--gpumem-pack`, in a worker: says what each test took, gives it back, and repeats a test for want of memory."""

    def __init__(self, session: GpuSession) -> None:
        self._session, self._config = session, session.config
        self._folder = Path(given(session.config, FOLDER))
        self._me = this_process()
        self._leases: list[Leases] = []  # of the GPUs of the job that runs, this worker's own first
        self._held: int | None = None  # bytes that this process holds of its GPU, as it was last read
        self._idle = 0  # bytes that it held before its first test
        self._last: pytest.Item | None = None
        self._asked = Asked("")  # the test that runs, as it was collected
        self._short: str | None = None  # the phase in which the test ran out of memory
        self._twice = False  # the test runs again, alone
        self._lease: Lease | None = None  # with which the test runs
        self._before: list[tuple[str, object]] = []  # the test's properties, before it began
        self._began: tuple[int | None, int] = (None, 0)  # bytes held and free when the test began
        self._used: dict[str, int] = {}  # fixtures of wider scopes that the test uses
        self._free = 0  # bytes that were free when the test began, with what this process held
        self._trouble = ""
        self._fixtures: dict[str, int] = {}  # of wider scopes than a test that live, with the bytes that each holds
        self._wide: list[int] = []  # bytes of the fixtures that a fixture has set up, whose setup runs; the innermost last
        self._new = 0  # bytes of fixtures that the test has set up

    # The begin and the end

    @pytest.hookimpl(specname="pytest_collection_finish", tryfirst=True)
    def pytest_collection_finish_told(self, session: pytest.Session) -> None:
        """Tell the controller of the tests, before xdist says that they are collected."""
        tests = [asked_of(item, self._session) for item in session.items]
        write_whole(self._folder / f"{self._config.workerinput['workerid']}.json", json.dumps(tests))  # type: ignore[attr-defined]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Add the place holders behind the tests, whose ids xdist has sent."""
        for keeps in (False, True):
            holder = PlaceHolder.from_parent(session, name="gpumem-pack")
            holder.keeps = keeps
            session.items.append(holder)

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        with suppress(DeviceError):  # the first test finds it
            _ = self._session.device
        self._read()
        self._idle = self._held or 0
        self._leases = [Leases(leases_file(self._session.facts.uuid, self._folder))]
        try:
            self._hold()
            yield
        finally:
            with suppress(LeaseError):
                for leases in self._leases:
                    leases.leave(self._me)
                    leases.close()

    def _read(self) -> None:
        """Read how much this process holds of its GPU."""
        facts = self._session.facts
        found = self._session.chosen.occupancy(facts.uuid or facts.key)
        self._held = None if found is None else found.of.get(os.getpid())
        if self._held is None:
            self._trouble = "nothing is packed: NVML does not list what processes hold of the GPU, as in some containers"
        elif found is not None:
            self._free = found.total - found.used + self._held

    def _own(self) -> Lease | None:
        """The lease of the job that runs, on this worker's own GPU."""
        try:
            return next((lease for lease in self._leases[0].all() if lease.process == self._me), None)
        except LeaseError as error:
            self._trouble = str(error)
            return None

    def _hold(self) -> None:
        """Say how much this process holds, unless it has been given a test meanwhile."""
        try:
            self._leases[0].hold(self._me, self._held or 0)
        except LeaseError as error:
            self._trouble = str(error)

    def _give_back(self) -> None:
        """Say that no test runs here, and how much this process holds all the same."""
        own, *further = self._leases
        try:
            own.put(Lease(self._me, self._held or 0, IDLE))
            for leases in further:
                leases.leave(self._me)
                leases.close()
        except LeaseError as error:
            self._trouble = str(error)
        self._leases = [own]

    # One test

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if not isinstance(item, PlaceHolder):
            self._last, self._short, self._twice, self._new = item, None, False, 0
            self._before = [*item.user_properties]
            if isinstance(nextitem, PlaceHolder):
                nextitem.after = item
            self._asked = asked_of(item, self._session)
            further = self._session.chosen.gpus[len(self._leases) : self._asked.gpus]
            self._leases += [Leases(leases_file(uuid, self._folder)) for uuid in further]
            self._lease = self._own()
            self._began = self._held, self._free
        try:
            yield
        finally:
            if isinstance(item, PlaceHolder):
                self._hold()
            elif nextitem is None or isinstance(nextitem, PlaceHolder):
                self._give_back()
            elif self._twice and self._lease is not None:
                with suppress(LeaseError):
                    self._leases[0].put(self._lease)

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if isinstance(item, PlaceHolder):
            self._rest(item, nextitem)
            return True
        if self._reruns(item):
            return None  # pytest-rerunfailures repeats it, if it may
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if self._short is not None and self._clear(item):
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @contextmanager
    def setup(self, item: pytest.Item) -> Iterator[None]:
        if self._short is not None:
            self._clear(item)
        yield

    @contextmanager
    def fixture(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """What a fixture of a wider scope holds is charged to its process while it lives, and to all tests that use it."""
        if fixturedef.scope == "function":
            yield
            return
        self._read()
        before = self._held
        self._wide.append(0)
        yield
        within = self._wide.pop()
        self._read()
        took = max(0, (self._held or 0) - (before or 0))
        if self._wide:
            self._wide[-1] += took
        else:
            self._new += took
        if (own := took - within) >= PAGE:
            name = _name(fixturedef)
            self._fixtures[name] = own
            fixturedef.addfinalizer(lambda: self._fixtures.pop(name, None))

    def _reruns(self, item: pytest.Item) -> bool:
        """True if pytest-rerunfailures may run a test again."""
        if not self._config.pluginmanager.hasplugin("rerunfailures"):
            return False
        option, ini = self._config.option, self._config.getini("reruns")
        return bool(getattr(option, "reruns", None) or getattr(option, "force_reruns", None) or ini or item.get_closest_marker("flaky"))

    def _rest(self, item: PlaceHolder, nextitem: pytest.Item | None) -> None:
        """Tear down what the test that comes does not need. An error is one of the test before."""
        call = pytest.CallInfo.from_call(
            lambda: item.session._setupstate.teardown_exact(nextitem), "teardown", (KeyboardInterrupt, pytest.exit.Exception)
        )
        if isinstance(nextitem, PlaceHolder):
            nextitem.after = None
            self._read()
        if call.excinfo is not None and self._last is not None:
            vars(item)["_nodeid"] = self._last.nodeid  # xdist compares them
            item.ihook.pytest_runtest_logreport(report=pytest.TestReport.from_item_and_call(self._last, call))

    def _clear(self, item: pytest.Item) -> bool:
        """Wait until this process has its GPUs to itself, for another run of a test; False if it had them, or if that is no use."""
        phase, self._short = self._short, None
        if self._session.lost_in is not None or self._twice or self._lease is None or self._lease.state != RUNS:
            return False
        self._twice = True
        if phase == "setup":  # pytest keeps the error of a fixture that others use
            with suppress(Exception):
                item.session._setupstate.teardown_exact(None)
        item.user_properties[:] = self._before
        item._report_sections.clear()
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # they hold the frames of the test, and with them its memory
            vars(sys).pop(name, None)
        gc.collect()
        self._empty(0)
        self._read()
        try:
            ticket = time.monotonic_ns()
            for leases in self._leases:
                leases.put(Lease(self._me, self._held or 0, WAITS, ticket))
            while not take([(leases, Lease(self._me, self._lease.nbytes, ALONE, ticket), 0) for leases in self._leases]):
                time.sleep(POLL)
        except LeaseError as error:
            self._trouble = str(error)
        return True

    def _empty(self, least: int) -> bool:
        try:
            return self._session.lost_in is None and self._session.device.footprints.empty(least)
        except (DeviceError, RuntimeError):
            return False

    @contextmanager
    def teardown(self, item: pytest.Item) -> Iterator[None]:
        info = getattr(item, "_fixtureinfo", None)
        names = {_name(defs[-1]) for defs in info.name2fixturedefs.values()} if info is not None else ()
        self._used = {name: nbytes for name, nbytes in self._fixtures.items() if name in names}
        yield

    def report(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        if report.failed and call.excinfo is not None and shortage(call.excinfo.value) is not None:
            self._short = call.when
        if call.when == "teardown":
            setattr(report, TAKEN, self._taken(item))

    def _taken(self, item: pytest.Item) -> dict[str, object]:
        """What a test took, for the controller. Its process holds less afterwards."""
        before, free = self._began
        self._read()
        after = self._held
        rows = item.stash.get(ROWS, [])
        found = next((row.footprint for row in rows if not row.label and row.footprint is not None), None)
        grown = max(found.driver_peak or 0, found.peak) if found is not None else 0
        kept = sum(use.kept + use.allowed + use.reserved for use in found.uses if use.kind == "device") if found is not None else 0
        used = self._used
        peak = total = None
        if before is not None and after is not None:
            # What no allocation explains: the code of kernels, and libraries that are not watched.
            grown += max(0, after - before - max(0, kept) - self._new)
            peak, total = before + grown + self._new, grown + sum(used.values())
        if self._empty(EMPTIED):
            self._read()
        lease = self._lease
        packed = lease is not None and lease.state == RUNS and not self._twice
        return {
            "name": self._asked.nodeid,
            "peak": peak,
            "grown": total,
            "fixtures": used,
            "lives": [*self._fixtures],
            "held": self._held,
            "idle": self._idle,
            "works": (total or 0) > 0,
            "measures": any(row.measurement is not None for row in rows),
            "greedy": 0.0 if packed else greedy(grown, free),
            "share": lease.nbytes if lease is not None and packed else 0,
            "twice": self._twice,
            "trouble": self._trouble,
        }
