"""The result of a measurement, for assertions in a test."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from pytest_gpumem.judging.finding import basis
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement, Overlap
from pytest_gpumem.records.what_ran import Migrations
from pytest_gpumem.units import Quantity, ShownError, format_rate, format_share, format_time


class NoTraffic(ShownError, ValueError):
    """A figure was asked for that this measurement does not have: a bandwidth without known bytes,
    a latency without dependent accesses, an overlap of one piece of work."""


class Extra(dict[str, float]):
    """Further figures of a measurement, by a name with its unit; they stand in its row, and no
    limit holds for them."""

    def __setitem__(self, name: str, value: float) -> None:
        """Add a figure, or replace it. Raises `BadCall`: the name is no short text, or the value no
        finite number."""
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise BadCall(
                f"extra[{name!r}]: the name of a figure is a short text, such as 'elements/s'"
            )
        try:
            figure = float(value)
        except (TypeError, ValueError):
            figure = math.nan
        if isinstance(value, (bool, str)) or not math.isfinite(figure):
            raise BadCall(f"extra[{name!r}] = {value!r}; accepted is a finite number")
        super().__setitem__(name, figure)

    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __ior__(self, other: Any) -> Extra:  # type: ignore[misc,override]
        self.update(other)
        return self


@dataclass(frozen=True, repr=False)
class Result:
    """The figures of a measurement, for assertions in the test that took it."""

    measurement: Measurement
    """Everything that was recorded."""
    device: DeviceFacts
    """The device. Its `peak_bandwidth`, in bytes per second, raises `UnknownPeak` where the driver
    does not report it."""
    extra: Extra
    """Further figures that the test adds: `result.extra["elements/s"] = n / result.latency`."""
    _claim: Callable[[str, str, float], None]
    """Records a claim: label, that of the other, factor. `plugin.rows` judges it."""

    def faster_than(self, label: str, by: float = 1.0) -> None:
        """Claim that this measurement is faster than another of the same test.

        The claim is judged when the test ends: it passes where the factor holds beyond the interval
        within which a repetition may lie (99 %, one-sided); else the test fails.

        Args:
            label: of the other measurement, which must come first.
            by: times as fast, 1 or more.

        Raises:
            BadCall: no such measurement, a factor below 1, or another claim was made of this
            measurement.
        """
        self._claim(self.measurement.label, label, by)

    @property
    def latency(self) -> float:
        """Seconds of one launch: the mean over placements of each placement's median."""
        return Quantity(self.measurement.latency, format_time)

    @property
    def latency_per_access(self) -> float:
        """Seconds of one dependent access, for a pointer chase.

        Raises:
            NoTraffic: the kernel's accesses do not depend on each other.
        """
        latency = self.measurement.latency_per_access
        if latency is None:
            raise NoTraffic(
                f"{self.measurement.target} has no dependent accesses; its latency is `.latency`"
            )
        return Quantity(latency, format_time)

    @property
    def sectors_per_request(self) -> float | None:
        """Mean 32-byte sectors of a warp's request, predicted from the access pattern: 4 where all
        are coalesced, up to 32.

        None where the pattern is unknown (a callable, a `Case`) or there are no such requests (a
        copy, a pointer chase).
        """
        return self.measurement.sectors_per_request

    @property
    def bandwidth(self) -> float:
        """Compulsory bytes per second.

        Raises:
            NoTraffic: the bytes that one launch of this callable moves are unknown.
        """
        bandwidth = self.measurement.bandwidth
        if bandwidth is None:
            raise NoTraffic(
                f"the traffic of {self.measurement.target} is unknown: pass moved=<bytes that must "
                "be read plus written>, or name the arrays in the Case's reads= and writes="
            )
        return Quantity(bandwidth, format_rate)

    @property
    def overlap(self) -> Overlap:
        """The parts of work that overlaps, each alone, and the bound, in seconds.

        Raises:
            NoTraffic: the measured work does not overlap, or a profiler was attached.
        """
        overlap = self.measurement.overlap
        if overlap is None:
            raise NoTraffic(
                f"{self.measurement.target} has no parts that overlap: measure staged_copy or "
                "gpu_work.together"
            )
        return overlap

    @property
    def hidden(self) -> float:
        """Hidden share of the time that overlap can hide: 0 is as slow as one part after another, 1
        is at the bound.

        Raises:
            NoTraffic: the measured work does not overlap, or one part takes all of the time.
        """
        hidden = self.overlap.hidden(self.latency)
        if hidden is None:
            raise NoTraffic(
                f"{self.measurement.target}: there is nothing to hide, as one part takes all of "
                "the time"
            )
        return Quantity(hidden, format_share)

    @property
    def counts(self) -> Migrations | None:
        """Page faults and migrations of an untimed pass: `counts.launch.gpu_faults`,
        `counts.launch.migrated`, `counts.before` and more.

        None unless requested (`count_pages=True`, a limit). If counting failed,
        `counts.not_counted` gives the reason and `counts.launch` is None.
        """
        return self.measurement.migrations

    @property
    def samples(self) -> tuple[float, ...]:
        """Seconds of each sample, placement after placement."""
        return self.measurement.samples

    @property
    def sampler(self) -> str:
        """How samples were taken: "blocked", "graph", "batched", "host" or, under a profiler,
        "plain"."""
        return self.measurement.sampler

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the figures."""
        return self.measurement.notes

    @property
    def checked(self) -> bool:
        """True if the result of a launch was compared before and after timing."""
        return self.measurement.checked

    def __repr__(self) -> str:
        measurement = self.measurement
        parts = [measurement.target, format_time(measurement.latency)]
        if measurement.bandwidth is not None:
            parts.append(format_rate(measurement.bandwidth))
        if measurement.noise is not None:
            parts.append(f"±{format_share(measurement.noise)}")
        parts.append(basis(measurement))
        parts.append(measurement.mode)
        if self.device.simulated:
            parts.append("simulated")
        return f"<Result {', '.join(parts)}>"
