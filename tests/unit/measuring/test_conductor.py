"""From a target to a measurement: samplers, placements, throttling, ranges, and that nothing is left behind."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from itertools import groupby, pairwise
from typing import Any

import pytest
from bench import Bench
from cases import naming
from counted_device import CountedDevice, failing
from msgspec.structs import replace

from pytest_gpumem.devices.protocol import CannotCapture, DeviceError, HoldExpired, OutOfMemory
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.devices.simulated.streams import SimulatedHold
from pytest_gpumem.kernels.stream import VECTOR_BYTES
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.case import Case
from pytest_gpumem.measuring.harness import FLOOR_SAMPLES, STREAMS, Harness, worst
from pytest_gpumem.measuring.measure import PROFILED_SAMPLES
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.units import GiB, MiB

LAUNCH_LATENCY = 20e-6
"""Most that a sampler on the host's clock may add to a launch."""


def triad(bench: Bench, nbytes: int = 32 * MiB, **plan: Any) -> Any:
    return bench.measure("triad", *bench.buffers(3, nbytes), 3.0, **plan)


# Samplers


def test_samplers_agree() -> None:
    """One kernel, cold: what lies between the events is the same however the launch gets there."""
    taken = {s: triad(Bench(), sampler=s, placements=4) for s in ("blocked", "host")}
    assert {name: m.sampler for name, m in taken.items()} == {"blocked": "blocked", "host": "host"}
    assert (
        taken["blocked"].latency < taken["host"].latency < taken["blocked"].latency + LAUNCH_LATENCY
    )
    plain = triad(Bench(profiled=True))
    assert (
        taken["blocked"].latency * 0.995 < plain.latency < taken["blocked"].latency + LAUNCH_LATENCY
    )


def test_hot_samplers_agree_where_nothing_fits_in_cache() -> None:
    batched, blocked = (
        triad(Bench(), nbytes=256 * MiB, mode="hot", sampler=s, placements=4)
        for s in ("auto", "blocked")
    )
    assert batched.sampler == "graph"
    assert batched.latency == pytest.approx(blocked.latency, rel=0.02)


def test_modes_are_ordered() -> None:
    """2 MiB arrays stay in L2 while hot."""
    hot, *cold = (
        triad(Bench(), nbytes=2 * MiB, mode=m, placements=4).latency
        for m in ("hot", "clean-cold", "dirty-cold")
    )
    assert hot < 0.8 * min(cold)


def test_each_mode_flushes_in_its_own_way() -> None:
    for mode, flush, per_sample in [
        ("clean-cold", "read", 1),
        ("dirty-cold", "write", 1),
        ("hot", None, 0),
    ]:
        bench = Bench(profiled=True)
        bench.conductor._harness.flush(mode)  # which launches it once, so that it is loaded
        bench.device.launched.clear()
        triad(bench, nbytes=2 * MiB, mode=mode)
        # The launch overhead is measured on the smallest write there is.
        flushes = [
            f
            for f in bench.device.launched
            if f.kernel.name in ("read", "write") and f.arrays["a"].nbytes > VECTOR_BYTES
        ]
        assert len(flushes) == per_sample * PROFILED_SAMPLES, mode
        assert all(
            f.kernel.name == flush and f.arrays["a"].nbytes == 2 * bench.device.facts.l2_bytes
            for f in flushes
        ), mode


