"""What a sweep of persisting L2 found: the map, the best setting measured again, and what to pass to `persisting_stream`."""

from __future__ import annotations

from typing import NamedTuple

from pytest_gpumem.records.record import Record
from pytest_gpumem.units import format_bytes, format_share, format_shares

LEAST_GAIN = 0.01
"""Gain below which persistence is not recommended: what is set aside is missing for everything else that runs."""


class Setting(NamedTuple):
    """One place of the map."""

    set_aside: int
    """Bytes of L2 set aside; 0: off, no window either."""
    hit_ratio: float
    """Share of the window's accesses that get the persisting property; 0 where it is off."""

    def __str__(self) -> str:
        return f"{format_bytes(self.set_aside)} at hit ratio {self.hit_ratio:.3g}" if self.set_aside else "off"


OFF = Setting(0, 0.0)
"""No set-aside and no window."""


class Point(Record, frozen=True):
    """One setting, measured."""

    setting: Setting
    latency: float
    """Seconds of one launch."""
    half_width: float | None
    """Half of the 95 % confidence interval of `latency`, in seconds; None where it is unknown."""


class Change(Record, frozen=True):
    """How one setting compares with another, with its 95 % confidence interval."""

    share: float
    """0.25: the latency of the one is 1.25 times the other's."""
    low: float
    high: float


class Textbook(Record, frozen=True):
    """A setting that guides recommend whatever the kernel, measured beside the best."""

    name: str
    """What the guide says: "the maximum", "the maximum (3/4 of L2)", or "3/4 of L2"."""
    point: Point
    """Measured on the fresh samples."""
    loss: Change
    """What it takes longer than what `Sweep.recommend` gives; negative where it is faster."""


class Sweep(Record, frozen=True):
    """Set-aside and hit ratio of one kernel and window, searched for the least latency."""

    target: str
    """What was launched."""
    device: str
    """Name of the device."""
    simulated: bool
    """The device is a model: its best setting says nothing of a GPU."""
    window_bytes: int
    """Bytes under the window."""
    points: tuple[Point, ...]
    """The settings that were measured, in the order in which the search took them."""
    grid: int
    """Settings of the full grid: every step of L2/16 up to the maximum at each of five hit ratios, and off."""
    off: Point
    """No set-aside and no window, on the fresh samples."""
    best: Point
    """The best setting with a set-aside, on the fresh samples."""
    gain: Change
    """What `off` takes longer than `best`: 0.25 is 1.25 times as fast with persistence."""
    textbook: tuple[Textbook, ...]
    """What guides recommend: the maximum, and 3/4 of L2 where the maximum allows it; at the fitted hit ratio."""
    notes: tuple[str, ...] = ()
    """What a reader must know besides."""

    @property
    def pays(self) -> bool:
        """Whether persistence is worth its set-aside: the gain's interval lies above 0, and the gain is 1 % or more."""
        return self.gain.low > 0 and self.gain.share >= LEAST_GAIN

    def recommend(self) -> dict[str, int | float | str]:
        """Arguments for `persisting_stream(buffer, **sweep.recommend())`: set-aside in bytes and hit ratio, or `{"set_aside": "off"}`."""
        if not self.pays:
            return {"set_aside": "off"}
        return {"set_aside": self.best.setting.set_aside, "hit_ratio": self.best.setting.hit_ratio}

    def fitted(self, setting: Setting) -> bool:
        """Whether a setting's hit ratio is the largest that does not thrash."""
        return setting.hit_ratio == min(1.0, setting.set_aside / self.window_bytes)

    @property
    def sentence(self) -> str:
        """What was found, in one sentence."""
        gain = f"{format_share(self.gain.share, sign=True)} against off, 95 % interval {_interval(self.gain)}"
        if self.pays:
            return f"persistence pays: {self.best.setting} gains {gain}"
        if self.gain.high < 0:
            why = "it costs"
        elif self.gain.low <= 0:
            why = "the interval of the gain includes 0"
        else:
            why = f"the gain is below {format_share(LEAST_GAIN)}"
        return f"persistence does not pay, leave it off: {why}; the best setting, {self.best.setting}, gains {gain}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """The finding, what the textbook's settings lose, what the search took, and notes."""
        losses = (f"{book.name}, {book.point.setting}: {self._loss(book)}" for book in self.textbook)
        took = f"{len(self.points)} of {self.grid} settings measured, then the best, off and the textbook's again on fresh samples"
        return (self.sentence, *losses, took, *self.notes)

    def _loss(self, book: Textbook) -> str:
        if self.pays and book.point.setting == self.best.setting:
            return "it is what is recommended"
        return f"latency {format_share(book.loss.share, sign=True)} against what is recommended, 95 % interval {_interval(book.loss)}"


def _interval(change: Change) -> str:
    return " to ".join(format_shares(change.low, change.high))
