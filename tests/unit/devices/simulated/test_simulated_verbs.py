"""Every verb of the device protocol, as its docstring promises it."""

from __future__ import annotations

import numpy as np
import pytest
from workbench import ACCUMULATE, SCAN, Workbench, scale

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import (
    CannotCapture,
    DeviceError,
    HoldExpired,
    OutOfMemory,
)
from pytest_gpumem.units import GiB, MiB

KINDS = tuple(kind for kind in MemoryKind if kind is not MemoryKind.PEER)
"""Of memory that one GPU has."""


def test_facts_say_simulated_and_follow_from_the_datasheet() -> None:
    for name, terabytes_per_second in [("h100", 3.352), ("h200", 4.8)]:
        facts = Workbench(name).device.facts
        assert facts.simulated, name
        assert facts.key.startswith("simulated-"), name
        assert facts.dram_peak == pytest.approx(terabytes_per_second * 1e12, rel=2e-3), (
            name
        )  # as published
        assert facts.persisting_l2_max_bytes % facts.l2_step_bytes == 0, name


# Memory


def test_free_bytes_and_out_of_memory(bench: Workbench) -> None:
    before = bench.device.memory.free_bytes(MemoryKind.DEVICE)
    taken = bench.memory(GiB)
    assert bench.device.memory.free_bytes(MemoryKind.DEVICE) == before - GiB
    with pytest.raises(OutOfMemory, match="device memory"):
        bench.memory(before)
    assert bench.device.memory.free_bytes(MemoryKind.DEVICE) == before - GiB
    bench.device.memory.free(taken)
    bench.device.memory.free(taken)
    assert bench.device.memory.free_bytes(MemoryKind.DEVICE) == before
    assert bench.device.memory.free_bytes(MemoryKind.PINNED) < bench.device.memory.free_bytes(
        MemoryKind.PAGEABLE
    )
    with pytest.raises(OutOfMemory, match="pinned memory"):
        bench.memory(bench.device.memory.free_bytes(MemoryKind.PINNED) + 1, MemoryKind.PINNED)


def test_freed_memory_is_refused(bench: Workbench) -> None:
    x, y = bench.memory(4096), bench.memory(4096)
    launch = bench.bind(scale(), x=x, y=y)
    bench.run(launch)
    bench.device.memory.free(x)
    with pytest.raises(DeviceError, match="memory of x was freed"):
        bench.device.kernels.launch(launch, bench.stream)
    with pytest.raises(DeviceError, match="freed"):
        bench.device.memory.view(x, "f4", 1)


def test_copy_between_all_kinds(bench: Workbench) -> None:
    for source in KINDS:
        for destination in KINDS:
            a, b = bench.memory(4096, source), bench.memory(4096, destination)
            content = np.arange(1024, dtype="i4")
            bench.device.content.from_host(a, content)
            bench.device.content.copy(b, a, 2048, bench.stream)
            copied = bench.device.content.to_host(b, "i4", 1024)
            assert np.array_equal(copied[:512], content[:512])
            assert not copied[512:].any()


# Work


# Streams, events, graphs


def test_waiting_behind_a_hold_expires_once(bench: Workbench) -> None:
    hold = bench.device.streams.hold(bench.stream, 0.25)
    mark = bench.device.streams.event()
    bench.device.streams.record(mark, bench.stream)
    before = bench.device.now()
    with pytest.raises(HoldExpired):
        bench.device.streams.synchronize()
    assert bench.device.now() - before == pytest.approx(0.25, rel=0.01)
    bench.device.streams.release(hold)
    bench.device.streams.synchronize()


def test_a_replay_computes_and_records_again(bench: Workbench) -> None:
    x, y = bench.memory(64 * MiB), bench.memory(64 * MiB)
    bench.device.content.from_host(x, np.ones(1024, dtype="f4"))
    graph, elapsed = bench.captured(bench.bind(ACCUMULATE, x=x, y=y))
    assert bench.device.content.to_host(y, "f4", 1)[0] == 0
    with pytest.raises(DeviceError, match="was not recorded"):
        elapsed()
    seen = []
    for turn in range(1, 4):
        bench.replay(graph)
        assert bench.device.content.to_host(y, "f4", 1)[0] == turn
        seen.append(elapsed())
    assert len(set(seen)) > 1
    assert min(seen) > 1e-5


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("synchronize", "it synchronises"),
        ("allocate", "it allocates memory"),
        ("nothing", "it queued nothing"),
        ("swallowed", "it allocates memory"),
        ("mistake", "^KeyError: 'mine'$"),
    ],
)
def test_what_cannot_be_captured(bench: Workbench, what: str, reason: str) -> None:
    memory = bench.memory(4096)
    launch = bench.bind(SCAN, x=memory)

    def swallowed() -> None:
        bench.device.kernels.launch(launch, bench.stream)
        try:
            bench.memory(4096)
        except DeviceError as error:
            raise ValueError("dressed up") from error

    def mistake() -> None:
        raise KeyError("mine")

    body = {
        "synchronize": bench.device.streams.synchronize,
        "allocate": lambda: bench.memory(4096),
        "nothing": lambda: None,
        "swallowed": swallowed,
        "mistake": mistake,
    }[what]
    with pytest.raises(CannotCapture, match=reason):
        bench.device.streams.capture(bench.stream, body)  # type: ignore[arg-type]
    bench.run(launch)
