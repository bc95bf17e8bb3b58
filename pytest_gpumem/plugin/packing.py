"""Tests packed by their memory into workers of pytest-xdist: the controller's side, and what the plan says."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.devices.opening import DeviceChoice, NoDevice, choose
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.packing.jobs import Asked, Job, expected, jobs_of, useful_workers
from pytest_gpumem.packing.leases import IDLE, Lease, Leases, Process, this_process
from pytest_gpumem.packing.scheduler import Gpu, PackScheduler
from pytest_gpumem.packing.shares import PAGE, Learnt, load, save
from pytest_gpumem.plugin.gpus import VISIBLE
from pytest_gpumem.plugin.packed import FOLDER, TAKEN, asked_of, leases_file
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.plugin.workers import Channel, hands_out, worker_count
from pytest_gpumem.printable import printable
from pytest_gpumem.settings import Settings
from pytest_gpumem.units import short_bytes

SPARED = 64  # the part of a GPU's memory that stays free: one of so many
LOOK = 0.2  # seconds between two looks at the leases, and for which what the driver says counts
GAIN = 0.95  # of the time of the tests one after another: a session that takes longer has gained nothing
NAMED = 5  # tests that a line names
OVER = 1.02  # a test that takes so many times its share is named


def auto_workers(config: pytest.Config, settings: Settings) -> int:
    """The number of workers for `-n auto`: the fewest with which the tests that are known take the least time."""
    try:
        chosen = choose(settings.device)
    except NoDevice:  # the session says so
        return 1
    known = load(shares_file(config, chosen))
    rooms = [room_of(chosen, gpu) for gpu in gpus_of(chosen)]
    jobs = jobs_of([Asked(nodeid) for nodeid in known.tests], known.tests)
    return useful_workers(jobs, rooms, known.idle) if jobs else len(rooms)


def gpus_of(chosen: DeviceChoice) -> list[str]:
    """The UUIDs of the session's GPUs of one model; of a simulated device its key."""
    return [*chosen.alike] or [chosen.facts.uuid or chosen.facts.key]


def room_of(chosen: DeviceChoice, gpu: str, leased: Iterable[int] = ()) -> int:
    """Bytes of a GPU for tests: without what processes hold that are not `leased`."""
    found = chosen.occupancy(gpu)
    if found is None:
        return 0
    foreign = found.used - sum(found.of.get(pid, 0) for pid in leased)
    return found.total - found.total // SPARED - max(0, foreign)


def shares_file(config: pytest.Config, chosen: DeviceChoice) -> Path:
    """The file with the shares of a project's tests.
    Raises `pytest.UsageError`: pytest's cache is switched off.
    """
    if not config.pluginmanager.hasplugin("cacheprovider"):
        raise pytest.UsageError(
            "gpumem: --gpumem-pack keeps what tests take in pytest's cache, which is switched off; leave out -p no:cacheprovider"
        )
    return Path(config.rootpath, config.getini("cache_dir")).expanduser() / "d" / "gpumem" / f"{chosen.facts.key}.json"


def check(config: pytest.Config, chosen: DeviceChoice) -> None:
    """Raises `pytest.UsageError`: tests cannot be packed in this session."""
    if sys.platform != "linux":
        raise pytest.UsageError("gpumem: --gpumem-pack needs Linux, which says which processes live")
    if not config.pluginmanager.hasplugin("xdist"):
        raise pytest.UsageError("gpumem: --gpumem-pack needs pytest-xdist: pip install pytest-xdist")
    if any(chosen.occupancy(gpu) is None for gpu in gpus_of(chosen)):
        raise pytest.UsageError("gpumem: --gpumem-pack: NVML does not say how much memory of the GPU is free")
    if config.option.collectonly:
        return
    if not hands_out(config):
        raise pytest.UsageError("gpumem: --gpumem-pack packs tests into workers: add -n auto, or a number such as -n 8")
    if config.option.dist == "each":
        raise pytest.UsageError(
            "gpumem: --gpumem-pack: --dist each runs all tests in each worker; accepted are load, loadfile, loadscope, "
            "loadgroup and worksteal"
        )
    if any(not spec.rpartition("*")[2].startswith("popen") for spec in config.option.tx):
        raise pytest.UsageError("gpumem: --gpumem-pack: workers on other machines have other GPUs; accepted are workers here, such as -n 8")


class _Notes:
    """What a session has to say of its packing."""

    def __init__(self) -> None:
        self.over: dict[str, str] = {}  # tests that took more than their share, each with the figures
        self.twice: list[str] = []  # tests that ran out of memory, and ran again alone
        self.trouble: dict[str, None] = {}


