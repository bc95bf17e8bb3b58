"""Cold samples captured into one CUDA graph: the cheapest in host time."""

from __future__ import annotations

from pytest_gpumem.measuring.samplers.shot import Shot

SIZE = 48
"""Samples of one graph: its launch costs nothing then, and its capture is still cheap."""


class GraphSampler:
    """Flush, event, launch, event, many times in one graph: no launch gap lies inside an interval.

    What a reading contains besides the kernel depends on the sample's position within the graph (0.24 us standard deviation on an H200, and
    0.37 us more on average, docs/measuring.md), so placements take random positions, and other samplers are taken where they can be.

    The capture happens at construction and raises `CannotCapture`; the graph keeps what was allocated during it.
    """

    name = "graph"

    def __init__(self, shot: Shot) -> None:
        self._shot = shot
        self._each = max(1, SIZE // shot.places)
        self._order = list(shot.rounds(self._each))
        self._pairs = [(shot.device.event(), shot.device.event()) for _ in self._order]
        self._graph = shot.device.capture(shot.stream, self._body)

    def _body(self) -> None:
        shot = self._shot
        for place, (start, end) in zip(self._order, self._pairs, strict=True):
            shot.before(place, shot.stream)
            shot.device.record(start, shot.stream)
            shot.launch(place, shot.stream)
            shot.device.record(end, shot.stream)

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        device, taken = self._shot.device, list[tuple[int, float]]()
        for _ in range(-(-rounds // self._each)):
            device.replay(self._graph, self._shot.stream)
            device.synchronize(self._shot.stream)
            taken += [(place, device.elapsed(*pair)) for place, pair in zip(self._order, self._pairs, strict=True)]
        return taken
