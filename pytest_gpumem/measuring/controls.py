"""Control readings: they show whether the device has changed since the baseline, and between start and end of a session.

They run no code of the project under test: a read bound by DRAM, a read bound by L2, and a launch that reads nothing. The latency of DRAM
distinguishes variants of a card that have the same name (docs/gate.md, Card variants).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.protocol import Allocation, Device, HoldExpired, Launch, Stream
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.controls import CONTROL_READ, SOURCE, whole_waves
from pytest_gpumem.kernels.kernel import ArrayFacts, Call
from pytest_gpumem.kernels.l2_bandwidth import TILE_BYTES
from pytest_gpumem.kernels.latency import NODE_BYTES
from pytest_gpumem.kernels.sources import fingerprint
from pytest_gpumem.measuring.bound import CYCLE_SEED, BoundKernel
from pytest_gpumem.measuring.samplers import held
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Controls

BLOCKS_PER_SM = 2  # grid of the launch: full, like that of measured kernels


def idle_launch(facts: DeviceFacts, memory: Allocation) -> Launch:
    """A launch of a full grid of `write` with no elements to write; `memory` is any device memory.

    One element would not do: the address of a written line changes the reading by as much as processes differ (standard deviation 52 ns
    on an H200: ci/records/nvidia-h200/reading_noise.json, "16 bytes, by where they lie").
    """
    kernel = CATALOGUE["write"]
    call = Call({"a": ArrayFacts(0, "f4", 4)}, {"value": 1.0}, BLOCKS_PER_SM * facts.sm_count)
    return Launch(kernel, call, kernel.shape(facts, call), {"a": memory})


def middle_mean(readings: Sequence[float]) -> float:
    """Mean of the middle half: finer than the ticks that a median falls on, and untouched by outliers."""
    quarter = len(readings) // 4
    return float(np.mean(sorted(readings)[quarter : len(readings) - quarter]))


DRAM_MULTIPLES = 2  # size over L2 of each array that is read from DRAM
DRAM_ARRAYS = 16
"""Arrays that are read from DRAM in turn: nothing of one is in L2 when its turn comes again, and no address decides the reading. With two
arrays, readings of 215 processes on two H200 had a standard deviation of 0.18 %, with four those of 116 processes one of 0.13 %
(ci/records/nvidia-h200/gate_validation.json and gate_validation_32.json, "controls")."""
L2_PART = 8
"""L2 over the size of each array that is read from L2. An eighth leaves room for two copies of the data, one in each half of L2."""
L2_ARRAYS = 16  # arrays that are read from L2 in turn: more than fit in it, so that each first pass is from DRAM
L2_PASSES = 16  # times that one launch reads such an array: all but the first are from L2
READINGS = 24  # batches of each read, one launch for each array, and readings of the idle launch
LATENCY_MULTIPLES = 4
"""Size over L2 of the nodes of a pointer chase. Its placement then changes the latency by 0.2 % (standard deviation on an H200,
test_latency.py in ci/records/nvidia-h200/suite.json), a seventh of the difference between variants of a card."""
LATENCY_STEPS = 4000  # nodes of one walk; each walk continues where the last one ended. The launch itself takes a thousandth of the time.
LATENCY_SPARE = 2  # nodes of the cycle over those that the walks visit: the other nodes of the memory need no place on it
DIGITS = 16  # hexadecimal digits of the digest of the kernels' source


def read_controls(device: Device, *, latency: bool = True) -> Controls:
    """Read all controls, and free the memory. The device's clocks must be up.
    `latency`: read the latency of DRAM too, which does not change while a card is in use.
    Raises `OutOfMemory`: less than 40 times the size of L2 is free.
    Raises `DeviceError`: a launch failed.
    """
    arena = Arena(device, seed=0)
    try:
        stream = device.streams.create()
        facts = device.facts
        large = [
            _launch(device, arena, whole_waves(facts, DRAM_MULTIPLES * facts.l2_bytes), 1)
            for _ in range(DRAM_ARRAYS)
        ]
        small = [
            _launch(device, arena, whole_waves(facts, facts.l2_bytes // L2_PART), L2_PASSES)
            for _ in range(L2_ARRAYS)
        ]
        idle = _launch(device, arena, TILE_BYTES, 0)
        walk = [_walk(device, arena, stream)] if latency else []
        for launch in (
            *large,
            *small,
            idle,
            *walk,
        ):  # compiles and loads, which waits for the device: nothing may be held then
            device.kernels.launch(launch, stream)
        device.streams.synchronize(stream)
        device.memory.settle()
        return Controls(
            dram=_reading(device, stream, large),
            # Which SMs get how many blocks depends on the kernel before, and lasts: each batch follows another one.
            l2=_reading(device, stream, small, before=large),
            launch=_reading(device, stream, [idle]),
            # Last: the reads before it have evicted the nodes from L2.
            latency=_reading(device, stream, walk) / LATENCY_STEPS if walk else None,
            source=_source(),
        )
    finally:
        arena.close()


def _source() -> str:
    """Digest of the kernels and arrays: readings of others are not comparable."""
    sizes = (
        DRAM_MULTIPLES,
        DRAM_ARRAYS,
        L2_PART,
        L2_ARRAYS,
        L2_PASSES,
        LATENCY_MULTIPLES,
        LATENCY_STEPS,
        LATENCY_SPARE,
    )
    return hashlib.sha256(f"{fingerprint(SOURCE)} {sizes}".encode()).hexdigest()[:DIGITS]


def changed(start: Controls, end: Controls) -> dict[str, float]:
    """Log-ratio of each control's reading at the end to that at the start, positive if slower; "dram" and "l2" where both are known."""
    found = {}
    for kind in ("dram", "l2"):
        before, after = getattr(start, kind), getattr(end, kind)
        if before is not None and after is not None:
            found[kind] = math.log(after / before)
    return found