class PackFeature(Feature):
    """With `--gpumem-pack`, in the controller: hands out the tests by the memory that they take."""

    def __init__(self, session: GpuSession, channel: Channel) -> None:
        self._session, self._config = session, session.config
        self._shares = load(self._file())
        self._folder = tempfile.TemporaryDirectory(prefix="gpumem-pack-")
        self._config.add_cleanup(self._folder.cleanup)
        channel.give(FOLDER, lambda here: self._folder.name)
        self._gpus: dict[str, Gpu] = {}
        self._scheduler: PackScheduler | None = None
        self._jobs: Sequence[Job] = ()
        self._names: Sequence[str] = ()  # of the tests, as they are learnt
        self._learnt: dict[str, Learnt] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._failed: set[str] = set()
        self._notes = _Notes()
        self._wall = 0.0
        self._ended = threading.Event()

    def _file(self) -> Path:
        return shares_file(self._config, self._session.chosen)

    # GPUs and workers

    def _gpu(self, uuid: str) -> Gpu:
        if uuid not in self._gpus:
            leases = Leases(leases_file(uuid if self._session.facts.uuid is not None else None, Path(self._folder.name)))
            self._config.add_cleanup(leases.close)
            read = lru_cache(maxsize=1)(lambda at: room_of(self._session.chosen, uuid, [one.process.pid for one in leases.all()]))
            name = f"{self._session.facts.name} ({uuid})" if self._session.facts.uuid else self._session.facts.name
            self._gpus[uuid] = Gpu(name, leases, lambda: read(int(time.monotonic() / LOOK)))
        return self._gpus[uuid]

    def _gpus_of(self, node: Any) -> tuple[Gpu, ...]:
        """The GPUs of a worker, its own first."""
        order = node.gateway.spec.env.get(VISIBLE) if len(gpus_of(self._session.chosen)) > 1 else None
        return tuple(map(self._gpu, order.split(",") if order else gpus_of(self._session.chosen)))

    @staticmethod
    def _process_of(node: Any) -> Process:
        return this_process(node.gateway._rinfo().pid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        # What its context will hold, until it says so itself.
        self._gpus_of(node)[0].leases.put(Lease(self._process_of(node), self._shares.idle, IDLE))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config) -> PackScheduler:
        self._scheduler = PackScheduler(
            worker_count(config),
            self._plan,
            self._process_of,
            self._gpus_of,
            time.monotonic,
            self._tell,
            self._stop,
            self._differ,
        )
        self._scheduler.config = config
        return self._scheduler

    def _plan(self, ids: Sequence[str]) -> Sequence[Job]:
        """The jobs of the tests that were collected."""
        file = next(Path(self._folder.name).glob("*.json"))  # all workers have collected the same
        tests = [Asked(*one) for one in json.loads(file.read_text())] if ids else []
        self._take(tests)
        return self._jobs

    def _take(self, tests: Sequence[Asked]) -> None:
        self._names = [test.nodeid for test in tests]
        self._jobs = jobs_of([test._replace(group=self._group(test)) for test in tests], self._shares.tests)

    def _group(self, test: Asked) -> str | None:
        """The group in which a test stays, by the option --dist."""
        dist = self._config.option.dist
        if dist == "loadgroup":
            return test.group
        return {"loadscope": test.nodeid.rpartition("::")[0], "loadfile": test.nodeid.partition("::")[0]}.get(dist)

    def _tell(self, line: str) -> None:
        if (reporter := self._config.pluginmanager.getplugin("terminalreporter")) is not None:
            reporter.ensure_newline()
            reporter.write_line(printable(line))

    def _stop(self, why: str) -> None:
        self._config.pluginmanager.getplugin("dsession").shouldstop = printable(why)

    def _differ(self, one: Any, other: Any, ids: Sequence[str], others: Sequence[str]) -> bool:
        from xdist.report import report_collection_diff  # type: ignore[import-untyped]

        text = report_collection_diff(ids, others, one.gateway.id, other.gateway.id)
        if text:
            report = pytest.CollectReport(nodeid=other.gateway.id, outcome="failed", longrepr=text, result=[])
            self._config.hook.pytest_collectreport(report=report)
        return bool(text)

    # The session

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        if self._config.option.collectonly:
            yield
            return
        begun = time.monotonic()
        waker = threading.Thread(target=self._wake, name="gpumem-pack", daemon=True)
        waker.start()
        try:
            yield
        finally:
            self._ended.set()
            waker.join()
            self._wall = time.monotonic() - begun
            self._save()

    def _wake(self) -> None:
        """Have xdist's loop look at the leases, which other processes change: the loop itself waits for its workers alone."""
        queue = self._config.pluginmanager.getplugin("dsession").queue
        while not self._ended.wait(LOOK):
            if self._scheduler is not None and self._scheduler.looks and queue.empty():
                queue.put(("unscheduled", {"node": None, "indices": ()}))

    def _save(self) -> None:
        if not self._learnt:
            return
        try:
            self._config.cache.mkdir("gpumem")
            save(self._file(), self._shares, self._learnt)
        except OSError as error:
            self._notes.trouble[f"what the tests took could not be kept: {error.strerror or error}"] = None

    def selected(self, session: pytest.Session) -> None:
        if self._config.option.collectonly:
            self._take([asked_of(item, self._session) for item in session.items])

    @contextmanager
    def logged(self, report: pytest.TestReport) -> Iterator[None]:
        yield
        taken = getattr(report, TAKEN, None)
        name = report.nodeid if taken is None else taken["name"]
        self._seconds[name] += report.duration
        if report.failed:
            self._failed.add(name)
        if taken is None:
            return
        if taken["twice"]:
            self._notes.twice.append(report.nodeid)
        if taken["trouble"]:
            self._notes.trouble[taken["trouble"]] = None
        if taken["peak"] is None:
            return
        self._shares.idle = max(self._shares.idle, min(taken["held"], taken["idle"]))
        if self._scheduler is not None:
            self._scheduler.lives(report.node, taken["lives"])
        grown = (taken["grown"],) if taken["works"] else ()
        now = Learnt(self._seconds[name], grown, taken["fixtures"], taken["works"], taken["measures"], taken["greedy"])
        before = self._shares.tests.get(name)
        if before is not None and 0 < taken["share"] < taken["peak"] / OVER - PAGE:
            self._notes.over[report.nodeid] = f"{short_bytes(taken['peak'])} instead of {short_bytes(taken['share'])}"
        if before is not None:
            self._learnt[name] = before.after(now, failed=name in self._failed)
        elif name not in self._failed:
            self._learnt[name] = now

    # What is printed

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = self._planned() if self._config.option.collectonly else [*self._said()]
        for line in lines:
            terminalreporter.write_line(printable(f"gpumem: {line}"))

    def _why_alone(self) -> str:
        """Why tests have the GPU to themselves, with their numbers; empty if none has."""
        why = Counter[str]()
        for job in self._jobs:
            if job.alone:
                why[re.sub("took .* of", "took most of", job.alone)] += len(job.tests)
        return ", ".join(f"{number} {reason}" for reason, number in why.items())

    def _planned(self) -> list[str]:
        """The plan, for `--collect-only`."""
        chosen, known = self._session.chosen, self._shares.tests
        rooms = [room_of(chosen, gpu) for gpu in gpus_of(chosen)]
        workers = len(self._config.option.tx) or useful_workers(self._jobs, rooms, self._shares.idle) if self._jobs else len(rooms)
        serial = sum(known[name].seconds for name in self._names if name in known)
        seconds = expected(self._jobs, rooms, workers, self._shares.idle)
        new = sum(name not in known for name in self._names)
        on = f"{counted(len(self._names), 'test')} on {counted(len(rooms), 'GPU')} with {counted(workers, 'worker')}"
        lines = [f"plan: {on}: {duration(serial)} -> {duration(seconds)} expected" + (f", without {new} never measured" if new else "")]
        if why := self._why_alone():
            lines.append(f"alone on the GPU: {why}")
        packed = [job for job in self._jobs if job.works and not job.alone]
        if largest := max(packed, key=lambda job: job.share, default=None):
            share = f"{short_bytes(largest.share)} of {short_bytes(rooms[0])}"
            lines.append(f"largest share of the others: {share} ({self._names[largest.tests[0]]})")
        if self._config.get_verbosity() > 0:
            lines += [line for job in sorted(self._jobs, key=lambda job: (-job.share, job.tests)) for line in self._planned_job(job)]
        return lines

    def _planned_job(self, job: Job) -> Iterator[str]:
        """A line for each test of a job."""
        for name in (self._names[number] for number in job.tests):
            known = self._shares.tests.get(name)
            took = "" if known is None else f": {short_bytes(known.share) if known.works else 'no GPU work'}, {duration(known.seconds)}"
            yield f"{name}{took}" + (f", alone: {job.alone}" if job.alone else "")

    def _said(self) -> Iterator[str]:
        """What the session has to say; the saving comes last."""
        notes = self._notes
        for nodeid, figures in notes.over.items():
            yield f"{nodeid} took more than its share: {figures}; the next session knows it"
        if notes.twice:
            yield f"{counted(len(notes.twice), 'test')} ran twice (memory), the second time alone on the GPU: {_some(notes.twice)}"
        yield from notes.trouble
        why = self._why_alone()
        if why:
            yield f"alone on the GPU: {why}" + ("; the next session packs what was never measured" if "never measured" in why else "")
        known = {**self._shares.tests, **self._learnt}
        serial = sum(known[name].seconds if name in known else self._seconds[name] for name in self._names)
        if not self._names or self._scheduler is None:
            return
        most = f"{counted(len(self._names), 'test')}, up to {self._scheduler.most} at once"
        if self._wall < GAIN * serial:
            yield f"{duration(serial)} -> {duration(self._wall)} ({most})"
        else:
            yield f"packing gained nothing: {duration(self._wall)}, and {duration(serial)} for the tests one after another ({most})"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def duration(seconds: float) -> str:
    """ "0.42 s", "31 s", "12 min", "4 min 5 s"."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"
