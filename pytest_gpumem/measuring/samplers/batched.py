"""Hot samples: many launches between two events."""

from __future__ import annotations

from functools import partial

from pytest_gpumem.devices.protocol import CannotCapture, Graph
from pytest_gpumem.measuring.samplers.held import held
from pytest_gpumem.measuring.samplers.shot import Shot

LEAST_BATCH = 20
MOST_BATCH = 400
BATCH_SECONDS = 400e-6
"""Length of a batch, so that the microsecond of its first launch is a quarter of a per cent of it."""
FOREIGN_BATCH = (5, 50)
"""Least and most for foreign callables, each of which may launch many kernels: a stream holds some thousand before queueing waits."""
UNTIMED = 2
"""Launches before the first event: they bring the buffers into L2."""


def batch_of(latency: float | None, *, foreign: bool) -> int:
    """Launches of one batch for a kernel that takes about `latency` seconds; the least where that is unknown."""
    least, most = FOREIGN_BATCH if foreign else (LEAST_BATCH, MOST_BATCH)
    return least if latency is None or latency <= 0 else int(min(most, max(least, BATCH_SECONDS / latency)))


class BatchedSampler:
    """A sample is the mean of `batch` launches that follow each other without a flush: the state is hot.

    The batch is captured into a graph where that is allowed and works, else queued behind a held stream: launches follow each other
    without gaps either way. Raises `HoldExpired` from `samples` if a launch waits for the device.
    """

    name = "batched"

    def __init__(self, shot: Shot, batch: int, *, capture: bool) -> None:
        self._shot = shot
        self._batch = batch
        self._start, self._end = shot.device.event(), shot.device.event()
        self._graphs: list[Graph] = []
        if capture:
            try:
                self._graphs = [shot.device.capture(shot.stream, partial(self._body, place)) for place in range(shot.places)]
            except CannotCapture:
                self._graphs = []

    def _body(self, place: int) -> None:
        device, stream = self._shot.device, self._shot.stream
        for _ in range(UNTIMED):
            self._shot.launch(place, stream)
        device.record(self._start, stream)
        for _ in range(self._batch):
            self._shot.launch(place, stream)
        device.record(self._end, stream)

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        shot, device, taken = self._shot, self._shot.device, list[tuple[int, float]]()
        for place in shot.rounds(rounds):
            shot.restore(shot.stream)
            if self._graphs:
                device.replay(self._graphs[place], shot.stream)
            else:
                device.synchronize(shot.stream)
                with held(device, shot.stream):
                    self._body(place)
            device.synchronize(shot.stream)
            taken.append((place, device.elapsed(self._start, self._end) / self._batch))
        return taken
