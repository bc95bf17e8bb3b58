"""What a card is: its bandwidths, latencies and host link, and its state while it works.

Kernels and sizes are those of the suite's rows (tests/memory), so that the records of other cards compare. Controls are read too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.opening import NoDevice
from pytest_gpumem.devices.protocol import Device, Launch, Stream
from pytest_gpumem.kernels.calls import requested_bytes
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.l2_bandwidth import TILE_BYTES
from pytest_gpumem.kernels.latency import NODE_BYTES
from pytest_gpumem.kernels.stream import tile_bytes
from pytest_gpumem.measuring.bound import CYCLE_SEED, BoundKernel
from pytest_gpumem.measuring.controls import middle_mean, read_controls, readings
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.records.device import Card, CardFigures
from pytest_gpumem.records.measurement import Controls
from pytest_gpumem.units import MiB

STREAMED = 512 * MiB
"""Bytes of an array in DRAM; less on a small GPU."""
COPIED = 256 * MiB  # bytes of a copy over the host link
L2_SHARE = 4  # L2 over the bytes that are read from it
L2_PASSES = 256  # passes of one launch over them, of which the launch itself is nothing
STEPS = 40000  # nodes of one walk in L2, likewise
READINGS, QUICK_READINGS = 24, 6  # launches of each kernel
LOAD, QUICK_LOAD = 8.0, 0.5
"""Seconds of copies in DRAM under which the state is read: a warm card shows throttling that a cold one does not. Not of reads of L2,
under which a sound H100 reaches its power limit."""
SPELL = 200  # copies that are queued while the state is read once


@dataclass(frozen=True)
class Examined:
    """One card."""

    figures: CardFigures
    controls: Controls
    card: Card | None  # state under load: the lowest clocks and all throttle reasons that were seen; None where the driver does not tell
    other_processes: int | None  # most other compute processes that were seen; None where the driver does not tell


def examine(device: Device, look: Callable[[], Card], *, quick: bool = False) -> Examined:
    """Measure a card. It has to be idle.

    Args:
        device: the card.
        look: reads its state; may raise `NoDevice`.
        quick: take few readings, and let the card work for half a second only.

    Raises:
        OutOfMemory: the card is small or in use.
        TooMuchPinned: the host has too little memory to lock.
        DeviceError: a launch failed.
    """
    arena = Arena(device, seed=0)
    try:
        stream = device.streams.create()
        work = _Work(device, arena, stream)
        copy = work.streaming("copy")
        work.warm(copy)
        controls = read_controls(device)
        figures = _figures(work, copy, controls, QUICK_READINGS if quick else READINGS)
        return Examined(figures, controls, *_under_load(device, stream, copy, look, QUICK_LOAD if quick else LOAD))
    finally:
        arena.close()


class _Work:
    """Launches on buffers of one arena."""

    def __init__(self, device: Device, arena: Arena, stream: Stream) -> None:
        self.device, self.arena, self.stream = device, arena, stream
        facts = device.facts
        self.streamed = max(min(STREAMED, facts.memory_bytes // 16 // MiB * MiB), 4 * facts.l2_bytes)

    def launch(self, name: str, buffers: dict[str, Buffer], **scalars: int | float) -> Launch:
        """A launch of a kernel of the catalogue that is loaded."""
        launch = BoundKernel(CATALOGUE[name], self.device, self.stream).launch(buffers, scalars)
        self.device.kernels.launch(launch, self.stream)
        self.device.streams.synchronize(self.stream)
        return launch

    def warm(self, launch: Launch) -> None:
        """Raise the clocks, which fall while memory is prepared."""
        _queue(self.device, self.stream, [launch] * SPELL)
        self.device.streams.synchronize(self.stream)

    def buffer(self, nbytes: int, dtype: str = "f4", kind: MemoryKind = MemoryKind.DEVICE) -> Buffer:
        return self.arena.buffer(nbytes, dtype, kind)

    def streaming(self, name: str) -> Launch:
        """A kernel over arrays that no cache holds."""
        whole = partial(self.buffer, self.streamed)
        if name == "read":
            return self.launch("read", {"a": whole(), "sums": self.buffer(4 * (self.streamed // tile_bytes("read")))})
        return self.launch("copy", {"c": whole(), "a": whole()}) if name == "copy" else self.launch("write", {"a": whole()}, value=1.0)

    def reading_l2(self) -> Launch:
        """Reads a quarter of L2 over and over."""
        nbytes = self.device.facts.l2_bytes // L2_SHARE // TILE_BYTES * TILE_BYTES
        sums = self.buffer(4 * (nbytes // TILE_BYTES) * L2_PASSES, "i4")
        return self.launch("l2_read", {"a": self.buffer(nbytes, "i4"), "sums": sums}, repeats=L2_PASSES)

    def walking_l2(self) -> Launch:
        """Walks over nodes in a quarter of L2."""
        nodes, out = self.buffer(self.device.facts.l2_bytes // L2_SHARE // NODE_BYTES * NODE_BYTES, "i4"), self.buffer(4, "i4")
        self.device.content.fill_cycle(nodes.allocation, NODE_BYTES, CYCLE_SEED, self.stream)
        return self.launch("chase", {"nodes": nodes, "out": out}, steps=STEPS, start=0)


def _figures(work: _Work, copy: Launch, controls: Controls, count: int) -> CardFigures:
    read, write = work.streaming("read"), work.streaming("write")
    l2_read, walk = work.reading_l2(), work.walking_l2()
    here, there = work.buffer(COPIED, kind=MemoryKind.PINNED), work.buffer(COPIED)
    to_device = work.launch("memcpy", {"destination": there, "source": here})
    to_host = work.launch("memcpy", {"destination": here, "source": there})
    work.device.memory.settle()
    work.warm(copy)

    def seconds(launch: Launch, before: Sequence[Launch] = ()) -> float:
        return middle_mean(readings(work.device, [work.stream], [launch], count + 1, before=before))

    def rate(launch: Launch, *, clean: bool = False) -> float:
        """Bytes that a launch moves over its time. `clean`: after a read, which leaves no dirty lines in L2."""
        return requested_bytes(launch.kernel.accesses(launch.call)) / seconds(launch, [read] if clean else [])

    return CardFigures(
        dram_read=rate(read, clean=True),
        dram_write=rate(write, clean=True),
        dram_copy=rate(copy, clean=True),
        l2_read=rate(l2_read),
        dram_latency=controls.latency,
        l2_latency=seconds(walk) / STEPS,
        to_device=rate(to_device) / 2,  # a copy over the link reads and writes, and each byte crosses once
        to_host=rate(to_host) / 2,
        launch=controls.launch,
    )


def _under_load(device: Device, stream: Stream, launch: Launch, look: Callable[[], Card], seconds: float) -> tuple[Card | None, int | None]:
    """The state of the card while a launch runs over and over, and the most other processes that were seen."""
    seen, others = list[Card](), list[int | None]()
    begun = device.now()
    while not others or device.now() - begun < seconds:
        _queue(device, stream, [launch] * SPELL)
        with suppress(NoDevice):
            seen.append(look())
        others.append(device.conditions().other_processes)
        device.streams.synchronize(stream)
    most = max((count for count in others if count is not None), default=None)
    if not seen:
        return None, most
    reasons = [one.throttle_reasons for one in seen if one.throttle_reasons is not None]
    slowing = tuple(dict.fromkeys(reason for one in reasons for reason in one)) if reasons else None
    clocks = {name: [clock for one in seen if (clock := getattr(one, name)) is not None] for name in ("sm_clock_hz", "memory_clock_hz")}
    return replace(seen[-1], throttle_reasons=slowing, **{name: min(known) for name, known in clocks.items() if known}), most


def _queue(device: Device, stream: Stream, launches: Sequence[Launch]) -> None:
    for launch in launches:
        device.kernels.launch(launch, stream)
