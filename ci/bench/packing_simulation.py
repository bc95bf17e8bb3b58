"""Simulate packed sessions on virtual time, with the scheduler and the leases that are shipped. Needs no GPU.

A suite has 200 tests of 0 to 40 GiB and 0.1 to 5 s; one in twenty-five measures, one in twenty-five does no GPU work, two take two GPUs.
Each scenario draws suites of its own. A test takes its whole memory at once, and holds it to its end: where that is more than the GPU has,
it runs out of memory, and repeats with the GPU to itself, as in a worker. The leases are files. Processes, GPUs and clocks are simulated.

The bound of a suite is the largest of: memory x time over the memory of all GPUs, where a test that has a GPU to itself takes all of it;
its longest test; its measuring tests one after another on each GPU. Exits with 1 if a promise is broken: with true peaks no test runs out
of memory, no test fails by memory, nothing stays locked, and half of the undisturbed suites end within 1.15 times their bound.

    python ci/bench/packing_simulation.py --json ci/records/no-gpu/packing_simulation.json
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import record_parser, utc_now, write_record

from pytest_gpumem.packing.jobs import Asked, Job, jobs_of
from pytest_gpumem.packing.leases import ALONE, IDLE, WAITS, Gpu, LeaseError, Process, take
from pytest_gpumem.packing.scheduler import PackScheduler
from pytest_gpumem.packing.shares import Learnt
from pytest_gpumem.units import GiB, MiB

TESTS = 200
CONTEXT = 512 * MiB  # that a worker holds between tests
WORKERS = 6  # of each GPU
SPARED = 64  # as in the plugin: one part of so many of a GPU stays free
LOOK, POLL, START = (
    0.2,
    0.05,
    2.0,
)  # seconds between two looks of a session, and of a worker that waits; of starting a worker
MEASURES = "measures"
LIMIT = 1.15  # times the bound, for the median of undisturbed suites
SCENARIOS: dict[str, tuple[int, int, int]] = {
    "true peaks, 2 GPUs": (300, 80, 2),
    "true peaks, 4 MIG slices": (200, 71, 4),
    "a tenth of the peaks wrong by up to 50 %": (200, 80, 2),
    "workers killed idle, running and at the end": (100, 80, 2),
    "two sessions, one killed": (100, 80, 2),
    "full disk under the leases for a while": (50, 80, 2),
    "another session holds everything for a while": (50, 80, 2),
}
"""By what happens: number of suites, GiB of a GPU, GPUs."""
UNDISTURBED = ("true peaks, 2 GPUs", "true peaks, 4 MIG slices")


@dataclass
class Test:
    asked: Asked
    seconds: float
    nbytes: int  # that it takes
    recorded: int  # that earlier sessions have seen
    works: bool

    @property
    def learnt(self) -> Learnt:
        return Learnt(self.seconds, (self.recorded if self.works else 0,))


def suite(draw: random.Random, wrong: float) -> list[Test]:
    """The tests of a suite. `wrong`: part of the recorded peaks that are wrong."""
    tests = []
    for number in range(TESTS):
        kind = number % 25
        alone = MEASURES if kind == 3 else "takes 2 GPUs" if number in (60, 140) else ""
        asked = Asked(
            f"test_{number // 10}.py::test_{number}",
            gpus=2 if number in (60, 140) else 1,
            alone=alone,
        )
        nbytes, works = int(draw.uniform(0, 40) * GiB), kind != 4
        recorded = int(nbytes * (draw.uniform(0.5, 1.5) if draw.random() < wrong else 1))
        tests.append(Test(asked, draw.uniform(0.1, 5), nbytes if works else 0, recorded, works))
    draw.shuffle(tests)
    return tests


def bound(tests: Sequence[Test], capacity: int, gpus: int) -> float:
    """Seconds below which no session can be."""
    alone = [test for test in tests if test.asked.alone]
    area = sum(
        test.seconds * (capacity * test.asked.gpus if test in alone else test.nbytes)
        for test in tests
    )
    measuring = sum(test.seconds for test in alone if test.asked.alone == MEASURES) / gpus
    return max(area / (capacity * gpus), measuring, *(test.seconds for test in tests))


class World:
    """The machine: a clock, processes, and the memory of its GPUs."""

    def __init__(self, folder: Path, capacity: int, gpus: int) -> None:
        self.now, self.capacity = 0.0, capacity
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self.alive: set[Process] = set()
        self.held: list[dict[Process, int]] = [{} for _ in range(gpus)]  # of each GPU
        self.room = capacity - capacity // SPARED
        self.gpus = [
            Gpu(
                folder / f"{number}.leases", str(number), lambda: self.room, self.alive.__contains__
            )
            for number in range(gpus)
        ]
        self.out_of_memory = 0

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), what))

    def process(self) -> Process:
        found = Process(next(self._numbers), 1)
        self.alive.add(found)
        return found

    def end(self, process: Process) -> None:
        self.alive.discard(process)
        for held in self.held:
            held.pop(process, None)

    def allocate(self, gpus: Sequence[int], process: Process, nbytes: int) -> bool:
        for gpu in gpus:
            held = self.held[gpu]
            if sum(held.values()) + nbytes > self.capacity:
                self.out_of_memory += 1
                return False
        for gpu in gpus:
            self.held[gpu][process] = self.held[gpu].get(process, 0) + nbytes
        return True

    def free(self, gpus: Sequence[int], process: Process, nbytes: int) -> None:
        for gpu in gpus:
            self.held[gpu][process] -= nbytes

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            at, _, what = heapq.heappop(self._events)
            self.now = max(self.now, at)
            what()
            if self.now > 3600:
                raise RuntimeError("a session does not end")


@dataclass(eq=False)
class Worker:
    """A worker, with the methods of xdist's that the scheduler calls."""

    session: Session
    number: int
    process: Process = field(init=False)
    gpus: list[int] = field(init=False)
    queue: list[int] = field(default_factory=list)
    shutting_down: bool = False
    running: int | None = None

    def __post_init__(self) -> None:
        world = self.session.world
        self.process = world.process()
        count = len(world.gpus)
        self.gpus = [(self.number + more) % count for more in range(count)]
        world.held[self.gpus[0]][self.process] = CONTEXT
        world.gpus[self.gpus[0]].put(self.process, held=CONTEXT)

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self.queue += indices
        if self.running is None:
            self._next()

    def shutdown(self) -> None:
        self.shutting_down = True
        self.session.world.at(0.1, partial(self.session.world.end, self.process))

    def _next(self) -> None:
        tests = self.session.tests
        while self.queue and self.queue[0] >= len(tests):
            self.queue.pop(0)  # a place holder
        if not self.queue:
            return
        self.running = self.queue.pop(0)
        self._begin(again=False)

    def _begin(self, *, again: bool) -> None:
        world, number = self.session.world, self.running or 0
        test = self.session.tests[number]
        gpus = self.gpus[: test.asked.gpus]
        if world.allocate(gpus, self.process, test.nbytes):
            world.at(test.seconds, partial(self._end, gpus, test))
        elif again:
            self.session.failed.append(test.asked.nodeid)
            self._done(gpus)
        else:
            self.session.twice += 1
            ticket = int(world.now * 1e9) + 1
            for gpu in gpus:
                world.gpus[gpu].put(self.process, share=0, state=WAITS, ticket=ticket)
            self._await(gpus)

    def _await(self, gpus: Sequence[int]) -> None:
        world = self.session.world
        if self.process not in world.alive:
            return
        if take([world.gpus[gpu] for gpu in gpus], self.process, 0, alone=True):
            self._begin(again=True)
        else:
            world.at(POLL, partial(self._await, gpus))

    def _end(self, gpus: Sequence[int], test: Test) -> None:
        if self.process not in self.session.world.alive:
            return
        self.session.world.free(gpus, self.process, test.nbytes)
        self._done(gpus)

    def _done(self, gpus: Sequence[int]) -> None:
        world, ran = self.session.world, self.running
        if not self.queue or self.queue[0] >= len(self.session.tests):
            self._give_back(gpus)
        self.running = None
        self.session.ended += 1
        self.session.last = world.now
        self.session.scheduler.mark_test_complete(self, ran or 0)
        if self.running is None:
            self._next()

    def _give_back(self, gpus: Sequence[int]) -> None:
        """As a worker: where it cannot, the lease stays, until its next job ends."""
        try:
            for gpu in gpus:
                self.session.world.gpus[gpu].put(self.process, share=0, state=IDLE)
        except LeaseError:
            self.session.world.at(LOOK, partial(self._give_back_later, gpus))

    def _give_back_later(self, gpus: Sequence[int]) -> None:
        if self.process in self.session.world.alive and self.running is None:
            self._give_back(gpus)


