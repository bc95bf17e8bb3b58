"""Samples for a profiler: plain launches, each in a range of its own."""

from __future__ import annotations

from pytest_gpumem.measuring.samplers.shot import Shot
from pytest_gpumem.ranges import LAUNCH, MEASURE, phase


class PlainSampler:
    """One launch after the other, each in a range `measure` with nothing else in it, the flush in a range of its own before that.

    The launch's range says which part of the memory system it is about, by its category, and the bytes that it must move, as its payload.
    Both ranges are open before the first event is recorded and closed after the second: nothing of theirs is in the interval.

    A filter on a test's `measure` range therefore finds the kernels of the test and none of the harness's.

    No graph (profilers see its kernels in another way) and no held stream (a profiler that replays kernels one by one would wait for
    ever). The times carry the profiler's own cost.
    """

    name = "plain"

    def __init__(self, shot: Shot) -> None:
        self._shot = shot
        self._start, self._end = shot.device.event(), shot.device.event()

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        shot, device, taken = self._shot, self._shot.device, list[tuple[int, float]]()
        for place in shot.rounds(rounds):
            with shot.ranges.range(phase(shot.name, "flush")):
                shot.before(place, shot.stream)
            with (
                shot.ranges.range(phase(shot.name, MEASURE)),
                shot.ranges.range(phase(shot.name, LAUNCH), payload=shot.moved, category=shot.category),
            ):
                device.record(self._start, shot.stream)
                shot.launch(place, shot.stream)
                device.record(self._end, shot.stream)
            device.synchronize(shot.stream)
            taken.append((place, device.elapsed(self._start, self._end)))
        return taken
