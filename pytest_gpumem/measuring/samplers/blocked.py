"""Cold samples from behind a kernel that holds the stream."""

from __future__ import annotations

from pytest_gpumem.measuring.samplers.held import held
from pytest_gpumem.measuring.samplers.shot import Shot


class BlockedSampler:
    """The stream is held while flush, event, launch and event are queued, then released: no launch gap lies inside the interval.

    One sample at a time: several behind one hold read up to 0.5 us longer on an H200 (docs/measuring.md). Streams take turns, because
    the time that a launch needs before the kernel starts differs between them.

    Raises `HoldExpired` from `samples` if the launch itself waits for the device.
    """

    name = "blocked"

    def __init__(self, shot: Shot) -> None:
        self._shot = shot
        self._start, self._end = shot.device.event(), shot.device.event()
        self._taken = 0

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        return [(place, self._one(place)) for place in self._shot.rounds(rounds)]

    def _one(self, place: int) -> float:
        shot, device = self._shot, self._shot.device
        stream = shot.streams[self._taken % len(shot.streams)]
        self._taken += 1
        # Before the hold: page migration, and a restore from pageable memory, need the host's help, which a held stream would starve. The
        # whole device, because a restore need not follow the current stream any more than a launch does.
        if shot.restores:
            shot.restore(stream)
            device.synchronize()
        with held(device, stream):
            shot.state(place, stream)
            device.record(self._start, stream)
            shot.launch(place, stream)
            device.record(self._end, stream)
        device.synchronize(stream)
        return device.elapsed(self._start, self._end)
