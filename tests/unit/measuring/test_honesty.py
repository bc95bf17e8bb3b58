"""What would give a wrong number, or blame the wrong test, without any error: each must give the right one, or say what is wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from bench import Bench
from counted_device import CountedDevice
from msgspec.structs import replace

from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.case import Case, CaseTarget
from pytest_gpumem.measuring.harness import HOLD_TIMEOUT
from pytest_gpumem.measuring.samplers import BATCH_SECONDS
from pytest_gpumem.measuring.works import Works
from pytest_gpumem.memory.buffers import BadBuffer
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.units import MiB


def faulting_case(restores: bool) -> Any:
    """Managed memory that starts on the host; a restore that writes it on the device moves its pages there."""

    def build(memory: Memory) -> Case:
        x, y = memory.managed(16 * MiB), memory.managed(16 * MiB)

        def add() -> None:
            y.view()[:] += x.view()

        def reset() -> None:
            y.view()[:] = 1

        return Case(
            add, reference=add, restore=reset if restores else None, reads=[x, y], writes=[y]
        )

    return build


def test_pages_go_home_after_the_data_is_restored(bench: Bench) -> None:
    plain = bench.case(faulting_case(restores=False))
    restored = bench.case(faulting_case(restores=True))
    assert restored.latency > 0.5 * plain.latency > 1e-3  # faults, not resident pages


def test_a_batchs_floor_is_shared_by_its_launches(bench: Bench) -> None:
    cold, hot = (
        bench.measure("copy", *bench.buffers(2)),
        bench.measure("copy", *bench.buffers(2), mode="hot"),
    )
    assert hot.sampler == "graph"
    batch = cold.floor / hot.floor
    assert batch == pytest.approx(round(batch))
    assert batch * hot.latency == pytest.approx(BATCH_SECONDS, rel=0.1)


def test_a_chase_over_random_data_is_refused_before_it_runs(bench: Bench) -> None:
    nodes, out = bench.memory.device(64 * 1024, "i4"), bench.memory.device((1,), "i4")
    nodes.write(np.full(nodes.size, 2**30, dtype="i4"))
    guest = bench.memory.managed(16 * 1024, "i4", like=np)
    guest[:] = 2**30
    for written in (nodes, bench.arena.find(guest)):
        with pytest.raises(BadCall, match="no cycle"):
            bench.kernels.chase(written, out, 10)
    with pytest.raises(BadCall, match="no cycle"):
        bench.measure("chase", nodes, out, 10)


def test_a_chase_gets_its_cycle_and_a_users_own_is_kept(bench: Bench) -> None:
    nodes, other = (bench.memory.device(16 * 1024, "i4") for _ in range(2))
    out = bench.memory.device((1,), "i4")
    bench.kernels.chase(nodes, out, 10)
    Works(bench.memory).kernel(bench.kernels.chase, other, out, 10)
    for buffer in (nodes, other):
        assert sorted(buffer.read()[::16]) == list(range(256))
    own = bench.memory.device(16 * 1024, "i4")
    ring = np.zeros((256, 16), dtype="i4")
    ring[:, 0] = np.roll(np.arange(256), -1)
    own.write(ring)
    bench.kernels.chase(own, out, 10)
    assert int(out.read()[0]) == 10


def test_registered_memory_is_not_called_pageable(bench: Bench) -> None:
    array = np.ones(1 * MiB, dtype="f4")
    bench.memory.registered(array)
    with pytest.raises(BadBuffer, match="page-locked"):
        bench.target(bench.kernels.memcpy, bench.memory.device(array.nbytes), array)


def test_only_what_lies_beyond_the_link_counts_as_link_traffic(bench: Bench) -> None:
    a, c = bench.buffers(2)
    target = bench.target(bench.kernels.triad, a, bench.memory.pinned(a.nbytes), c)
    assert target.moved_bytes is not None
    assert target.moved_bytes.link
    assert target.moved_bytes.total == a.nbytes
    target.close()


def test_persisting_l2_is_left_alone_on_a_mig_instance_which_has_none() -> None:
    for mig_profile, asked in ((None, ["l2.reset_persisting", "l2.set_aside"]), ("1g.18gb", [])):
        bench = Bench(CountedDevice())
        bench.device.facts = replace(bench.device.facts, mig_profile=mig_profile)
        calls = list[str]()
        for verb in ("l2.reset_persisting", "l2.set_aside"):
            bench.device.before(verb, partial(calls.append, verb))
        bench.take(bench.target(bench.kernels.copy, *bench.buffers(2)), ran=True)
        assert calls == asked


@pytest.mark.parametrize("sampler", ["blocked", "host"])
def test_hot_stays_hot_where_placements_take_turns(sampler: str) -> None:
    """Sixteen placements of 6 MiB do not fit in L2 at once: each must find its own data there all the same."""

    def latency(placements: int) -> float:
        bench = Bench()
        taken = bench.measure(
            "triad", *bench.buffers(3, 2 * MiB), mode="hot", sampler=sampler, placements=placements
        )
        assert len(taken.placements) >= placements
        return taken.latency

    assert latency(16) == pytest.approx(latency(1), rel=0.1)


def test_slow_launches_have_fewer_placements_instead_of_a_budget_spent_many_times_over(
    bench: Bench,
) -> None:
    nodes, out = bench.memory.device(1 * MiB, "i4"), bench.memory.device((1,), "i4")
    begun = bench.device.now()
    taken = bench.measure("chase", nodes, out, 1_000_000, placements=8, budget=1.0)
    assert taken.latency > 0.1
    assert bench.device.now() - begun < 4.0
    assert len(taken.placements) >= 2
    assert f"{len(taken.placements)} of 8 placements" in taken.notes


def test_an_expired_hold_is_not_the_next_measurements_fault(bench: Bench) -> None:
    """Work that waits for the device behind a hold and then raises: its own error is the one that counts, also for the same stream."""
    x, calls = bench.memory.device(1 * MiB), 0

    def work() -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            bench.device.timeline.host += 2 * HOLD_TIMEOUT
            raise RuntimeError("the twentieth call")

    with pytest.raises(RuntimeError, match="the twentieth call"):
        bench.case(lambda memory: Case(launch=work, reference=work, reads=[x]), sampler="blocked")
    assert bench.measure("copy", *bench.buffers(2)).checked


def test_a_restore_on_a_stream_of_its_own_has_ended_before_a_sample(bench: Bench) -> None:
    """Numba's kernels, say, go to the default stream, which ours do not wait for."""
    waited: list[Any] = []
    unsound, restores = list[int](), 0

    def called(foreign: Any, stream: Any) -> None:
        nonlocal restores
        if foreign.function is restore:
            restores += 1
            waited.clear()

    def restore() -> None:
        pass

    bench.device.before("streams.synchronize", lambda stream=None: waited.append(stream))
    bench.device.before(
        "streams.hold",
        lambda *_: unsound.append(restores) if restores and None not in waited else None,
    )
    bench.device.before("kernels.call", called)
    x = bench.memory.device(1 * MiB)
    taken = bench.case(
        lambda memory: Case(launch=lambda: None, reference=lambda: None, restore=restore, reads=[x])
    )
    assert taken.sampler == "blocked"
    assert restores > 10
    assert not unsound


