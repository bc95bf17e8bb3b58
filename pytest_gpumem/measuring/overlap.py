"""How much of the time of works the overlap of their parts hides."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.measuring.harness import Harness
from pytest_gpumem.measuring.measure import Plan, measure
from pytest_gpumem.measuring.works import DEVICE_TO_HOST, HOST_TO_DEVICE, Work, Works
from pytest_gpumem.records.measurement import Overlap, Part

PART_SHARE = 0.25  # share of the budget that each part, and their sequence, is measured with
AGREE = 0.1  # largest difference between the sequence and the sum of its parts, as a share
TRIES = 3  # times that parts and sequence are measured until they agree


def overlap_of(harness: Harness, work: Work, plan: Plan, name: str) -> Overlap | None:
    """Measure each part of overlapping work alone, and all parts in turn.

    Returns None for work that overlaps nothing, and under a profiler, which slows each part
    differently.
    """
    if not work.parts or harness.profiled:
        return None
    sampler = "host" if work.waits else plan.sampler
    short = Plan(plan.mode, sampler, 1, plan.precision, PART_SHARE * plan.budget)

    def latency(part: Work) -> float:
        part = copy.copy(part)
        part.verify = None  # the whole is checked, of which it is a part
        return measure(harness, part, short, name).latency

    pieces = (*work.parts, Works.in_turn(*work.parts))
    seconds = [latency(piece) for piece in pieces]
    for _ in range(TRIES - 1):
        together = sum(seconds[:-1])
        if abs(seconds[-1] - together) <= AGREE * together:
            break
        # Other traffic on the link makes a reading longer, never shorter.
        for index, piece in enumerate(pieces):
            seconds[index] = min(seconds[index], latency(piece))
    parts, engines = [], []
    for part, alone in zip(work.parts, seconds, strict=False):
        parts.append(Part(part.name, alone))
        engines.append((part.engines, alone))
    return Overlap(
        parts=tuple(parts),
        sequential=seconds[-1],
        bound=bound_of(work.device, engines),
        streams=work.streams,
        chunks=work.chunks,
    )


def bound_of(device: Device, parts: Sequence[tuple[frozenset[str], float]]) -> float:
    """Return the lower bound, in seconds, of any overlap of parts (engines, seconds alone).

    It is the longest part, or the sum of those that share an engine. A single copy engine serves
    both directions.
    """
    busy: dict[str, float] = {}
    for engines, seconds in parts:
        shared = engines
        if device.facts.async_engines < 2 and DEVICE_TO_HOST in engines:
            shared = (engines - {DEVICE_TO_HOST}) | {HOST_TO_DEVICE}
        for engine in shared:
            busy[engine] = busy.get(engine, 0.0) + seconds
    return max(busy.values())
