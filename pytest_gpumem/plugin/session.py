"""One session with `--gpumem`: its device, baseline and rows, and the hooks that begin and end it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.baselines.history import Baseline, History
from pytest_gpumem.baselines.store import BaselineError, Store, keys
from pytest_gpumem.devices.opening import Chosen, NoDevice, choose
from pytest_gpumem.devices.protocol import Device, DeviceError
from pytest_gpumem.judging.drift import kind_of, since_start
from pytest_gpumem.judging.judge import comparable
from pytest_gpumem.judging.suite import Family
from pytest_gpumem.measuring.benchmark import Conductor, Plan
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.budget import Ledger, need
from pytest_gpumem.measuring.controls import changed, read_controls
from pytest_gpumem.memory.l2_leftovers import Watch
from pytest_gpumem.plugin import replay
from pytest_gpumem.plugin.exclusive import LockUnusable, exclusive, lock_file
from pytest_gpumem.plugin.fixtures import BENCHMARK_FIXTURE
from pytest_gpumem.plugin.hooks import SESSION, marks_of
from pytest_gpumem.plugin.judging import TEST
from pytest_gpumem.plugin.l2_sweeping import SweepHooks, check_serial
from pytest_gpumem.plugin.leftovers import LeftoverHooks
from pytest_gpumem.plugin.lost import LostHooks
from pytest_gpumem.plugin.reported import Rows
from pytest_gpumem.plugin.running import ROWS_ATTRIBUTE, GpuTest, RunningHooks, uses
from pytest_gpumem.ranges import Names, Ranges
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.l2_sweep import Sweep
from pytest_gpumem.records.measurement import Controls, Counted, Measurement, Taken
from pytest_gpumem.records.row import Missing, Row, key_of
from pytest_gpumem.records.schema import device_to_json, document, row_from_json
from pytest_gpumem.records.sweep_schema import KEY as SWEEPS
from pytest_gpumem.records.sweep_schema import sweeps_to_json
from pytest_gpumem.revisions import RevisionError, ancestry
from pytest_gpumem.settings import (
    DEFAULT_BUDGET,
    FURTHER_PROCESS,
    FURTHER_REPORTS,
    READS_CONTROLS,
    Overrides,
    Settings,
    SettingsError,
    marker_keywords,
    marker_overrides,
    override,
    switched_off,
)

if TYPE_CHECKING:
    from pytest_gpumem.runs.repeats import Further

WORKER_BASELINE = "gpumem_baseline"
"""Key of xdist's `workerinput`: the baseline's folder, as the controller found it."""

SIMULATED = "simulated-"
"""What the baseline key of a simulated device begins with."""

DRIFTED = "gpumem_drifted"
"""Key of xdist's `workeroutput`: how the device changed while a worker measured."""

GPU_IDENTITY = ("key", "name", "simulated", "compute_capability", "memory_bytes", "ecc", "mig_profile", "driver", "cuda")
"""Facts that go into pytest-benchmark's `machine_info`."""


