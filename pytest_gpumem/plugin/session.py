"""The begin and the end of a session with `--gpumem`: device, baseline, hooks; measurements that are lost."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.baselines.acceptances import Acceptances, acceptances
from pytest_gpumem.baselines.storage import RemoteStorage, Storage, storage
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.devices.opening import DeviceChoice, DriverAnswer, NoDevice, choose
from pytest_gpumem.judging.expectations import open_under_strict
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.plugin import entries
from pytest_gpumem.plugin.adoption import AdoptionFeature
from pytest_gpumem.plugin.deadline import FOLDER
from pytest_gpumem.plugin.exclusive import LockUnusable, lock_file
from pytest_gpumem.plugin.expecting import IN_BASE, BaseOfGate, ExpectationFeature, base_of_gate
from pytest_gpumem.plugin.footprints import FootprintFeature
from pytest_gpumem.plugin.gpus import VISIBLE
from pytest_gpumem.plugin.isolation import IsolationFeature, ReplacementFeature
from pytest_gpumem.plugin.judging import VerdictFeature
from pytest_gpumem.plugin.leftovers import LeftoverFeature, WorkFeature
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, SESSION_PLUGIN, TEST_FIXTURE, uses
from pytest_gpumem.plugin.reported import COMPLETE, ROWS_ATTRIBUTE, exit_code
from pytest_gpumem.plugin.running import RUNNING_PLUGIN, Feature, RunningHooks
from pytest_gpumem.plugin.state import SESSION, GpuSession
from pytest_gpumem.plugin.waits import WaitFeature
from pytest_gpumem.plugin.workers import (
    Channel,
    Controller,
    baseline_of_session,
    check_worker,
    given,
    hands_out,
    is_part,
    own_in_turn,
    prepare,
    settings_of_session,
)
from pytest_gpumem.quantity import comparison_text
from pytest_gpumem.records.device import SIMULATED
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import device_to_json, document, row_from_json
from pytest_gpumem.reporting.exports import figures, properties
from pytest_gpumem.revisions import RevisionError, ancestry
from pytest_gpumem.settings import ACCEPTS, ANNOUNCE, Settings, switched_off
from pytest_gpumem.units import did_you_mean

if TYPE_CHECKING:
    from pytest_gpumem.plugin.outputs import OutputFeature
    from pytest_gpumem.plugin.repeating import RepeatFeature
    from pytest_gpumem.plugin.terminal import TerminalFeature

GPU_IDENTITY = (
    "key",
    "name",
    "simulated",
    "compute_capability",
    "memory_bytes",
    "ecc",
    "mig_profile",
    "driver",
    "cuda",
)
"""Facts that go into pytest-benchmark's `machine_info`."""


def start(config: pytest.Config, settings: Settings, asked: DriverAnswer) -> None:
    """Find the device, for which `asked` asks the driver, load the baseline, and register the hooks.
    Raises `pytest.UsageError`: the chosen device is not there, its lock or the baseline cannot be used, or pytest-benchmark is switched
    off.
    """
    prepare(config)
    _check_plugins(config)
    settings = settings_of_session(config, settings)
    place = _baseline_place(config, settings)
    chosen = _chosen(config, settings, place, asked)
    of_base = base_of_gate(config)
    session = _session(config, settings, place, chosen, of_base)
    config.stash[SESSION] = session
    expectations, leftovers = ExpectationFeature(session), LeftoverFeature(session)
    repeats = _repeats(session)
    channel = _channel(session, expectations)
    if of_base is not None:
        channel.give(IN_BASE, of_base.given)
    results = (
        None
        if session.is_part
        else _results(session, Controller(settings, chosen, place, channel), channel)
    )
    whole = Session(session, expectations, leftovers, repeats, results, channel)
    # The first feature enters each phase of a test before the others, and leaves it after them.
    features: list[Feature] = [
        whole,  # has the rows of a report before anyone looks at them
        *([] if repeats is None else [repeats]),
        *_isolation(session, channel),
        VerdictFeature(session),
        FootprintFeature(session),
        leftovers,
        WorkFeature(session),  # has waited for the work when the others look at what a test leaves
        expectations,
        *(results or ()),
        AdoptionFeature(session, channel),
        WaitFeature(session),
    ]
    config.add_cleanup(session.close)
    config.add_cleanup(whole.hush_if_lost)  # before it, and after pytest has put back its hook
    config.pluginmanager.register(whole, SESSION_PLUGIN)
    config.pluginmanager.register(RunningHooks(features), RUNNING_PLUGIN)
    for plugin in (channel, *features[1:]):
        config.pluginmanager.register(plugin)


