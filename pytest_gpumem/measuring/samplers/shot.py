"""One sample as every sampler sees it: what comes before, what is timed, where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pytest_gpumem.devices.protocol import Device, Stream
from pytest_gpumem.ranges import Ranges


@dataclass(frozen=True)
class Shot:
    """The parts of a sample. All functions queue on the stream that they are given."""

    device: Device
    streams: tuple[Stream, ...]
    """Streams that samples take in turn; one for what is bound to a stream."""
    places: int
    """Placements of the buffers that live side by side."""
    homes: Callable[[Stream], None] | None
    """Puts managed pages back; cannot be captured."""
    prepare: Callable[[Stream], None]
    """Puts changed inputs back."""
    flush: Callable[[Stream], None]
    """Brings L2 into the mode's state."""
    launch: Callable[[int, Stream], None]
    """What is timed, on the buffers of one placement."""
    ranges: Ranges
    name: str
    """Name of the test's NVTX range."""
    moved: int | None = None
    """Compulsory bytes of one launch, if known."""
    category: str | None = None
    """Which part of the memory system a launch is about: the NVTX category of its range."""
    random: np.random.Generator = field(default_factory=np.random.default_rng)
    """Order of the placements within a round."""
    restores: bool = True
    """Whether `prepare` or `homes` does anything."""
    untimed: int = 0
    """Launches before the interval, on the placement that is timed: what makes it hot where other placements were launched meanwhile."""

    @property
    def stream(self) -> Stream:
        """The first stream, for samplers that use one."""
        return self.streams[0]

    def before(self, place: int, stream: Stream) -> None:
        """Queue everything that comes before the timed interval."""
        self.restore(stream)
        self.state(place, stream)

    def state(self, place: int, stream: Stream) -> None:
        """Queue what brings L2 into the mode's state."""
        self.flush(stream)
        for _ in range(self.untimed):
            self.launch(place, stream)

    def restore(self, stream: Stream) -> None:
        """Queue what puts data and pages back. Pages come last: putting data back touches them."""
        self.prepare(stream)
        if self.homes is not None:
            self.homes(stream)

    def rounds(self, count: int) -> Iterator[int]:
        """Every placement `count` times, each round in a random order: a drift must not look like a difference between placements."""
        for _ in range(count):
            yield from (int(place) for place in self.random.permutation(self.places))


class Sampler(Protocol):
    """A way to take samples."""

    name: str

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        """At least `rounds` samples of every placement, in the order in which they were taken: placement, seconds of one launch."""
