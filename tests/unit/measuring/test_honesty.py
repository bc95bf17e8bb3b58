"""Ways to get a wrong number that were seen once: each must give the right one, or say what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bench import Bench
from counted_device import CountedDevice
from msgspec.structs import replace

from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.samplers import BATCH_SECONDS
from pytest_gpumem.measuring.target_case import Case
from pytest_gpumem.memory.buffers import BadBuffer
from pytest_gpumem.memory.l2 import persisting
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

        return Case(add, reference=add, restore=reset if restores else None, reads=[x, y], writes=[y])

    return build


def test_pages_go_home_after_the_data_is_restored(bench: Bench) -> None:
    plain = bench.case(faulting_case(restores=False))
    restored = bench.case(faulting_case(restores=True))
    assert restored.latency > 0.5 * plain.latency > 1e-3  # faults, not resident pages


def test_pages_of_unlisted_managed_memory_go_home_too(bench: Bench) -> None:
    def build(memory: Memory) -> Case:
        memory.managed(16 * MiB)
        x = memory.device(1 * MiB)
        return Case(lambda: None, reference=lambda: None, reads=[x])

    target = bench.conductor.case(build, arena=bench.arena)
    assert len(target.managed) == 1
    target.close()
    bench.memory.managed(1 * MiB)
    assert len(bench.target(lambda: None).managed) == 1


def test_throttling_under_load_alone_reaches_the_conditions(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = bench.device.conditions()
    readings: list[int] = []

    def conditions() -> Any:
        readings.append(1)
        inside = any(name.endswith(".measure") for name in bench.ranges.open)
        return replace(calm, throttle_reasons=("sw_power_cap",)) if inside else calm

    monkeypatch.setattr(bench.device, "conditions", conditions)
    taken = bench.measure("copy", *bench.buffers(2))
    assert taken.discarded == len(taken.samples)
    assert taken.during is not None
    assert taken.during.throttle_reasons == ("sw_power_cap",)


def test_a_batchs_floor_is_shared_by_its_launches(bench: Bench) -> None:
    cold, hot = bench.measure("copy", *bench.buffers(2)), bench.measure("copy", *bench.buffers(2), mode="hot")
    assert hot.sampler == "batched"
    batch = cold.floor / hot.floor
    assert batch == pytest.approx(round(batch))
    assert batch * hot.latency == pytest.approx(BATCH_SECONDS, rel=0.1)


def test_a_closed_persisting_stream_is_refused(bench: Bench) -> None:
    (table,) = bench.buffers(1)
    with persisting(bench.device, table) as stream:
        pass
    with pytest.raises(BadCall, match="has ended"):
        bench.target(bench.kernels.copy, *bench.buffers(2), stream=stream)


def test_a_chase_over_random_data_is_refused_before_it_runs(bench: Bench) -> None:
    nodes, out = bench.memory.device(64 * 1024, "i4"), bench.memory.device((1,), "i4")
    nodes.write(np.full(nodes.size, 2**30, dtype="i4"))
    with pytest.raises(BadCall, match="no cycle"):
        bench.kernels.chase(nodes, out, 10)
    with pytest.raises(BadCall, match="no cycle"):
        bench.measure("chase", nodes, out, 10)


def test_a_direct_chase_gets_its_cycle_and_a_users_own_is_kept(bench: Bench) -> None:
    nodes, out = bench.memory.device(16 * 1024, "i4"), bench.memory.device((1,), "i4")
    bench.kernels.chase(nodes, out, 10)
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
    assert target.traffic is not None
    assert target.traffic.link
    assert target.traffic.total == a.nbytes
    target.close()


def test_lines_that_persist_are_not_reset_on_a_mig_instance_which_has_none() -> None:
    for mig_profile, resets in ((None, 1), ("1g.18gb", 0)):
        bench = Bench(CountedDevice())
        bench.device.machine.facts = replace(bench.device.facts, mig_profile=mig_profile)
        calls: list[None] = []
        bench.device.l2.reset_persisting = lambda calls=calls: calls.append(None)  # type: ignore[method-assign]
        bench.measure("copy", *bench.buffers(2))
        assert len(calls) == resets