def test_a_batch_that_cannot_be_captured_is_held_instead(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = triad(Bench(), mode="hot", placements=4).latency
    monkeypatch.setattr(bench.device.graphs, "capture", failing(error=CannotCapture))
    taken = triad(bench, mode="hot", placements=4)
    assert taken.sampler == "batched"
    assert taken.sampler_reason.endswith("behind a hold, as no graph takes them: made to fail")
    assert taken.latency == pytest.approx(expected, rel=0.005)
    with pytest.raises(BadCall, match='sampler "graph" was asked for, but made to fail'):
        triad(bench, mode="hot", sampler="graph")


def test_samples_of_a_graph_and_of_a_hold_are_not_averaged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph takes may change while placements follow each other, as where a library is imported meanwhile."""
    capture, moved = bench.device.graphs.capture, list[int]()

    def captured(*arguments: Any, **keywords: Any) -> Any:
        if len(moved) > 1:
            raise CannotCapture("a library is in the way")
        return capture(*arguments, **keywords)

    target = bench.kernel_target("triad", *bench.buffers(3, 2 * MiB))
    move = target.move
    assert move is not None

    def counted(wanted: int, most: int, random: Any) -> Any:
        moved.append(1)
        return dataclasses.replace(move(1, 1, random), move=counted)

    monkeypatch.setattr(bench.device.graphs, "capture", captured)
    taken = bench.take(
        dataclasses.replace(target, move=counted), mode="hot", placements=4, budget=1.0
    )
    assert taken.sampler == "batched"
    assert len(moved) > len(taken.placements) >= 4


def make_launches_wait(bench: Bench, *kernels: str) -> None:
    """From now on each launch of these kernels waits for the device."""

    def wait(launch: Any, *_: object, **__: object) -> None:
        if launch.kernel.name in kernels:
            bench.device.streams.synchronize()

    bench.device.before("kernels.launch", wait)


def test_what_cannot_be_held_is_timed_by_the_hosts_clock(bench: Bench) -> None:
    expected = triad(Bench(), placements=4).latency
    make_launches_wait(bench, "triad", "add")
    taken = triad(bench, placements=4)
    assert expected < taken.latency < expected + LAUNCH_LATENCY
    assert taken.overhead is None
    managed = bench.measure("add", bench.memory.managed(1 * MiB), bench.memory.managed(1 * MiB))
    for measured in (taken, managed):
        assert measured.sampler == "host"
        assert measured.sampler_reason.endswith(": wall-clock time, launch latency included")


@pytest.mark.parametrize(("mode", "waits_at"), [("clean-cold", 20), ("hot", 60)])
def test_one_wait_among_hundreds_of_launches_does_not_change_the_clock(
    bench: Bench, mode: str, waits_at: int
) -> None:
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        if calls == waits_at:
            bench.device.streams.synchronize()

    def build(memory: Memory) -> Case:
        x = memory.device(1 * MiB)
        return Case(launch=work, reference=work, reads=[x])

    taken = bench.case(build, placements=4, mode=mode, budget=1.0)
    assert calls > waits_at
    assert taken.sampler == ("batched" if mode == "hot" else "blocked")
    assert len(taken.placements) >= 4
    assert min(map(len, taken.placements)) > 10
    assert any("tried again" in note for note in taken.notes)


def test_the_first_launch_at_a_new_placement_is_not_held(bench: Bench) -> None:
    """A kernel that `build` makes is loaded there, which waits for the device."""
    built = 0

    def build(memory: Memory) -> Case:
        nonlocal built
        built += 1
        x, loaded = memory.device(1 * MiB), False

        def work() -> None:
            nonlocal loaded
            if not loaded:
                bench.device.streams.synchronize()
            loaded = True

        return Case(launch=work, reference=work, reads=[x])

    taken = bench.case(build, placements=4)
    assert built >= 4
    assert taken.sampler == "blocked"
    assert not any("tried again" in note for note in taken.notes)


@pytest.mark.parametrize("sampler", ["blocked", "host"])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_off_while_samples_are_taken(
    bench: Bench, sampler: str, enabled: bool
) -> None:
    seen: list[bool] = []

    def build(memory: Memory) -> Case:
        def work() -> None:
            seen.append(gc.isenabled())
            if len(seen) == 40:
                raise RuntimeError("the fortieth call")

        return Case(launch=work, reference=work, reads=[memory.device(1 * MiB)])

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(RuntimeError, match="the fortieth call"):
            bench.case(build, sampler=sampler)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    # The first launch of all is no sample.
    assert seen[0] is enabled
    assert seen.count(False) >= (39 - 4 if enabled else 40)


def case(function: Callable[[], object], buffer: Any) -> Case:
    return Case(launch=function, reference=function, reads=[buffer])


def test_placements_from_before_a_fallback_are_dropped(bench: Bench) -> None:
    """A hold may expire late, on a busy host: two clocks must not be averaged."""
    x, built = bench.memory.device(1 * MiB), 0
    blocked = bench.case(lambda memory: case(lambda: None, x), sampler="blocked").latency

    def build(memory: Memory) -> Case:
        nonlocal built
        built += 1
        waits = built > 4

        def work() -> None:
            if waits:
                bench.device.streams.synchronize()

        return case(work, x)

    taken = bench.case(build, placements=8)
    assert built > 5
    assert taken.sampler == "host"
    assert len(taken.placements) == built - 4
    assert all(statistics.median(p) > 1.2 * blocked for p in taken.placements)


def test_samples_from_before_a_fallback_are_dropped(bench: Bench) -> None:
    x, calls = bench.memory.device(2 * GiB), 0  # several chunks of samples

    def work() -> None:
        nonlocal calls
        calls += 1
        if calls >= 150:
            bench.device.streams.synchronize()

    target = bench.target(work, reads=[x], reference=work)
    taken = bench.take(target, precision=1e-9, budget=1.0)
    assert taken.sampler == "host"
    assert len(taken.samples) == calls - 151  # of the two holds that expired


def test_a_sampler_that_was_asked_for_does_not_fall_back(bench: Bench) -> None:
    target = bench.kernel_target("triad", *bench.buffers(3))
    make_launches_wait(bench, "triad")
    with pytest.raises(BadCall, match='sampler "blocked" was asked for, but'):
        bench.take(target, sampler="blocked")
    assert bench.leftovers() == 0


def test_faulting_pages_cannot_be_measured_in_a_batch(bench: Bench) -> None:
    def pair() -> list[Any]:
        return [bench.memory.managed(1 * MiB), bench.memory.managed(1 * MiB)]

    with pytest.raises(
        BadCall, match='sampler "batched" cannot put managed pages back before every launch'
    ):
        bench.measure("add", *pair(), sampler="batched", mode="hot")
    assert bench.measure("add", *pair(), mode="hot").sampler == "blocked"


def test_every_sample_of_managed_memory_faults(bench: Bench) -> None:
    x, y = bench.memory.managed(16 * MiB), bench.memory.managed(16 * MiB)
    taken = bench.measure("add", x, y)
    assert min(taken.samples) > 0.9 * max(taken.samples)
    assert min(taken.samples) > 10 * bench.measure("add", *bench.buffers(2, 16 * MiB)).latency


def test_every_sample_of_prefetched_memory_is_prefetched(bench: Bench) -> None:
    x, y = bench.memory.prefetched(16 * MiB), bench.memory.prefetched(16 * MiB)
    moved: list[bool] = []
    bench.device.before(
        "managed.prefetch", lambda allocation, to_host, stream: moved.append(to_host)
    )
    taken = bench.measure("add", x, y)
    assert moved.count(True) == moved.count(False) >= 2 * len(taken.samples)
    assert taken.latency < 4 * bench.measure("add", *bench.buffers(2, 16 * MiB)).latency


# Placements


def test_placements_are_at_different_addresses(bench: Bench) -> None:
    a, b = bench.buffers(2, 2 * MiB)
    own = (a.address, b.address)
    taken = bench.measure("copy", a, b, placements=6)
    placed = set(launched(bench)) - {own}
    assert len(taken.placements) == len(placed) >= 6
    everywhere = [address for pair in (*placed, own) for address in pair]
    assert len(set(everywhere)) == len(everywhere)
    assert taken.half_width is not None
    assert taken.half_width > 0
    assert own == (a.address, b.address)


def launched(bench: Bench) -> list[tuple[int, int]]:
    """Addresses of the written and the read array of every launch of `copy`, in order."""
    return [
        (what.arrays["c"].address, what.arrays["a"].address)
        for what in bench.device.launched
        if what.kernel.name == "copy"
    ]


def test_placements_side_by_side_take_turns_in_a_random_order(bench: Bench) -> None:
    a, b = bench.buffers(2, 2 * MiB)
    own = (a.address, b.address)
    bench.measure("copy", a, b, placements=4, precision=1e-9)
    order = [where for where in launched(bench) if where != own]
    count = len(set(order))
    rounds = [tuple(order[first : first + count]) for first in range(0, len(order), count)]
    assert len(rounds) > 10
    assert all(set(turn) == set(order) for turn in rounds)
    assert len(set(rounds)) > len(rounds) / 2


def test_streams_take_turns(bench: Bench) -> None:
    a, b = bench.buffers(2, 2 * MiB)
    used = list[int]()

    def booked(what: Any, stream: Any) -> None:
        if what.kernel.name == "copy" and bench.ranges.open[-1].endswith(".measure"):
            used.append(stream.handle)

    bench.device.before("kernels.launch", booked)
    bench.measure("copy", a, b, placements=5)
    assert len(set(used)) == STREAMS
    turns = [used[first : first + STREAMS] for first in range(0, len(used) - STREAMS, STREAMS)]
    # Each set of placements begins with the first stream.
    assert sum(turn == turns[0] for turn in turns) > 0.9 * len(turns)


def test_what_is_bound_to_a_stream_is_measured_there_one_placement_after_the_other(
    bench: Bench,
) -> None:
    a, b = bench.buffers(2, 2 * MiB)
    used = set[int]()
    bench.device.before(
        "kernels.launch",
        lambda what, stream, **_: used.add(stream.handle) if what.kernel.name == "copy" else None,
    )
    with persisting(bench.device, b) as stream:
        taken = bench.take(bench.target(bench.kernels.copy, a, b, stream=stream), placements=6)
        assert used == {stream.stream.handle}
    placed = [addresses for addresses, _ in groupby(launched(bench))]
    assert len(taken.placements) == len(placed) == 6
    assert (
        len(set(placed)) > 3
    )  # without padding the places that moves leave free would come round again
    assert all(
        one != other
        for before, after in pairwise(placed)
        for one, other in zip(before, after, strict=True)
    )


def test_what_cannot_move_has_one_placement(bench: Bench) -> None:
    pinned = bench.memory.pinned(1 * MiB)
    taken = bench.measure("memcpy", bench.memory.pinned(1 * MiB), pinned, placements=6)
    assert len(taken.placements) == 1
    assert taken.half_width is None


def test_a_callable_with_arrays_of_its_own_has_one_placement_and_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.device.kernels, "call", lambda foreign, stream: foreign.function())
    a, b = bench.buffers(2)
    copy = bench.kernels.copy

    def copying(c: Any, a: Any) -> None:
        buffers, values = copy.arguments((c, a), {})
        bench.device.kernels.launch(copy.launch(buffers, values), bench.arena.stream)

    own = bench.take(bench.target(lambda: copying(a, b)), placements=4)
    assert len(own.placements) == 1
    assert (
        own.notes[0]
        == "one placement: the callable's arrays are its own; a Case is built anew for each"
    )
    moved = bench.take(bench.target(copying, a, b, moved=2 * MiB), placements=4)
    assert len(moved.placements) == 4
    assert (moved.target, moved.sampler, moved.checked) == ("copying", "blocked", False)
    assert moved.bandwidth == 2 * MiB / moved.latency


def test_memory_that_is_short_ends_placements_with_a_note() -> None:
    bench = Bench(CountedDevice(memory_bytes=3 * GiB + DATASHEETS["h100"].context_bytes))
    taken = bench.measure("write", bench.memory.device(2 * GiB), placements=4)
    assert len(taken.placements) == 1
    assert [note for note in taken.notes if note.startswith("no further placement: ")]
    assert "1 of 4 placements" in taken.notes
    assert taken.checked
    assert bench.leftovers() == 0


def test_a_case_that_does_not_fit_twice_ends_placements_with_a_note() -> None:
    bench = Bench(CountedDevice(memory_bytes=3 * GiB + DATASHEETS["h100"].context_bytes))

    def build(memory: Any) -> Case:
        x = memory.device(2 * GiB)
        return Case(lambda: None, reference=lambda: None, check=lambda: True, reads=[x])

    taken = bench.case(build, placements=4)
    assert len(taken.placements) == 1
    assert "no further placement: two placements of the case do not fit at once" in taken.notes
    assert bench.leftovers() == 0


def test_the_padding_between_placements_does_not_stay(bench: Bench) -> None:
    buffers = bench.buffers(2, 2 * MiB)
    bench.measure("copy", *buffers, placements=4)
    bench.conductor.close()
    assert len(bench.device.live) == len(buffers)


# Throttling


def throttling(bench: Bench, monkeypatch: pytest.MonkeyPatch, hot: Callable[[int], bool]) -> None:
    """The n-th look at the conditions after the first finds the device throttled where `hot(n)`."""
    calm = bench.device.conditions()
    looks = [0]

    def conditions() -> Any:
        looks[0] += 1
        return replace(calm, throttle_reasons=("sw_power_cap",)) if hot(looks[0]) else calm

    monkeypatch.setattr(bench.device, "conditions", conditions)
    monkeypatch.setattr(SimulatedHold, "clock", lambda _: 1.4e9)
    bench.conductor._harness._awake = True


def test_throttled_samples_of_placements_side_by_side_are_discarded_and_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    throttling(bench, monkeypatch, lambda look: look in (3, 4))
    monkeypatch.setattr("pytest_gpumem.measuring.measure.WAIT_SHARE", 0.0)
    monkeypatch.setattr("pytest_gpumem.measuring.measure.CHUNK_SECONDS", 1e-6)  # a look a round
    a, b = bench.buffers(2, 2 * MiB)
    own = (a.address, b.address)
    taken = bench.measure("copy", a, b, placements=5)
    count = len(taken.placements)
    assert count >= 5
    assert taken.discarded == 2 * count
    taken_in_all = len([where for where in launched(bench) if where != own])
    assert (
        len(taken.samples) == taken_in_all - taken.discarded - count
    )  # and the first round, which warms them up
    assert taken.during is not None
    assert taken.during.throttle_reasons == ("sw_power_cap",)
    assert [c.throttle_reasons for c in taken.conditions] == [(), ()]


def test_samples_stay_visible_where_all_were_throttled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    throttling(bench, monkeypatch, lambda look: True)
    taken = triad(bench, nbytes=2 * MiB, placements=3)
    assert len(taken.placements) >= 3
    assert taken.discarded == len(taken.samples)
    assert "every sample was taken under throttling" in taken.notes
    assert [c.throttle_reasons for c in taken.conditions] == [("sw_power_cap",)] * 2


# Order, ranges, once a session


def test_phases_have_their_ranges_in_order(bench: Bench) -> None:
    triad(bench, nbytes=2 * MiB)
    assert [entry for entry in bench.log if entry.startswith("<")] == [
        f"<test_it.{phase}" for phase in ("check", "warm-up", "measure", "check")
    ]
    assert bench.ranges.open == []


def test_under_a_profiler_each_launch_is_alone_in_its_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(profiled=True)
    bench.conductor.floors()
    bench.conductor._harness.flush("clean-cold")
    bench.device.before("kernels.launch", lambda what, stream: bench.log.append(what.kernel.name))
    monkeypatch.setattr(bench.device.graphs, "capture", failing())  # no graph
    monkeypatch.setattr(bench.device.streams, "hold", failing())  # no held stream
    taken = triad(bench, nbytes=2 * MiB)
    check = ["<test_it.check", "triad", "test_it.check>"]
    warm_up = ["<test_it.warm-up", "triad", "test_it.warm-up>"]
    flush = ["<test_it.flush", "read", "test_it.flush>"]
    sample = ["<test_it.measure", "<test_it.launch", "triad", "test_it.launch>", "test_it.measure>"]
    assert bench.log == check + warm_up + PROFILED_SAMPLES * (flush + sample) + check
    assert taken.profiled
    assert (taken.sampler, [len(p) for p in taken.placements]) == ("plain", [5])
    assert "measured under a profiler: times are not comparable" in taken.notes


def test_the_floor_is_measured_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harness, "busy", lambda self: False)
    holds: list[Any] = []
    bench.device.before("streams.hold", lambda stream, timeout: holds.append(stream))
    one = triad(bench, nbytes=2 * MiB, sampler="host")  # so that only the floor holds a stream
    after_one = len(holds)
    two = triad(bench, nbytes=2 * MiB, sampler="host")
    assert after_one > 0
    assert len(holds) == after_one
    assert one.floor == two.floor
    assert 0 < one.floor < min(one.samples)


def test_the_launch_overhead_is_measured_once_and_belongs_to_held_samples(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Harness, "busy", lambda self: False)
    one, two = triad(bench, nbytes=2 * MiB), triad(bench, nbytes=8 * MiB)
    assert one.sampler == two.sampler == "blocked"
    assert one.overhead is not None
    assert one.overhead == two.overhead
    assert one.floor < one.overhead < min(one.samples)
    smallest = [
        w
        for w in bench.device.launched
        if w.kernel.name == "write" and w.arrays["a"].nbytes == VECTOR_BYTES
    ]
    assert len(smallest) == 1 + STREAMS * FLOOR_SAMPLES
    assert (
        smallest[0].shape.blocks > bench.device.facts.sm_count
    )  # a full grid, like what is measured
    others = [
        triad(bench, nbytes=2 * MiB, sampler="host"),
        triad(bench, nbytes=2 * MiB, mode="hot"),
    ]
    assert [m.overhead for m in others] == [None, None]


def test_the_floor_needs_no_hold_where_holds_expire(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under CUDA_LAUNCH_BLOCKING: every launch waits, so a held stream would wait for its time-out each time."""
    hold, holds = bench.device.streams.hold, [0]

    def expiring(stream: Any, timeout: float) -> Any:
        holds[0] += 1
        held = hold(stream, timeout)
        bench.device.streams.synchronize = waits  # type: ignore[method-assign]
        return held

    synchronize = bench.device.streams.synchronize

    def waits(stream: Any = None) -> None:
        bench.device.streams.synchronize = synchronize  # type: ignore[method-assign]
        synchronize(stream)
        raise HoldExpired("made to fail")

    monkeypatch.setattr(bench.device.streams, "hold", expiring)
    floors = bench.conductor.floors()
    assert holds[0] == 2  # one for the empty interval, one for the launch
    assert 0 < floors.empty < floors.launch


def test_flush_buffers_are_made_once_and_freed_at_the_end(bench: Bench) -> None:
    triad(bench, nbytes=2 * MiB)
    flush = [a for a in bench.device.live if a.nbytes >= bench.device.facts.l2_bytes]
    triad(bench, nbytes=2 * MiB)
    assert len(flush) == 1
    assert [a for a in bench.device.live if a.nbytes >= bench.device.facts.l2_bytes] == flush
    assert bench.leftovers() == 0


def test_a_flush_that_does_not_fit_leaves_nothing(bench: Bench) -> None:
    target = bench.kernel_target("triad", *bench.buffers(3))
    bench.device.before("memory.allocate", failing(1, OutOfMemory, once=True))
    with pytest.raises(OutOfMemory, match="made to fail"):
        bench.take(target)
    assert bench.leftovers() == 0


def test_the_same_seed_gives_the_same_measurement() -> None:
    one, two = triad(Bench()), triad(Bench())
    assert one == two


# Wrong results and errors


def test_a_wrong_result_after_timing_is_no_measurement(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bench.kernel_target("add", *bench.buffers(2))
    launch, taken = bench.device.kernels.launch, [0]

    def breaks(what: Any, stream: Any) -> None:
        if what.kernel.name == "add":
            taken[0] += 1
        launch(what, stream)
        if taken[0] > 200 and what.kernel.name == "add":
            launch(what, stream)  # twice, once it is warm

    monkeypatch.setattr(bench.device.kernels, "launch", breaks)
    with pytest.raises(WrongResult, match=r"add: .* elements of 'y' are wrong"):
        bench.take(target, sampler="host", placements=8)
    assert taken[0] > 200


STAGES = [
    *(("kernels.launch", after) for after in (0, 1, 2, 40, 80)),  # check, flush, warm-up, samples
    *(("streams.record", after) for after in (0, 50)),  # floor
    *(("streams.synchronize", after) for after in (0, 2, 60, 90, 150)),
    *(("content.copy", after) for after in (0, 1, 2)),  # check, moves
    *(("memory.allocate", after) for after in (0, 1, 2, 3)),  # flush, padding, moves
]


def test_an_error_at_any_stage_leaves_nothing() -> None:
    for verb, after in STAGES:
        for error in [DeviceError, KeyboardInterrupt]:
            bench = Bench()
            with naming(verb, after, error):
                x, y = bench.buffers(2, 2 * MiB)
                target = bench.kernel_target("add", x, y)
                bench.device.before(verb, failing(after, error, once=True))
                bench.conductor._harness._awake = True
                with pytest.raises(error, match="made to fail"):
                    bench.take(target, sampler="host", placements=4)
                assert bench.ranges.open == []
                bench.conductor.close()
                # Neither what the target saved nor padding is left; the test's own buffers are its arena's to free.
                assert set(map(id, bench.device.live)) == {id(x.allocation), id(y.allocation)}
                assert bench.leftovers() == 0


def test_room_is_made_before_somebody_elses_code_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is kept for speed must not make a library run out of it."""
    made: list[str] = []
    monkeypatch.setattr(
        bench.device.memory, "make_room", lambda *, unless_free: made.append("room")
    )
    bench.kernel_target("triad", *bench.buffers(3)).close()
    assert made == []
    bench.target(lambda: None).close()
    assert made == ["room"]
    bench.conductor.case(
        lambda memory: made.append("built") or Case(lambda: None), arena=bench.arena
    ).close()
    assert made == ["room", "room", "built"]


def test_a_case_that_runs_out_of_memory_is_built_again_once_kept_memory_is_given_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, x = [True], bench.memory.device(1 * MiB)

    def make_room(*, unless_free: float = 1.0) -> bool:
        given, kept[:] = (bool(kept), []) if unless_free == 1.0 else (False, kept)
        return given

    def build(memory: Memory) -> Case:
        if kept:
            raise OutOfMemory("full")
        return case(lambda: None, x)

    monkeypatch.setattr(bench.device.memory, "make_room", make_room)
    bench.conductor.case(build, arena=bench.arena).close()
    kept.append(True)
    monkeypatch.setattr(bench.device.memory, "make_room", lambda *, unless_free=1.0: False)
    with pytest.raises(OutOfMemory):
        bench.conductor.case(build, arena=bench.arena)


def test_a_row_says_that_the_test_had_made_another_gpu_current(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("current" in note for note in triad(bench, nbytes=2 * MiB).notes)
    monkeypatch.setattr(bench.device, "elsewhere", lambda: "GPU 1")
    assert any("made GPU 1 current" in note for note in triad(bench, nbytes=2 * MiB).notes)


@pytest.mark.parametrize(
    ("sampler", "mode"), [("host", "clean-cold"), ("blocked", "clean-cold"), ("batched", "hot")]
)
def test_the_current_stream_of_the_libraries_is_set_once_for_many_samples(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, sampler: str, mode: str
) -> None:
    entered: list[Any] = []

    def counted(stream: Any) -> Any:
        entered.append(stream)
        return nullcontext()

    monkeypatch.setattr(bench.device.kernels, "current_stream", counted)
    x = bench.memory.device(1 * MiB)
    taken = bench.case(
        lambda memory: case(lambda: None, x), sampler=sampler, mode=mode, placements=1
    )
    assert 0 < len(entered) < len(taken.samples) / 2
    entered.clear()
    triad(bench, nbytes=1 * MiB)
    assert entered == []


KNOWN = Conditions(1.98e9, 2.6e9, 40.0, 300.0, ("sw_power_cap",), 0)


def test_each_figure_is_the_least_favourable_one() -> None:
    for seen, expected in [
        ([], None),
        ([KNOWN], KNOWN),
        ([Conditions(), Conditions()], Conditions()),
        ([Conditions(throttle_reasons=None)] * 2, Conditions(throttle_reasons=None)),
        (
            [Conditions(), Conditions(throttle_reasons=None), KNOWN],
            KNOWN,
        ),  # what the driver does not say is left out
        (
            [
                KNOWN,
                Conditions(1.2e9, 2.7e9, 60.0, 200.0, (), 2),
                Conditions(1.5e9, 2.5e9, 50.0, 700.0, ("hw_slowdown", "sw_power_cap"), 1),
            ],
            Conditions(1.2e9, 2.5e9, 60.0, 700.0, ("sw_power_cap", "hw_slowdown"), 2),
        ),
    ]:
        assert worst(seen) == expected, seen
