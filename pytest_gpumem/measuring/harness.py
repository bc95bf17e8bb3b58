"""What the measurements of a session share: streams, flushes of L2, floors; and what disturbs
them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import (
    Device,
    DeviceError,
    Hold,
    HoldExpired,
    Launch,
    NotCounted,
    Stream,
)
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import ArrayFacts, Call
from pytest_gpumem.kernels.stream import VECTOR_BYTES, tile_bytes
from pytest_gpumem.measuring.bound import BoundKernel
from pytest_gpumem.measuring.stopping import steady
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.ranges import Ranges
from pytest_gpumem.records.device import Conditions

HOLD_TIMEOUT = 0.5  # seconds: work that waits for the device would never return
FLUSH_FACTOR = 2  # flush size over L2; 1/8 of the earlier lines stay where eviction is random
BLOCKS_PER_SM = 2  # grid of the idle launch: full, like that of measured kernels
STREAMS = 4  # that take turns: launch overhead differs between them, by 30 ns on an H200
FULL_SPEED = 0.99  # share of the highest SM clock from which a throttle reason slows nothing
FLOOR_SAMPLES = 40  # readings of an empty interval, and of an idle launch, on each stream
BUSY = 2.0  # reading of an idle launch over the usual, above which the device is busy
SURELY_BUSY = 30e-6  # seconds of such a reading from which on the device is busy in any case
LOOK_PAUSES = (200e-6, 300e-6, 450e-6)
"""Seconds of pauses, in turn, that let other Python threads launch; uneven, so that no rhythm of
theirs is missed."""
LOOK_SECONDS = 0.025  # between two looks for other work among samples
WAIT = 0.01  # seconds between two looks while the device is throttled or busy
WAKE_BATCH = 100  # flushes between two readings of the clocks
WAKE_SECONDS = 0.3  # of work that raise the clocks of an idle GPU
WAKE_LIMIT = 2.0  # most seconds of that work: every measurement warms up besides


@contextmanager
def holding(device: Device, stream: Stream, timeout: float = HOLD_TIMEOUT) -> Iterator[Hold]:
    """Hold `stream` while the block queues work on it, for `timeout` seconds at most.

    The next `synchronize` raises `HoldExpired` if the hold expired, and the block did not raise.
    """
    hold = device.streams.hold(stream, timeout)
    try:
        yield hold
    except BaseException:
        device.streams.release(hold)
        with suppress(DeviceError):
            device.streams.synchronize(stream)
        raise
    device.streams.release(hold)


def flush_of(arena: Arena, mode: str) -> Launch:
    """Return a launch that fills L2 with lines of a buffer.

    clean-cold reads: its lines are evicted for free. dirty-cold writes: the kernel pays for their
    write-back.
    """
    device = arena.device
    swept = arena.buffer(FLUSH_FACTOR * device.facts.l2_bytes, "f4", MemoryKind.DEVICE)
    if mode == "dirty-cold":
        write = BoundKernel(CATALOGUE["write"], device, arena.stream)
        return write.launch({"a": swept}, {"value": 1.0})
    sums = arena.buffer((swept.nbytes // tile_bytes("read"),), "f4", MemoryKind.DEVICE)
    read = BoundKernel(CATALOGUE["read"], device, arena.stream)
    return read.launch({"a": swept, "sums": sums}, {})


class Floors(NamedTuple):
    """What a reading contains besides the timed work, in seconds."""

    empty: float  # between two events with nothing between them
    launch: float  # with an idle launch between them: the launch overhead of this process


class Harness:
    """Streams, flush buffers and floors of a device; each is made at its first use."""

    def __init__(self, device: Device, ranges: Ranges, *, profiled: bool) -> None:
        self.device, self.ranges = device, ranges
        self.profiled = profiled  # a profiler is attached
        self._flushes: dict[str, Launch] = {}
        self._floors: Floors | None = None
        self._awake = False
        self._watched = False  # CUPTI has made a pass in this process
        self._arena = Arena(device, seed=0)
        self._pauses = itertools.cycle(LOOK_PAUSES)

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that take turns for a target that runs on any stream."""
        return tuple(self.device.streams.create() for _ in range(STREAMS))

    def flush(self, mode: str) -> Launch | None:
        """Return the launch, loaded, that flushes L2; None for "hot"."""
        if mode == "hot":
            return None
        if mode not in self._flushes:
            self._flushes[mode] = self._loaded(flush_of(self._arena, mode))
        return self._flushes[mode]

    def _loaded(self, launch: Launch) -> Launch:
        """Launch once: the first launch waits while it loads the kernel, so not behind a hold."""
        self.device.kernels.launch(launch, self.streams[0])
        self.device.streams.synchronize()
        return launch

    def wake(self) -> None:
        """Keep the device busy until its clocks have settled; only the first call does anything."""
        if self._awake or self.profiled:
            return
        device, streams = self.device, self.device.streams
        stream, start, end = streams.create(), streams.event(), streams.event()
        begun, flush = device.now(), self.flush("clean-cold")
        assert flush is not None
        asleep = device.conditions()
        means: list[float] = []
        while not self._awake:
            streams.record(start, stream)
            for _ in range(WAKE_BATCH):
                device.kernels.launch(flush, stream)
            streams.record(end, stream)
            streams.synchronize(stream)
            means.append(streams.elapsed(start, end) / WAKE_BATCH)
            spent, now = device.now() - begun, device.conditions()
            if now.sm_clock_hz is not None and now.sm_clock_hz == asleep.sm_clock_hz:
                self._awake = now.memory_clock_hz == asleep.memory_clock_hz
            if spent > WAKE_LIMIT or (spent > WAKE_SECONDS and steady(means)):
                self._awake = True

    def wake_counters(self) -> None:
        """Make CUPTI's first pass of the process, which may lose records, and changes the floors
        and later samples; only the first call that succeeds does anything."""
        if self._watched or self.profiled:
            return

        def work() -> None:
            self.device.kernels.launch(self.idle, self.streams[0])
            self.device.streams.synchronize()

        with suppress(NotCounted):
            self.device.counters.spans(work)
            self._watched, self._floors = True, None

    def floors(self) -> Floors:
        if self._floors is None:
            empty = self._readings(self.streams, None, FLOOR_SAMPLES)
            launch = sorted(self._readings(self.streams, self.idle, FLOOR_SAMPLES))
            # The mean of the middle half is finer than ticks, and ignores outliers.
            quarter = len(launch) // 4
            middle = float(np.mean(launch[quarter:-quarter]))
            self._floors = Floors(statistics.median(empty), middle)
        return self._floors

    @cached_property
    def idle(self) -> Launch:
        """A launch, loaded, of a full grid of `write` with no elements to write.

        The address of a written line would change the reading by as much as processes differ.
        """
        memory = self._arena.allocate(VECTOR_BYTES)
        facts, kernel = self.device.facts, CATALOGUE["write"]
        blocks = BLOCKS_PER_SM * facts.sm_count
        call = Call({"a": ArrayFacts(0, "f4", 4)}, {"value": 1.0}, blocks)
        return self._loaded(Launch(kernel, call, kernel.shape(facts, call), {"a": memory}))

    def _readings(
        self, streams: Sequence[Stream], launch: Launch | None, rounds: int
    ) -> list[float]:
        """Return the seconds of launches by events; the first round, which is slow, is left out."""
        device, plain = self.device, self.profiled or self.device.launches_wait()
        start, end = device.streams.event(), device.streams.event()
        seconds = []
        with uncollected():
            for stream in [*streams] * rounds:
                with nullcontext() if plain else holding(device, stream):
                    device.streams.record(start, stream)
                    if launch is not None:
                        device.kernels.launch(launch, stream)
                    device.streams.record(end, stream)
                try:
                    device.streams.synchronize(stream)
                except HoldExpired:  # every launch waits, as under a debugger
                    plain = True
                seconds.append(device.streams.elapsed(start, end))
        return seconds[len(streams) :]

    def busy(self) -> bool:
        """True if an idle launch has to wait for room, after a pause or behind a hold."""
        if self.device.launches_wait():
            return False
        if self._after_a_pause() > SURELY_BUSY:
            return True
        (reading,) = self._readings(self.streams[:1], self.idle, 2)
        return reading > min(BUSY * self.floors().launch, SURELY_BUSY)

    def _after_a_pause(self) -> float:
        """Return the seconds that an idle launch waits for SMs after a pause: between its events,
        less those of queueing on the host. Behind a hold the first event would wait too."""
        device, stream, idle = self.device, self.streams[0], self.idle
        start, end = device.streams.event(), device.streams.event()
        device.pause(next(self._pauses))
        with uncollected():
            begun = device.now()
            device.streams.record(start, stream)
            device.kernels.launch(idle, stream)
            queued = device.now() - begun
            device.streams.record(end, stream)
        device.streams.synchronize(stream)
        return device.streams.elapsed(start, end) - queued

    def forget_floors(self) -> None:
        """Measure the floors anew, as other work, counting or its end may have changed them."""
        self._floors, self._watched = None, False

    def close(self) -> None:
        self._arena.close()