class Session:
    """A session of pytest."""

    def __init__(self, world: World, tests: Sequence[Test], workers: int) -> None:
        self.world, self.tests = world, tests
        self.failed: list[str] = []
        self.killed: list[str] = []
        self.stopped = ""
        self.twice = self.ended = 0
        self.last = 0.0
        self.dead = False
        self.scheduler = PackScheduler(
            workers,
            self._plan,
            lambda node: (node.process, tuple(world.gpus[number] for number in node.gpus)),
            lambda: world.now,
            lambda line: None,
            lambda why: setattr(self, "stopped", why),
        )
        self.workers = [Worker(self, number) for number in range(workers)]
        for worker in self.workers:
            self._join(worker)
        self.scheduler.schedule()
        self._look()

    def _plan(self) -> list[Job]:
        return jobs_of(
            [test.asked for test in self.tests],
            {test.asked.nodeid: test.learnt for test in self.tests},
        )

    def _join(self, worker: Worker) -> None:
        self.scheduler.add_node(worker)
        self.scheduler.add_node_collection(worker, [test.asked.nodeid for test in self.tests])

    def _look(self) -> None:
        if not self.over:
            if self.scheduler.looks:
                self.scheduler.remove_pending_tests_from_node(None, ())
            self.world.at(LOOK, self._look)

    @property
    def over(self) -> bool:
        return self.dead or bool(self.stopped) or self.scheduler.tests_finished

    def kill_worker(self, worker: Worker) -> None:
        """As by the system: xdist learns of it, and starts another one."""
        if self.over or worker.shutting_down or worker not in self.workers:
            return
        self.workers.remove(worker)
        worker.shutting_down = True
        self.world.end(worker.process)
        ran = self.scheduler.remove_node(worker)
        if ran is not None:
            self.killed.append(ran)
        self.world.at(START, partial(self._replace, worker.number))

    def _replace(self, number: int) -> None:
        if not self.over:
            self.workers.append(Worker(self, number))
            self._join(self.workers[-1])
            self.scheduler.schedule()

    def end(self, *, killed: bool = False) -> None:
        self.dead = self.dead or killed
        for worker in self.workers:
            worker.shutting_down = True
            self.world.end(worker.process)


