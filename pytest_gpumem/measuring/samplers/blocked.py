"""Cold samples from behind a kernel that holds the stream, for what cannot be captured."""

from __future__ import annotations

from pytest_gpumem.measuring.samplers.shot import Shot

HOLD_TIMEOUT = 0.5
"""Seconds after which the holding kernel gives up: work that waits for the device would otherwise never return."""


class BlockedSampler:
    """The stream is held while flush, event, launch and event are queued, then released: no launch gap lies inside the interval.

    Raises `HoldExpired` from `samples` if the launch itself waits for the device.
    """

    name = "blocked"

    def __init__(self, shot: Shot) -> None:
        self._shot = shot
        self._start, self._end = shot.device.event(), shot.device.event()

    def samples(self, count: int) -> list[float]:
        return [self._one() for _ in range(count)]

    def _one(self) -> float:
        shot, device = self._shot, self._shot.device
        # Before the hold: page migration, and a restore from pageable memory, need the host's help, which a held stream would starve.
        shot.restore()
        device.synchronize(shot.stream)
        hold = device.hold(shot.stream, HOLD_TIMEOUT)
        try:
            shot.flush(shot.stream)
            device.record(self._start, shot.stream)
            shot.launch()
            device.record(self._end, shot.stream)
        finally:
            hold.release()
        device.synchronize(shot.stream)
        return device.elapsed(self._start, self._end)
