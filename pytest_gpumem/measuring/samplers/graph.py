"""Cold samples captured into one CUDA graph: the cheapest exact way seen (docs: measured facts)."""

from __future__ import annotations

from pytest_gpumem.measuring.samplers.shot import Shot


class GraphSampler:
    """Flush, event, launch, event, many times in one graph: no launch gap lies inside an interval.

    The capture happens at construction and raises `CannotCapture`; the graph keeps what was allocated during it.
    """

    name = "graph"

    def __init__(self, shot: Shot, size: int) -> None:
        self._shot = shot
        self._pairs = [(shot.device.event(), shot.device.event()) for _ in range(size)]
        self._graph = shot.device.capture(shot.stream, self._body)

    def _body(self) -> None:
        for start, end in self._pairs:
            self._shot.before()
            self._shot.device.record(start, self._shot.stream)
            self._shot.launch()
            self._shot.device.record(end, self._shot.stream)

    def samples(self, count: int) -> list[float]:
        device, taken = self._shot.device, list[float]()
        while len(taken) < count:
            device.replay(self._graph, self._shot.stream)
            device.synchronize(self._shot.stream)
            taken += [device.elapsed(start, end) for start, end in self._pairs]
        return taken
