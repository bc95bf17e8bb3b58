"""The untimed passes of a measurement: page counts, and what a launch ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bench import Bench
from counted_device import replaced

from pytest_gpumem.devices.protocol import NotCounted, Undelivered
from pytest_gpumem.measuring.case import Case
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.what_ran import PageCounts, Step, WhatRan, what_ran
from pytest_gpumem.units import MiB

N = 16 * MiB
PAGES, RAN = {"pages": True}, {"ran": True}


def found(one: Any) -> Any:
    assert one is not None
    return one


def added(bench: Bench, kind: str = "managed", passes: Any = PAGES) -> Measurement:
    x, y = (getattr(bench.memory, kind)(N) for _ in range(2))
    return bench.take(bench.target(bench.kernels.add, x, y), **passes)


# All of them


def test_nobody_looks_unasked_and_nothing_is_timed_meanwhile(bench: Bench) -> None:
    look, record, looking = bench.device.counters.pages, bench.device.streams.record, list[str]()

    def watched(work: Callable[[], None]) -> Any:
        looking.append("on")
        try:
            return look(work)
        finally:
            looking.append("off")

    def recorded(*args: Any) -> None:
        assert looking[-1:] != ["on"], "an event was recorded meanwhile"
        record(*args)

    replaced(bench.device.counters, pages=watched)
    replaced(bench.device.streams, record=recorded)
    plain = added(bench, passes={})
    assert (plain.migrations, plain.what_ran, looking) == (None, None, [])
    added(bench, passes=PAGES)
    assert looking == ["on", "off"] * 2
    looking.clear()
    added(bench, "device", passes=RAN)
    assert looking == []


def test_what_keeps_us_from_looking_stands_in_the_result_and_the_figures_stay() -> None:
    cases: list[tuple[Any, str, Any]] = [
        (PAGES, "pages", lambda taken: taken.migrations.not_counted),
        (RAN, "what_ran", lambda taken: taken.what_ran.not_watched),
    ]
    for passes, counter, reason in cases:

        def refuse(*_: object) -> Any:
            raise NotCounted("another tool holds CUPTI")

        for bench, said in (
            (Bench(), "another tool holds CUPTI"),
            (Bench(profiled=True), "a profiler is attached"),
        ):
            replaced(bench.device.counters, **{counter: refuse})
            taken = added(bench, passes=passes)
            assert str(reason(taken)).startswith(said), passes
            assert taken.latency > 0, passes


# Page counts


def test_faulting_and_prefetched_memory_tell_different_stories(bench: Bench) -> None:
    naive = found(added(bench).migrations)
    assert naive.launch.gpu_faults > 0
    assert (naive.launch.to_device, naive.before.to_host) == (2 * N, 2 * N)
    ahead = found(added(bench, "prefetched").migrations)
    assert (ahead.launch.gpu_faults, ahead.launch.migrated) == (0, 0)
    assert (ahead.before.to_device, ahead.before.to_host) == (2 * N, 2 * N)
    assert ahead.before.causes == {"prefetch": 4 * N}


@pytest.mark.parametrize(("lost", "counted"), [(1, True), (100, False)])
def test_counts_that_are_not_delivered_are_counted_again_from_the_start(
    bench: Bench, lost: int, counted: bool
) -> None:
    """The pages are put back before each try, so a try that is lost leaves no trace in the count."""
    pages, passes = bench.device.counters.pages, [0]

    def losing(work: Callable[[], None]) -> PageCounts:
        taken = pages(work)
        passes[0] += 1
        if passes[0] in range(2, 2 + 2 * lost, 2) or lost == 100:
            raise Undelivered("CUPTI told of nothing")
        return taken

    replaced(bench.device.counters, pages=losing)
    taken = found(added(bench).migrations)
    if counted:
        assert (taken.launch.to_device, taken.before.to_host) == (2 * N, 2 * N)
    else:
        assert taken.launch is None
        assert "told of nothing (tried 4 times)" in str(taken.not_counted)


# What ran


def test_a_scalar_argument_is_part_of_it_and_an_address_is_not(bench: Bench) -> None:
    def ran(scalar: float, nbytes: int = N) -> WhatRan:
        buffers = [bench.memory.device(nbytes, "f4") for _ in range(3)]
        taken: WhatRan = found(
            bench.take(
                bench.target(bench.kernels.triad.with_grid(32), *buffers, scalar), **RAN
            ).what_ran
        )
        return taken

    plain = ran(3.0)
    assert plain.launch[0].arguments == (
        "device -",
        "device -",
        "device -",
        "40400000",
        f"{N // 4:x} 0",
    )
    assert plain == ran(3.0) != ran(3.5)
    assert ran(3.0, N + N // 32) != plain


def test_the_window_and_the_set_aside_are_part_of_it(bench: Bench) -> None:
    arguments = bench.buffers(2, 4 * MiB)
    without = found(bench.take(bench.target(bench.kernels.copy, *arguments), **RAN).what_ran)
    with persisting(bench.device, arguments[0]) as stream:
        under = found(
            bench.take(bench.target(bench.kernels.copy, *arguments, stream=stream), **RAN).what_ran
        )
    assert without.launch[0].window is None
    assert under.launch[0].window == "4 MiB at hit ratio 1, persisting, else streaming"
    assert under != without


def answers(*digests: str | None) -> Callable[..., WhatRan]:
    left = list(digests)

    def answer(work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        if left[0] == "lost":
            raise Undelivered(f"CUPTI {left.pop(0)} kernels")
        return what_ran(
            [Step("kernel", "k", code=left[0])],
            {},
            not_watched=None if left.pop(0) else "unknown code",
        )

    return answer


def case(bench: Bench) -> Any:
    taken = bench.case(
        lambda memory: Case(lambda: None, reference=lambda: None, reads=[memory.device(N)]),
        **RAN,
    )
    return found(taken.what_ran)


def test_two_launches_of_foreign_code_have_to_agree() -> None:
    for codes, known in [
        (("a", "a"), True),
        (("a", "b", "c"), False),
        ((None,), False),
        (("lost", "lost", "lost"), False),
    ]:
        bench = Bench()
        replaced(bench.device.counters, what_ran=answers(*codes))
        seen = case(bench)
        assert (seen.not_watched is None) == known, codes