def disturb(
    scenario: str, world: World, session: Session, draw: random.Random, further: list[Session]
) -> None:
    """Have happen what a scenario is about."""
    if scenario.startswith("workers killed"):
        for _ in range(6):
            world.at(draw.uniform(0, 70), lambda: session.kill_worker(draw.choice(session.workers)))
        idle = [one for one in session.workers if one.running is None]
        world.at(1.0, lambda: session.kill_worker(draw.choice(idle or session.workers)))
    elif scenario.startswith("two sessions"):
        other = Session(world, suite(draw, 0.1), WORKERS * len(world.gpus))
        further.append(other)
        world.at(draw.uniform(5, 60), lambda: other.end(killed=True))
    elif scenario.startswith("full disk"):
        written = os.pwrite

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        world.at(draw.uniform(1, 30), lambda: setattr(os, "pwrite", full))
        world.at(draw.uniform(31, 60), lambda: setattr(os, "pwrite", written))
    elif scenario.startswith("another session"):
        holder = world.process()
        for gpu in world.gpus:
            gpu.put(holder, held=world.room, state=ALONE)
        world.at(draw.uniform(20, 120), lambda: world.end(holder))


def simulated(scenario: str, seed: int, folder: Path) -> dict[str, Any]:
    """One suite."""
    _, capacity, gpus = SCENARIOS[scenario]
    draw = random.Random(f"{scenario} {seed}")
    world = World(folder, capacity * GiB, gpus)
    tests = suite(draw, 0.1 if scenario.startswith("a tenth") else 0.0)
    further: list[Session] = []
    session = Session(world, tests, WORKERS * gpus)
    disturb(scenario, world, session, draw, further)
    world.run(lambda: session.over and all(one.over for one in further))
    wall = session.last
    session.end()
    for one in further:
        one.end()
    locked = sum(len(gpu.leases()) for gpu in world.gpus)
    for gpu in world.gpus:
        gpu.path.unlink()
    least = bound(tests, world.capacity, gpus)
    return {
        "ratio": wall / least,
        "serial": sum(test.seconds for test in tests) / wall,
        "out_of_memory": world.out_of_memory,
        "twice": session.twice,
        "failed": len(session.failed) + bool(session.stopped),
        "not_run": TESTS - session.ended - len(session.killed),
        "locked": locked,
    }


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a scenario showed."""
    ratios = sorted(one["ratio"] for one in found)
    sums = {
        name: sum(one[name] for one in found)
        for name in ("out_of_memory", "twice", "failed", "not_run", "locked")
    }
    faster = statistics.median(one["serial"] for one in found)
    return {
        "suites": len(found),
        "median": statistics.median(ratios),
        "p95": ratios[int(0.95 * (len(ratios) - 1))],
        "worst": ratios[-1],
        "times_faster": faster,
        **sums,
    }


def broken(name: str, of: dict[str, Any]) -> list[str]:
    """The promises that a scenario breaks."""
    found = [f"{name}: {of[what]} {what}" for what in ("failed", "not_run", "locked") if of[what]]
    if not name.startswith(("a tenth", "two sessions")) and of["out_of_memory"]:
        found.append(f"{name}: {of['out_of_memory']} tests with true peaks ran out of memory")
    if name in UNDISTURBED and of["median"] > LIMIT:
        found.append(f"{name}: {of['median']:.3f} times the bound in the median")
    return found


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    lines = [
        "SIMULATED, no GPU: suites of 200 tests: time over the bound, and how much faster than one test after another",
        "",
    ]
    heads = (
        "suites",
        "median",
        "95 %",
        "worst",
        "faster",
        "no memory",
        "fail",
        "not run",
        "locked",
    )
    lines.append(f"{'':45}" + "".join(f"{head:>10}" for head in heads))
    for name, of in record["scenarios"].items():
        figures = [f"{of[key]:.2f}" for key in ("median", "p95", "worst", "times_faster")]
        counts = [str(of[key]) for key in ("out_of_memory", "failed", "not_run", "locked")]
        lines.append(
            f"{name:45}" + "".join(f"{one:>10}" for one in (str(of["suites"]), *figures, *counts))
        )
    return "\n".join(lines)


def main() -> int:
    parser = record_parser(__doc__, device=None)
    parser.add_argument(
        "--part", type=float, default=1.0, help="part of the suites (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="scenarios whose name begins so")
    given = parser.parse_args()
    begun, started = utc_now(), time.perf_counter()
    scenarios = {}
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        for name, (suites, _, _) in SCENARIOS.items():
            if name.startswith(given.only):
                scenarios[name] = summary(
                    [
                        simulated(name, seed, Path(folder))
                        for seed in range(max(1, round(suites * given.part)))
                    ]
                )
    record = {
        "kind": "packing_simulation",
        "begun": begun,
        "ended": utc_now(),
        "seconds": time.perf_counter() - started,
        "scenarios": scenarios,
    }
    print(table(record))
    faults = [fault for name, of in scenarios.items() for fault in broken(name, of)]
    print(*faults, sep="\n")
    if given.json is not None:
        write_record(given.json, record, indent=1)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