def start(config: pytest.Config, settings: Settings) -> None:
    """Find the device, load the baseline, and register the hooks.

    Raises:
        pytest.UsageError: the chosen device is not there, its lock or the baseline cannot be used, or pytest-benchmark is switched off.
    """
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("gpumem: --gpumem needs pytest-benchmark, which is switched off; leave out -p no:benchmark")
    if settings.l2_sweep:
        check_serial(config)
    folder = _baseline_folder(config, settings)
    chosen = _choose(settings, folder)
    if chosen.facts.uuid is not None:
        try:
            lock_file(chosen.facts.uuid)
        except LockUnusable as error:
            raise pytest.UsageError(f"gpumem: {error}") from None
    store = Store(folder, chosen.facts)
    # Where the change left the history that it is compared with is asked of the project's repository.
    shared = partial(ancestry, settings.baseline_of, folder=config.rootpath) if settings.baseline_of is not None else None
    try:
        baseline = store.load(shared, settings.baseline_window)
    except BaselineError as error:
        raise pytest.UsageError(f"gpumem: {error}") from None
    except RevisionError as error:
        raise pytest.UsageError(f"gpumem: {settings.origins['baseline_of']}: {error}") from None
    if settings.save and not config.option.collectonly and not hasattr(config, "workerinput") and (why := store.unwritable()) is not None:
        raise pytest.UsageError(f"gpumem: {settings.origins['save']}: {why}")
    replay.default_storage(config, chosen.facts.key)
    session = GpuSession(config, settings, chosen, store, baseline, folder)
    if settings.counted is not None and not session.ranges.tool_attached():  # under a profiler they are counted anew
        session.counts = _counts(config, settings, chosen.facts)
    config.stash[SESSION] = session
    config.pluginmanager.register(SessionHooks(session), "gpumem-session")
    config.pluginmanager.register(RunningHooks(session), "gpumem-running")
    config.pluginmanager.register(LeftoverHooks(session), "gpumem-leftovers")
    config.pluginmanager.register(LostHooks(session), "gpumem-lost")
    if session.further_reports is not None:
        from pytest_gpumem.plugin.repeating import FurtherReports

        config.pluginmanager.register(FurtherReports(Path(session.further_reports), session), "gpumem-further-reports")
    if settings.processes is not None and settings.processes > 1:
        from pytest_gpumem.plugin.repeating import RepeatHooks

        config.pluginmanager.register(RepeatHooks(session), "gpumem-repeats")
    elif session.decides and not session.is_worker:
        from pytest_gpumem.plugin.repeating import DecideHooks

        config.pluginmanager.register(DecideHooks(session), "gpumem-repeats")
    if not session.is_worker:
        from pytest_gpumem.plugin.outputs import OutputHooks
        from pytest_gpumem.plugin.terminal import TerminalHooks

        config.pluginmanager.register(OutputHooks(session), "gpumem-outputs")
        config.pluginmanager.register(TerminalHooks(session), "gpumem-terminal")
        config.pluginmanager.register(SweepHooks(session), "gpumem-l2-sweep")


def _choose(settings: Settings, folder: Path) -> Chosen:
    origin = settings.origins.get("device", "default")
    try:
        chosen = choose(settings.device)
    except NoDevice as missing:
        raise pytest.UsageError(
            f"gpumem: device {settings.device!r} ({origin}): {missing}; "
            "choose --gpumem-device sim for the simulated device; `gpumem doctor` says what is missing"
        ) from None
    if chosen.fallback_reason is None:
        return chosen
    in_ci = os.environ.get("CI", "").strip().lower() not in ("", "0", "false", "no", "off")
    if in_ci and (measured := [key for key in keys(folder) if not key.startswith(SIMULATED)]):
        raise pytest.UsageError(
            f"gpumem: device {settings.device!r} ({origin}): no GPU ({chosen.fallback_reason}), the variable CI is set, and {folder} holds "
            f"a baseline of {', '.join(measured)}; choose --gpumem-device sim if the simulated device is meant"
        )
    if in_ci and not settings.device_chosen:
        raise pytest.UsageError(
            f"gpumem: no GPU ({chosen.fallback_reason}), the variable CI is set, and nobody chose a device: a broken driver must not turn "
            "a pipeline green; choose --gpumem-device sim or auto if the simulated device is meant"
        )
    if settings.strict:
        raise pytest.UsageError(
            f"gpumem: no GPU ({chosen.fallback_reason}) under --gpumem-strict; choose --gpumem-device sim if the simulated device is meant"
        )
    return chosen


def _counts(config: pytest.Config, settings: Settings, facts: DeviceFacts) -> Mapping[str, Counted]:
    """What the file of `--gpumem-counted` holds, by `Row.key`."""
    from pytest_gpumem.nsight.counting import BadFile, load

    origin = settings.origins["counted"]
    try:
        stored = load(_place(config, settings, "counted"))
    except BadFile as error:
        raise pytest.UsageError(f"gpumem: {origin}: {error}") from None
    if stored.device != facts.key:
        raise pytest.UsageError(
            f"gpumem: {origin}: {settings.counted} was counted on {stored.device}, this session's device is {facts.key}; "
            "counts of another device say nothing of this one"
        )
    return stored.counts


