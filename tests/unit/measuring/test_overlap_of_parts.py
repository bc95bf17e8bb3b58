"""Parts of overlapping work are measured alone and in turn, and other traffic on the link does not decide what overlap can hide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from bench import QUICK, Bench
from msgspec.structs import replace

from pytest_gpumem.measuring.overlap import TRIES, overlap_of, with_overlap
from pytest_gpumem.measuring.plan import Plan
from pytest_gpumem.measuring.works import Works, work_target
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
    work = Works(bench.memory).staged(4, "8 MiB", rounds=200, back=False)
    found = overlap_of(bench.conductor, work, Plan(**QUICK), arena=bench.arena, name="test_it")
    assert found is not None
    return found, len(taken)


def test_a_reading_that_others_made_longer_is_taken_again(bench: Bench) -> None:
    with pytest.MonkeyPatch.context() as patched:
        quiet, readings = overlap(bench, patched, [])
    assert readings == ALONE
    assert quiet.sequential == pytest.approx(sum(part.seconds for part in quiet.parts), rel=0.1)
    for disturbed in ([1, 1, 2], [2, 2, 1.5, 1, 1, 2]):
        with pytest.MonkeyPatch.context() as patched:
            found, readings = overlap(Bench(), patched, disturbed)
        assert ALONE < readings <= TRIES * ALONE
        assert found.sequential == pytest.approx(quiet.sequential, rel=0.05)
        assert found.bound == pytest.approx(quiet.bound, rel=0.05)


def test_parts_are_not_checked_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = list[int]()
    bench.device.before("content.poison", lambda *_: poisoned.append(1))
    overlap(bench, monkeypatch, [])
    assert poisoned == []


def test_overlapping_work_is_measured_again_while_the_link_is_disturbed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Works(bench.memory).staged(4, "8 MiB", rounds=1000, back=False)
    plan = Plan(**QUICK)
    quiet = bench.take(work_target(work, bench.arena))
    slower = replace(quiet, placements=tuple(tuple(1.2 * x for x in p) for p in quiet.placements))
    parts = with_overlap(
        bench.conductor, work, quiet, plan, arena=bench.arena, name="test_it"
    ).overlap
    assert parts is not None
    assert parts.estimate is not None
    evenly = replace(
        quiet, placements=(((parts.estimate + parts.sequential) / 2,) * 4,)
    )  # half of what overlap can hide
    apart = replace(
        quiet,
        placements=((quiet.latency, 1.3 * quiet.latency, 1.3 * quiet.latency, quiet.latency),),
    )
    for disturbed in (slower, evenly, apart):
        found = with_overlap(
            bench.conductor, work, disturbed, plan, arena=bench.arena, name="test_it"
        )
        assert found.latency == pytest.approx(quiet.latency, rel=0.05)
        assert found.overlap is not None
        assert (found.overlap.hidden(found.latency) or 0) > 0.3
    measured = list[int]()
    measure = bench.conductor.measure

    def counted(*arguments: Any, **keywords: Any) -> Measurement:
        measured.append(1)
        return measure(*arguments, **keywords)

    monkeypatch.setattr(bench.conductor, "measure", counted)
    with_overlap(bench.conductor, work, quiet, plan, arena=bench.arena, name="test_it")
    assert len(measured) == ALONE
