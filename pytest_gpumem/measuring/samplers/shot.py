"""One sample as every sampler sees it: what comes before, what is timed, where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pytest_gpumem.devices.protocol import Device, Stream
from pytest_gpumem.ranges import Ranges


@dataclass(frozen=True)
class Shot:
    """The parts of a sample. All functions queue on `stream`."""

    device: Device
    stream: Stream
    homes: Callable[[], None] | None
    """Puts managed pages back; cannot be captured."""
    prepare: Callable[[], None]
    """Puts changed inputs back."""
    flush: Callable[[Stream], None]
    """Brings L2 into the mode's state."""
    launch: Callable[[], None]
    """What is timed."""
    ranges: Ranges
    name: str
    """Name of the test's NVTX range."""

    def before(self) -> None:
        """Queue everything that comes before the timed interval."""
        self.restore()
        self.flush(self.stream)

    def restore(self) -> None:
        """Queue what puts data and pages back. Pages come last: putting data back touches them."""
        self.prepare()
        if self.homes is not None:
            self.homes()


class Sampler(Protocol):
    """A way to take samples."""

    name: str

    def samples(self, count: int) -> list[float]:
        """At least `count` samples, in seconds of one launch, in the order in which they were taken."""