def _check_plugins(config: pytest.Config) -> None:
    """Raises `pytest.UsageError`: pytest-benchmark is switched off, or pytest-forked is on."""
    # By its module: it has another name where -p or a conftest loads it than by its entry point.
    if not any(
        getattr(plugin, "__name__", "") == "pytest_benchmark.plugin"
        for plugin in config.pluginmanager.get_plugins()
    ):
        raise pytest.UsageError(
            "gpumem: --gpumem needs pytest-benchmark, which is switched off; leave out -p no:benchmark"
        )
    if getattr(config.option, "forked", False):
        raise pytest.UsageError(
            "gpumem: --forked runs each test in a copy of this process, in which CUDA does not work; --gpumem-isolate replaces the process "
            "after a test that crashes"
        )


def _chosen(
    config: pytest.Config, settings: Settings, place: Storage, asked: DriverAnswer
) -> DeviceChoice:
    """The device, which can run this session. Raises `pytest.UsageError`: it is not there, or cannot."""
    try:
        chosen = _choose(settings, place, asked)
        if (own := own_in_turn(os.environ, settings, chosen)) is not None:
            os.environ[VISIBLE] = own
            chosen = _choose(settings, place)
        check_worker(config, chosen.facts, place)
        if chosen.facts.uuid is not None:
            lock_file(chosen.facts.uuid)
    except (UserError, LockUnusable) as error:
        raise pytest.UsageError(f"gpumem: {error}") from None
    return chosen


def _session(
    config: pytest.Config,
    settings: Settings,
    place: Storage,
    chosen: DeviceChoice,
    of_base: BaseOfGate | None,
) -> GpuSession:
    """The state of a session, with its baseline. Raises `pytest.UsageError`: the baseline cannot be used."""
    store = Store(place, chosen.facts)
    # Where the change left the history that it is compared with is asked of the project's repository.
    shared = (
        partial(ancestry, settings.baseline_of, folder=config.rootpath)
        if settings.baseline_of is not None
        else None
    )
    try:
        accepted = acceptances(config.rootpath)
        merged, added = _merged_and_added(accepted, config, settings)
        baseline = store.load(shared, accepted)
    except (UserError, RevisionError) as error:
        raise pytest.UsageError(f"gpumem: {error}") from None
    if (
        settings.save
        and not config.option.collectonly
        and not is_part(config)
        and (why := store.unwritable()) is not None
    ):
        raise pytest.UsageError(f"gpumem: {settings.origins['save']}: {why}")
    return GpuSession(
        config,
        settings,
        chosen,
        store,
        baseline,
        merged,
        added,
        None if of_base is None else of_base.selection,
    )


def _repeats(session: GpuSession) -> RepeatFeature | None:
    """What measures in further processes; None if nothing does."""
    if session.settings.processes == 1:
        return None
    from pytest_gpumem.plugin.repeating import RepeatFeature

    return RepeatFeature(session)


def _channel(session: GpuSession, expectations: ExpectationFeature) -> Channel:
    """What the processes of a session tell each other."""
    channel = Channel(session.config)
    channel.carry("collected", lambda: expectations.seen, expectations.take)
    channel.collect(expectations.select)
    return channel


def _results(
    session: GpuSession, workers: Controller, channel: Channel
) -> tuple[OutputFeature, TerminalFeature]:
    """What writes the results.
    Raises `pytest.UsageError`: a file cannot be written.
    """
    from pytest_gpumem.plugin.outputs import OutputFeature
    from pytest_gpumem.plugin.terminal import TerminalFeature

    session.config.pluginmanager.register(workers)
    terminal = TerminalFeature(session, workers)
    channel.collect(terminal.expect)
    return OutputFeature(session), terminal


