"""Overlapping work: its parts alone, all of them in turn, and how much of their time is hidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from pytest_gpumem.measuring.conductor import Conductor
from pytest_gpumem.measuring.plan import Plan
from pytest_gpumem.measuring.work import InTurn, StagedCopy, Together, Work, bound_of
from pytest_gpumem.measuring.works import work_target
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.overlap import Overlap, Part
from pytest_gpumem.units import format_share, format_time

PART_SHARE = 0.25  # share of the budget that each part, and their sequence, is measured with
AGREE = 0.1
"""Largest difference between the sequence and the sum of its parts, as a share of the sum. Other
traffic on a host's link makes copies up to twice as long, for some milliseconds."""
TRIES = 3  # times that parts and sequence are measured until they agree


def overlap_of(
    conductor: Conductor, work: Work, plan: Plan, *, arena: Arena, name: str
) -> Overlap | None:
    """Measure each part of overlapping work alone, and all parts in turn.

    Returns None for work that overlaps nothing, and under a profiler, which slows each part in its
    own way.
    """
    if not isinstance(work, (Together, StagedCopy)):
        return None
    if work.before is not None or conductor.profiled:
        return None
    short = dataclasses.replace(plan, placements=1, budget=PART_SHARE * plan.budget)
    if work.on_host:
        short = dataclasses.replace(short, sampler="host")

    def latency(part: Work) -> float:
        # The whole is checked, of which it is a part.
        unchecked = dataclasses.replace(work_target(part, arena), check=None)
        return conductor.measure(unchecked, short, arena=arena, label="", name=name).latency

    pieces: Sequence[Work] = (*work.parts, InTurn(arena.device, work.parts))
    seconds = [latency(piece) for piece in pieces]
    for _ in range(TRIES - 1):
        together = sum(seconds[:-1])
        if abs(seconds[-1] - together) <= AGREE * together:
            break
        # What others do on the link makes a reading longer, never shorter.
        for index, piece in enumerate(pieces):
            seconds[index] = min(seconds[index], latency(piece))
    alone = list(zip(work.parts, seconds, strict=False))
    return Overlap(
        parts=tuple(Part(part.name, part_seconds) for part, part_seconds in alone),
        sequential=seconds[-1],
        bound=bound_of(
            arena.device, [(part.engines, part_seconds) for part, part_seconds in alone]
        ),
        streams=work.streams,
        chunks=work.chunks if isinstance(work, StagedCopy) else None,
    )


def with_overlap(
    conductor: Conductor, work: Work, measured: Measurement, plan: Plan, *, arena: Arena, name: str
) -> Measurement:
    """Return the measurement of work with its parts, where it overlaps some.

    While the link is disturbed the work is measured again, `TRIES` times at most, and the shortest
    latency counts: what others do on the link makes it longer, never shorter.
    """
    overlap = overlap_of(conductor, work, plan, arena=arena, name=name)
    if overlap is None:
        return measured
    for _ in range(TRIES - 1):
        if not _disturbed(measured, overlap):
            break
        target = work_target(work, arena)
        again = conductor.measure(target, plan, arena=arena, label=measured.label, name=name)
        if again.latency < measured.latency:
            measured = replace(again, what_ran=measured.what_ran, migrations=measured.migrations)
    note = overlap_note(overlap, measured.latency)
    return replace(measured, overlap=overlap, notes=(*measured.notes, note))


def _disturbed(measured: Measurement, overlap: Overlap) -> bool:
    """True if samples lie far apart, or the work takes longer than its bound or estimate."""
    low, middle, high = np.quantile(measured.samples, (0.25, 0.5, 0.75))
    if high - low > AGREE * middle:
        return True
    return measured.latency > (1 + AGREE) * (overlap.estimate or overlap.bound)


def overlap_note(overlap: Overlap, latency: float) -> str:
    """Return a sentence about the hidden share, the bound, and the text's estimate."""
    hidden, share = overlap.hidden(latency), "there is nothing to hide"
    if hidden is not None:
        share = f"hides {format_share(hidden)} of what overlap can hide"
    bound = f"in turn {format_time(overlap.sequential)}, bound {format_time(overlap.bound)}"
    if overlap.estimate is not None:
        bound += f", the text's estimate {format_time(overlap.estimate)}"
    parts = ", ".join(f"{part.name} {format_time(part.seconds)}" for part in overlap.parts)
    return f"{share}: {bound}; alone: {parts}"
