"""The state that the measurements of a session share: streams, flushes of L2, launch floors, and clocks that are up."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Device, HoldExpired, Launch, Stream
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import ArrayFacts, Call
from pytest_gpumem.kernels.stream import VECTOR_BYTES, tile_bytes
from pytest_gpumem.measuring.bound import BoundKernel
from pytest_gpumem.measuring.samplers import held
from pytest_gpumem.measuring.stopping import steady
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.ranges import Ranges
from pytest_gpumem.records.device import DeviceFacts

FLUSH_FACTOR = 2  # size over L2: nothing of the sample before survives least-recently-used eviction, an eighth survives random eviction


class Flush:
    """Fills L2 with lines of a buffer of its own. clean-cold reads: its lines are evicted for free. dirty-cold writes: the kernel pays for
    their write-back, which made a 32 MiB triad on an H100 26 % slower. hot does nothing."""

    def __init__(self, device: Device, mode: str) -> None:
        self._device = device
        self._launch: Launch | None = None
        self._arena = Arena(device, seed=0)
        if mode == "hot":
            return
        try:
            self._launch = self._made(mode)
        except BaseException:
            self._arena.close()
            raise

    def _made(self, mode: str) -> Launch:
        device = self._device
        swept = self._arena.buffer(FLUSH_FACTOR * device.facts.l2_bytes, "f4", MemoryKind.DEVICE)
        if mode == "clean-cold":
            sums = self._arena.buffer(
                (swept.nbytes // tile_bytes("read"),), "f4", MemoryKind.DEVICE
            )
            return self._bound("read").launch({"a": swept, "sums": sums}, {})
        return self._bound("write").launch({"a": swept}, {"value": 1.0})

    def _bound(self, name: str) -> BoundKernel:
        return BoundKernel(CATALOGUE[name], self._device, self._arena.stream)

    def __call__(self, stream: Stream) -> None:
        """Queue the flush."""
        if self._launch is not None:
            self._device.kernels.launch(self._launch, stream)

    def close(self) -> None:
        """Free the buffer."""
        self._arena.close()


BLOCKS_PER_SM = 2  # grid of the idle launch: full, like that of measured kernels
STREAMS = 4
"""Streams that take turns: what a launch adds to a reading differs between streams by 30 ns and between processes by 60 ns (standard
deviations on an H200); more than four streams average no better."""
FLOOR_SAMPLES = 40  # readings of an empty interval, and of an idle launch, on each stream
BUSY = 2.0
"""Reading of an idle launch over the one that is usual, above which other work keeps the device busy. A reading varies by some 2 %."""
LOOK_PAUSES = (200e-6, 300e-6, 450e-6)
"""Seconds, in turn, in which another thread takes the interpreter's lock and launches. They differ because looks of one rhythm could all
miss work of the same rhythm."""
SURELY_BUSY = 30e-6  # seconds of such a reading from which on the device is busy, however long the usual one took
WAIT = 0.01  # seconds between two looks while the device is throttled or busy
WAKE_BATCH = 100  # flushes between two readings of the clocks
WAKE_SECONDS = 0.3
"""Seconds of work that raise the clocks of an idle GPU, which takes tens of milliseconds: longer than a warm-up by samples would notice."""
WAKE_LIMIT = 2.0
"""Most seconds of that work. A GPU that is not steady by then is measured all the same; every measurement warms up besides."""


@dataclass(frozen=True)
class Floors:
    """What a reading contains besides the timed work."""

    empty: float  # seconds between two events with nothing between them
    launch: float  # seconds between two events with an idle launch between them: the launch overhead of this process


class Harness:
    """Streams, flush buffers and floors of one device; each is made at its first use and lives as long as the session."""

    def __init__(self, device: Device, ranges: Ranges, *, profiled: bool) -> None:
        self.device = device
        self.ranges = ranges
        self.profiled = profiled  # a profiler is attached
        self._flushes: dict[str, Flush] = {}
        self._streams: tuple[Stream, ...] = ()
        self._floors: Floors | None = None
        self._awake = False
        self._arena = Arena(device, seed=0)
        self._idle: Launch | None = None
        self._pauses = itertools.cycle(LOOK_PAUSES)

    def streams(self) -> tuple[Stream, ...]:
        """The streams that take turns for a target that runs on any stream."""
        if not self._streams:
            self._streams = tuple(self.device.streams.create() for _ in range(STREAMS))
        return self._streams

    def flush(self, mode: str) -> Flush:
        """The flush of a mode, loaded."""
        if mode not in self._flushes:
            flush = self._flushes[mode] = Flush(self.device, mode)
            # A kernel is loaded at its first launch, which waits for the device: never behind a held stream.
            stream = self.streams()[0]
            flush(stream)
            self.device.streams.synchronize(stream)
        return self._flushes[mode]

    def wake(self) -> None:
        """Keep the device busy until its clocks have settled; only the first call does anything."""
        if self._awake or self.profiled:
            return
        device = self.device
        stream, start, end = device.streams.create(), device.streams.event(), device.streams.event()
        begun, means = device.now(), list[float]()
        flush = self.flush("clean-cold")
        asleep = device.conditions()
        while True:
            device.streams.record(start, stream)
            for _ in range(WAKE_BATCH):
                flush(stream)
            device.streams.record(end, stream)
            device.streams.synchronize(stream)
            means.append(device.streams.elapsed(start, end) / WAKE_BATCH)
            spent, now = device.now() - begun, device.conditions()
            unchanged = (now.sm_clock_hz, now.memory_clock_hz) == (
                asleep.sm_clock_hz,
                asleep.memory_clock_hz,
            )
            if (
                (unchanged and now.sm_clock_hz is not None)
                or (spent > WAKE_SECONDS and steady(means))
                or spent > WAKE_LIMIT
            ):
                break
        self._awake = True

    def floors(self) -> Floors:
        """What readings contain besides the timed work; measured at the first call and after `forget_floors`."""
        if self._floors is None:
            streams, hold = self.streams(), not (self.profiled or self.device.launches_wait())
            empty = readings(self.device, streams, [], FLOOR_SAMPLES, hold=hold)
            launch = readings(self.device, streams, [self.idle()], FLOOR_SAMPLES, hold=hold)
            self._floors = Floors(statistics.median(empty), middle_mean(launch))
        return self._floors

    def idle(self) -> Launch:
        """A launch that does nothing, loaded."""
        if self._idle is None:
            self._idle = idle_launch(
                self.device.facts, self._arena.allocate(VECTOR_BYTES, MemoryKind.DEVICE)
            )
            # The first launch loads the kernel, which waits for the device: never behind a held stream.
            self.device.kernels.launch(self._idle, self.streams()[0])
            self.device.streams.synchronize()
        return self._idle

    def busy(self) -> bool:
        """True if other work keeps the device busy, of another thread or another process: an idle launch has to wait for room then.

        It reads an idle launch twice, after a pause and behind a hold. Another thread of Python needs the interpreter's lock to launch, and
        gets it in the pause. On an H100, such a thread made each sample eleven times as long; 57 of 60 looks after a pause and a reading of
        the clocks saw it, and no look behind a hold (2026-11-28).
        """
        if self.device.launches_wait():
            return False
        if self._after_a_pause() > SURELY_BUSY:
            return True
        (reading,) = readings(self.device, self.streams()[:1], [self.idle()], 2)
        return reading > min(BUSY * self.floors().launch, SURELY_BUSY)

    def _after_a_pause(self) -> float:
        """Seconds that an idle launch waits for room after a pause. The stream is not held: a hold would begin when there is room."""
        device, stream, idle = self.device, self.streams()[0], self.idle()
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

    def wait_out(self, most: float) -> float:
        """Wait while the device is throttled or busy with other work, for `most` seconds at most; gives the seconds."""
        begun = self.device.now()
        while (waited := self.device.now() - begun) < most and (
            self.device.conditions().throttle_reasons or self.busy()
        ):
            self.device.pause(min(WAIT, most - waited))
        return waited

    def forget_floors(self) -> None:
        """Measure the floors anew before the next measurement."""
        self._floors = None

    def close(self) -> None:
        """Free the flush buffers."""
        for flush in self._flushes.values():
            flush.close()
        self._flushes.clear()
        self._arena.close()


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


def readings(
    device: Device,
    streams: Sequence[Stream],
    launches: Sequence[Launch],
    rounds: int,
    *,
    hold: bool = True,
) -> list[float]:
    """Seconds between two events around all of `launches`, each stream in turn, without the first round: first launches are slow.
    `streams`: read one after another in each round.
    `launches`: kernels that are loaded already; none for an empty interval.
    `rounds`: readings on each stream, including the one that is left out.
    `hold`: hold the stream while work is queued; given up once a hold expires.
    """
    start, end = device.streams.event(), device.streams.event()
    found = list[float]()
    for _ in range(rounds):
        for stream in streams:
            with uncollected(), held(device, stream) if hold else nullcontext():
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
