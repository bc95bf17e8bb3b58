"""The counting pass of a measurement: untimed, of one launch, from where pages are before every sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bench import QUICK, Bench
from counted_device import CountedDevice, replaced
from msgspec.structs import replace

from pytest_gpumem.devices.protocol import NotCounted, Undelivered
from pytest_gpumem.measuring.conductor import Passes
from pytest_gpumem.measuring.sampling import Plan
from pytest_gpumem.measuring.target_case import Case
from pytest_gpumem.memory.pinned import PinnedCap
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.units import MiB

N = 16 * MiB
PLAN = Plan(**QUICK)  # type: ignore[arg-type]


def measured(bench: Bench, x: Any, y: Any, *, count: bool = True) -> Measurement:
    target = bench.target(bench.kernels.add, x, y)
    return bench.conductor.measure(target, PLAN, arena=bench.arena, label="", name="test_add", passes=Passes(pages=count))


def test_faulting_and_prefetched_memory_tell_different_stories() -> None:
    bench = Bench()
    naive = measured(bench, bench.memory.managed(N), bench.memory.managed(N)).migrations
    assert naive is not None
    assert naive.launch is not None
    assert naive.before is not None
    assert naive.launch.gpu_faults > 0
    assert naive.launch.to_device == 2 * N
    assert naive.before.to_host == 2 * N
    ahead = measured(bench, bench.memory.prefetched(N), bench.memory.prefetched(N)).migrations
    assert ahead is not None
    assert ahead.launch is not None
    assert ahead.before is not None
    assert (ahead.launch.gpu_faults, ahead.launch.migrated) == (0, 0)
    assert (ahead.before.to_device, ahead.before.to_host) == (2 * N, 2 * N)
    assert ahead.before.causes == {"prefetch": 4 * N}


def test_nobody_counts_unasked_and_nothing_is_timed_while_counting() -> None:
    counting = list[str]()

    class Watched(CountedDevice):
        def __init__(self) -> None:
            super().__init__()
            pages, record = self.counters.pages, self.streams.record

            def watched(work: Callable[[], None]) -> PageCounts:
                counting.append("on")
                try:
                    return pages(work)
                finally:
                    counting.append("off")

            def recorded(*args: Any) -> None:
                assert counting[-1:] != ["on"], "an event was recorded while pages were counted"
                record(*args)

            replaced(self.counters, pages=watched)
            replaced(self.streams, record=recorded)

    bench = Bench(Watched())
    assert measured(bench, bench.memory.managed(N), bench.memory.managed(N), count=False).migrations is None
    assert counting == []
    measured(bench, bench.memory.managed(N), bench.memory.managed(N))
    assert counting == ["on", "off", "on", "off"]


def test_what_cannot_be_counted_is_said_and_the_figures_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def refuse(work: Callable[[], None]) -> PageCounts:
        raise NotCounted("cupti-python cannot be imported")

    monkeypatch.setattr(bench.device.counters, "pages", refuse)
    taken = measured(bench, bench.memory.managed(N), bench.memory.managed(N))
    assert taken.migrations is not None
    assert (taken.migrations.launch, taken.migrations.not_counted) == (None, "cupti-python cannot be imported")
    assert taken.latency > 0


def test_under_a_profiler_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(profiled=True)
    monkeypatch.setattr(bench.device.counters, "pages", lambda work: pytest.fail("a second tool asked for the counters"))
    taken = measured(bench, bench.memory.managed(N), bench.memory.managed(N))
    assert taken.migrations is not None
    assert "a profiler is attached" in str(taken.migrations.not_counted)


def test_labels_of_the_device_reach_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.device.machine, "facts", replace(bench.device.facts, pageable_memory_access=True))
    assert any(note.startswith("HMM:") for note in measured(bench, bench.memory.managed(N), bench.memory.managed(N)).notes)


def test_what_a_test_may_take_holds_in_its_cases_too() -> None:
    bench, seen = Bench(), list[Memory]()

    def case(memory: Memory) -> Case:
        seen.append(memory)
        return Case(lambda: None)

    bench.arena.oversubscribes, bench.arena.pinned = True, PinnedCap(0.1, "here")
    bench.conductor.case(case, arena=bench.arena).close()
    assert (seen[0].arena.oversubscribes, seen[0].arena.pinned) == (True, PinnedCap(0.1, "here"))


@pytest.mark.parametrize(("lost", "counted"), [(1, True), (2, True), (100, False)])
def test_counts_that_are_not_delivered_are_counted_again_from_the_start(lost: int, counted: bool) -> None:
    """The pages are put back before each try, so a try that is lost leaves no trace in the count."""

    class Losing(CountedDevice):
        passes = 0

        def __init__(self) -> None:
            super().__init__()
            pages = self.counters.pages

            def losing(work: Callable[[], None]) -> PageCounts:
                found = pages(work)
                self.passes += 1
                if self.passes in range(2, 2 + 2 * lost, 2) or lost == 100:
                    raise Undelivered("CUPTI told of nothing")
                return found

            replaced(self.counters, pages=losing)

    bench = Bench(Losing())
    found = measured(bench, bench.memory.managed(N), bench.memory.managed(N)).migrations
    assert found is not None
    if counted:
        assert found.launch is not None
        assert found.before is not None
        assert (found.launch.to_device, found.before.to_host) == (2 * N, 2 * N)
    else:
        assert found.launch is None
        assert "told of nothing (tried 4 times)" in str(found.not_counted)


def test_what_a_launch_costs_is_read_again_after_a_count() -> None:
    """CUPTI, once it has looked, may leave a process with launches that cost something else."""
    bench = Bench(CountedDevice())
    before = bench.conductor.floors()
    measured(bench, bench.memory.managed(N), bench.memory.managed(N), count=False)
    assert bench.conductor.floors() is before
    measured(bench, bench.memory.managed(N), bench.memory.managed(N))
    assert bench.conductor.floors() is not before
