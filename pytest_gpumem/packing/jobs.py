"""The jobs that start as one: a test, a group of tests that stay together, or some short tests of one file."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pytest_gpumem.packing.shares import Learnt

SHORT = 0.5  # seconds of short tests that are started at once: each start takes some milliseconds
LEAST, NEW = 0.01, 0.06  # seconds that a test counts at least, and one that was never measured
WORKERS = (1, 2, 3, 4, 6, 8, 12, 16)  # of one GPU, among which is chosen
_ALIKE = 256 << 20
"""Bytes, to so many of which the shares of tests that are started at once are rounded."""


class Asked(NamedTuple):
    """A test, as it was collected."""

    nodeid: str
    group: str | None = None  # tests of one group stay together
    gpus: int = 1
    alone: str = ""  # why it has its GPU to itself; empty if nothing but what it took says so


class Job(NamedTuple):
    """What is started at once in one process."""

    tests: tuple[int, ...]  # their numbers
    seconds: float  # expected
    share: int = 0  # bytes that it needs beyond what its process holds without its fixtures
    alone: str = ""  # why it has its GPU to itself; empty if it has not
    gpus: int = 1  # that it takes at once
    file: str = ""
    fixtures: tuple[
        tuple[str, int], ...
    ] = ()  # of wider scopes, with the bytes that each holds while it lives

    @property
    def works(self) -> bool:
        """False if it needs no GPU."""
        return self.share > 0 or self.alone != ""

    def joined(self, other: Job) -> Job:
        """Both as one, in which what needs no GPU takes its turn."""
        return Job(
            self.tests + other.tests,
            self.seconds + other.seconds,
            max(self.share, other.share),
            self.alone or other.alone,
            max(self.gpus, other.gpus),
            other.file,
            (*{**dict(self.fixtures), **dict(other.fixtures)}.items(),),
        )


def jobs_of(tests: Sequence[Asked], known: Mapping[str, Learnt]) -> list[Job]:
    """The jobs of a session. `known`: by node id."""
    jobs: dict[
        object, Job
    ] = {}  # by their group, or by what tests have in common that start at once
    for number, test in enumerate(tests):
        job = _job(number, test, known.get(test.nodeid))
        key: object = test.group or (
            job.file,
            job.alone,
            job.gpus,
            job.share > 0,
            job.share // _ALIKE,
        )
        begun = jobs.get(key)
        if begun is not None and test.group is None and begun.seconds + job.seconds > SHORT:
            jobs[begun.tests] = jobs.pop(key)
            begun = None
        jobs[key] = job if begun is None else begun.joined(job)
    return [*jobs.values()]


def _job(number: int, test: Asked, known: Learnt | None) -> Job:
    file = test.nodeid.partition("::")[0]
    if known is None or not known.grown:
        return Job((number,), NEW, 0, test.alone or "never measured", test.gpus, file)
    seconds = max(LEAST, known.seconds)
    return Job(
        (number,),
        seconds,
        known.share,
        test.alone or known.alone,
        test.gpus,
        file,
        (*known.fixtures.items(),),
    )


def ordered(jobs: Iterable[Job]) -> list[Job]:
    """The order in which jobs start: those alone on their GPU while nothing runs there yet, then the longest first. Of two that take as
    long, the larger one counts as longer: the GPU has room for it less often.
    """
    jobs = [*jobs]
    mean = sum(job.share for job in jobs) / len(jobs) if jobs else 0
    return sorted(
        jobs, key=lambda job: (not job.alone, -job.seconds * (mean + job.share), -job.seconds)
    )


def expected(jobs: Iterable[Job], rooms: Sequence[int], workers: int, idle: int) -> float:
    """Seconds that jobs take in so many workers.
    `rooms`: bytes that tests may have of each GPU. `idle`: bytes that a worker holds between tests.
    """
    now, waiting = 0.0, ordered(jobs)
    ends: list[tuple[float, int, Job]] = []  # of what runs, and on which GPU
    free = [
        len(range(gpu, workers, len(rooms))) for gpu in range(len(rooms))
    ]  # workers of each GPU
    rooms = [room - idle * count for room, count in zip(rooms, free, strict=True)]
    at_work: list[list[Job]] = [[] for _ in rooms]

    def fits(job: Job, gpu: int) -> bool:
        beside = at_work[gpu]
        if not (job.works and beside):
            return True
        return (
            not (job.alone or beside[0].alone)
            and sum(one.share for one in (job, *beside)) <= rooms[gpu]
        )

    while waiting or ends:
        for job in waiting[:] if any(free) else ():
            gpu = next(
                (gpu for gpu, workers in enumerate(free) if workers and fits(job, gpu)), None
            )
            if gpu is not None:
                waiting.remove(job)
                free[gpu] -= 1
                at_work[gpu] += [job] * job.works
                heapq.heappush(ends, (now + job.seconds, gpu, job))
        now, gpu, job = heapq.heappop(ends)
        free[gpu] += 1
        if job.works:
            at_work[gpu].remove(job)
    return now


def useful_workers(jobs: Sequence[Job], rooms: Sequence[int], idle: int) -> int:
    """The fewest workers with which a session is about as short as with any number of them."""
    times = {each * len(rooms): expected(jobs, rooms, each * len(rooms), idle) for each in WORKERS}
    return next(
        workers for workers, seconds in times.items() if seconds <= min(times.values()) * 1.02
    )
