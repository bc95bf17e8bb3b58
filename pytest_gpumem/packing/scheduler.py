"""The scheduler, with the methods that pytest-xdist calls: it chooses the next job and its worker.

A worker of xdist begins a test when it is sent what follows. What follows a job is a place holder, which begins with the next job: so a
worker that has nothing to do can get any job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pytest_gpumem.packing.jobs import Job, ordered
from pytest_gpumem.packing.leases import ALONE, IDLE, RUNS, WAITS, Lease, LeaseError, Leases, Process, take

RESERVED_AFTER = 30.0  # seconds after which what does not fit gets a reservation: nothing else starts on its GPU before
TELL_AFTER, TELL_EVERY = 30.0, 60.0  # seconds without a test that runs, after which a line says so, and between two lines
RELIEF = 5.0  # seconds that workers have to give back memory, before they are asked for more
GIVE_UP_AFTER = 600.0  # seconds without a test that runs, after which the session ends


class Gpu(NamedTuple):
    """A GPU of the session."""

    name: str
    leases: Leases
    room: Callable[[], int]  # bytes that leases may have: without what other processes hold

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(eq=False)
class _Worker:
    """A worker of xdist."""

    node: Any
    process: Process
    gpus: tuple[Gpu, ...]  # in its order: its own is the first
    job: Job | None = None  # that it runs, or that is reserved for it
    ticket: int = 0  # of the reservation
    left: list[int] = field(default_factory=list)  # tests of the job that have not ended
    keeps: bool = False  # it keeps the fixtures of the file of its last test
    lives: frozenset[str] = frozenset()  # fixtures that live in it, and that jobs may use

    @property
    def waits(self) -> bool:
        """True if its job is reserved, and has not begun."""
        return self.ticket > 0


class _View(NamedTuple):
    """What the leases of a GPU leave to one worker."""

    gpu: Gpu
    worker: _Worker
    held: int  # bytes, by the worker
    free: int  # bytes that the leases of others leave
    busy: bool  # a test of another process runs there
    closed: bool  # for a test that has it alone, or waits for that

    def fits(self, job: Job) -> bool:
        """True if a job may begin, as far as was known when this was read."""
        if job.alone:
            return not (self.busy or self.closed)
        return not self.closed and _needs(self.worker, job, self.held) <= self.free


def _needs(worker: _Worker, job: Job, held: int) -> int:
    """Bytes that a worker needs for a job. `held`: that it holds."""
    there = sum(nbytes for name, nbytes in job.fixtures if name in worker.lives) if job.fixtures else 0
    return held + max(0, job.share - there)


def _lease(worker: _Worker, job: Job, held: int) -> Lease:
    """What a worker asks for, for a job."""
    return Lease(worker.process, _needs(worker, job, held), ALONE if job.alone else RUNS, worker.ticket)


def _held(leases: Iterable[Lease], worker: _Worker) -> int:
    return next((lease.nbytes for lease in leases if lease.process == worker.process), 0)


def _view(gpu: Gpu, workers: Sequence[_Worker]) -> _View:
    leases = gpu.leases.all()
    held = {lease.process: lease.nbytes for lease in leases}
    worker = max(workers, key=lambda one: held.get(one.process, 0))
    others = [lease for lease in leases if lease.process != worker.process]
    free = gpu.room() - sum(lease.nbytes for lease in others)
    closed = any(lease.state in (ALONE, WAITS) for lease in others)
    return _View(gpu, worker, held.get(worker.process, 0), free, any(lease.busy for lease in others), closed)


class PackScheduler:
    """Starts the longest job that fits, where most memory is free. Jobs that are alone on their GPU come first, when none runs yet."""

    def __init__(
        self,
        count: int,
        plan: Callable[[Sequence[str]], Sequence[Job]],
        process_of: Callable[[Any], Process],
        gpus_of: Callable[[Any], tuple[Gpu, ...]],
        clock: Callable[[], float],
        tell: Callable[[str], None],
        stop: Callable[[str], None],
        differ: Callable[[Any, Any, Sequence[str], Sequence[str]], bool] = lambda *_: False,
    ) -> None:
        """`count`: workers that the session starts with. `plan`: the jobs, of the node ids that were collected.
        `clock`: seconds, the same in all processes. `tell`: prints a line. `stop`: ends the session with a reason.
        `differ`: reports two workers that have collected other tests; False if they have not.
        """
        self._count, self._plan, self._process_of, self._gpus_of = count, plan, process_of, gpus_of
        self._clock, self._tell, self._stop, self._differ = clock, tell, stop, differ
        self._workers: dict[Any, _Worker] = {}
        self._collections: dict[Any, Sequence[str]] = {}
        self._ids: Sequence[str] | None = None  # the tests, once their jobs are known
        self._by_test: dict[int, Job] = {}
        self._pending: list[Job] = []  # in the order in which they start
        self._files: Counter[str] = Counter()  # of what is pending
        self._passed: dict[Job, float] = {}  # since when later jobs start before it, because it does not fit
        self._refused: object = None  # what was free when no job could start, and how many there were
        self._relieved = 0.0  # when workers were asked to give back memory
        self._still: float | None = None  # since when no test runs
        self._told = 0.0
        self.most = 0  # jobs that ran at once
        self.config: Any = None  # pytest's, which plugins ask a scheduler of xdist for

    # What xdist asks

    @property
    def nodes(self) -> list[Any]:
        return list(self._workers)

    @property
    def collection_is_completed(self) -> bool:
        return len(self._collections) >= self._count or self._ids is not None

    @property
    def has_pending(self) -> bool:
        return bool(self._pending) or any(worker.job is not None for worker in self._workers.values())

    @property
    def tests_finished(self) -> bool:
        return self._ids is not None and not self.has_pending

    def add_node(self, node: Any) -> None:
        self._workers[node] = _Worker(node, self._process_of(node), self._gpus_of(node))

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        if self._ids is None or list(collection) == list(self._ids):
            self._collections[node] = list(collection)

    def schedule(self) -> None:
        if self._ids is None:
            (first, ids), *others = self._collections.items()
            differing = [node for node, other in others if list(other) != list(ids) and self._differ(first, node, ids, other)]
            self._ids = [] if differing else ids
            self._await(self._plan(self._ids))
        self._fill()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        worker = self._workers.get(node)
        if worker is None or item_index not in worker.left:
            return  # a place holder
        worker.left.remove(item_index)
        if not worker.left:
            worker.job = None  # the worker itself has given back what it does not hold
            self._fill()

    def mark_test_pending(self, item: str) -> None:
        assert self._ids is not None
        number = list(self._ids).index(item)
        self._await([self._by_test[number]._replace(tests=(number,))])
        self._fill()

    def remove_node(self, node: Any) -> str | None:
        """Forget a worker; the test that it ran, if it ran one. What else it had been given is given to others."""
        worker = self._workers.pop(node)
        self._collections.pop(node, None)
        if worker.job is None or self._ids is None:
            return None
        ran = None if worker.waits else worker.left.pop(0)
        if worker.left:
            self._await([worker.job._replace(tests=tuple(worker.left))])
        return None if ran is None else self._ids[ran]

    def lives(self, node: Any, fixtures: Iterable[str]) -> None:
        """Take note of the fixtures that live in a worker."""
        if node in self._workers:
            self._workers[node].lives = frozenset(fixtures)

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> None:
        """Look at the leases again. xdist calls it for an event that the session sends to itself."""
        self._fill()

    # What starts

    @property
    def looks(self) -> bool:
        """True while jobs wait for memory, which others may give back."""
        return bool(self._pending) or any(worker.waits for worker in self._workers.values())

    def _await(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._by_test |= dict.fromkeys(job.tests, job)
            self._files[job.file] += 1
            self._pending.append(job)
        self._pending = ordered(self._pending)

    def _fill(self) -> None:
        """Start what can be started."""
        if self._ids is None:
            return
        try:
            for worker in [worker for worker in self._workers.values() if worker.waits and not worker.node.shutting_down]:
                self._begin_reserved(worker)
            while self._start_next():
                pass
        except LeaseError as error:
            self._look_at_stillness(str(error))
            return
        self._look_at_stillness(None)

    @property
    def _idle(self) -> Iterator[_Worker]:
        return (one for one in self._workers.values() if one.job is None and one.node in self._collections and not one.node.shutting_down)

    def _views(self) -> list[_View]:
        """The GPUs with a worker that has nothing to do, most free memory first: of each the worker that holds most."""
        idle: dict[Gpu, list[_Worker]] = {}
        for worker in self._idle:
            idle.setdefault(worker.gpus[0], []).append(worker)
        return sorted((_view(gpu, workers) for gpu, workers in idle.items()), key=lambda view: -view.free)

    def _start_next(self) -> bool:
        """Start the first job in the order that fits; False if none does."""
        if not self._pending or not (views := self._views()):
            return False
        now, known = self._clock(), (views, len(self._pending))
        for at, job in enumerate(self._pending if known != self._refused else ()):
            for view in views:
                if not job.works or (view.fits(job) and self._take(view.worker, job)):
                    for other in self._pending[:at]:
                        self._passed.setdefault(other, now)
                    del self._pending[at]
                    self._begin(view.worker, job)
                    return True
        self._refused = known
        late = [job for job, since in self._passed.items() if now - since >= RESERVED_AFTER]
        if late and not any(worker.waits for worker in self._workers.values()):
            self._reserve(views[0].worker, max(late, key=lambda job: (bool(job.alone), job.share)))
        return False

    def _take(self, worker: _Worker, job: Job) -> bool:
        gpus = worker.gpus[: job.gpus]
        return take([(gpu.leases, _lease(worker, job, _held(gpu.leases.all(), worker)), gpu.room()) for gpu in gpus])

    def _begin(self, worker: _Worker, job: Job) -> None:
        self._passed.pop(job, None)
        self._files[job.file] -= 1
        worker.job, worker.left, worker.ticket = job, [*job.tests], 0
        worker.keeps = self._files[job.file] > 0
        worker.node.send_runtest_some([*job.tests, self._place_holder(keeps=worker.keeps)])
        self.most = max(self.most, sum(one.job is not None and not one.waits for one in self._workers.values()))

    def _place_holder(self, *, keeps: bool) -> int:
        """The number of the item that follows a job: under which the fixtures of the last file stay, or not."""
        assert self._ids is not None
        return len(self._ids) + keeps

    def _reserve(self, worker: _Worker, job: Job) -> None:
        """Have nothing else start on the GPUs of a worker until its job fits, in other sessions too."""
        self._pending.remove(job)
        worker.job, worker.left, worker.ticket = job, [*job.tests], max(1, int(self._clock() * 1e9))
        for gpu in worker.gpus[: job.gpus]:
            gpu.leases.put(Lease(worker.process, _held(gpu.leases.all(), worker), WAITS, worker.ticket))
        self._begin_reserved(worker)

    def _begin_reserved(self, worker: _Worker) -> None:
        job, gpus = worker.job, worker.gpus[: worker.job.gpus if worker.job else 1]
        assert job is not None
        if self._take(worker, job):
            self._begin(worker, job)
        elif not any(lease.busy or lease.state == WAITS for gpu in gpus for lease in gpu.leases.all() if lease.process != worker.process):
            self._relieve(worker, job)

    def _relieve(self, worker: _Worker, job: Job) -> None:
        """Have workers that do nothing give back what they hold: the fixtures of their files, then all. Then the job starts however little
        is free."""
        if (now := self._clock()) - self._relieved < RELIEF:
            return
        self._relieved = now
        own = [one for one in self._idle if one.gpus[0] in worker.gpus[: job.gpus]]
        if keeping := [one for one in own if one.keeps]:
            for one in keeping:
                one.keeps = False
                one.node.send_runtest_some([self._place_holder(keeps=False)])
        elif own:
            for one in own:
                one.node.shutdown()
        elif all(self._foreign(gpu) == 0 for gpu in worker.gpus[: job.gpus]):
            for gpu in worker.gpus[: job.gpus]:
                gpu.leases.put(_lease(worker, job, _held(gpu.leases.all(), worker))._replace(state=ALONE))
            self._begin(worker, job)

    def _foreign(self, gpu: Gpu) -> int:
        """Leases of other sessions, and of workers that are about to end."""
        own = {worker.process for worker in self._workers.values() if not worker.node.shutting_down}
        return sum(lease.process not in own for lease in gpu.leases.all())

    def _look_at_stillness(self, trouble: str | None) -> None:
        """Say that nothing runs, and end the session if that lasts."""
        now = self._clock()
        runs = any(worker.job is not None and not worker.waits for worker in self._workers.values())
        if runs or not self.looks or not self._collections:
            self._still = None
            return
        self._still = now if self._still is None else self._still
        why = trouble or self._why_still()
        if now - self._still >= GIVE_UP_AFTER:
            self._stop(f"gpumem: --gpumem-pack: {GIVE_UP_AFTER:.0f} s without a test: {why}")
        elif now - self._still >= TELL_AFTER and now - self._told >= TELL_EVERY:
            self._told = now
            self._tell(f"gpumem: {why}; gives up in {self._still + GIVE_UP_AFTER - now:.0f} s")

    def _why_still(self) -> str:
        try:
            gpus = {worker.gpus[0]: None for worker in self._workers.values()}
            return "no test can start: " + "; ".join(map(self._occupied, gpus))
        except LeaseError as error:
            return str(error)

    def _occupied(self, gpu: Gpu) -> str:
        leases = [lease for lease in gpu.leases.all() if lease.state != IDLE]
        who = ", ".join(f"process {lease.process.pid} {lease.state}" for lease in leases) or "no test of another session runs"
        return f"{gpu.name} leaves {max(0, gpu.room()) / 2**30:.1f} GiB to tests ({who})"