def _is_the_program() -> bool:
    """True if the process ends with the session; False in a program that calls `pytest.main`."""
    program = Path(sys.argv[0])
    return program.stem in ("pytest", "py.test") or program.parts[-2:] == ("pytest", "__main__.py")


def _merged_and_added(
    accepted: Acceptances, config: pytest.Config, settings: Settings
) -> tuple[Acceptances, Acceptances]:
    """The accepted changes that BASE has too, and those that the change of a gate adds, if they count.

    Raises `RevisionError`: git cannot tell the history.
    """
    if settings.baseline_of is None or not accepted.files:
        return accepted, Acceptances()
    merge_base = ancestry(settings.baseline_of, (), config.rootpath).merge_base
    added = accepted.added_since(merge_base)
    merged = {name: file for name, file in accepted.files.items() if name not in added.files}
    return Acceptances(merged), added if ACCEPTS in os.environ else Acceptances()


def _leave(session: pytest.Session) -> None:
    """End the process before the libraries that hold memory of a lost context print a traceback for each piece of it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(session.exitstatus))


def _isolation(session: GpuSession, channel: Channel) -> list[Feature]:
    """What replaces a worker that a test ends."""
    config = session.config
    if is_part(config):
        folder = given(config, FOLDER)
        if folder is None:  # on another machine
            own = tempfile.TemporaryDirectory(prefix="gpumem-")
            config.add_cleanup(own.cleanup)
            folder = own.name
        return [IsolationFeature(session, Path(folder))]
    return [ReplacementFeature(config, channel)] if hands_out(config) else []


def _choose(settings: Settings, place: Storage, asked: DriverAnswer = None) -> DeviceChoice:
    origin = settings.origins.get("device", "default")
    try:
        chosen = choose(settings.device, asked=asked)
    except NoDevice as missing:
        remedy = "; choose --gpumem-device sim for the simulated device; `gpumem doctor` says what is missing"
        raise pytest.UsageError(
            f"gpumem: device {settings.device!r} ({origin}): {missing}{'' if settings.device.startswith('sim') else remedy}"
        ) from None
    if chosen.fallback_reason is None:
        return chosen
    in_ci = os.environ.get("CI", "").strip().lower() not in ("", "0", "false", "no", "off")
    if in_ci and (measured := [key for key in place.devices() if not key.startswith(SIMULATED)]):
        raise pytest.UsageError(
            f"gpumem: device {settings.device!r} ({origin}): no GPU ({chosen.fallback_reason}), the variable CI is set, and {place} holds "
            f"a baseline of {', '.join(measured)}; choose --gpumem-device sim if the simulated device is meant"
        )
    if in_ci and not settings.device_chosen:
        raise pytest.UsageError(
            f"gpumem: no GPU ({chosen.fallback_reason}), the variable CI is set, and no device was chosen: a broken driver must not turn "
            "a pipeline green; choose --gpumem-device sim or auto if the simulated device is meant"
        )
    if settings.strict:
        raise pytest.UsageError(
            f"gpumem: no GPU ({chosen.fallback_reason}) under --gpumem-strict; choose --gpumem-device sim if the simulated device is meant"
        )
    return chosen


def _baseline_place(config: pytest.Config, settings: Settings) -> Storage:
    if (given := baseline_of_session(config)) is not None:
        return given
    if settings.baseline is None:
        place = Storage(entries.storage_folder(config).absolute())
    else:
        # A folder is relative to the ini file that names it, else to where pytest was called.
        from_ini = config.inipath if settings.origins["baseline"].startswith("gpumem_") else None
        base = config.invocation_params.dir if from_ini is None else from_ini.parent
        place = storage(settings.baseline, base)
    named = settings.baseline is not None and not isinstance(place, RemoteStorage)
    if named and not place.folder.exists() and not _may_be_new(config, settings):
        near = did_you_mean(place.folder.name, [one.name for one in place.folder.parent.glob("*/")])
        raise pytest.UsageError(
            f"gpumem: {settings.origins['baseline']}: there is no baseline {place.folder}{near}; --gpumem-save makes one"
        )
    return place


def _may_be_new(config: pytest.Config, settings: Settings) -> bool:
    """True if a baseline need not be there yet: the session makes it, compares nothing, or is of a gate, whose base decides without one."""
    return settings.save or settings.baseline_of is not None or config.option.collectonly


@contextmanager
def _stoppable(session: pytest.Session) -> Iterator[None]:
    """Have Ctrl-C, `pytest.exit` and errors end the session as where its tests run: what was measured is written all the same."""
    try:
        yield
    except (KeyboardInterrupt, pytest.exit.Exception) as error:
        session.config.hook.pytest_keyboard_interrupt(
            excinfo=pytest.ExceptionInfo.from_exception(error)
        )
        session.exitstatus = getattr(error, "returncode", None) or pytest.ExitCode.INTERRUPTED
    except Exception as error:
        session.config.notify_exception(
            pytest.ExceptionInfo.from_exception(error), session.config.option
        )
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


class Session(Feature):
    """A session with `--gpumem`: what it takes from pytest and pytest-benchmark, and its end; registered only with `--gpumem`."""

    def __init__(
        self,
        session: GpuSession,
        expectations: ExpectationFeature,
        leftovers: LeftoverFeature,
        repeats: RepeatFeature | None,
        results: tuple[OutputFeature, TerminalFeature] | None,
        channel: Channel,
    ) -> None:
        """`repeats`: None with one process. `results`: None in a worker, whose rows another process has."""
        self._session = session
        self._expectations = expectations
        self._leftovers = leftovers
        self._repeats = repeats
        self._results = results
        self._channel = channel
        # the other GPU of a saved run that pytest-benchmark compares with
        self._left_out: str | None = None
        self._left_out_names: set[str] = set()  # of its entries

    def selected(self, session: pytest.Session) -> None:
        if self._left_out is not None and any(
            uses(item, BENCHMARK_FIXTURE) or f"{item.nodeid}[gpu]" in self._left_out_names
            for item in session.items
        ):
            raise pytest.UsageError(
                f"--benchmark-compare: the saved run is of {self._left_out}, this session's device is {self._session.facts.key}; results "
                "of different devices are not comparable. Give each GPU a storage of its own, such as --benchmark-storage=file://.benchmarks/"
                f"{self._session.facts.key}"
            )
        self._session.collected(session.items)

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        follows = self._session.evidence and uses(item, TEST_FIXTURE)
        with self._session.chosen.follow() if follows else nullcontext():
            yield

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        if not session.config.option.collectonly:
            _ = self._session.base  # until it is known, another process collects
        yield

    @contextmanager
    def logged(self, report: pytest.TestReport) -> Iterator[None]:
        rows = getattr(report, ROWS_ATTRIBUTE, None)
        if rows is not None and not self._session.is_part:
            self._session.rows.add(report.nodeid, [row_from_json(row) for row in rows])
        self._session.rows.report(report)
        if report.when in ("call", "teardown"):  # JUnit takes the properties of the last report
            own = self._properties(report.nodeid)
            report.user_properties = [
                *(one for one in report.user_properties if one[0] not in own),
                *own.items(),
            ]
        yield

    def _properties(self, nodeid: str) -> dict[str, object]:
        """The properties of a test in JUnit's file."""
        return dict(
            one
            for row in self._session.rows.reported(nodeid)
            for one in properties(row, self._session.facts)
        )

    @pytest.hookimpl(
        wrapper=True
    )  # around that of pytest-benchmark, which was registered before: no file is written yet
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        self.finish(session)
        return (yield)

    def finish(self, session: pytest.Session) -> None:
        """The end of a session, from its last test to its exit code: nothing is written before the last verdict is known."""
        gpu, strict = self._session, self._session.settings.strict
        self.hush_if_lost()
        if self._leaves:
            atexit.register(_leave, session)
        failed = False
        with _stoppable(session):
            self._leftovers.end(session)
            if self._repeats is not None:
                failed = self._repeats.failed_elsewhere()
        if self._results is None:
            self._channel.send()
            return
        complete = session.exitstatus in COMPLETE
        outputs, terminal = self._results
        terminal.end_progress()
        self._expectations.write_selection()
        if (
            not session.config.option.collectonly and not gpu.ranges.tool_attached()
        ):  # under a profiler nothing is judged
            gpu.lacks(self._expectations.discharged(complete=complete))
        failed = self._undecided(gpu.screen()) or failed
        open_ = open_under_strict(gpu.missing)
        saved = terminal.save(complete=complete)
        written = session.config.option.collectonly or outputs.write()
        session.exitstatus = exit_code(
            session.exitstatus, failed=failed or bool(strict and open_) or not saved or not written
        )

    def _undecided(self, rows: Sequence[Row]) -> bool:
        """True if rows that stay undecided fail the session: under strict, where no duet follows."""
        duet_follows = ANNOUNCE in switched_off(os.environ)
        if not rows or not self._session.settings.strict or duet_follows:
            return False
        self._session.remark(f"--gpumem-strict: {counted(len(rows), 'row')} undecided: this fails")
        return True

    @property
    def _leaves(self) -> bool:
        """True if the context was lost, and the process ends with the session. A program that called pytest goes on with its own."""
        gpu = self._session
        return (
            gpu.lost_in is not None
            and not gpu.facts.simulated
            and (gpu.is_part or _is_the_program())
        )

    def hush_if_lost(self) -> None:
        """Have libraries print no traceback for each piece of memory of a lost context. Cython prints an error of a destructor by the one
        hook, and reports it by the other, which pytest puts back once it has collected its garbage."""
        if self._leaves:
            sys.excepthook, sys.unraisablehook = (lambda *_: None), (lambda _: None)

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        return comparison_text(left, op, right)

    # pytest-benchmark

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        if not len(self._session.rows):
            return  # no GPU took part in it, as while it is compared before the first test
        # Identity only: clocks, temperatures and serial numbers would make every two runs differ.
        whole = device_to_json(self._session.facts)
        machine_info["gpu"] = {name: whole[name] for name in GPU_IDENTITY}

    @pytest.hookimpl(wrapper=True)
    def pytest_report_header(
        self, config: pytest.Config
    ) -> Generator[None, list[object], list[object]]:
        """The session's lines below pytest-benchmark's, of whose defaults none holds for a measurement of a GPU; with -v it is there."""
        lines = yield
        # pytest prints them from the last one on.
        own = [] if self._results is None else [self._results[1].header(config)]
        at = next(
            (at for at, line in enumerate(lines) if str(line).startswith("benchmark: ")), len(lines)
        )
        return [*lines[:at], *own, *lines[at + (config.get_verbosity() <= 0) :]]

    @pytest.hookimpl(
        wrapper=True, tryfirst=True
    )  # around pytest-benchmark's table, and pytest's short summary: what to do comes last
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, object, object]:
        try:
            with entries.without_table(
                self._session.config, always=self._session.ranges.tool_attached()
            ):
                return (yield)
        finally:  # also if pytest-benchmark's own comparison ends in an error
            if self._results is not None:
                outputs, terminal = self._results
                terminal.summarise(terminalreporter)
                outputs.summarise(terminalreporter)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_compare_machine_info(self, compared_benchmark: dict[str, Any]) -> None:
        names = entries.leave_out(compared_benchmark, self._session.facts.key)
        if names:
            self._left_out = str(compared_benchmark["gpu"].get("key", "an unnamed GPU"))
            self._left_out_names.update(names)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        session = self._session
        found = {(row.range_name, row.label): figures(row, session.facts) for row in session.rows}
        for one in output_json.get("benchmarks", ()):  # a project may write its own JSON
            if (
                fed := one.get("extra_info", {}).get("gpumem")
            ) is not None:  # since then the row may have been judged again
                fed.update(found.get((fed["range"], fed.get("label", "")), {}))
        output_json["gpumem"] = document(
            session.facts, list(session.rows), session.settings.to_json(), session.missing
        )
