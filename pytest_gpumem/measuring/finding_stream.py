"""The search for the stream on which a foreign callable works.

A library need not follow the current stream: Numba has none, a framework may keep its streams.
Timing the wrong stream gives a wrong number without any error, so the device is watched.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from pytest_gpumem.devices.protocol import Device, Stream
from pytest_gpumem.measuring.harness import HOLD_TIMEOUT, held
from pytest_gpumem.records.measurement import NOTHING_RAN

LOOKS = 2
"""Times that each stream is watched: short work that is seen only once is of another origin."""
LONG = 0.025  # seconds of work from which delays of microseconds by other streams do not matter
LONG_SHARE = 0.1  # share of the whole time for which a stream must be busy with long work
ALONE = 0.99  # the same for work that is launched once: nothing of it runs on other streams
FILLED = 0.9  # the same for long work that is timed without a look at other streams
BESIDE = 20e-6
"""Seconds for which the device may be busy after the timed stream is done, beyond the cost of
waiting; above, something runs beside it."""
BESIDE_SHARE = 1e-3
"""The same as a share of long work, after which a wait takes longer (H200)."""
NEAR = 5  # looks at each default stream that tell which of them the work is on
JOINED = 0.1e-6  # seconds that work takes longer on the other default stream: 0.4 us on an H100
QUEUED_IN = 0.1
QUEUED_FACTOR = 10
"""To queue work takes at most `QUEUED_IN` seconds, and `QUEUED_FACTOR` times the work's whole time:
what takes longer waits for the device."""


class Elsewhere(Exception):
    """The work cannot be timed on one stream; the message is the reason."""


class NoWork(Elsewhere):
    """The device did nothing: the time by the host's clock may be the host's alone."""


Queues = Callable[[Stream], object]
"""A function that queues work, with the given stream as the current one of every library."""


@dataclass(frozen=True)
class TimingSite:
    """The place where work can be timed."""

    stream: Stream
    name: str | None  # of a default stream; None for the current stream of the launch
    seconds: float  # from a launch until the device is idle
    sample: float | None = None
    """Seconds of the launch that showed long work to be alone on the current stream."""


def find_stream(
    device: Device,
    prepare: Queues,
    launch: Queues,
    current: Stream,
    floor: float,
    first: float = 0.0,
) -> TimingSite:
    """Find the stream on which the work can be timed.

    The search launches short work some seven times, and long work at most twice.

    `prepare`: restores the work's inputs. `launch`: queues the work once; it ran before.
    `current`: the current stream of the launch. `floor`: seconds of an empty interval.
    `first`: seconds of the first launch, with what it compiled.
    Raises `HoldExpired`: the work waits for the device.
    Raises `Elsewhere`: it runs on streams of its own; `NoWork` if it runs nowhere.
    """
    defaults = device.streams.defaults()
    watch = _LaunchWatch(device, prepare, launch, floor)
    if first > LONG:
        sample = watch.alone(current, first)
        if sample is not None:
            return TimingSite(current, None, sample, sample)
    busy = [current] if watch.fills(current) else watch.busy_streams(current, (current, *defaults))
    if defaults and current in busy and defaults[0] in busy:
        # With the default stream as the current stream, all of the work runs there.
        watch.first_on(defaults[0])
        busy = watch.busy_streams(defaults[0], (defaults[0], current))
    elif defaults and defaults[0] in busy:
        # The two default streams wait for each other: work on either is seen on both.
        busy = [watch.nearer(current, *defaults) if defaults[1] in busy else defaults[0]]
    if not busy:
        if watch.goes_on(current):
            raise Elsewhere("its work runs on streams of its own")
        raise NoWork("no work was seen on the timed stream, on a default one or on the device")
    if len(busy) > 1:
        raise Elsewhere("its work is spread over several streams")
    if watch.goes_on(busy[0]):
        raise Elsewhere("some of its work goes on beside the timed stream")
    name = None
    if defaults and busy[0] is defaults[0]:
        name = "the legacy default stream"
    elif defaults and busy[0] is defaults[1]:
        name = "this thread's default stream"
    return TimingSite(busy[0], name, watch.whole(current))


class _LaunchWatch:
    """Launches the work and watches the device."""

    def __init__(self, device: Device, prepare: Queues, launch: Queues, floor: float) -> None:
        self._device, self._prepare, self._launch = device, prepare, launch
        self._floor = floor
        self._whole: float | None = None
        self._first: Stream | None = None  # the current stream of the first look
        self._beside = 0.0  # seconds for which the device was busy after that stream

    def alone(self, current: Stream, first: float) -> float | None:
        """Return the seconds of a launch if long work keeps `current` busy for the whole time."""
        begun = self._device.now()
        interval = self._interval(current, current, first)
        whole = self._device.now() - begun
        if interval > max(LONG, ALONE * whole):
            return interval
        return None

    def fills(self, current: Stream) -> bool:
        """True if long work keeps `current` busy for nearly the whole time.

        Work beside it that ends sooner costs nothing.
        """
        whole = self.whole(current)
        return whole > LONG and self._interval(current, current, whole) > FILLED * whole

    def busy_streams(self, current: Stream, streams: tuple[Stream, ...]) -> list[Stream]:
        """Return the streams that are busy each time, with `current` as the current stream."""
        return [stream for stream in streams if self._busy(current, stream)]

    def _busy(self, current: Stream, watched: Stream) -> bool:
        whole = self.whole(current)
        least, looks = NOTHING_RAN * self._floor, LOOKS
        if whole > LONG:
            least, looks = max(least, LONG_SHARE * whole), 1
        return all(self._interval(current, watched, whole) > least for _ in range(looks))

    def nearer(self, current: Stream, legacy: Stream, thread: Stream) -> Stream:
        """Return the default stream that the work is on, if both are busy with it.

        With long work it does not matter.
        """
        whole = self.whole(current)
        if whole > LONG:
            return legacy
        on_legacy = statistics.median(self._interval(current, legacy, whole) for _ in range(NEAR))
        on_thread = statistics.median(self._interval(current, thread, whole) for _ in range(NEAR))
        return thread if on_thread + JOINED < on_legacy else legacy

    def first_on(self, current: Stream) -> None:
        """Launch once without a hold: a library sets up its state for a stream at first."""
        self._idle_after(current, work=True)

    def whole(self, current: Stream) -> float:
        """Return the seconds until the device is idle after a launch; the first call decides."""
        if self._whole is None:
            self._first = current
            whole, self._beside = self._idle_after(current, work=True)
            if whole <= LONG:
                for _ in range(LOOKS - 1):
                    whole = min(whole, self._idle_after(current, work=True)[0])
            self._whole = whole
        return self._whole

    def goes_on(self, stream: Stream) -> bool:
        """True if the device is busy for longer than `stream`, each time.

        Work beside it that ends sooner stays unnoticed.
        """
        whole = self._whole or 0.0
        allowed = max(BESIDE, BESIDE_SHARE * whole) if whole > LONG else BESIDE
        idle = min(self._idle_after(stream, work=False)[1] for _ in range(LOOKS + 1))
        limit = idle + allowed
        if stream is self._first and whole > LONG and self._beside <= limit:
            return False
        return all(self._idle_after(stream, work=True)[1] > limit for _ in range(LOOKS + 1))

    def _idle_after(self, current: Stream, *, work: bool) -> tuple[float, float]:
        """Return the seconds until the device is idle, and those of them after `current` is."""
        device = self._device
        self._prepare(current)
        device.streams.synchronize()
        begun = device.now()
        if work:
            self._launch(current)
        device.streams.synchronize(current)
        done = device.now()
        device.streams.synchronize()
        return device.now() - begun, device.now() - done

    def _interval(self, current: Stream, watched: Stream, whole: float) -> float:
        """Return the seconds for which `watched` is busy, held while the work is queued.

        The hold ends when work on other streams has ended, which would delay the second event.
        """
        device = self._device
        start, end = device.streams.event(), device.streams.event()
        self._prepare(current)
        device.streams.synchronize()
        with held(device, watched, min(HOLD_TIMEOUT, QUEUED_IN + QUEUED_FACTOR * whole)):
            device.streams.record(start, watched)
            self._launch(current)
            device.streams.record(end, watched)
            over = device.now()
            if whole <= LONG:
                over += 2 * whole
            while device.now() < over:
                pass
        device.streams.synchronize()
        return device.streams.elapsed(start, end)
