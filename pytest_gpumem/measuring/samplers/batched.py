"""Hot samples: many launches between two events."""

from __future__ import annotations

from pytest_gpumem.devices.protocol import CannotCapture
from pytest_gpumem.measuring.samplers.blocked import HOLD_TIMEOUT
from pytest_gpumem.measuring.samplers.shot import Shot


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
        self._graph = None
        if capture:
            try:
                self._graph = shot.device.capture(shot.stream, self._body)
            except CannotCapture:
                self._graph = None

    def _body(self) -> None:
        device, stream = self._shot.device, self._shot.stream
        device.record(self._start, stream)
        for _ in range(self._batch):
            self._shot.launch()
        device.record(self._end, stream)

    def samples(self, count: int) -> list[float]:
        shot, device, taken = self._shot, self._shot.device, list[float]()
        for _ in range(count):
            shot.restore()
            if self._graph is not None:
                device.replay(self._graph, shot.stream)
            else:
                device.synchronize(shot.stream)
                hold = device.hold(shot.stream, HOLD_TIMEOUT)
                try:
                    self._body()
                finally:
                    hold.release()
            device.synchronize(shot.stream)
            taken.append(device.elapsed(self._start, self._end) / self._batch)
        return taken
