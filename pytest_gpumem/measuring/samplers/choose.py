"""Which sampler fits a target, and why."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpumem.measuring.bound import BadCall


@dataclass(frozen=True)
class Choice:
    """A sampler by name, the reason, and what to fall back to if it turns out not to work."""

    sampler: str
    reason: str
    fallback: bool
    """Whether another sampler may take over; not if the user asked for this one."""


def choose(requested: str, *, mode: str, foreign: bool, pages_move: bool, restores: bool, waits: bool, profiled: bool) -> Choice:
    """Choose a sampler.

    Args:
        requested: "auto" or a sampler's name.
        mode: state of the cache before each sample.
        foreign: the target is not of the catalogue.
        pages_move: managed pages must be put back before every sample, which no graph can do.
        waits: the host takes part in every launch and returns late, as in a copy of pageable memory.
        restores: something must run before every launch, so launches cannot follow each other in a batch.
        profiled: a profiler is attached.

    Raises:
        BadCall: the requested sampler cannot measure in this mode.
    """
    if profiled:
        return Choice("plain", "a profiler is attached: plain launches, one range each", fallback=False)
    if requested != "auto":
        if requested == "batched" and mode != "hot":
            raise BadCall(f'sampler "batched" measures launches that follow each other: it goes with mode "hot", not "{mode}"')
        if requested == "batched" and (pages_move or restores):
            what = "put managed pages back" if pages_move else "restore its input"
            raise BadCall(f'sampler "batched" cannot {what} before every launch; "blocked" can')
        if requested == "graph" and pages_move:
            raise BadCall('sampler "graph" cannot put managed pages back before every sample; "blocked" can')
        return Choice(requested, "asked for", fallback=False)
    if waits:
        return Choice("host", "the host takes part (a copy of pageable memory): wall-clock time, launch latency included", fallback=False)
    if pages_move:
        return Choice("blocked", "managed pages are put back before every sample, which a graph cannot do", fallback=True)
    if mode == "hot" and not restores:
        return Choice("batched", "hot launches follow each other", fallback=True)
    if foreign:
        return Choice(
            "blocked", "what a foreign callable does on the host is unknown, and a hold that expires shows that it waits", fallback=True
        )
    return Choice("blocked", "one launch at a time behind a held stream reads the steadiest", fallback=True)
