"""The scheduler, with the methods that pytest-xdist calls: it chooses the next job and its worker.

A worker of xdist begins a test when it is sent what follows. What follows a job is a place holder, which begins with the next job: so a
worker that has nothing to do can get any job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gpumem.packing.jobs import Job, ordered
from pytest_gpumem.packing.leases import IDLE, WAITS, Gpu, LeaseError, Process, take

RESERVED_AFTER = 30.0  # seconds after which what does not fit gets a reservation: nothing else starts on its GPU before
TELL_EVERY = 30.0  # seconds without a test that runs, after which a line says so
RELIEF = 5.0  # seconds without a test that runs, after which workers that do nothing end, for the memory that they hold
GIVE_UP_AFTER = 600.0  # seconds without a test that runs, after which the session ends


@dataclass(eq=False)
class _Worker:
    """A worker of xdist."""

    node: Any
    process: Process
    gpus: tuple[Gpu, ...]  # in its order: its own is the first
    collected: bool = False  # the tests of the session
    left: list[int] = field(default_factory=list)  # tests of its job that have not ended
    waits: bool = False  # its job is reserved, and has not begun
    lives: frozenset[str] = frozenset()
    """Fixtures of wider scopes that live in it, and that jobs may use."""

    @property
    def runs(self) -> bool:
        return bool(self.left) and not self.waits

    @property
    def idle(self) -> bool:
        return self.collected and not self.left and not self.node.shutting_down

    def needs(self, job: Job) -> int:
        """Bytes that it needs for a job beyond what it holds."""
        there = (
            sum(nbytes for name, nbytes in job.fixtures if name in self.lives)
            if job.fixtures
            else 0
        )
        return max(0, job.share - there)

    def take(self, job: Job, *, alone: bool = False) -> bool:
        """Take what a job needs, of all its GPUs; False if one of them leaves too little."""
        return take(
            self.gpus[: job.gpus], self.process, self.needs(job), alone=alone or job.alone != ""
        )


class PackScheduler:
    """Starts the longest job that fits, where most memory is free. Jobs that are alone on their GPU come first, when none runs yet."""

    def __init__(
        self,
        count: int,
        plan: Callable[[], Iterable[Job]],
        place: Callable[[Any], tuple[Process, tuple[Gpu, ...]]],
        clock: Callable[[], float],
        tell: Callable[[str], None],
        stop: Callable[[str], None],
    ) -> None:
        """`count`: workers that the session starts with. `plan`: the jobs, once they have collected. `place`: process and GPUs of one.
        `clock`: seconds, the same in all processes. `tell`: prints a line. `stop`: ends the session with a reason.
        """
        self._count, self._plan, self._place = count, plan, place
        self._clock, self._tell, self._stop = clock, tell, stop
        self._workers: dict[Any, _Worker] = {}
        self._ids: list[str] = []  # the tests that were collected
        self._jobs: Sequence[Job] | None = None  # of them
        self._pending: list[Job] = []  # in the order in which they start
        self._unfit: dict[Job, float] = {}  # since when it does not fit
        self._still = self._told = 0.0  # since when no test runs, and since when nobody has said so
        self.most = 0  # jobs that ran at once
        self.config: Any = None  # pytest's, which plugins ask a scheduler of xdist for

    # What xdist asks

    @property
    def nodes(self) -> list[Any]:
        return [*self._workers]

    @property
    def collection_is_completed(self) -> bool:
        return (
            self._jobs is not None
            or sum(worker.collected for worker in self._workers.values()) >= self._count
        )

    @property
    def has_pending(self) -> bool:
        return bool(self._pending) or any(worker.left for worker in self._workers.values())

    @property
    def tests_finished(self) -> bool:
        return self._jobs is not None and not self.has_pending

    def add_node(self, node: Any) -> None:
        self._workers[node] = _Worker(node, *self._place(node))

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        if self._jobs is None and not any(worker.collected for worker in self._workers.values()):
            self._ids = [*collection]
        if self._ids == [*collection]:
            self._workers[node].collected = True
        elif self._jobs is None:
            differ = sorted({*collection} ^ {*self._ids})[:1] or "the same tests in another order"
            self._stop(
                f"gpumem: --gpumem-pack: workers collected different tests: {''.join(differ)}"
            )

    def schedule(self) -> None:
        if self._jobs is None:
            self._jobs = [*self._plan()]
            self._pending = ordered(self._jobs)
            self._still = self._told = self._clock()
        self._fill()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        worker = self._workers.get(node)
        if worker is None or item_index not in worker.left:
            return  # a place holder
        worker.left.remove(item_index)
        if not worker.left:  # the worker itself has given back what it does not hold
            self._fill()

    def mark_test_pending(self, item: str) -> None:
        self._await([self._ids.index(item)])
        self._fill()

    def remove_node(self, node: Any) -> str | None:
        """Forget a worker; the test that it ran, if it ran one. What else it had been given is given to others."""
        worker = self._workers.pop(node)
        ran = self._ids[worker.left.pop(0)] if worker.runs else None
        if worker.left:
            self._await(worker.left)
        return ran

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> None:
        """Look at the leases again. xdist calls it for an event that the session sends to itself."""
        self._fill()

    # What starts

    @property
    def looks(self) -> bool:
        """True while jobs wait for memory, which others may give back."""
        return bool(self._pending) or any(worker.waits for worker in self._workers.values())

    def lives(self, node: Any, fixtures: Iterable[str]) -> None:
        """Take note of the fixtures that live in a worker."""
        if node in self._workers:
            self._workers[node].lives = frozenset(fixtures)

    def _job(self, tests: Sequence[int]) -> Job:
        """The job of some of its tests."""
        return next(job for job in self._jobs or () if tests[0] in job.tests)._replace(
            tests=(*tests,)
        )

    def _await(self, tests: Sequence[int]) -> None:
        self._pending = ordered([*self._pending, self._job(tests)])

    def _fill(self) -> None:
        """Start what can be started."""
        if self._jobs is None:
            return
        try:
            for worker in [
                worker
                for worker in self._workers.values()
                if worker.waits and not worker.node.shutting_down
            ]:
                self._begin_reserved(worker, self._job(worker.left))
            while self._start_next():
                pass
            self._look_at_stillness()
        except LeaseError as error:
            self._look_at_stillness(str(error))

    def _start_next(self) -> bool:
        """Start the first job in the order that fits; False if none does."""
        idle = sorted(
            (worker for worker in self._workers.values() if worker.idle),
            key=lambda worker: len(worker.lives),
        )
        if not self._pending or not idle:
            return False
        # Of each GPU the worker with most fixtures, and what is free there.
        free = {
            worker: gpu.free()
            for gpu, worker in {worker.gpus[0]: worker for worker in idle}.items()
        }
        workers = sorted(free, key=lambda worker: -free[worker])
        now, refused = self._clock(), set[object]()
        for job in self._pending:
            for worker in workers:
                asked = worker, job.gpus, job.alone != ""
                if job.works and (
                    asked in refused or (not job.alone and worker.needs(job) > free[worker])
                ):
                    continue
                if not job.works or worker.take(job):
                    self._pending.remove(job)
                    self._begin(worker, job)
                    return True
                refused.add(
                    asked
                )  # so would others be: the GPU is not free for a test alone, or not open to any
            self._unfit.setdefault(job, now)
        late = [job for job in self._pending if now - self._unfit[job] >= RESERVED_AFTER]
        if late and not any(worker.waits for worker in self._workers.values()):
            self._reserve(workers[0], max(late, key=lambda job: (bool(job.alone), job.share)))
        return False

    def _begin(self, worker: _Worker, job: Job) -> None:
        self._unfit.pop(job, None)
        worker.left, worker.waits = [*job.tests], False
        self._send(worker, job.tests, keeps=any(other.file == job.file for other in self._pending))
        self.most = max(self.most, sum(one.runs for one in self._workers.values()))

    def _send(self, worker: _Worker, tests: Iterable[int], *, keeps: bool) -> None:
        """Send tests, and the place holder that follows them: under which the fixtures of the last file stay, or not."""
        worker.node.send_runtest_some([*tests, len(self._ids) + keeps])

    def _reserve(self, worker: _Worker, job: Job) -> None:
        """Have nothing else start on the GPUs of a worker until its job fits, in other sessions too."""
        self._pending.remove(job)
        worker.left, worker.waits = [*job.tests], True
        for gpu in worker.gpus[: job.gpus]:
            gpu.put(worker.process, state=WAITS, ticket=int(self._clock() * 1e9))
        self._begin_reserved(worker, job)

    def _begin_reserved(self, worker: _Worker, job: Job) -> None:
        """Start a job if it fits. Else workers that do nothing give back the fixtures that they keep; if nothing runs any more, they end.
        Once there is nobody else the job starts, however little is free."""
        gpus = worker.gpus[: job.gpus]
        others = [
            lease for gpu in gpus for lease in gpu.leases() if lease.process != worker.process
        ]
        if worker.take(job) or (not others and worker.take(job, alone=True)):
            self._begin(worker, job)
            return
        stands = self._clock() - self._still >= RELIEF and all(
            lease.state == IDLE for lease in others
        )
        for one in [one for one in self._workers.values() if one.idle and one.gpus[0] in gpus]:
            if one.lives:
                one.lives = frozenset()
                self._send(one, (), keeps=False)
            elif stands:
                one.node.shutdown()

    def _look_at_stillness(self, trouble: str = "") -> None:
        """Say that no test runs, and end the session if that lasts."""
        now = self._clock()
        if not self.looks or any(worker.runs for worker in self._workers.values()):
            self._still = self._told = now
        elif (left := self._still + GIVE_UP_AFTER - now) <= 0:
            self._stop(
                f"gpumem: --gpumem-pack: {GIVE_UP_AFTER:.0f} s without a test: {trouble or self._occupied()}"
            )
        elif now - self._told >= TELL_EVERY:
            self._told = now
            self._tell(f"gpumem: {trouble or self._occupied()}; gives up in {left:.0f} s")

    def _occupied(self) -> str:
        found = []
        for gpu in {worker.gpus[0]: None for worker in self._workers.values()}:
            leases = (
                f"process {lease.process.pid} {lease.state}"
                for lease in gpu.leases()
                if lease.state != IDLE
            )
            who = ", ".join(leases) or "no test of another session runs"
            found.append(f"{gpu.name} leaves {max(0, gpu.room()) / 2**30:.1f} GiB to tests ({who})")
        return "no test can start: " + "; ".join(found)
