"""Footprints from single allocations: peaks, what is kept, and what must not count twice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.devices.errors import NotCounted
from pytest_gpumem.devices.footprints import Footprints
from pytest_gpumem.devices.memory_events import (
    AllocationEvent,
    Figures,
    MemoryLog,
    Source,
    account,
    claim,
    live_of,
)
from pytest_gpumem.devices.memory_kinds import MemoryKind

MIB = 2**20


def event(
    at: float, library: str, layer: Any, address: int, nbytes: int, kind: Any = "device"
) -> AllocationEvent:
    return AllocationEvent(at, (library, kind), layer, address, nbytes)


def log_of(*events: AllocationEvent) -> MemoryLog:
    log = MemoryLog()
    for one in events:
        log.emit(one)
    log.settle()
    return log


def test_a_segment_of_a_pool_counts_where_it_is_used_and_at_the_driver_once() -> None:
    log = log_of(
        event(1.0, "CUDA", "driver", 0xA000, 4 * MIB),
        event(1.0001, "CuPy", "segment", 0xA000, 4 * MIB),  # reported after the driver made it
        event(1.1, "CuPy", "use", 0xA000, MIB),
        event(1.2, "CuPy", "use", 0xA000 + MIB, 2 * MIB),
        event(1.3, "CuPy", "use", 0xA000, 0),
        event(1.4, "CUDA", "driver", 0xB000, MIB),  # nobody's pool
    )
    _, peak, uses, *_ = account(log.changes)
    assert peak == 3 * MIB
    cupy, cuda = uses["CuPy", "device"], uses["CUDA", "device"]
    assert (cupy.peak, cupy.kept, cupy.allocations, cupy.largest) == (
        3 * MIB,
        2 * MIB,
        2,
        2 * MIB,
    )
    assert (cuda.peak, cuda.kept) == (MIB, MIB)
    assert [one.nbytes for one in live_of(log.changes)] == [2 * MIB, MIB]


def test_the_peak_is_that_of_all_libraries_at_one_time() -> None:
    log = log_of(
        event(1, "CuPy", "use", 1, 3 * MIB),
        event(2, "CuPy", "use", 1, 0),
        event(3, "PyTorch", "use", 1, 2 * MIB),  # the same address in another library
        event(4, "CUDA", "driver", 9, 8 * MIB, "pinned"),
    )
    _, peak, uses, *_ = account(log.changes)
    assert peak == 3 * MIB
    assert uses["CUDA", "pinned"].peak == 8 * MIB


def test_an_address_that_is_given_out_again_was_freed_unseen() -> None:
    log = log_of(event(1, "CUDA", "driver", 7, MIB), event(2, "CUDA", "driver", 7, 2 * MIB))
    _, peak, uses, *_ = account(log.changes)
    assert (peak, uses["CUDA", "device"].kept) == (2 * MIB, 2 * MIB)


def test_a_free_of_what_was_never_seen_is_nothing() -> None:
    assert account(log_of(event(1, "CuPy", "use", 5, 0)).changes)[:3] == (0, 0, {})


class Library(Source):
    """A library with a pool of 16 MiB or more."""

    name = "CuPy"

    def __init__(self) -> None:
        self.log: MemoryLog | None = None
        self.used: dict[int, int] = {}
        self.pool = 16 * MIB
        self.high = 0  # of a library whose allocations are not reported

    def ready(self) -> bool:
        return True

    def start(self, log: MemoryLog) -> str | None:
        self.log = log
        return "its history is off" if self.high else None

    def stop(self) -> None:
        self.log = None

    def figures(self) -> Mapping[str, Figures]:
        used = sum(self.used.values())
        figures = Figures(used, self.pool - used, self.pool, self.high, not self.high)
        return {self.name: figures}

    def take(self, address: int, nbytes: int, *, hooked: bool = True) -> None:
        self.used[address] = nbytes
        grows = max(0, sum(self.used.values()) - self.pool)
        self.pool += grows
        if self.high:
            self.high = max(self.high, sum(self.used.values()))
        elif hooked and grows:
            self.emit("segment", -address, grows)
        if hooked:
            self.emit("use", address, nbytes)

    def free(self, address: int, *, hooked: bool = True) -> None:
        del self.used[address]
        if hooked:
            self.emit("use", address, 0)

    def emit(self, layer: Any, address: int, nbytes: int) -> None:
        if self.log is not None and not self.high:
            self.log.emit(event(time.perf_counter(), self.name, layer, address, nbytes))


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def footprints(library: Library) -> Footprints:
    made = Footprints(None, (library,))
    made.start(driver=False)
    return made


def test_what_a_pool_keeps_for_reuse_is_reserved_and_not_kept(
    library: Library, footprints: Footprints
) -> None:
    library.take(1, MIB)
    watch = footprints.watch()
    library.take(2, 4 * MIB)
    library.free(2)
    (use,) = watch.read().uses
    assert (use.peak, use.kept, use.reserved) == (4 * MIB, 0, 0)
    library.take(3, 20 * MIB)  # the pool grows
    library.free(3)
    found = watch.read()
    assert (found.peak, found.kept, found.reserved) == (20 * MIB, 0, 5 * MIB)
    library.take(4, 4096)
    assert watch.read().kept == 4096
    library.free(1)  # of before: what it frees does not make up for what others keep
    assert watch.read().kept == 0


def test_the_harness_counts_for_nothing_and_its_frees_of_the_tests_memory_do(
    library: Library, footprints: Footprints
) -> None:
    watch = footprints.watch()
    library.take(1, MIB)
    with footprints.ours():
        library.take(2, 8 * MIB)
        library.free(2)
        library.free(1)
    found = watch.read()
    assert (found.peak, found.kept, found.allocations) == (MIB, 0, 1)


def test_memory_that_a_pool_maps_counts_once() -> None:
    assert claim((), "JAX", 8 * MIB)
    assert not claim(log_of(event(1, "CUDA", "driver", 1, 4 * MIB)).changes, "JAX", 8 * MIB)


def test_buffers_of_fixtures_count_by_kind_whatever_their_address(
    footprints: Footprints,
) -> None:
    watch = footprints.watch()
    numbers = [
        footprints.took(kind, MIB)
        for kind in (
            MemoryKind.DEVICE,
            MemoryKind.MANAGED,
            MemoryKind.REGISTERED,
            MemoryKind.PAGEABLE,
        )
    ]
    found = watch.read()
    assert {use.kind: use.kept for use in found.uses if use.library == "gpumem"} == {
        "device": MIB,
        "managed": MIB,
        "pinned": MIB,
    }
    assert found.peak == MIB
    for number in (*numbers, *numbers):
        footprints.gave_back(number)
    assert watch.read().kept == 0


def test_watches_lie_inside_each_other(library: Library, footprints: Footprints) -> None:
    outer = footprints.watch()
    library.take(1, MIB)
    inner = footprints.watch()
    library.take(2, 2 * MIB)
    library.free(2)
    assert inner.read().peak == 2 * MIB
    inner.close()
    assert (outer.read().peak, outer.read().kept) == (3 * MIB, MIB)
    outer.close()
    assert footprints.watch().read().peak == 0


def test_what_an_allowed_line_allocates_is_not_kept() -> None:
    footprints = Footprints(None, [Library()])
    for name, kept in ((Path(__file__).name, 0), ("other.py", MIB)):
        footprints.start(driver=True, allow_kept=[f"{name}:*"])
        watch = footprints.watch()
        footprints.took(MemoryKind.DEVICE, MIB)
        (use,) = watch.read().uses
        assert (use.kept, use.allowed) == (kept, MIB - kept)


def test_a_pause_costs_nothing_and_frees_in_it_count(
    library: Library, footprints: Footprints
) -> None:
    watch = footprints.watch()
    library.take(1, MIB)
    library.take(2, 2 * MIB)
    with footprints.paused():
        assert library.log is None
        library.take(3, 8 * MIB)
        with footprints.resumed():
            library.take(4, 4 * MIB)
            library.free(4)
        library.free(2)
    library.take(5, MIB)
    assert (watch.read().peak, watch.read().kept) == (7 * MIB, 2 * MIB)


def test_a_test_is_watched_after_a_measurement_that_nobody_watched(library: Library) -> None:
    footprints = Footprints(None, (library,))
    with footprints.paused(), footprints.resumed():
        library.take(1, MIB)
    footprints.start(driver=False)
    watch = footprints.watch()
    library.take(2, 4 * MIB)
    library.free(2)
    assert (watch.read().peak, watch.read().allocations) == (4 * MIB, 1)


def test_where_not_all_is_reported_the_peak_has_a_bound(library: Library) -> None:
    library.high = MIB  # as RMM and JAX
    footprints = Footprints(None, (library,))
    footprints.start(driver=False)
    watch = footprints.watch()
    library.take(1, 6 * MIB)
    library.free(1)
    assert (watch.read().peak, watch.read().peak_bound) == (6 * MIB, None)
    later = footprints.watch()
    library.take(1, MIB)
    assert (later.read().peak, later.read().peak_bound) == (MIB, 6 * MIB)
    assert any("below an earlier one" in why for why in later.read().not_watched)


def test_a_second_read_sees_what_happened_since_the_first(
    library: Library, footprints: Footprints
) -> None:
    outer = footprints.watch()
    library.take(1, MIB)
    inner = footprints.watch()
    assert (outer.read().kept, inner.read().kept) == (MIB, 0)
    library.take(2, 2 * MIB)
    library.free(1)
    assert (outer.read().peak, inner.read().peak) == (3 * MIB, 2 * MIB)
    assert (outer.read().kept, outer.read().allocations) == (2 * MIB, 2)


def test_a_thread_without_the_hook_leaves_the_peak_unknown(
    library: Library, footprints: Footprints
) -> None:
    watch = footprints.watch()
    library.take(1, 20 * MIB)
    assert (watch.read().peak_bound, watch.read().not_watched) == (None, ())
    library.take(2, 256 * MIB, hooked=False)
    library.free(2, hooked=False)
    found = watch.read()
    assert (found.peak, found.peak_bound) == (20 * MIB, (16 + 260) * MIB)
    assert any("arrays of a thread" in why for why in found.not_watched)


def test_a_watch_that_was_open_while_the_driver_did_not_report_is_not_read() -> None:
    footprints = Footprints(driver := Library(), ())
    footprints.start(driver=True)
    watch = footprints.watch()
    driver.lost("PyTorch's profiler has CUPTI")
    with pytest.raises(NotCounted, match="profiler has CUPTI"):
        watch.read()
    part = footprints.watch()  # as after a fork, since which it reports no more
    with pytest.raises(NotCounted, match="profiler has CUPTI"):
        part.read()
    part.close()
    watch.close()
    assert footprints.watch().read().kept == 0


def test_what_follows_a_gap_counts_where_as_many_changes_are_left(
    library: Library, footprints: Footprints
) -> None:
    watch = footprints.watch()
    library.take(1, MIB)
    known = watch.read().peak
    changes = len(footprints.log.changes)
    library.lost("another tool records it")
    for _ in range(changes):
        footprints.took(MemoryKind.DEVICE, 8 * MIB)
    assert known == MIB
    assert watch.read().peak >= 8 * MIB * changes
