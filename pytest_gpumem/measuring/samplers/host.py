"""Samples by the host's clock, for work that itself waits for the device."""

from __future__ import annotations

from pytest_gpumem.measuring.samplers.shot import Shot


class HostSampler:
    """Wall-clock time from before the launch until the device is idle: launch latency is included, and the result says so."""

    name = "host"

    def __init__(self, shot: Shot) -> None:
        self._shot = shot

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        shot, device, taken = self._shot, self._shot.device, list[tuple[int, float]]()
        for place in shot.rounds(rounds):
            shot.before(place, shot.stream)
            device.synchronize()
            start = device.now()
            shot.launch(place, shot.stream)
            device.synchronize()
            taken.append((place, device.now() - start))
        return taken
