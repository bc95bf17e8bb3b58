"""Control readings: a device's own, whatever a suite does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from counted_device import CountedDevice, failing
from msgspec.structs import replace

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.devices.protocol import HoldExpired, OutOfMemory, Stream
from pytest_gpumem.kernels.controls import CONTROL_READ, whole_waves
from pytest_gpumem.kernels.kernel import ArrayFacts, Call
from pytest_gpumem.kernels.l2_bandwidth import TILE_BYTES
from pytest_gpumem.measuring.controls import (
    DRAM_MULTIPLES,
    L2_PART,
    L2_PASSES,
    changed,
    read_controls,
)
from pytest_gpumem.records.measurement import Controls


@pytest.mark.parametrize("name", ["sim:h100", "sim:h200"])
def test_each_reading_is_what_it_is_named_for(name: str) -> None:
    device = choose(name).open()
    facts = device.facts
    controls = read_controls(device)
    assert controls.dram is not None
    assert controls.l2 is not None
    assert controls.launch is not None
    of_dram = DRAM_MULTIPLES * facts.l2_bytes / controls.dram
    assert 0.6 * facts.dram_peak < of_dram < facts.dram_peak
    # Faster than DRAM could give as many bytes.
    assert L2_PASSES * whole_waves(facts, facts.l2_bytes // L2_PART) / controls.l2 > 1.1 * of_dram
    assert 1e-6 < controls.launch < 10e-6
    # DRAM's, not that of L2, which answers in some 200 ns here.
    assert controls.latency is not None
    assert 300e-9 < controls.latency < 600e-9
    assert read_controls(device, latency=False).latency is None


def test_two_readings_agree_far_within_what_is_taken_for_a_drift() -> None:
    device = choose("sim").open()
    first, second = read_controls(device), read_controls(device)
    assert first.source == second.source != ""
    for log in changed(first, second).values():
        assert abs(log) < 0.01


def test_they_take_little_time_and_leave_nothing() -> None:
    device = CountedDevice()
    begun = device.now()
    read_controls(device)
    # At the start and at the end of a run: 0.3 s together.
    assert device.now() - begun < 0.15
    assert not device.live


def test_without_memory_nothing_is_read_and_nothing_kept() -> None:
    device = CountedDevice()
    device.before("memory.allocate", failing(3, OutOfMemory))
    with pytest.raises(OutOfMemory):
        read_controls(device)
    assert not device.live


def test_a_change_is_a_log_ratio_and_slower_counts_up() -> None:
    start = Controls(dram=60e-6, l2=20e-6, launch=3e-6)
    found = changed(start, Controls(dram=63e-6, l2=19e-6, launch=4e-6))
    assert found == {"dram": pytest.approx(math.log(1.05)), "l2": pytest.approx(math.log(0.95))}
    assert changed(start, Controls(l2=20e-6)) == {"l2": 0.0}


def test_a_slower_device_reads_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that lie 3 % further apart: all three readings say so."""
    device = choose("sim").open()
    before = read_controls(device)
    elapsed = device.streams.elapsed
    monkeypatch.setattr(device.streams, "elapsed", lambda start, end: 1.03 * elapsed(start, end))
    after = read_controls(device)
    for log in changed(before, after).values():
        assert log == pytest.approx(math.log(1.03), abs=0.01)


def test_launches_that_wait_are_read_without_a_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with CUDA_LAUNCH_BLOCKING: the first hold expires, and no other is tried."""
    device = choose("sim").open()
    hold, synchronize, held = device.streams.hold, device.streams.synchronize, list[Any]()

    def holding(stream: Stream, timeout: float) -> Any:
        held.append(stream)
        return hold(stream, timeout)

    def expired(stream: Stream | None = None) -> None:
        synchronize(stream)
        if held and len(held) % 2:
            held.append(stream)
            raise HoldExpired("waited")

    monkeypatch.setattr(device.streams, "hold", holding)
    monkeypatch.setattr(device.streams, "synchronize", expired)
    assert read_controls(device).dram is not None
    assert len(held) == 8  # one hold for each of the four readings, and the note that it expired


@pytest.mark.parametrize(
    ("sms", "kib"),
    [(132, 6400), (132, 204800), (132, 100), (108, 5120), (16, 512), (24, 3072), (148, 16128)],
)
def test_every_sm_reads_as_much(sms: int, kib: int) -> None:
    facts = replace(choose("sim").facts, sm_count=sms)
    nbytes = whole_waves(facts, kib << 10)
    call = Call(
        {"a": ArrayFacts(nbytes // 4, "i4", 4), "sums": ArrayFacts(nbytes // TILE_BYTES, "i4", 4)},
        {"passes": 1},
    )
    blocks = CONTROL_READ.shape(facts, call).blocks
    warps = blocks * CONTROL_READ.shape(facts, call).threads // 32
    assert blocks % sms == 0
    assert nbytes // TILE_BYTES % warps == 0
    assert nbytes == pytest.approx(kib << 10, rel=0.5) or blocks == sms


def test_the_kernel_sums_tile_by_tile() -> None:
    a = np.arange(3 * TILE_BYTES // 4, dtype="i4")
    sums = np.full(3, 7, dtype="i4")
    assert CONTROL_READ.reference is not None
    once = CONTROL_READ.reference({"a": a, "sums": sums}, {"passes": 2})["sums"]
    assert once.tolist() == [int(part.sum()) for part in a.reshape(3, -1)]
    assert CONTROL_READ.reference({"a": a, "sums": sums}, {"passes": 0})["sums"].tolist() == [
        7,
        7,
        7,
    ]


@pytest.mark.parametrize(
    ("size", "sums", "passes", "wrong"),
    [
        (1024, 1, 1, None),
        (1024, 1, 0, None),
        (1023, 1, 1, "has 4092 bytes"),
        (2048, 1, 1, "sums 1 elements"),
        (1024, 1, -1, "passes is -1"),
    ],
)
def test_what_the_kernel_takes(size: int, sums: int, passes: int, wrong: str | None) -> None:
    call = Call(
        {"a": ArrayFacts(size, "i4", 4), "sums": ArrayFacts(sums, "i4", 4)}, {"passes": passes}
    )
    said = CONTROL_READ.problem(call)
    assert (said is None) if wrong is None else (said is not None and wrong in said)


def test_what_a_launch_touches() -> None:
    arrays = {"a": ArrayFacts(2048, "i4", 4), "sums": ArrayFacts(2, "i4", 4)}
    read, written = CONTROL_READ.accesses(Call(arrays, {"passes": 5}))
    assert (read.footprint, read.requested, written.footprint) == (8192, 5 * 8192, 8)
    assert CONTROL_READ.accesses(Call(arrays, {"passes": 0})) == ()
