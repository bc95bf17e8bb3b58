"""The jobs that start as one: a test, a group of tests that stay together, or some short tests of one file."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pytest_gpumem.packing.shares import Learnt

SHORT = 0.5  # seconds of short tests that are started at once: each start takes some milliseconds
MOST = 50  # tests that are started at once
NEW = 8  # tests that are started at once and were never measured
WORKERS = (1, 2, 3, 4, 6, 8, 12, 16)  # of one GPU, among which is chosen
_ALIKE = 256 << 20  # bytes by which the shares of tests that are started at once may differ


class Asked(NamedTuple):
    """A test, as it was collected."""

    nodeid: str
    group: str | None = None  # tests of one group stay together
    gpus: int = 1
    measures: bool = False  # it has the fixture that measures


class Job(NamedTuple):
    """What is started at once in one process."""

    tests: tuple[int, ...]  # their numbers
    seconds: float  # expected
    share: int = 0  # bytes that it needs beyond what its process holds without its fixtures
    alone: str = ""  # why it has its GPU to itself; empty if it has not
    gpus: int = 1  # that it takes at once
    works: bool = True  # False: no GPU work
    file: str = ""
    fixtures: tuple[tuple[str, int], ...] = ()  # of wider scopes, with the bytes that each holds while it lives


def ordered(jobs: Iterable[Job]) -> list[Job]:
    """The order in which jobs start: those alone on their GPU while nothing runs there yet, then the longest first. Of two that take as
    long, the larger one counts as longer: the GPU has room for it less often.
    """
    jobs = [*jobs]
    mean = sum(job.share for job in jobs) / len(jobs) if jobs else 0
    return sorted(jobs, key=lambda job: (not job.alone, -job.seconds * (mean + job.share), -job.seconds))


def expected(jobs: Sequence[Job], rooms: Sequence[int], workers: int, idle: int) -> float:
    """Seconds that jobs take in so many workers.
    `rooms`: bytes that tests may have of each GPU. `idle`: bytes that a worker holds between tests.
    """
    now, waiting = 0.0, ordered(jobs)
    running: list[tuple[float, int, Job]] = []  # when it ends, on which GPU
    free = [room - idle * len(range(gpu, workers, len(rooms))) for gpu, room in enumerate(rooms)]
    idle_workers = [len(range(gpu, workers, len(rooms))) for gpu in range(len(rooms))]
    at_work, alone = [0] * len(rooms), [False] * len(rooms)  # jobs that work on each GPU

    def account(job: Job, gpu: int, sign: int) -> None:
        idle_workers[gpu] -= sign
        if job.works:
            at_work[gpu] += sign
            free[gpu] -= sign * job.share
            alone[gpu] = bool(job.alone) and sign > 0

    while waiting or running:
        for job in waiting[:]:
            open_ = [gpu for gpu, count in enumerate(idle_workers) if count]
            if not open_:
                break
            for gpu in open_:
                if not job.works or not at_work[gpu] or not (alone[gpu] or job.alone or job.share > free[gpu]):
                    waiting.remove(job)
                    account(job, gpu, 1)
                    heapq.heappush(running, (now + job.seconds, gpu, job))
                    break
        now, gpu, job = heapq.heappop(running)
        account(job, gpu, -1)
    return now


def useful_workers(jobs: Sequence[Job], rooms: Sequence[int], idle: int) -> int:
    """The fewest workers with which a session is about as short as with any number of them."""
    times = {each * len(rooms): expected(jobs, rooms, each * len(rooms), idle) for each in WORKERS}
    return next(workers for workers, seconds in times.items() if seconds <= min(times.values()) * 1.02)


def _why_alone(test: Asked, known: Learnt | None) -> str:
    if test.gpus > 1:
        return f"takes {test.gpus} GPUs"
    if test.measures or (known is not None and known.measures):
        return "measures"
    if known is None or (known.works and not known.grown):
        return "never measured"
    return f"took {known.greedy:.0%} of the free memory" if known.greedy else ""


def _one(number: int, test: Asked, known: Learnt | None) -> Job:
    why = _why_alone(test, known)
    file = test.nodeid.partition("::")[0]
    if known is None:
        return Job((number,), 0.0, 0, why, test.gpus, True, file)
    return Job((number,), known.seconds, known.share, why, test.gpus, known.works or bool(why), file, (*known.fixtures.items(),))


def _together(jobs: Sequence[Job]) -> Job:
    """Several jobs as one. What works on no GPU takes its turn in it."""
    return Job(
        tuple(number for job in jobs for number in job.tests),
        sum(job.seconds for job in jobs),
        max(job.share for job in jobs),
        next((job.alone for job in jobs if job.alone), ""),
        max(job.gpus for job in jobs),
        any(job.works for job in jobs),
        jobs[-1].file,
        (*dict(one for job in jobs for one in job.fixtures).items(),),
    )


def _joins(job: Job, begun: Sequence[Job]) -> bool:
    """True if a test is started with those before it."""
    first = begun[0]
    if (job.file, job.alone, job.gpus, job.works) != (first.file, first.alone, first.gpus, first.works):
        return False
    if abs(job.share - first.share) > _ALIKE or sum(one.seconds for one in begun) + job.seconds > SHORT:
        return False
    return len(begun) < (NEW if job.alone == "never measured" else MOST)


def jobs_of(tests: Sequence[Asked], known: Mapping[str, Learnt]) -> list[Job]:
    """The jobs of a session. `known`: by node id."""
    groups: dict[str, list[Job]] = {}
    single: list[Job] = []
    for number, test in enumerate(tests):
        job = _one(number, test, known.get(test.nodeid))
        (single if test.group is None else groups.setdefault(test.group, [])).append(job)
    return [*map(_together, groups.values()), *_chunks(single)]


def _chunks(jobs: Sequence[Job]) -> Iterator[Job]:
    begun: list[Job] = []
    for job in jobs:
        if begun and not _joins(job, begun):
            yield _together(begun)
            begun = []
        begun.append(job)
    if begun:
        yield _together(begun)