def test_a_check_waits_for_the_device_between_its_steps(bench: Bench) -> None:
    """The poison is on our stream, restore and launch may be on another that does not wait for it, and the check on a third."""
    steps: list[str] = []

    def step(name: str) -> Any:
        return lambda: steps.append(name)

    def build(memory: Memory) -> Case:
        y = memory.device(1 * MiB)
        launch = step("launch")
        return Case(
            launch=launch,
            reference=launch,
            restore=step("restore"),
            check=step("check"),
            writes=[y],
        )

    bench.device.before(
        "streams.synchronize", lambda stream=None: steps.append("wait") if stream is None else None
    )
    bench.device.before("content.poison", lambda *_: steps.append("poison"))
    target = CaseTarget(build, bench.arena)
    steps.clear()
    target.check()
    target.close()
    assert " ".join(steps).startswith("poison wait restore wait launch wait check")


@pytest.mark.parametrize("moves", [True, False])
def test_a_case_with_arrays_that_may_not_move_says_so(bench: Bench, moves: bool) -> None:
    def build(memory: Memory) -> Case:
        array = memory.device(1 * MiB) if moves else np.zeros(1)
        return Case(lambda: None, reference=lambda: None, reads=[array])

    notes = bench.case(build).notes
    assert any(note.startswith("its own arrays may lie at the same place") for note in notes) is (
        not moves
    )


def test_ats_is_labelled_where_pages_migrate(bench: Bench) -> None:
    bench.device.facts = replace(bench.device.facts, host_page_tables=True)
    assert bench.measure("add", *bench.buffers(2)).notes == ()
    managed = bench.measure("add", bench.memory.managed(MiB), bench.memory.managed(MiB))
    assert [note[:4] for note in managed.notes] == ["ATS:"]
