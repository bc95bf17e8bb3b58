"""The begin and the end of a session with `--gpumem`: device, baseline, hooks; controls that changed, measurements that are lost."""

from __future__ import annotations

import atexit
import os
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.baselines.storage import BaselineError, RemoteStorage, Storage, storage
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.devices.opening import Asked, Chosen, NoDevice, choose
from pytest_gpumem.plugin import fitting, replay
from pytest_gpumem.plugin.exclusive import LockUnusable, lock_file
from pytest_gpumem.plugin.footprints import FootprintHooks
from pytest_gpumem.plugin.gpus import KEY, VISIBLE, WorkerGpus, own_in_turn
from pytest_gpumem.plugin.hangs import WatchdogHooks
from pytest_gpumem.plugin.isolation import FOLDER, ControllerHooks, WorkerHooks
from pytest_gpumem.plugin.l2_sweeping import SweepHooks
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, SESSION_PLUGIN, TEST_FIXTURE, uses
from pytest_gpumem.plugin.reported import CARD_ATTRIBUTE, FAILED, PASSED, ROWS_ATTRIBUTE
from pytest_gpumem.plugin.running import LeftoverHooks, RunningHooks
from pytest_gpumem.plugin.state import SESSION, GpuSession, fail
from pytest_gpumem.plugin.workers import is_controller, is_worker
from pytest_gpumem.ranges import Names
from pytest_gpumem.records.row import ALLOWED, LOST, NOT_RUN, Missing, Status, key_of, selects
from pytest_gpumem.records.schema import SWEEPS_KEY, device_to_json, document, row_from_json, sweeps_to_json
from pytest_gpumem.reporting.concerns import Place
from pytest_gpumem.reporting.exports import figures, properties
from pytest_gpumem.revisions import RevisionError, ancestry
from pytest_gpumem.settings import FURTHER_PROCESS, Settings
from pytest_gpumem.units import comparison_text

WORKER_BASELINE = "gpumem_baseline"
"""Key of xdist's `workerinput`: the place of the baseline, as the controller found it; and whether its copy is read as it is."""

SIMULATED = "simulated-"  # prefix of the baseline key of a simulated device

DRIFTED = "gpumem_drifted"  # key of xdist's `workeroutput`: how the device changed while a worker measured

GPU_IDENTITY = ("key", "name", "simulated", "compute_capability", "memory_bytes", "ecc", "mig_profile", "driver", "cuda")
"""Facts that go into pytest-benchmark's `machine_info`."""

DESELECTED = "gpumem_deselected"  # key of xdist's `workeroutput`: the deselected tests that the baseline holds

_COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""How a session ends that collected all it was asked for."""

_SECTIONS = {
    **dict.fromkeys(("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"), re.compile("")),
    "pyproject.toml": re.compile(r"^\s*\[tool\.pytest\b", re.MULTILINE),
    "tox.ini": re.compile(r"^\[pytest\]", re.MULTILINE),
    "setup.cfg": re.compile(r"^\[tool:pytest\]", re.MULTILINE),
}
"""By the name of an ini file, in pytest's order, the section that it must have
(https://docs.pytest.org/en/stable/reference/customize.html#finding-the-rootdir)."""


def start(config: pytest.Config, settings: Settings, asked: Asked) -> None:
    """Find the device, for which `asked` asks the driver, load the baseline, and register the hooks.
    Raises `pytest.UsageError`: the chosen device is not there, its lock or the baseline cannot be used, or pytest-benchmark is switched
    off.
    """
    replay.prepare_for_xdist(config)
    # By its module: it has another name where -p or a conftest loads it than by its entry point.
    if not any(getattr(plugin, "__name__", "") == "pytest_benchmark.plugin" for plugin in config.pluginmanager.get_plugins()):
        raise pytest.UsageError("gpumem: --gpumem needs pytest-benchmark, which is switched off; leave out -p no:benchmark")
    place = _baseline_place(config, settings)
    try:
        chosen = _choose(settings, place, asked)
        if (own := own_in_turn(os.environ, settings, chosen)) is not None:
            os.environ[VISIBLE] = own
            chosen = _choose(settings, place)
        fitting.check(config, settings, chosen)
        if chosen.facts.uuid is not None:
            lock_file(chosen.facts.uuid)
        store = Store(place, chosen.facts)
        # Where the change left the history that it is compared with is asked of the project's repository.
        shared = partial(ancestry, settings.baseline_of, folder=config.rootpath) if settings.baseline_of is not None else None
        baseline = store.load(shared, settings.baseline_window)
    except (BaselineError, LockUnusable) as error:
        raise pytest.UsageError(f"gpumem: {error}") from None
    except RevisionError as error:
        raise pytest.UsageError(f"gpumem: {settings.origins['baseline_of']}: {error}") from None
    record = None if settings.record is None else storage(settings.record, _base(config, settings, "record"))
    if not config.option.collectonly and not is_worker(config):
        for name, why in (
            ("save", store.unwritable() if settings.save else None),
            ("record", record.recorded().unwritable(chosen.facts.key) if record is not None else None),
        ):
            if why is not None:
                raise pytest.UsageError(f"gpumem: {settings.origins[name]}: {why}")
    session = GpuSession(config, settings, chosen, store, baseline)
    session.unfit = _unfit_worker(config, session)
    config.stash[SESSION] = session
    config.pluginmanager.register(SessionHooks(session), SESSION_PLUGIN)
    config.pluginmanager.register(RunningHooks(session), "gpumem-running")
    config.pluginmanager.register(LeftoverHooks(session), "gpumem-leftovers")
    if settings.footprint != "off":
        config.pluginmanager.register(FootprintHooks(session), "gpumem-footprints")  # after the others, so that it is outside them
    config.pluginmanager.register(LostHooks(session), "gpumem-lost")
    _register_watchdog(config, session)
    if settings.memory_limit is not None:
        config.pluginmanager.register(fitting.FittingHooks(session), "gpumem-fitting")
    if session.further_reports is not None:
        from pytest_gpumem.plugin.repeating import FurtherReports

        config.pluginmanager.register(FurtherReports(Path(session.further_reports), session), "gpumem-further-reports")
    if settings.processes is not None and settings.processes > 1:
        from pytest_gpumem.plugin.repeating import RepeatHooks

        config.pluginmanager.register(RepeatHooks(session), "gpumem-repeats")
    elif session.decides and not session.is_worker:
        from pytest_gpumem.plugin.repeating import DecideHooks

        config.pluginmanager.register(DecideHooks(session), "gpumem-repeats")
    places: Callable[[], Mapping[str, Place]] = dict
    if not session.is_worker:
        config.pluginmanager.register(WorkerGpus(settings, chosen), "gpumem-worker-gpus")
        from pytest_gpumem.plugin.outputs import OutputHooks
        from pytest_gpumem.plugin.terminal import TerminalHooks

        outputs = OutputHooks(session)
        config.pluginmanager.register(outputs, "gpumem-outputs")
        places = outputs.places
        config.pluginmanager.register(TerminalHooks(session, record), "gpumem-terminal")
        config.pluginmanager.register(SweepHooks(session), "gpumem-l2-sweep")
    if settings.shard is not None:
        from pytest_gpumem.plugin.sharding import ShardHooks

        config.pluginmanager.register(ShardHooks(session, settings.shard, places), "gpumem-shard")


def _leave(session: pytest.Session) -> None:
    """End the process before the libraries that hold memory of a lost context print a traceback for each piece of it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(session.exitstatus))


def _register_watchdog(config: pytest.Config, session: GpuSession) -> None:
    if not hasattr(os, "fork"):
        return
    worker: WorkerHooks | None = None
    if is_worker(config):
        folder = getattr(config, "workerinput", {}).get(FOLDER)
        if folder is None:  # on another machine
            own = tempfile.TemporaryDirectory(prefix="gpumem-")
            config.add_cleanup(own.cleanup)
            folder = own.name
        worker = WorkerHooks(session, Path(folder))
        config.pluginmanager.register(worker, "gpumem-isolation")
        config.pluginmanager.register(WatchdogHooks(session, leave=worker.leave, gone=worker.alive), "gpumem-watchdog")
    elif is_controller(config):  # the tests run in workers
        config.pluginmanager.register(ControllerHooks(session), "gpumem-isolation")
    else:
        config.pluginmanager.register(WatchdogHooks(session), "gpumem-watchdog")


def _unfit_worker(config: pytest.Config, session: GpuSession) -> str | None:
    """Why a worker of xdist cannot take part: it alone is simulated or real, or it has not the session's baseline."""
    given: Mapping[str, Any] = getattr(config, "workerinput", {})
    if (key := given.get(KEY, session.facts.key)).startswith(SIMULATED) != session.facts.simulated:
        return f"this worker's device is {session.facts.key}, and the session's is {key}: simulated rows are never beside a GPU's"
    place = session.store.storage
    if given and given[WORKER_BASELINE]["exists"] and not place.folder.exists() and not isinstance(place, RemoteStorage):
        return (
            f"the baseline {place} is a folder of the machine that started this worker, which {platform.node()} does not have; accepted "
            "for workers on other machines is a URL, or a folder that all of them share"
        )
    return None


def _choose(settings: Settings, place: Storage, asked: Asked = None) -> Chosen:
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


def _base(config: pytest.Config, settings: Settings, name: str) -> Path:
    """The folder that a path among the settings is relative to: of the ini file that has it, else where pytest was called."""
    from_ini = settings.origins.get(name, "").startswith("gpumem_")
    return config.inipath.parent if from_ini and config.inipath else config.invocation_params.dir


def _baseline_place(config: pytest.Config, settings: Settings) -> Storage:
    # An xdist worker may run in another folder; one on this machine reads the copy that the controller brought up to date.
    if (given := getattr(config, "workerinput", {}).get(WORKER_BASELINE)) is not None:
        return storage(given["place"], offline=given["offline"])
    if settings.baseline is None:
        place = Storage(replay.storage_folder(config).absolute())
    else:
        place = storage(settings.baseline, _base(config, settings, "baseline"), offline=settings.baseline_offline)
    if settings.baseline_offline and not isinstance(place, RemoteStorage):
        raise pytest.UsageError(
            f"gpumem: {settings.origins['baseline_offline']}: the baseline {place} is a folder, which has no copy; accepted is a URL"
        )
    return place


class SessionHooks:
    """Hooks of the session and of pytest-benchmark; registered only with `--gpumem`."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._left_out: str | None = None  # the other GPU of a saved run that pytest-benchmark compares with
        self._interrupted = False

    @pytest.hookimpl(tryfirst=True)  # before the terminal announces the budget
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._left_out is not None and any(uses(item, BENCHMARK_FIXTURE) for item in session.items):
            raise pytest.UsageError(
                f"--benchmark-compare: the saved run is of {self._left_out}, this session's device is {self._session.facts.key}; results "
                "of different devices are not comparable. Give each GPU a storage of its own, such as --benchmark-storage=file://.benchmarks/"
                f"{self._session.facts.key}"
            )
        self._session.names = Names(item.nodeid for item in session.items)
        self._session.tests = frozenset(key_of(item.nodeid, "") for item in session.items)
        self._session.open_ledger(session.items)
        self._session.open_family(item.nodeid for item in session.items)
        if self._session.evidence and not session.config.option.collectonly and any(uses(item, TEST_FIXTURE) for item in session.items):
            self._session.chosen.follow()

    @pytest.hookimpl(tryfirst=True)  # before anyone looks at the rows
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        rows = getattr(report, ROWS_ATTRIBUTE, None)
        if rows is not None and not self._session.is_worker:
            self._session.rows.add(report.nodeid, [row_from_json(row) for row in rows], getattr(report, CARD_ATTRIBUTE, None))
        self._session.rows.report(report)
        if report.when in ("call", "teardown"):  # JUnit takes the properties of the last report
            own = dict(one for row in self._session.rows.reported(report) for one in properties(row, self._session.facts))
            report.user_properties = [*(one for one in report.user_properties if one[0] not in own), *own.items()]

    @pytest.hookimpl(tryfirst=True)  # before anything is stored
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        gpu = self._session
        if gpu.lost_in is not None and not gpu.facts.simulated:
            # Cython prints an error of a destructor by the one, and reports it by the other, which pytest puts back once it has collected
            # its garbage.
            sys.excepthook, sys.unraisablehook = (lambda *_: None), (lambda _: None)
            atexit.register(_leave, session)
        # Nothing is stored of a session that was interrupted, and the main process has a further process's rows.
        if exitstatus in _COMPLETE and FURTHER_PROCESS not in os.environ:
            gpu.check_controls()
        if gpu.is_worker:
            gpu.config.workeroutput[DRIFTED] = gpu.drifts  # type: ignore[attr-defined]
        elif gpu.drifted and gpu.settings.strict:
            fail(session)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._session.drifts += map(tuple, getattr(node, "workeroutput", {}).get(DRIFTED, []))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._interrupted = excinfo.type is KeyboardInterrupt

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._session.close()

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        return comparison_text(left, op, right)

    # xdist

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        self._session.open_family(ids)  # the controller judges rows again, and collects nothing

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        place, here = self._session.store.storage, bool(node.gateway.spec.popen)
        offline = isinstance(place, RemoteStorage) and (here or place.offline)
        node.workerinput[WORKER_BASELINE] = {"place": str(place), "offline": offline, "exists": place.folder.exists()}

    # pytest-benchmark

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_benchmark_generate_machine_info(self) -> dict[str, Any] | None:
        # py-cpuinfo starts a process for it, which takes a second. Unused in a further process, and too long after Ctrl-C.
        return {} if FURTHER_PROCESS in os.environ or self._interrupted else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        if not len(self._session.rows):
            return  # no GPU took part in it, as while it is compared before the first test
        # Identity only: clocks, temperatures and serial numbers would make every two runs differ.
        whole = device_to_json(self._session.facts)
        machine_info["gpu"] = {name: whole[name] for name in GPU_IDENTITY}

    @pytest.hookimpl(wrapper=True)
    def pytest_report_header(self, config: pytest.Config) -> Generator[None, list[object], list[object]]:
        """Without pytest-benchmark's line of defaults, none of which holds for a measurement of a GPU; with -v it is there."""
        lines = yield
        return lines if config.get_verbosity() > 0 else [one for one in lines if not str(one).startswith("benchmark: ")]

    @pytest.hookimpl(wrapper=True)  # around pytest-benchmark's table
    def pytest_terminal_summary(self) -> Generator[None, object, object]:
        with replay.without_table(self._session.config, always=self._session.ranges.tool_attached()):
            return (yield)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_benchmark_compare_machine_info(self, compared_benchmark: dict[str, Any]) -> None:
        self._left_out = replay.leave_out(compared_benchmark, self._session.facts.key) or self._left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        session = self._session
        found = {(row.range_name, row.label): figures(row, session.facts) for row in session.rows}
        for one in output_json.get("benchmarks", ()):  # a project may write its own JSON
            if (fed := one.get("extra_info", {}).get("gpumem")) is not None:  # since then the row may have been judged again
                one["extra_info"]["gpumem"] = found.get((fed["range"], fed.get("label", "")), fed)
        output_json["gpumem"] = document(session.facts, list(session.rows), session.settings.to_json(), session.missing)
        if session.sweeps:
            output_json[SWEEPS_KEY] = sweeps_to_json(session.sweeps)


class LostHooks:
    """Finds missing measurements at the end of the session. A lost one fails a strict session."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._collected: set[str] = set()
        self._deselected: set[str] = set()

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self._deselected.update(item.nodeid for item in items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Iterable[str]) -> None:
        self._collected.update(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._deselected.update(getattr(node, "workeroutput", {}).get(DESELECTED, ()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before results are written
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
        self._find(session, exitstatus)
        return (yield)

    def _find(self, session: pytest.Session, exitstatus: int) -> None:
        gpu = self._session
        known = gpu.baseline.expected(gpu.settings.mode)
        if gpu.is_worker:
            stored = {row.nodeid for row in known.values()}
            gpu.config.workeroutput[DESELECTED] = sorted((self._deselected & stored) - gpu.elsewhere)  # type: ignore[attr-defined]
            return
        # A session under a profiler judges nothing.
        if session.config.option.collectonly or gpu.ranges.tool_attached():
            return
        measured = {row.key for row in gpu.rows if row.measurement is not None and gpu.rows.end_of(row) in (PASSED, FAILED)}
        for key, row in known.items():
            if key in measured or (why := self._why(row.nodeid, complete=exitstatus in _COMPLETE)) is None:
                continue
            status, reason = why
            one = Missing(row.nodeid, row.label, status, reason)
            if status == LOST and any(one.named(name) for name in gpu.settings.allow_lost):
                one = Missing(row.nodeid, row.label, ALLOWED, reason)
            gpu.missing.append(one)
        gpu.remarks += self._useless(measured)
        if gpu.settings.strict and any(one.status == LOST for one in gpu.missing):
            fail(session)

    def _why(self, nodeid: str, *, complete: bool) -> tuple[Status, str] | None:
        """Status and reason of a measurement that is missing; None if its test was not requested."""
        end = self._session.rows.end(nodeid)
        if nodeid in self._session.elsewhere:
            return None
        if end is not None:
            return LOST, "its test passed without it" if end == PASSED else f"its test {self._session.rows.explain(nodeid)}"
        if nodeid in self._deselected:
            return NOT_RUN, "deselected"
        if nodeid in self._collected:
            return NOT_RUN, "not reached"
        if not complete or not self._asked_for(nodeid):
            return None
        if self._ignored(nodeid):
            return NOT_RUN, "ignored"
        return LOST, "its test is no longer collected"

    def _asked_for(self, nodeid: str) -> bool:
        """True if the command line selects a test that does not exist; False under -k and -m, which cannot be applied to it."""
        config = self._session.config
        option = config.option
        if option.keyword or option.markexpr or getattr(option, "lf", False):
            return False
        if any(nodeid.startswith(prefix) for prefix in option.deselect or ()):
            return False
        return any(name == "." or selects(name, nodeid) for name in map(self._nodeid, config.args))

    def _nodeid(self, argument: str) -> str:
        """An argument of the command line as a node id, which begins at the root folder."""
        config = self._session.config
        path, *names = argument.split("::")
        file = os.path.relpath(config.invocation_params.dir / path, config.rootpath)
        return "::".join((Path(file).as_posix(), *names))

    def _ignored(self, nodeid: str) -> bool:
        config = self._session.config
        file = config.rootpath / nodeid.partition("::")[0]
        within = [file, *(folder for folder in file.parents if config.rootpath in folder.parents)]
        return any(config.hook.pytest_ignore_collect(collection_path=path, config=config) for path in within)

    def _useless(self, measured: set[str]) -> Iterator[str]:
        """Remarks about names in `allow_lost` that allow nothing."""
        gpu = self._session
        origin = gpu.settings.origins.get("allow_lost")
        for name in gpu.settings.allow_lost if gpu.baseline.rows else ():
            named = [key for key, rows in gpu.baseline.rows.items() if name == key or selects(name, rows[-1].nodeid)]
            if not named:
                yield f"{origin}: the baseline holds no measurement {name!r}"
            elif measured.issuperset(named):
                yield f"{origin}: {name!r} is measured; the name is no longer needed"


def check_ini_file(config: pytest.Config) -> None:
    """That the ini file in use is that of the tests, and no option stands in `[tool.gpumem]`, which pytest does not read.
    Raises `pytest.UsageError`: a value of an option led pytest away from the ini file, or a key of `[tool.gpumem]` cannot be used.
    """
    if is_worker(config):  # its controller has checked
        return
    if (config.rootpath / "pyproject.toml").exists():
        from pytest_gpumem.kernels.declared import BadDeclaration, project  # here: it imports the reader of TOML

        try:
            project(config.rootpath)
        except BadDeclaration as error:
            raise pytest.UsageError(f"gpumem: {error}") from None
    if config.option.inifilename is not None:
        return
    tests = [str(given) for given in config.option.file_or_dir]
    given = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *map(str, config.invocation_params.args)]
    away = astray(tests, given, config.invocation_params.dir, config.inipath)
    if away is not None:
        raise pytest.UsageError(f"gpumem: {away}")


def astray(tests: Sequence[str], arguments: Sequence[str], folder: Path, used: Path | None) -> str | None:
    """A sentence, if pytest uses another ini file than that of the tests because it took values of options for tests.
    `used`: the ini file in use; None if there is none.
    """
    values = [one for one in arguments if not one.startswith("-") and one not in tests and (folder / one).exists()]
    wanted = _ini_file(list(_folders(tests, folder)) or [folder])
    if not values or wanted is None or wanted == used:
        return None
    instead = f"{used} is used" if used is not None else "none is used"
    which = "it" if len(values) == 1 else "them"
    return (
        f"the settings in {wanted} are lost, {instead}: pytest takes {' and '.join(values)} for tests, and looks for an ini file there; "
        f"write {which} as --option=VALUE, with an equals sign, or name the file with -c"
    )


def _folders(tests: Iterable[str], folder: Path) -> Iterator[Path]:
    for one in tests:
        path = Path(os.path.abspath(folder / one.split("::")[0]))
        if path.exists():
            yield path if path.is_dir() else path.parent


def _ini_file(folders: Sequence[Path]) -> Path | None:
    """The file that pytest would find: from the common folder upwards, then from each folder."""
    for start in (Path(os.path.commonpath(folders)), *folders):
        for folder in (start, *start.parents):
            for name, section in _SECTIONS.items():
                if (path := folder / name).is_file() and section.search(path.read_text(errors="replace")):
                    return path
    return None