def _place(config: pytest.Config, settings: Settings, name: str) -> Path:
    """A path among the settings; one from the ini file is relative to that file, others to where pytest was called."""
    from_ini = settings.origins.get(name, "").startswith("gpumem_")
    base = config.inipath.parent if from_ini and config.inipath else config.invocation_params.dir
    return base / Path(getattr(settings, name)).expanduser()


def _baseline_folder(config: pytest.Config, settings: Settings) -> Path:
    # An xdist worker inherits the controller's rewritten storage option: it cannot find the folder by itself.
    told = getattr(config, "workerinput", {}).get(WORKER_BASELINE)
    if told is not None:
        return Path(told)
    if settings.baseline is None:
        return replay.storage_folder(config).absolute()
    return _place(config, settings, "baseline")


class GpuSession:
    """What lives as long as the session. The device is opened at its first use, so never in an xdist controller."""

    def __init__(
        self, config: pytest.Config, settings: Settings, chosen: Chosen, store: Store, baseline: Baseline, baseline_folder: Path
    ) -> None:
        self.config = config
        self.settings = settings
        self.chosen = chosen
        self.store = store
        self.baseline = baseline
        self.baseline_folder = baseline_folder
        self.counts: Mapping[str, Counted] = {}
        """Counted traffic by `Row.key`, from an earlier run."""
        self.missing: list[Missing] = []
        """Measurements that the baseline holds and the session did not take, once it ends."""
        self.remarks: list[str] = []
        """Lines for the summary."""
        self.sweeps: list[tuple[str, Sweep]] = []
        """Sweeps of persisting L2, each with its test's id."""
        self.is_worker = hasattr(config, "workerinput")
        self._pid = os.getpid()
        self.ranges = Ranges()
        self.names = Names()
        self.tests: frozenset[str] = frozenset()
        """`key_of` of each collected test, without a label."""
        self.rows = Rows()
        self.replays: dict[str, replay.Replay] = {}
        """By node id, what pytest-benchmark was given of the tests that may be judged again."""
        self.ledger: Ledger | None = None
        """The total budget, once the tests are collected; None where each measurement has its own."""
        self.family = Family()
        """The rows that are compared with the baseline, as far as they were judged."""
        self.further: list[Further] = []
        """The further processes of `--gpumem-processes`, once they have run."""
        # Taken out of the environment: a session that a test starts is none of these processes.
        self.further_reports = os.environ.pop(FURTHER_REPORTS, None)
        """In a further process: the file for its reports. Verdicts are then for the main process to give, over all of them."""
        self.begun = datetime.now(timezone.utc)
        self._drifted: list[tuple[str, str]] = []
        """Controls that changed from the session's start to its end, and what there is to say of it; here and in the workers of xdist."""
        """How the device changed while the session measured, in this process or in a worker of xdist."""
        self.watch: Watch | None = None
        """Of persisting L2, once the device is open."""
        self._device: Device | None = None
        self._announced: set[str] = set()

    @property
    def reports_elsewhere(self) -> bool:
        """True if only this process's reports reach the process that has the rows: in a worker of xdist and in a forked child."""
        return self.is_worker or os.getpid() != self._pid

    def history(self, row: Row) -> History:
        """What the baseline knows of a row that was measured."""
        assert row.measurement is not None
        return self.baseline.history(row.key, partial(comparable, row.measurement))

    def failure_elsewhere(self, nodeid: str) -> str | None:
        """Why a test failed in a further process; None if it did not."""
        return next((why for process in self.further if (why := process.failure_of(nodeid)) is not None), None)

    @property
    def facts(self) -> DeviceFacts:
        return self.chosen.facts

    @property
    def device(self) -> Device:
        """The open device. Raises `DeviceError` if it cannot be opened."""
        if self._device is None:
            self._device = self.chosen.open()
            self.watch = Watch(self._device)
        return self._device

    @cached_property
    def kernels(self) -> Kernels:
        return Kernels(self.device)

    @cached_property
    def conductor(self) -> Conductor:
        return Conductor(self.device, self.ranges, profiled=self.ranges.tool_attached())

    @cached_property
    def taken(self) -> Taken:
        """When and where this process measures, with its control readings; the first use takes them."""
        # The latency tells the variant of the card, which is the same in a further process.
        controls = self._controls(latency=FURTHER_PROCESS not in os.environ)
        return Taken(self.begun.isoformat(timespec="seconds"), self.facts.uuid, controls)

    @property
    def decides(self) -> bool:
        """True if undecided rows are measured again at the session's end: then none of them fails before."""
        return self.settings.processes is None and "processes" not in switched_off(os.environ) and not self.ranges.tool_attached()

    @property
    def reads_controls(self) -> bool:
        """Whether control kernels are read: something is compared or stored, here or in the run that this process is one of."""
        asked = bool(self.baseline.processes) or self.settings.save or os.environ.get(FURTHER_PROCESS) == READS_CONTROLS
        return asked and not self.ranges.tool_attached()

    def _controls(self, *, latency: bool = True) -> Controls | None:
        """Control readings where something is compared or stored; None else, and where the device cannot take them."""
        if not self.reads_controls:
            return None
        try:
            self.conductor.ready()
            return read_controls(self.device, latency=latency)
        except DeviceError:  # such as too little free memory; what else is wrong the measurements will tell
            return None

    def look_back(self) -> None:
        """Read the controls once more, and say where the device has changed since the start."""
        if "taken" not in self.__dict__ or self.taken.controls is None or self._device is None:
            return
        try:
            with exclusive(self.facts, self._announce):
                changes = self.changes()
        except LockUnusable as error:
            self._drifted.append(("dram", f"UNDECIDED: whether the device changed while it was measured is not known: {error}"))
            return
        for kind, log in changes.items():
            if (said := since_start(kind, log)) is not None:
                self._drifted.append((kind, f"UNDECIDED: {said}"))

    def changes(self) -> dict[str, float]:
        """Read the controls once more: by kind, the log-ratio to the start, slower counted up. Empty where they are not read."""
        if "taken" not in self.__dict__:  # the controller of xdist measured nothing
            return {}
        start, now = self.taken.controls, self._controls(latency=False)
        return changed(start, now) if start is not None and now is not None else {}

    @property
    def drifted(self) -> list[str]:
        """What there is to say of controls that changed meanwhile and that a row of this session follows; DRAM concerns all."""
        concerned = {"dram", *(self._follows(row) for row in self.rows)}
        return [said for kind, said in self._drifted if kind in concerned]

    def drifts(self) -> list[tuple[str, str]]:
        """Controls that changed in this process, for the process that has the rows."""
        return list(self._drifted)

    def also_drifted(self, theirs: Iterable[Sequence[str]]) -> None:
        """Controls that changed in a worker of xdist."""
        self._drifted += [(kind, said) for kind, said in theirs]

    def settled(self, rows: Iterable[Row]) -> list[Row]:
        """Rows that follow no control that changed meanwhile."""
        changed_kinds = {kind for kind, _ in self._drifted}
        return [] if "dram" in changed_kinds else [row for row in rows if self._follows(row) not in changed_kinds]

    def _follows(self, row: Row) -> str | None:
        return kind_of(row.measurement, self.facts) if row.measurement is not None else None

    def begin(self, item: pytest.Item) -> GpuTest:
        """The device side of a test that uses our fixtures; waits for others on the same GPU."""
        with ExitStack() as stack:
            stack.enter_context(exclusive(self.facts, self._announce))
            test = GpuTest(item, self)
            if self.watch is not None:
                self.watch.fresh()
            test.exit.push(stack.pop_all())
        item.stash[TEST] = test
        return test

    def _announce(self, line: str) -> None:
        """Print a line at once, also where pytest captures what is printed. A line is printed once."""
        if line in self._announced:
            return
        self._announced.add(line)
        capture = self.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
            print(f"\n{line}", file=sys.stderr, flush=True)

    def plan(self, overrides: Overrides, nodeid: str, label: str) -> Plan:
        """How to take the measurement of a test that is about to begin.

        A marker's budget for each measurement lies within the total: the smaller of the two holds.
        """
        settings = override(self.settings, overrides)
        budgets = [settings.budget] if settings.budget is not None else []
        if self.ledger is not None:
            budgets.append(self.ledger.share(nodeid, label))
        return Plan(settings.mode, settings.sampler, settings.placements, settings.precision, min(budgets))

    def open_family(self, items: Iterable[pytest.Item]) -> None:
        """Count the rows that may be compared with the baseline: those of the collected tests that it knows."""
        collected = {item.nodeid for item in items}
        self.family = Family(size=max(1, sum(rows[-1].nodeid in collected for rows in self.baseline.rows.values() if rows)))

    def open_ledger(self, items: Iterable[pytest.Item]) -> None:
        """Share a total budget out over the tests that measure, by what they cost in the baseline."""
        total = self.settings.total_budget
        if total is None:
            return
        known: dict[str, dict[str, Measurement]] = {}
        for rows in self.baseline.rows.values():
            row = rows[-1]
            if row.measurement is not None:
                known.setdefault(row.nodeid, {})[row.label] = row.measurement
        expected = {}
        for item in items:
            if not uses(item, BENCHMARK_FIXTURE):
                continue
            try:
                own = marker_overrides(marker_keywords(marks_of(item))).budget
            except SettingsError:  # in a worker of xdist: the test fails by it, and measures nothing
                continue
            measured = known.get(item.nodeid, {})
            most = DEFAULT_BUDGET if own is None else own
            expected[item.nodeid] = {label: need(measurement, self.facts, most) for label, measurement in measured.items()}
        # Each process of the run has its part.
        self.ledger = Ledger(total / (self.settings.processes or 1), expected)

    def close(self) -> None:
        """Give the device back; a second call does nothing."""
        device, self._device, self.watch = self._device, None, None
        if device is None:
            return
        # Whoever needs the device again, such as for its controls, gets a new one with all that belongs to it.
        conductor = self.__dict__.pop("conductor", None)
        self.__dict__.pop("kernels", None)
        try:
            if conductor is not None:
                conductor.close()
        finally:
            device.close()


