"""Tests packed by their memory into workers of pytest-xdist: the controller's side, and what the plan says."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import msgspec
import pytest

from pytest_gpumem.devices.opening import DeviceChoice, NoDevice, choose
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.packing.jobs import Asked, Job, expected, jobs_of, useful_workers
from pytest_gpumem.packing.leases import Gpu, LeaseError, Process, running
from pytest_gpumem.packing.scheduler import PackScheduler
from pytest_gpumem.packing.shares import PAGE, Learnt, load, save
from pytest_gpumem.plugin.gpus import VISIBLE
from pytest_gpumem.plugin.packed import FOLDER, TAKEN, Taken, asked_of, leases_file
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.plugin.workers import Channel, hands_out, worker_count
from pytest_gpumem.printable import printable
from pytest_gpumem.settings import Settings
from pytest_gpumem.units import short_bytes

SPARED = 64  # the part of a GPU's memory that stays free: one of so many
LOOK = 0.2  # seconds between two looks at the leases, and for which what the driver says counts
GAIN = 0.95  # of the time of the tests one after another: a session that takes longer has gained nothing
OVER = 1.02  # a test that takes so many times its share is named
NAMED = 400  # characters of the names of tests in a line


def auto_workers(config: pytest.Config, settings: Settings) -> int:
    """The number of workers for `-n auto`: the fewest with which the tests that are known take the least time."""
    try:
        chosen = choose(settings.device)
        known = load(shares_file(config, chosen))
    except (NoDevice, ValueError):  # the session says so, and that pytest's cache is off
        return 1
    rooms = [room_of(chosen, gpu) for gpu in gpus_of(chosen)]
    jobs = jobs_of([Asked(nodeid) for nodeid in known.tests], known.tests)
    return useful_workers(jobs, rooms, known.idle)


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
    """The file with the shares of a project's tests, in pytest's cache."""
    return (
        Path(config.rootpath, config.getini("cache_dir")).expanduser()
        / "d"
        / "gpumem"
        / f"{chosen.facts.key}.json"
    )


def _why_not(config: pytest.Config, chosen: DeviceChoice) -> str | None:
    """Why tests cannot be packed in this session."""
    if sys.platform != "linux":
        return " needs Linux, which says which processes live"
    if not config.pluginmanager.hasplugin("xdist"):
        return " needs pytest-xdist: pip install pytest-xdist"
    if not config.pluginmanager.hasplugin("cacheprovider"):
        return " keeps what tests take in pytest's cache, which is switched off; leave out -p no:cacheprovider"
    if any(chosen.occupancy(gpu) is None for gpu in gpus_of(chosen)):
        return ": NVML does not say how much memory of the GPU is free"
    if config.option.collectonly:
        return None
    if not hands_out(config):
        return " packs tests into workers: add -n auto, or a number such as -n 8"
    if config.option.dist == "each":
        return ": --dist each runs all tests in each worker; accepted are load, loadfile, loadscope, loadgroup and worksteal"
    if any(not spec.rpartition("*")[2].startswith("popen") for spec in config.option.tx):
        return (
            ": workers on other machines have other GPUs; accepted are workers here, such as -n 8"
        )
    return None


class PackFeature(Feature):
    """With `--gpumem-pack`, in the controller: hands out the tests by the memory that they take."""

    def __init__(self, session: GpuSession, channel: Channel) -> None:
        """Raises `pytest.UsageError`: tests cannot be packed in this session."""
        self._session, self._config = session, session.config
        if (why := _why_not(self._config, session.chosen)) is not None:
            raise pytest.UsageError(f"gpumem: --gpumem-pack{why}")
        self._uuids = gpus_of(session.chosen)
        self._file = shares_file(self._config, session.chosen)
        self._shares = load(self._file)
        self._folder = tempfile.TemporaryDirectory(prefix="gpumem-pack-")
        self._config.add_cleanup(self._folder.cleanup)
        channel.give(FOLDER, lambda here: self._folder.name)
        self._gpus: dict[str, Gpu] = {}
        self._scheduler = PackScheduler(
            worker_count(self._config),
            self._plan,
            self._place,
            time.monotonic,
            self._tell,
            self._stop,
        )
        self._scheduler.config = self._config
        self._names: Sequence[str] = ()  # of the tests that were collected
        self._jobs: Sequence[Job] = ()  # of them, which have numbers
        self._taken: dict[str, Taken] = {}  # by node id
        self._trouble = ""
        self._wall = 0.0

    # GPUs and workers

    def _gpu(self, uuid: str) -> Gpu:
        facts = self._session.facts
        path = leases_file(uuid if facts.uuid is not None else None, Path(self._folder.name))
        room = lru_cache(maxsize=1)(
            lambda at: room_of(
                self._session.chosen, uuid, [one.process.pid for one in gpu.leases()]
            )
        )
        name = f"{facts.name} ({uuid})" if facts.uuid else facts.name
        gpu = self._gpus.setdefault(uuid, Gpu(path, name, lambda: room(time.monotonic() // LOOK)))
        return gpu

    def _place(self, node: Any) -> tuple[Process, tuple[Gpu, ...]]:
        """The process and the GPUs of a worker, its own first."""
        process = running(node.gateway._rinfo().pid)
        order = node.gateway.spec.env.get(VISIBLE) if len(self._uuids) > 1 else None
        gpus = tuple(map(self._gpu, order.split(",") if order else self._uuids))
        with suppress(LeaseError):  # the scheduler says so
            gpus[0].put(
                process, held=self._shares.idle
            )  # until the worker says itself what its context holds
        return process, gpus

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self) -> PackScheduler:
        return self._scheduler

    def _plan(self) -> Sequence[Job]:
        """The jobs of the tests that were collected."""
        file = next(Path(self._folder.name).glob("*.json"))  # all workers have collected the same
        return self._plan_of([Asked(*one) for one in json.loads(file.read_text())])

    def _plan_of(self, tests: Sequence[Asked]) -> Sequence[Job]:
        self._names = [test.nodeid for test in tests]
        self._jobs = jobs_of(
            [test._replace(group=self._group(test)) for test in tests], self._shares.tests
        )
        return self._jobs

    def _group(self, test: Asked) -> str | None:
        """The group in which a test stays, by the option --dist."""
        groups = {
            "loadgroup": test.group,
            "loadscope": test.nodeid.rpartition("::")[0],
            "loadfile": test.nodeid.partition("::")[0],
        }
        return groups.get(self._config.option.dist)

    def _tell(self, line: str) -> None:
        if (reporter := self._config.pluginmanager.getplugin("terminalreporter")) is not None:
            reporter.ensure_newline()
            reporter.write_line(printable(line))

    def _stop(self, why: str) -> None:
        self._config.pluginmanager.getplugin("dsession").shouldstop = printable(why)

    # The session

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        if self._config.option.collectonly:
            yield
            return
        begun, ended = time.monotonic(), threading.Event()
        waker = threading.Thread(target=self._wake, args=(ended,), name="gpumem-pack", daemon=True)
        waker.start()
        try:
            yield
        finally:
            ended.set()
            waker.join()
            self._wall = time.monotonic() - begun
            self._save()

    def _wake(self, ended: threading.Event) -> None:
        """Have xdist's loop look at the leases, which other processes change: the loop itself waits for its workers alone."""
        queue = self._config.pluginmanager.getplugin("dsession").queue
        while not ended.wait(LOOK):
            if self._scheduler.looks and queue.empty():
                queue.put(("unscheduled", {"node": None, "indices": ()}))

    def _save(self) -> None:
        learnt = {}
        for taken in self._taken.values():
            name, before = taken.asked.nodeid, self._shares.tests.get(taken.asked.nodeid)
            if taken.learnt is not None and before is not None:
                learnt[name] = before.after(taken.learnt, failed=taken.failed)
            elif taken.learnt is not None and not taken.failed:
                learnt[name] = taken.learnt
        if not learnt:
            return
        # A worker held as much before its first test.
        self._shares.idle = max(
            self._shares.idle, min(taken.before or 0 for taken in self._taken.values())
        )
        try:
            self._config.cache.mkdir("gpumem")
            save(self._file, self._shares, learnt)
        except OSError as error:
            self._trouble = f"what the tests took could not be kept: {error.strerror or error}"

    def selected(self, session: pytest.Session) -> None:
        if self._config.option.collectonly:
            self._plan_of([asked_of(item, self._session) for item in session.items])

    @contextmanager
    def logged(self, report: pytest.TestReport) -> Iterator[None]:
        yield
        if (told := getattr(report, TAKEN, None)) is not None:
            self._taken[report.nodeid] = taken = msgspec.convert(told, Taken)
            self._scheduler.lives(report.node, taken.lives)

    # What is printed

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._planned() if self._config.option.collectonly else self._said():
            terminalreporter.write_line(printable(f"gpumem: {line}"))

    def _why_alone(self) -> str:
        """Why tests have the GPU to themselves, with their numbers; empty if none has."""
        why = Counter(job.alone for job in self._jobs for _ in job.tests if job.alone)
        return ", ".join(f"{number} {reason}" for reason, number in why.items())

    def _planned(self) -> Iterator[str]:
        """The plan, for `--collect-only`."""
        known, names = self._shares.tests, self._names
        rooms = [room_of(self._session.chosen, uuid) for uuid in self._uuids]
        workers = len(self._config.option.tx) or useful_workers(
            self._jobs, rooms, self._shares.idle
        )
        serial = sum(known[name].seconds for name in names if name in known)
        seconds = expected(self._jobs, rooms, workers, self._shares.idle)
        new = sum(name not in known for name in names)
        on = f"{counted(len(names), 'test')} on {counted(len(rooms), 'GPU')} with {counted(workers, 'worker')}"
        yield f"plan: {on}: {duration(serial)} -> {duration(seconds)} expected" + (
            f", without {new} never measured" if new else ""
        )
        if why := self._why_alone():
            yield f"alone on the GPU: {why}"
        if self._config.get_verbosity() > 0:
            for job in sorted(self._jobs, key=lambda job: (-job.share, job.tests)):
                for name in (names[number] for number in job.tests):
                    alone = f", alone: {job.alone}" if job.alone else ""
                    yield name + (f": {_share(known[name])}" if name in known else "") + alone

    def _said(self) -> Iterator[str]:
        """What the session has to say; the saving comes last."""
        known = self._shares.tests
        for nodeid, taken in self._taken.items():
            if taken.beside and taken.peak > (taken.lease.nbytes + PAGE) * OVER:
                figures = f"{short_bytes(taken.peak)} instead of {short_bytes(taken.lease.nbytes)}"
                yield f"{nodeid} took more than its share: {figures}; the next session knows it"
        if twice := [nodeid for nodeid, taken in self._taken.items() if taken.twice]:
            yield f"{counted(len(twice), 'test')} ran twice (memory), the second time alone on the GPU: {shorten(', '.join(twice), NAMED)}"
        yield from sorted(
            {self._trouble, *(taken.trouble for taken in self._taken.values())} - {""}
        )
        if why := self._why_alone():
            yield f"alone on the GPU: {why}" + (
                "; the next session packs what was never measured"
                if "never measured" in why
                else ""
            )
        if not self._names:
            return
        took = {taken.asked.nodeid: taken.seconds for taken in self._taken.values()}
        serial = sum(
            known[name].seconds if name in known else took.get(name, 0.0) for name in self._names
        )
        nothing = "" if self._wall < GAIN * serial else "packing gained nothing: "
        most = f"{counted(len(self._names), 'test')}, up to {self._scheduler.most} at once"
        yield f"{nothing}{duration(serial)} -> {duration(self._wall)} ({most})"


def _share(known: Learnt) -> str:
    return (
        f"{short_bytes(known.share) if known.share else 'no GPU work'}, {duration(known.seconds)}"
    )


def duration(seconds: float) -> str:
    """ "0.42 s", "31 s", "12 min", "4 min 5 s"."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"
