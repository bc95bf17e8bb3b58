"""Samples from behind a held stream, one or several behind one hold, and a device that is awake before the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_gpumem.devices.protocol import Device, Stream
from pytest_gpumem.measuring.samplers import held

Work = Callable[[Stream], None]
"""Queues something on a stream. It ran once before it is held: the first launch of a kernel loads it, which waits for the device."""

WAKE_SECONDS = 0.3
"""Seconds of work after which clocks are up; an idle GPU raises them over tens of milliseconds."""
WAKE_BATCH = 50
"""Pieces of work between two looks at the clock."""


class HeldSamples:
    """Takes samples on any stream; the events are made once."""

    def __init__(self, device: Device, most: int = 1) -> None:
        self._device = device
        self._pairs = [(device.streams.event(), device.streams.event()) for _ in range(most)]

    def take(self, stream: Stream, before: Work | None, works: Sequence[Work | None]) -> list[float]:
        """Seconds between two events around each of `works`, all queued behind one hold, each with `before` in front of it.

        None is no work: an empty interval, or nothing before it. At most as many works as the constructor was told.

        Raises:
            HoldExpired: something that was queued waited for the device.
        """
        device, pairs = self._device, self._pairs[: len(works)]
        device.streams.synchronize(stream)
        with held(device, stream):
            for (start, end), work in zip(pairs, works, strict=True):
                if before is not None:
                    before(stream)
                device.streams.record(start, stream)
                if work is not None:
                    work(stream)
                device.streams.record(end, stream)
        device.streams.synchronize(stream)
        return [device.streams.elapsed(*pair) for pair in pairs]


def awake(device: Device, stream: Stream, work: Work) -> None:
    """Keep the device busy with `work` until its clocks are up."""
    begun = device.now()
    while device.now() - begun < WAKE_SECONDS:
        for _ in range(WAKE_BATCH):
            work(stream)
        device.streams.synchronize(stream)