def _launch(device: Device, arena: Arena, nbytes: int, passes: int) -> Launch:
    tiles = max(nbytes // TILE_BYTES, 1)
    buffers = {"a": arena.buffer(tiles * TILE_BYTES, "i4"), "sums": arena.buffer(4 * tiles, "i4")}
    # The idle launch has a full grid, like measured kernels.
    blocks = None if passes else BLOCKS_PER_SM * device.facts.sm_count
    return BoundKernel(CONTROL_READ, device, arena.stream, blocks).launch(
        buffers, {"passes": passes}
    )


def _walk(device: Device, arena: Arena, stream: Stream) -> Launch:
    """A pointer chase over more nodes than fit in L2, which continues where the walk before it ended."""
    nodes, out = (
        arena.buffer(LATENCY_MULTIPLES * device.facts.l2_bytes, "i4"),
        arena.buffer(4, "i4"),
    )
    length = LATENCY_SPARE * (READINGS + 2) * LATENCY_STEPS
    device.content.fill_cycle(nodes.allocation, NODE_BYTES, CYCLE_SEED, stream, length=length)
    return BoundKernel(CATALOGUE["chase_onward"], device, stream).launch(
        {"nodes": nodes, "out": out}, {"steps": LATENCY_STEPS}
    )


def _reading(
    device: Device, stream: Stream, launches: Sequence[Launch], before: Sequence[Launch] = ()
) -> float:
    """Seconds of one launch: the middle mean of batches."""
    # The first batch finds the cache in the state of the kernel before.
    batches = readings(device, [stream], launches, READINGS + 1, before=before)
    return middle_mean([seconds / len(launches) for seconds in batches])


def readings(
    device: Device,
    streams: Sequence[Stream],
    launches: Sequence[Launch],
    rounds: int,
    *,
    hold: bool = True,
    before: Sequence[Launch] = (),
) -> list[float]:
    """Seconds between two events around all of `launches`, each stream in turn, without the first round: first launches are slow.
    `streams`: read one after another in each round.
    `launches`: kernels that are loaded already; none for an empty interval.
    `rounds`: readings on each stream, including the one that is left out.
    `hold`: hold the stream while work is queued; given up once a hold expires.
    `before`: untimed kernels, one before each reading in turn.
    """
    start, end = device.streams.event(), device.streams.event()
    found = list[float]()
    for number in range(rounds):
        for stream in streams:
            with uncollected(), held(device, stream) if hold else nullcontext():
                if before:
                    device.kernels.launch(before[number % len(before)], stream)
                device.streams.record(start, stream)
                for launch in launches:
                    device.kernels.launch(launch, stream)
                device.streams.record(end, stream)
            try:
                device.streams.synchronize(stream)
            except HoldExpired:  # something makes every launch wait, such as CUDA_LAUNCH_BLOCKING
                hold = False
            found.append(device.streams.elapsed(start, end))
    return found[len(streams) :]