class Disturbances:
    """What disturbs a measurement: other work on the device, and clocks that throttle."""

    def __init__(self, harness: Harness, patience: float) -> None:
        """`patience`: seconds of waiting while the device is throttled or busy."""
        self._harness, self._device, self._patience = harness, harness.device, patience
        self.waited = 0.0
        self.looks: list[bool] = []  # whether other work kept the device busy
        self.seen: list[Conditions] = []  # between the first sample and the last
        self.notes: list[str] = []
        self._looked = 0.0  # when the last look ended

    def wait_out(self) -> None:
        device, most = self._device, self._patience - self.waited
        begun, waited = device.now(), 0.0
        while waited < most and (device.conditions().throttle_reasons or self._harness.busy()):
            device.pause(min(WAIT, most - waited))
            waited = device.now() - begun
        self.waited += waited

    def look(self, times: int) -> None:
        """Look whether other work keeps the device busy."""
        for _ in range(times):
            self.looks.append(self._harness.busy())
        self._looked = self._device.now()

    def after_samples(self, clocks: Sequence[float]) -> bool:
        """Look for other work from time to time; return True for samples under throttling.

        `clocks`: hertz of the SM clock that ran, where they are known.
        """
        reported = self._device.conditions()
        conditions = self._only_slowing(reported, clocks)
        self.seen.append(conditions)
        if self._device.now() - self._looked >= LOOK_SECONDS:
            self.look(1)
        if reported.throttle_reasons:
            self.wait_out()
        return bool(conditions.throttle_reasons)

    def _only_slowing(self, reported: Conditions, clocks: Sequence[float]) -> Conditions:
        """Drop all throttle reasons if the SM clock ran at full speed."""
        highest, reasons = self._device.facts.sm_clock_hz, reported.throttle_reasons
        if not reasons or not clocks or highest is None:
            return reported
        if statistics.median(clocks) < FULL_SPEED * highest:
            return reported
        full = f"{100 * FULL_SPEED:.0f} % or more of {highest / 1e6:.0f} MHz"
        self.notes.append(f"{', '.join(reasons)} reported, but the SM clock ran at {full}")
        return replace(reported, throttle_reasons=())
