"""From a target to a measurement: samplers, placements, throttling, ranges, and that nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from bench import Bench
from cases import naming
from counted_device import CountedDevice, failing

from pytest_gpumem.devices.protocol import DeviceError
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.kernels.stream import VECTOR_BYTES
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.case import Case
from pytest_gpumem.measuring.measure import PROFILED_SAMPLES
from pytest_gpumem.measuring.works import Works
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.records.device import Conditions
from pytest_gpumem.records.measurement import worst
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
        bench.harness.flush(mode)  # which launches it once, so that it is loaded
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
        assert measured.sampler_reason == (
            "the host waited for the device while the stream was held: "
            "wall-clock time, launch latency included"
        )


def test_every_launch_may_wait_as_under_a_debugger(bench: Bench) -> None:
    bench.device.before("kernels.launch", lambda *_, **__: bench.device.timeline.wait(None))
    assert triad(bench).sampler == "host"


def test_work_of_the_host_is_no_copy(bench: Bench) -> None:
    taken = bench.take(Works(bench.memory).host(lambda: sum(range(1000)), "sum"))
    assert taken.sampler_reason == "the host takes part: wall-clock time, launch latency included"


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


def test_every_sample_of_managed_memory_faults(bench: Bench) -> None:
    x, y = bench.memory.managed(16 * MiB), bench.memory.managed(16 * MiB)
    taken = bench.measure("add", x, y)
    assert min(taken.samples) > 0.9 * max(taken.samples)
    assert min(taken.samples) > 10 * bench.measure("add", *bench.buffers(2, 16 * MiB)).latency


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


def test_slow_launches_leave_the_budget_to_placements(bench: Bench) -> None:
    """A long warm-up, or many samples of each, would leave two placements, whose interval says nothing."""
    x, y = bench.memory.managed(64 * MiB), bench.memory.managed(64 * MiB)
    taken = bench.measure("add", x, y, placements=8, precision=0.001, budget=0.2)
    assert taken.latency > 0.05 * 0.2
    assert len(taken.placements) >= 6


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


def test_memory_that_is_short_ends_placements_with_a_note() -> None:
    bench = Bench(CountedDevice(memory_bytes=3 * GiB + DATASHEETS["h100"].context_bytes))
    taken = bench.measure("write", bench.memory.device(2 * GiB), placements=4)
    assert len(taken.placements) == 1
    assert [note for note in taken.notes if note.startswith("no further placement: ")]
    assert "1 of 4 placements" in taken.notes
    assert taken.checked
    assert bench.leftovers() == 0


# Order, ranges, once a session


def test_phases_have_their_ranges_in_order(bench: Bench) -> None:
    triad(bench, nbytes=2 * MiB)
    assert [entry for entry in bench.log if entry.startswith("<")] == [
        f"<test_it.{phase}" for phase in ("check", "warm-up", "measure", "check")
    ]
    assert bench.ranges.open == []


# Wrong results and errors


STAGES = [
    *(("kernels.launch", after) for after in (0, 2, 80)),  # check, warm-up, samples
    ("streams.record", 50),
    ("streams.synchronize", 90),
    *(("content.copy", after) for after in (0, 2)),  # check, moves
    *(("memory.allocate", after) for after in (0, 3)),  # flush, moves
]


def test_an_error_at_any_stage_leaves_nothing() -> None:
    for verb, after in STAGES:
        for error in [DeviceError, KeyboardInterrupt]:
            bench = Bench()
            with naming(verb, after, error):
                x, y = bench.buffers(2, 2 * MiB)
                target = bench.kernel_target("add", x, y)
                bench.device.before(verb, failing(after, error, once=True))
                bench.harness._awake = True
                with pytest.raises(error, match="made to fail"):
                    bench.take(target, sampler="host", placements=4)
                assert bench.ranges.open == []
                bench.harness.close()
                # Neither what the target saved nor padding is left; the test's own buffers are its arena's to free.
                assert set(map(id, bench.device.live)) == {id(x.allocation), id(y.allocation)}
                assert bench.leftovers() == 0


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