class SessionHooks:
    """Hooks of the session and of pytest-benchmark; registered only with `--gpumem`."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)  # before the terminal asks what to announce
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session.names = Names(item.nodeid for item in session.items)
        self._session.tests = frozenset(key_of(item.nodeid, "") for item in session.items)
        self._session.open_ledger(session.items)
        self._session.open_family(session.items)

    @pytest.hookimpl(tryfirst=True)  # before anyone looks at the rows
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        rows = getattr(report, ROWS_ATTRIBUTE, None)
        if rows is not None and not self._session.is_worker:
            self._session.rows.add(report.nodeid, [row_from_json(row) for row in rows])
        self._session.rows.report(report)

    @pytest.hookimpl(tryfirst=True)  # before anything is stored
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        gpu = self._session
        gpu.look_back()
        if gpu.is_worker:
            gpu.config.workeroutput[DRIFTED] = gpu.drifts()  # type: ignore[attr-defined]
        elif gpu.drifted and gpu.settings.strict and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._session.also_drifted(getattr(node, "workeroutput", {}).get(DRIFTED, []))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._session.close()

    # xdist

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[WORKER_BASELINE] = str(self._session.baseline_folder)

    # pytest-benchmark

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_benchmark_generate_machine_info(self) -> dict[str, Any] | None:
        # Nobody reads that of a further process, and py-cpuinfo starts a process for it, which takes a second.
        return {} if FURTHER_PROCESS in os.environ else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        facts = self._session.facts
        # Identity only: clocks, temperatures and serial numbers would make every two runs differ.
        whole = device_to_json(facts)
        machine_info["gpu"] = {name: whole[name] for name in GPU_IDENTITY}

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_benchmark_compare_machine_info(self, machine_info: Mapping[str, Any], compared_benchmark: dict[str, Any]) -> None:
        replay.check_machine(machine_info, compared_benchmark)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        session = self._session
        output_json["gpumem"] = document(session.facts, list(session.rows), session.settings.to_json(), session.missing)
        if session.sweeps:
            output_json[SWEEPS] = sweeps_to_json(session.sweeps)
