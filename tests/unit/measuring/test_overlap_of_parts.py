"""Parts of overlapping work are measured alone and in turn, and other traffic on the link does not decide what overlap can hide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from bench import QUICK, Bench
from msgspec.structs import replace

from pytest_gpumem.measuring.plan import Plan
from pytest_gpumem.measuring.works import TRIES, Works, overlap_of
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.overlap import Overlap

ALONE = 3
"""The parts are a copy and a kernel; the third reading is of both in turn."""


def overlap(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, longer: Sequence[float]
) -> tuple[Overlap, int]:
    """What is found if the readings take so many times as long as they do, and how many there were."""
    taken: list[Measurement] = []
    measure = bench.conductor.measure

    def disturbed(*arguments: Any, **keywords: Any) -> Measurement:
        one = measure(*arguments, **keywords)
        times = longer[len(taken)] if len(taken) < len(longer) else 1.0
        taken.append(one)
        return replace(one, placements=tuple(tuple(times * x for x in p) for p in one.placements))

    monkeypatch.setattr(bench.conductor, "measure", disturbed)
    work = Works(bench.memory).staged(4, "2 MiB", rounds=50, back=False)
    found = overlap_of(bench.conductor, work, Plan(**QUICK), arena=bench.arena, name="test_it")
    assert found is not None
    return found, len(taken)


def test_a_reading_that_others_made_longer_is_taken_again(bench: Bench) -> None:
    with pytest.MonkeyPatch.context() as patched:
        quiet, readings = overlap(bench, patched, [])
    assert readings == ALONE
    assert quiet.sequential == pytest.approx(sum(part.seconds for part in quiet.parts), rel=0.1)
    for disturbed in ([1, 1, 2],):
        with pytest.MonkeyPatch.context() as patched:
            found, readings = overlap(Bench(), patched, disturbed)
        assert ALONE < readings <= TRIES * ALONE
        assert found.sequential == pytest.approx(quiet.sequential, rel=0.05)
        assert found.bound == pytest.approx(quiet.bound, rel=0.05)
