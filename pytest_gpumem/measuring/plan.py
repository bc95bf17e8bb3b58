"""How to measure: settings, a share of a total budget, the sampler, the length of batches. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.target import Target

LEAST_BATCH = 20
MOST_BATCH = 400
BATCH_SECONDS = 400e-6  # length of a batch: its first launch takes a microsecond more
SLOW_BATCH_SECONDS = 2e-3  # length from which a batch has fewer launches, down to one
LEAST_FOREIGN_BATCH = 5
MOST_FOREIGN_BATCH = 50
UNTIMED = 2  # launches before the first event: they bring the buffers into L2
QUEUED_SECONDS = 900e-6
"""Most seconds of foreign calls behind a hold: a stream queues 1,024 launches of a microsecond or
more before the next one waits."""
BATCHES = ("graph", "batched")  # samplers that time launches which follow each other


LEAST = 1e-3  # least seconds of sampling of a measurement, however little time is left


@dataclass(frozen=True)
class Plan:
    """How to measure."""

    mode: str = "clean-cold"
    sampler: str = "auto"
    placements: int = 8
    precision: float = 0.001
    """Wanted half-width of the confidence interval over placements, as a share of the latency."""
    budget: float = 1.0  # seconds for a measurement


class Passes(NamedTuple):
    """Untimed passes of a measurement."""

    pages: bool = False  # counts page faults and migrations
    ran: bool = False  # finds each step of a launch, with the machine code of its kernels
    streams: bool = True  # finds work of a foreign launch outside of the timed interval


NO_PASSES = Passes()


class Ledger:
    """The time that is left of a total budget. Tests that have not ended share it equally."""

    def __init__(self, total: float, tests: Iterable[str]) -> None:
        """`total`: seconds for all measurements together. `tests`: those that measure."""
        self.total = total
        self.spent = 0.0  # seconds used so far
        self._waiting = set(tests)

    def share(self, test: str) -> float:
        """Seconds of sampling for a measurement that is about to begin; at least 1 ms."""
        tests = len(self._waiting | {test})
        return max((self.total - self.spent) / tests, LEAST)

    def took(self, seconds: float) -> None:
        """Count the seconds of a measurement, finished or not."""
        self.spent += seconds

    def ended(self, test: str) -> None:
        """Leave the time that a test did not use to the others: it measures nothing more."""
        self._waiting.discard(test)


def choose(
    requested: str, target: Target, mode: str, *, profiled: bool, launches_wait: bool = False
) -> tuple[str, str, bool]:
    """Return a sampler, the reason, and whether another may take over.

    Raises `BadCall`: the requested sampler cannot measure the target.
    """
    if profiled:
        return "plain", "a profiler is attached: plain launches, one range each", False
    if requested != "auto":
        if requested in BATCHES:
            _check_batches(requested, target, mode)
        return requested, "asked for", False
    if launches_wait:
        return "host", "CUDA_LAUNCH_BLOCKING is set: every launch waits for the device", False
    if target.waits:
        return "host", by_host("the host takes part (a copy of pageable memory)"), False
    if target.managed:
        return "blocked", "managed pages are put back before every sample", True
    if mode == "hot" and not target.restores:
        # Code of the user is not captured unasked: what it does on the host is unknown.
        if target.foreign:
            return "batched", "hot launches follow each other behind a hold", True
        return "graph", "hot launches follow each other in a CUDA graph", True
    reason = "each launch is queued while the stream is blocked"
    if target.foreign:
        reason += "; a callable that waits for the device is timed by the host's clock"
    else:
        reason += ", which varies least"
    return "blocked", reason, True


def by_host(why: str) -> str:
    """Return the reason of the host's clock."""
    return f"{why}: wall-clock time, launch latency included"


def _check_batches(requested: str, target: Target, mode: str) -> None:
    """Raise `BadCall` if launches of the target cannot follow each other."""
    if mode != "hot":
        raise BadCall(
            f'sampler "{requested}" measures launches that follow each other: '
            f'it goes with mode "hot", not "{mode}"'
        )
    if target.managed:
        what = "put managed pages back"
    elif target.restores:
        what = "restore its input"
    else:
        return
    raise BadCall(f'sampler "{requested}" cannot {what} before every launch; "blocked" can')


def batch_of(latency: float | None, *, foreign: bool) -> int:
    """Return the launches of a batch for a target that takes about `latency` seconds, if known."""
    if latency is None or latency <= 0:
        return 1
    least, most = LEAST_BATCH, MOST_BATCH
    if foreign:
        least = LEAST_FOREIGN_BATCH
        most = max(1, min(MOST_FOREIGN_BATCH, int(QUEUED_SECONDS / latency) - UNTIMED))
    least = min(least, math.ceil(SLOW_BATCH_SECONDS / latency))
    return int(min(most, max(least, BATCH_SECONDS / latency)))


def untimed_of(batch: int, places: int) -> int:
    """Return the launches before the first event of a batch: none where a slow launch follows."""
    if batch > 1:
        return UNTIMED
    return min(places - 1, 1)


def category_of(target: Target, mode: str, l2_bytes: int) -> str | None:
    """Return the NVTX category of a target's launches: the slowest part of memory that they use.

    "managed" if pages are put back before every sample, "link" if declared bytes cross a link, "L2"
    if a window lies on part of the data or hot caches may hold it all, "DRAM" for other declared
    bytes, else None.
    """
    if target.managed:
        return "managed"
    if target.moved_bytes is not None and target.moved_bytes.link:
        return "link"
    if target.window is not None:
        return "L2"
    if mode == "hot" and (target.footprint is None or target.footprint <= l2_bytes):
        return "L2"
    return None if target.moved_bytes is None else "DRAM"
