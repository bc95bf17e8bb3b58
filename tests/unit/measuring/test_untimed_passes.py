"""The untimed passes of a measurement: page counts, and what a launch ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bench import Bench
from counted_device import replaced
from msgspec.structs import replace

from pytest_gpumem.devices.protocol import NotCounted, Undelivered
from pytest_gpumem.measuring import untimed
from pytest_gpumem.measuring.case import Case
from pytest_gpumem.measuring.plan import NO_PASSES, Passes
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan, what_ran
from pytest_gpumem.units import MiB

N = 16 * MiB
PAGES, RAN = Passes(pages=True), Passes(ran=True)


def found(one: Any) -> Any:
    assert one is not None
    return one


def added(bench: Bench, kind: str = "managed", passes: Passes = PAGES) -> Measurement:
    x, y = (getattr(bench.memory, kind)(N) for _ in range(2))
    return bench.take(bench.target(bench.kernels.add, x, y), passes=passes)


def triad(bench: Bench, passes: Passes = RAN, grid: int = 32) -> Measurement:
    return bench.take(
        bench.target(bench.kernels.triad.with_grid(grid), *bench.buffers(3, N), 3.0), passes=passes
    )


def copied(kind: str) -> Measurement:
    bench = Bench()
    target = bench.target(
        bench.kernels.memcpy, bench.memory.device(N), getattr(bench.memory, kind)(N)
    )
    return bench.take(target, passes=RAN)


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
    plain = added(bench, passes=NO_PASSES)
    assert (plain.migrations, plain.what_ran, looking) == (None, None, [])
    added(bench, passes=PAGES)
    assert looking == ["on", "off"] * 2
    looking.clear()
    added(bench, "device", passes=RAN)
    assert looking == []


def test_what_keeps_us_from_looking_stands_in_the_result_and_the_figures_stay() -> None:
    cases: list[tuple[Passes, str, Any]] = [
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


def test_labels_of_the_device_reach_the_notes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench.device.roofline, "facts", replace(bench.device.facts, pageable_memory_access=True)
    )
    assert any(note.startswith("HMM:") for note in added(bench).notes)


def test_what_a_test_may_take_holds_in_its_cases_too(bench: Bench) -> None:
    seen = list[Memory]()

    def case(memory: Memory) -> Case:
        seen.append(memory)
        return Case(lambda: None)

    bench.arena.oversubscribes = True
    bench.conductor.case(case, arena=bench.arena).close()
    assert seen[0].arena.oversubscribes


@pytest.mark.parametrize(("lost", "counted"), [(1, True), (2, True), (100, False)])
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


def test_what_a_launch_costs_is_read_again_after_a_count(bench: Bench) -> None:
    """CUPTI, once it has looked, may leave a process with launches that cost something else."""
    before = bench.conductor.floors()
    added(bench, passes=NO_PASSES)
    assert bench.conductor.floors() is before
    added(bench)
    assert bench.conductor.floors() is not before


# What ran


def test_a_kernel_is_told_with_its_shape_and_a_digest_of_its_source(bench: Bench) -> None:
    (step,) = found(triad(bench).what_ran).launch
    assert (step.kind, step.name, step.grid, step.stream) == (
        StepKind.KERNEL,
        "triad",
        (32, 1, 1),
        0,
    )
    assert step.code is not None


def test_a_copy_is_told_with_its_kinds_of_memory_and_bytes() -> None:
    for kind in ["pinned", "pageable"]:
        (step,) = found(copied(kind).what_ran).launch
        assert (step.kind, step.name, step.source, step.memory, step.nbytes) == (
            StepKind.COPY,
            "H2D",
            kind,
            "device",
            N,
        ), kind


def test_two_processes_agree_and_each_change_shows() -> None:
    taken = (triad(Bench()), triad(Bench(), grid=64), copied("pinned"), copied("pageable"))
    digests = [found(one.what_ran).digest for one in taken]
    assert None not in digests
    assert len(set(digests)) == 4
    assert found(triad(Bench()).what_ran).digest == digests[0]


def test_a_scalar_argument_is_part_of_it_and_an_address_is_not(bench: Bench) -> None:
    def ran(scalar: float, nbytes: int = N) -> WhatRan:
        buffers = [bench.memory.device(nbytes, "f4") for _ in range(3)]
        taken: WhatRan = found(
            bench.take(
                bench.target(bench.kernels.triad.with_grid(32), *buffers, scalar), passes=RAN
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
    assert plain.digest == ran(3.0).digest != ran(3.5).digest
    assert ran(3.0, N + N // 32).digest != plain.digest


def test_the_window_and_the_set_aside_are_part_of_it(bench: Bench) -> None:
    arguments = bench.buffers(2, 4 * MiB)
    without = found(bench.take(bench.target(bench.kernels.copy, *arguments), passes=RAN).what_ran)
    with persisting(bench.device, arguments[0]) as stream:
        under = found(
            bench.take(
                bench.target(bench.kernels.copy, *arguments, stream=stream), passes=RAN
            ).what_ran
        )
    assert without.launch[0].window is None
    assert under.launch[0].window == "4 MiB at hit ratio 1, persisting, else streaming"
    assert under.digest != without.digest


def test_advice_is_part_of_it() -> None:
    digests = set()
    for advice in (
        {},
        {"read_mostly": True},
        {"preferred_location": "host"},
        {"accessed_by": "device"},
    ):
        bench = Bench()
        x, y = bench.memory.managed(N, **advice), bench.memory.managed(N)
        digests.add(
            found(bench.take(bench.target(bench.kernels.add, x, y), passes=RAN).what_ran).digest
        )
    assert len(digests) == 4


def test_the_pass_takes_no_virtual_time_and_changes_nothing_that_is_measured() -> None:
    def samples(passes: Passes) -> Any:
        bench = Bench()
        return [triad(bench, passes).samples for _ in range(2)][-1]

    assert samples(NO_PASSES) == pytest.approx(samples(RAN))


@pytest.mark.parametrize(
    ("launches", "expected"),
    [
        (["1234", "1234"], "1234"),
        (["1234 9", "1256 9"], "? 9"),
        (["lost", "1234", "lost"], None),
    ],
)
def test_words_of_arguments_that_differ_between_two_launches_are_left_out(
    bench: Bench, launches: list[str], expected: str | None
) -> None:
    def answer(work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        if (given := launches.pop(0)) == "lost":
            raise Undelivered("CUPTI delivered nothing")
        return what_ran([Step(StepKind.KERNEL, "k", code="a", arguments=(given,))], {})

    replaced(bench.device.counters, what_ran=answer)
    seen = case(bench)
    assert (seen.launch[0].arguments == (expected,), seen.digest is not None) == (
        expected is not None,
    ) * 2
    assert expected is not None or seen.not_watched == "CUPTI delivered nothing"


def answers(*digests: str | None) -> Callable[..., WhatRan]:
    left = list(digests)

    def answer(work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        if left[0] == "lost":
            raise Undelivered(f"CUPTI {left.pop(0)} kernels")
        return what_ran(
            [Step(StepKind.KERNEL, "k", code=left[0])],
            {},
            not_watched=None if left.pop(0) else "unknown code",
        )

    return answer


def case(bench: Bench, passes: Passes = RAN) -> Any:
    taken = bench.case(
        lambda memory: Case(lambda: None, reference=lambda: None, reads=[memory.device(N)]),
        passes=passes,
    )
    return found(taken.what_ran)


def test_two_launches_of_foreign_code_have_to_agree() -> None:
    for codes, known in [
        (("a", "a"), True),
        (("a", "b", "b"), True),
        (("a", "b", "c"), False),
        ((None,), False),
        (("a", None), False),
        (("lost", "a", "a"), True),
        (("lost", "a", "b"), False),
        (("lost", "lost", "lost"), False),
    ]:
        bench = Bench()
        replaced(bench.device.counters, what_ran=answers(*codes))
        seen = case(bench)
        assert (seen.digest is not None, seen.not_watched is None) == (known, known), codes


def test_our_own_kernels_and_long_launches_are_watched_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(bench.device.counters, what_ran=answers("a", "lost", "b", "c"))
    assert [found(triad(bench).what_ran).launch[0].code for _ in range(2)] == ["a", "b"]
    monkeypatch.setattr(untimed, "LONG", 0.0)
    assert case(bench).launch[0].code == "c"
