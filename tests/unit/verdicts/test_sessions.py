"""Processes of one session agree better than those of another hour or another card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement, Repeat, Taken
from pytest_gpumem.verdicts.judge import judge
from pytest_gpumem.verdicts.reading import readings, sessions
from pytest_gpumem.verdicts.screen import compare
from pytest_gpumem.verdicts.spread import between_processes, between_sessions, of_difference


def at(measurement: Measurement, utc: str | None, card: str | None = "GPU-a") -> Measurement:
    return replace(measurement, taken=None if utc is None else Taken(utc, card))


def test_an_hour_and_a_card_make_a_session(bench: Any) -> None:
    one: Measurement = bench.measurement()
    labels = sessions(
        [
            at(one, "2026-11-21T10:59:00+00:00"),
            at(one, "2026-11-21T10:00:00+00:00"),
            at(one, "2026-11-21T11:00:01+00:00"),
            at(one, "2026-11-21T10:10:00Z", "GPU-b"),
            at(one, "2026-11-21T10:20:00"),
            at(one, None),
            at(one, "yesterday"),
        ]
    )
    assert labels[0] == labels[1] == labels[4]
    assert len({labels[0], labels[2], labels[3], labels[5]}) == 4
    # Who does not know its session is of none that another knows.
    assert labels[5] is labels[6] is None


def test_processes_are_compared_inside_their_session(bench: Any) -> None:
    """Two sessions 2 % apart, whose processes agree: the difference is the sessions', not the processes'."""
    apart = [at(bench.measurement(268e-6), f"2026-11-21T10:0{i}:00Z") for i in range(5)]
    apart += [at(bench.measurement(268e-6 * 1.02), f"2026-11-22T10:0{i}:00Z") for i in range(5)]
    unknown = [at(m, None) for m in apart]
    assert between_processes(apart).value < 0.0005**2
    assert between_processes(unknown).value == pytest.approx(0.01**2, rel=0.15)
    # Of two sessions' difference the expected spread leaves a part, and no more than all of it: 0.02 / sqrt(2).
    assert 0.004**2 < between_sessions(apart).value < 0.0141**2


def test_three_sessions_are_taken_at_their_word(bench: Any) -> None:
    three = [
        at(bench.measurement(268e-6 * factor), f"2026-11-{day}T10:0{i}:00Z")
        for day, factor in ((21, 0.98), (22, 1.0), (23, 1.02))
        for i in range(3)
    ]
    assert between_sessions(three).value == pytest.approx(0.02**2, rel=0.05)


def test_a_run_of_the_same_session_resolves_more(bench: Any) -> None:
    history = [at(bench.measurement(268e-6), f"2026-11-21T10:0{i}:00Z") for i in range(5)]
    now: Measurement = bench.measurement(268e-6)
    same, other, card, unknown = (
        compare(now_at, history, 0.01)
        for now_at in (
            at(now, "2026-11-21T10:30:00Z"),
            at(now, "2026-11-21T15:30:00Z"),
            at(now, "2026-11-21T10:30:00Z", "GPU-b"),
            at(now, None),
        )
    )
    assert same.resolvable < 0.95 * other.resolvable
    assert other.resolvable == card.resolvable == unknown.resolvable
    assert (same.sessions, same.processes) == (1, 5)


def test_the_variance_of_a_new_session_is_that_of_the_formula(bench: Any) -> None:
    """session^2 (1 + 1/S) + process^2 (1/M + 1/K) + what the placements leave, for sessions of equal size."""
    history = [at(bench.process(268e-6, between=0.001, placement=0.002, within=0.0), f"2026-11-2{i % 4}T10:00:00Z") for i in range(8)]
    now = at(bench.process(268e-6, between=0.001, placement=0.002, within=0.0), "2026-11-30T10:00:00Z")
    from pytest_gpumem.verdicts.spread import between_placements

    expected = (
        between_sessions(history).value * (1 + 1 / 4)
        + between_processes(history).value * (1 + 1 / 8)
        + between_placements([now]).value / 8
        + between_placements(history).value / 64
    )
    assert of_difference(now, history).value == pytest.approx(expected)


def with_further(measurement: Measurement, *factors: float, overhead: float | None = None) -> Measurement:
    repeats = tuple(Repeat(tuple(m * factor for m in measurement.medians), overhead) for factor in factors)
    return replace(measurement, further=repeats)


def test_further_processes_are_averaged_and_sharpen_the_interval(bench: Any, h100: DeviceFacts) -> None:
    history = [bench.measurement(268e-6) for _ in range(20)]
    one: Measurement = bench.measurement(268e-6 * 1.02)
    three = with_further(one, 0.99, 1.0)
    alone, together = compare(one, history, 0.01), compare(three, history, 0.01)
    assert (alone.measured, together.measured) == (1, 3)
    assert together.delta == pytest.approx(1.02 * 0.99 ** (1 / 3) - 1, rel=1e-3)
    assert together.resolvable < alone.resolvable
    verdict = judge(three, Limits(max_regression="1%"), h100, history, strict=False)
    assert ", over 3 processes of this run" in verdict.reason


def test_each_further_process_has_its_own_launch_overhead(bench: Any) -> None:
    history = [bench.measurement(100e-6, sampler="blocked", overhead=2e-6) for _ in range(4)]
    one: Measurement = bench.measurement(100e-6, sampler="blocked", overhead=2e-6)
    further = with_further(one, 1.02, overhead=4e-6)
    assert compare(further, history, 0.01).delta == pytest.approx(0.0, abs=1e-6)


def test_a_baseline_of_runs_of_several_processes_counts_each_of_them(bench: Any) -> None:
    history = [with_further(bench.measurement(268e-6), 1.001, 0.999) for _ in range(4)]
    assert compare(bench.measurement(268e-6), history, 0.01).processes == 12
    assert [len(reading.medians) for reading in readings(history[0])] == [8, 8, 8]
