"""Measure overlap: each part of the work alone, and all of them in turn."""

from __future__ import annotations

from dataclasses import replace

from pytest_gpumem.measuring.conductor import Conductor
from pytest_gpumem.measuring.sampling import Plan
from pytest_gpumem.measuring.staging import StagedCopy
from pytest_gpumem.measuring.work import InTurn, Together, Work, bound_of
from pytest_gpumem.measuring.works import work_target
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.records.overlap import Overlap, Part
from pytest_gpumem.units import format_share, format_time

PART_SHARE = 0.25
"""Share of a measurement's budget that each part of overlapping work, and their sequence, is measured with."""
AGREE = 0.1
"""Largest difference between the sequence and the sum of its parts, as a share of the sum. Other traffic on a host's link makes copies up
to twice as long, for some milliseconds: on an H100 a sequence read 2.43 ms, its parts 1.22 and 0.37 ms."""
TRIES = 3
"""Times that parts and sequence are measured until they agree."""


def overlap_of(conductor: Conductor, work: Work, plan: Plan, *, arena: Arena, name: str) -> Overlap | None:
    """Measure each part of overlapping work alone, and all parts in turn, by the plan of the work itself.

    None for work that overlaps nothing, and under a profiler, which slows each part in its own way.
    """
    if not isinstance(work, (Together, StagedCopy)) or conductor.profiled:
        return None
    sampler = "host" if work.on_host else plan.sampler
    short = replace(plan, sampler=sampler, placements=1, budget=PART_SHARE * plan.budget)

    def latency(part: Work) -> float:
        return conductor.measure(work_target(part, arena), short, arena=arena, label="", name=name).latency

    device = arena.device
    pieces = (*work.parts, InTurn(device, work.parts))
    seconds = [latency(piece) for piece in pieces]
    for _ in range(TRIES - 1):
        if abs(seconds[-1] - sum(seconds[:-1])) <= AGREE * sum(seconds[:-1]):
            break
        # What others do on the link makes a reading longer, never shorter.
        seconds = [min(before, latency(piece)) for before, piece in zip(seconds, pieces, strict=True)]
    measured = list(zip(work.parts, seconds, strict=False))
    return Overlap(
        parts=tuple(Part(part.name, alone) for part, alone in measured),
        sequential=seconds[-1],
        bound=bound_of(device, [(part.engines, alone) for part, alone in measured]),
        streams=work.streams,
        chunks=work.chunks if isinstance(work, StagedCopy) else None,
    )


def overlap_note(overlap: Overlap, latency: float) -> str:
    """One sentence for a reader: the hidden share, the bound, and the text's estimate."""
    parts = ", ".join(f"{part.name} {format_time(part.seconds)}" for part in overlap.parts)
    hidden = overlap.hidden(latency)
    share = "there is nothing to hide" if hidden is None else f"hides {format_share(hidden)} of what overlap can hide"
    estimate = "" if overlap.estimate is None else f", the text's estimate {format_time(overlap.estimate)}"
    return f"{share}: in turn {format_time(overlap.sequential)}, bound {format_time(overlap.bound)}{estimate}; alone: {parts}"
