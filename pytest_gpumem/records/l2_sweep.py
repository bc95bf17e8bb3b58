"""Result of a sweep of persisting L2: the map, the best setting measured again, and the arguments for `persisting_stream`."""

from __future__ import annotations

from typing import NamedTuple

from pytest_gpumem.records.record import LaunchTime, Record

LEAST_GAIN = 0.01  # Least gain at which persistence is recommended: the L2 that is set aside is missing for all other work


class Setting(NamedTuple):
    """One place of the map."""

    set_aside: int  # Bytes of L2 set aside; 0 without a set-aside and a window
    hit_ratio: (
        float  # Share of the window's accesses with the persisting property; 0 without a window
    )

    def options(self) -> dict[str, int | float | str]:
        """The arguments of `persisting_stream`."""
        return (
            {"set_aside": self.set_aside, "hit_ratio": self.hit_ratio}
            if self.set_aside
            else {"set_aside": "off"}
        )


OFF = Setting(0, 0.0)  # No set-aside and no window


class Point(Record, frozen=True):
    """One measured setting."""

    setting: Setting
    latency: LaunchTime  # Seconds of one launch
    half_width: (
        float | None
    )  # Half of the 95 % confidence interval of `latency`, in seconds; None where it is unknown


class Change(Record, frozen=True):
    """Latency of one setting against another, with its 95 % confidence interval."""

    share: float  # 0.25: the latency of the one is 1.25 times the other's
    low: float
    high: float


class Textbook(Record, frozen=True):
    """A setting that guides recommend for every kernel, measured beside the best."""

    name: str  # The guide's name for it: "the maximum", "the maximum (3/4 of L2)", or "3/4 of L2"
    point: Point  # Measured on the fresh samples
    loss: Change  # Its latency against the recommended setting's; negative where it is faster


class Sweep(Record, frozen=True):
    """Search for the set-aside and hit ratio of least latency, for one kernel and window."""

    target: str  # Name of the kernel or the callable
    device: str  # Name of the device
    simulated: bool  # The device is simulated: the result says nothing about a GPU
    window_bytes: int  # Bytes under the window
    points: tuple[Point, ...]  # The measured settings, in the order of the search
    grid: int  # Settings of the full grid: every step of L2/16 up to the maximum at each of five hit ratios, and off
    off: Point  # No set-aside and no window, on the fresh samples
    best: Point  # The best setting with a set-aside, on the fresh samples
    gain: Change  # Latency of `off` against `best`: 0.25 is 1.25 times as fast with persistence
    textbook: tuple[Textbook, ...]
    """Settings that guides recommend: the maximum, and 3/4 of L2 where the maximum allows it; at the fitted hit ratio."""
    notes: tuple[str, ...] = ()  # Remarks for the reader

    @property
    def pays(self) -> bool:
        """True if the gain's interval lies above 0, and the gain is 1 % or more."""
        return self.gain.low > 0 and self.gain.share >= LEAST_GAIN

    def recommend(self) -> dict[str, int | float | str]:
        """Arguments for `persisting_stream(buffer, **sweep.recommend())`: set-aside in bytes and hit ratio, or `{"set_aside": "off"}`."""
        return (self.best.setting if self.pays else OFF).options()

    def fitted(self, setting: Setting) -> bool:
        """True if a setting's hit ratio is the largest that does not thrash."""
        return setting.hit_ratio == min(1.0, setting.set_aside / self.window_bytes)
