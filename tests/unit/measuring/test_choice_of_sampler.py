"""Which sampler is taken, and how many launches make a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from bench import Bench

from pytest_gpumem.measuring.samplers import (
    BATCH_SECONDS,
    LEAST_BATCH,
    LEAST_FOREIGN_BATCH,
    MOST_BATCH,
    MOST_FOREIGN_BATCH,
    QUEUED_SECONDS,
    SLOW_BATCH_SECONDS,
    batch_of,
    choose,
    untimed_of,
)
from pytest_gpumem.measuring.target import Target


def test_a_batch_is_long_enough_for_its_first_launch_not_to_count() -> None:
    for latency, launches in [
        (None, 1),
        (0.0, 1),
        (1e-9, MOST_BATCH),
        (BATCH_SECONDS / 100, 100),
        (BATCH_SECONDS / 100.5, 100),
        (SLOW_BATCH_SECONDS / LEAST_BATCH, LEAST_BATCH),
        (SLOW_BATCH_SECONDS / 4, 4),
        (SLOW_BATCH_SECONDS / 3.5, 4),
        (SLOW_BATCH_SECONDS, 1),
        (1.0, 1),
    ]:
        assert batch_of(latency, foreign=False) == launches, latency


def test_a_batch_of_a_foreign_callable_does_not_fill_the_stream() -> None:
    latencies = (None, 1e-9, BATCH_SECONDS / 30, 1e-4, 1e-3, 1.0)
    assert [batch_of(latency, foreign=True) for latency in latencies] == [
        1,
        MOST_FOREIGN_BATCH,
        30,
        LEAST_FOREIGN_BATCH,
        1,
        1,
    ]
    for latency in np.geomspace(
        1e-6, 1e-3, 200
    ):  # of kernels of a microsecond, of which a stream queues 1,024
        batch = batch_of(float(latency), foreign=True)
        assert batch == 1 or (batch + untimed_of(batch, 1)) * latency <= QUEUED_SECONDS


def chosen(
    requested: str = "auto", mode: str = "clean-cold", profiled: bool = False, **described: Any
) -> tuple[str, str]:
    target = Target("it", Bench().arena)
    for name, value in described.items():
        setattr(target, name, value)
    return choose(requested, target, mode, profiled=profiled)


def test_a_sampler_is_chosen() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "blocked"),
        ({"mode": "dirty-cold"}, "blocked"),
        ({"foreign": True}, "blocked"),
        ({"managed": ("a buffer",)}, "blocked"),
        ({"waits": True}, "host"),
        ({"mode": "hot"}, "graph"),
        ({"mode": "hot", "foreign": True}, "batched"),
        ({"mode": "hot", "foreign": True, "restores": True}, "blocked"),
        ({"profiled": True}, "plain"),
        ({"profiled": True, "mode": "hot"}, "plain"),
        ({"requested": "host"}, "host"),
        ({"requested": "host", "profiled": True}, "plain"),
    ]
    for facts, sampler in cases:
        name, reason = chosen(**facts)
        assert name == sampler, facts
        assert reason, facts
