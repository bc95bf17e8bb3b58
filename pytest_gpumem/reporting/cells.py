"""One row of results as text: the figures that every report shows, formatted in one place."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Comparison, Outcome
from pytest_gpumem.reporting.groups import COALESCED, function_of
from pytest_gpumem.units import format_rate, format_share, format_time

LEAST_NOISE = 1e-5
"""Share below which a noise is not told in figures."""

HEADINGS = ("latency", "bandwidth", "of peak", "noise", "change")
"""What `Cells.figures` are, in their order."""

BAR = 10
"""Characters of a whole bar: one for each tenth."""


@dataclass(frozen=True)
class Cells:
    """One row as text."""

    name: str
    latency: str
    bandwidth: str
    share: str
    noise: str
    change: str
    verdict: str
    outcome: Outcome
    bar: str = ""
    """The share of the peak as a bar; empty where there is none."""
    short_change: str = ""
    """The change without its interval."""

    @property
    def figures(self) -> tuple[str, ...]:
        return self.latency, self.bandwidth, self.share, self.noise, self.change


def cells_of(row: Row, facts: DeviceFacts, name: str) -> Cells:
    """A row as text; `name` is what `names_of` gives for it."""
    # A row keeps its own verdict where something else failed the test.
    verdict = row.verdict.outcome.value + (", test failed" if row.failed and row.verdict.outcome is not Outcome.FAIL else "")
    verdict += ", simulated" if is_simulated(row, facts) else ""
    measurement = row.measurement
    comparison = row.verdict.comparison
    change, short = (_change(comparison), f"{_points(comparison.delta)} %") if comparison is not None else ("", "")
    if measurement is None:
        return Cells(name, "", "", "", "", change, verdict, row.verdict.outcome, short_change=short)
    # What is read over and over is counted once in a bandwidth and its share, which looks as if L2 were slow.
    share = measurement.share_of_peak(facts) if measurement.asked_bandwidth is None else None
    return Cells(
        name,
        latency=_latency(measurement),
        bandwidth=_bandwidth(measurement),
        share=f"{share * 100:.1f} %" if share is not None else "",
        noise=_noise(measurement.noise),
        change=change,
        verdict=verdict,
        outcome=row.verdict.outcome,
        bar=bar(share) if share is not None else "",
        short_change=short,
    )


def is_simulated(row: Row, facts: DeviceFacts) -> bool:
    """Whether a row says nothing of a GPU."""
    return row.verdict.simulated or facts.simulated


def bar(share: float, width: int = BAR) -> str:
    """A share as `width` characters, "######...." for 0.6."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return "#" * full + "." * (width - full)


def sectors(measurement: Measurement) -> str | None:
    """Sectors of a request where they are not the four of coalesced ones, such as "8 sectors a request"; else None."""
    if measurement.sectors_per_request in (None, COALESCED):
        return None
    return f"{measurement.sectors_per_request:.3g} sectors a request"


def access_interval(measurement: Measurement) -> str | None:
    """The 95 % interval of a latency per access, such as "147.6 ns to 147.8 ns/access"; None where there is none."""
    interval = measurement.latency_per_access_interval
    return None if interval is None else f"{format_time(interval[0])} to {format_time(interval[1])}/access"


def _latency(measurement: Measurement) -> str:
    if measurement.latency_per_access is not None:
        return f"{format_time(measurement.latency_per_access)}/access"
    return format_time(measurement.latency)


def _bandwidth(measurement: Measurement) -> str:
    # Where each access waits for the one before, bytes per second say nothing.
    if not measurement.bandwidth or measurement.accesses_per_launch:
        return ""
    asked = measurement.asked_bandwidth
    return format_rate(measurement.bandwidth) if asked is None else f"{format_rate(asked)} asked"


def _change(comparison: Comparison) -> str:
    """ "+12.34 [+12.01, +12.66] %"; without an interval where it is narrower than the last digit, as on a simulated device."""
    low, high = _points(comparison.low), _points(comparison.high)
    delta = _points(comparison.delta)
    return f"{delta} %" if low == high == delta else f"{delta} [{low}, {high}] %"


def _points(share: float) -> str:
    """A share in signed percent with two decimals, and no negative zero."""
    return f"{round(share * 100, 2) + 0.0:+.2f}"


def names_of(rows: Sequence[Row]) -> list[str]:
    """Keys without what all of them share: without the file where they stay unique, else without the common folder."""
    tests = [row.key.partition("::")[2] for row in rows]
    if all(tests) and len(set(tests)) == len(rows):
        return tests
    folders = [posixpath.dirname(row.nodeid.partition("::")[0]) for row in rows]
    common = posixpath.commonpath(folders) if all(folders) and not any(posixpath.isabs(f) for f in folders) else ""
    return [row.key.removeprefix(f"{common}/") for row in rows]


def _noise(noise: float | None) -> str:
    """A half-width as a share; placements whose medians fall on the same tick of the clock have next to none."""
    if noise is None:
        return ""
    return format_share(noise) if noise >= LEAST_NOISE else f"< {format_share(LEAST_NOISE)}"


def split_names(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Each of `names_of` as the test function and what tells its rows apart: ("test_copy", "4, pinned") for "test_copy[4][pinned]"."""
    found = []
    for row, name in zip(rows, names_of(rows), strict=True):
        parameters = row.nodeid[len(function_of(row)) :]
        label = f"[{row.label}]" if row.label else ""
        inside = parameters.removeprefix("[").removesuffix("]")
        if f"{row.label}, ".startswith(f"{inside}, "):
            inside = ""  # the label says it again
        apart = ", ".join(part for part in (inside, row.label) if part)
        found.append((name.removesuffix(parameters + label), apart))
    return found
