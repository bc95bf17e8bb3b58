"""Saved runs, and those of a row that make its reference. Pure.

A *reference* belongs to an identity of a row: driver and CUDA, how it is measured, and what was
accepted of it. It consists of the runs of its first `DAYS` UTC dates. Three successive saved days,
each faster by more than the limit, begin it anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from itertools import chain
from statistics import fmean
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from pytest_gpumem.baselines.acceptances import Acceptances, Figure
from pytest_gpumem.judging.differences import measured_differently
from pytest_gpumem.judging.finding import window_text
from pytest_gpumem.judging.footprint import peaks_of
from pytest_gpumem.judging.slowdown import (
    DAYS,
    SUCCESSIVE,
    Reference,
    corrected_logs,
    gains_restart,
)
from pytest_gpumem.limits import LIMITS, of_the_test
from pytest_gpumem.records import Record, key_of
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement, Window
from pytest_gpumem.records.row import Past, Row
from pytest_gpumem.units import parse_growth, parse_margin, short_bytes, sizes

USUAL_LIMIT = "5%"
"""Limit of a row without one, for what begins a reference anew."""
ACCEPTED = "accepted"  # in an identity: the digest of what was accepted of the figure


# Saved runs


class SavedRow(Record, frozen=True):
    """A row of a run: its times, its memory, or both."""

    nodeid: str  # pytest's id of the test
    label: str = ""  # As `Row.label`
    measurement: Measurement | None = None  # Reduced: each placement has its median only
    footprint: Footprint | None = None  # As `Row.footprint`
    limits: Limits = Limits()  # Those of the row in this run
    accepted_time: str = ""  # `Acceptances.digest` of the accepted time; empty for nothing
    accepted_memory: str = ""  # The same of the accepted memory

    @property
    def key(self) -> str:
        """As `Row.key`."""
        return key_of(self.nodeid, self.label)

    def accepted(self, figure: Figure) -> str:
        return self.accepted_time if figure == "time" else self.accepted_memory

    def has(self, figure: Figure) -> bool:
        saved = self.measurement if figure == "time" else self.footprint
        return saved is not None


class SavedRun(Record, frozen=True, kw_only=True):
    """One file: a run."""

    id: str  # Unique: a copy of its file is not a second run
    utc: Annotated[datetime, Meta(tz=True)]  # When it was saved, in UTC
    device: DeviceFacts  # The device at that time, with its driver and CUDA versions
    revision: str | None = None
    """Revision of the measured code, with "-dirty" for uncommitted changes; None if unknown."""
    mode: str | None = None  # The session's mode, which a test may override; None if unknown
    written_by: str = ""  # The version of the plugin
    rows: tuple[SavedRow, ...] = ()

    @property
    def processes(self) -> int:
        numbers = [1]
        for row in self.rows:
            if row.measurement is not None:
                numbers.append(1 + len(row.measurement.further))
        return max(numbers)


class PastRow(SavedRow, frozen=True, kw_only=True):
    """A run of a row, with the file that holds it."""

    file: SavedRun


def times_of(runs: Iterable[PastRow]) -> list[tuple[date, Measurement]]:
    times = []
    for run in runs:
        if run.measurement is not None:
            times.append((run.file.utc.date(), run.measurement))
    return times


def memory_of(runs: Iterable[SavedRow]) -> list[Footprint]:
    return [run.footprint for run in runs if run.footprint is not None]


# The references of rows

Days = Sequence[Sequence[PastRow]]  # the runs of each date, oldest first


@dataclass(frozen=True)
class Baseline:
    """All saved rows of a kind of device, for a session on such a device.

    Each figure of a row, "time" or "memory", has a reference.
    """

    device: DeviceFacts  # the session's
    acceptances: Acceptances = field(default_factory=Acceptances)  # of the session's project
    merged: Acceptances = field(default_factory=Acceptances)  # of these, those that BASE has too
    added: Acceptances = field(default_factory=Acceptances)  # the others, if a gate counts them
    rows: Mapping[str, tuple[PastRow, ...]] = field(default_factory=dict)
    """By row key: its runs, oldest first."""
    processes: int = 0  # number of processes in the files that count
    note: str | None = None  # why it is empty, and which other devices have baselines there
    left_out: str | None = None  # which files do not count, and why
    _known: dict[tuple[Any, ...], Days] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """What `_days` returned."""

    def reference_runs(self, row: Row, figure: Figure = "time") -> tuple[PastRow, ...]:
        """Return the runs that make the reference of a figure, oldest first."""
        return tuple(chain.from_iterable(self._days(row, figure)[:DAYS]))

    def enters(self, row: Row, figure: Figure, today: date) -> bool:
        """Return whether a figure is to be saved: its reference is not full, or it gained.

        The day after a gain is saved too: only successive gains begin a reference anew. So are
        changed limits, which a gate compares with the newest row.
        """
        days = self._days(row, figure)
        reference, later = days[:DAYS], days[DAYS:]
        if len(reference) < DAYS or reference[-1][0].file.utc.date() == today:
            return True
        if _limits_of_test(row) != _limits_of_test(days[-1][-1]):
            return True
        # Would three days like this row, or like the last saved day, begin the reference anew?
        if gained(reference, [[row]] * SUCCESSIVE, figure):
            return True
        before = [day for day in later if day[0].file.utc.date() < today]
        return bool(before) and gained(reference, [before[-1]] * SUCCESSIVE, figure)

    def measured_differently(self, row: Row) -> bool:
        runs = times_of(self._saved(row.key, "time"))
        if not runs or row.measurement is None:
            return False
        return measured_differently(runs[-1][1], row.measurement) is not None

    def why_new(self, row: Row, figure: Figure = "time") -> str:
        runs = self._saved(row.key, figure)
        if not runs:
            return self.note or "the baseline holds no such row"
        now = self._identity(row, figure)
        words = []
        for name, was in _saved_identity(runs[-1], figure).items():
            if now[name] == was:
                continue
            if name == ACCEPTED:
                words.append(self._why_accepted(row, figure))
            else:
                words.append(f"{name} {_change(was, now[name])}")
        return f"{', '.join(words)}, so a new reference begins"

    def _why_accepted(self, row: Row, figure: Figure) -> str:
        accepted = self.acceptances.of(row.key, figure)
        if accepted is None:
            return f"an accepted change of its {figure} was taken back"
        return f"a change of its {figure} was accepted {accepted[0].why}"

    def _saved(self, key: str, figure: Figure) -> list[PastRow]:
        return [run for run in self.rows.get(key, ()) if run.has(figure)]

    def _identity(self, row: Row, figure: Figure) -> dict[str, Any]:
        return _identity(row, figure, self.device, self.acceptances.digest(row.key, figure))

    def _days(self, row: Row, figure: Figure) -> Days:
        """Return the runs from the begin of a figure's reference on, by their date."""
        identity = self._identity(row, figure)
        key = (row.key, figure, *identity.values())
        if key not in self._known:
            by_date: dict[date, list[PastRow]] = {}
            for run in self._saved(row.key, figure):
                if _saved_identity(run, figure) == identity:
                    by_date.setdefault(run.file.utc.date(), []).append(run)
            self._known[key] = _from_last_gain(list(by_date.values()), figure)
        return self._known[key]

    # All runs

    def saved(self, row: Row) -> tuple[PastRow, ...]:
        return self.rows.get(row.key, ())

    def past(self, row: Row) -> tuple[Past, ...]:
        """Return the runs of a row in its mode, oldest first, for a plot."""
        points = []
        for run in self.saved(row):
            then, file = run.measurement, run.file
            if then is None or row.measurement is None or then.mode != row.measurement.mode:
                continue
            points.append(Past(file.utc, then.latency, then.half_width, file.revision))
        return tuple(points)

    def expected(self, mode: str) -> dict[str, PastRow]:
        """Return by key the rows that a session in this mode measures, if it runs all tests."""
        expected = {}
        for key, saved in self.rows.items():
            # A label without a time: the memory of a part.
            runs = [run for run in saved if run.label or run.has("time")]
            if any(run.file.mode in (None, mode) for run in runs):
                expected[key] = runs[-1]
        return expected


def assemble(runs: Iterable[SavedRun], device: DeviceFacts, acceptances: Acceptances) -> Baseline:
    rows: dict[str, list[PastRow]] = {}
    processes = 0
    for run in sorted(runs, key=lambda run: (run.utc, run.id)):
        processes += run.processes
        for row in run.rows:
            rows.setdefault(row.key, []).append(PastRow(**asdict(row), file=run))
    by_key = {key: tuple(of_row) for key, of_row in rows.items()}
    return Baseline(device, acceptances, rows=by_key, processes=processes)


# Identity


def _identity(
    row: Row | SavedRow, figure: Figure, device: DeviceFacts, accepted: str
) -> dict[str, Any]:
    identity: dict[str, Any] = {}
    if figure == "memory":
        assert row.footprint is not None
        identity["the driver's allocations watched"] = row.footprint.driver_watched
    else:
        measurement = row.measurement
        assert measurement is not None
        moved = measurement.moved_bytes
        identity["mode"] = measurement.mode
        identity["sampler"] = measurement.sampler
        identity["window"] = measurement.window or "none"
        identity["declared bytes"] = None if moved is None else moved.total
    return {**identity, "driver": device.driver, "CUDA": device.cuda, ACCEPTED: accepted}


def _saved_identity(run: PastRow, figure: Figure) -> dict[str, Any]:
    return _identity(run, figure, run.file.device, run.accepted(figure))


def _change(was: object, now: object) -> str:
    if type(was) is int and type(now) is int:
        return " → ".join(sizes(was, now))
    return f"{_text(was)} → {_text(now)}"


def _text(value: object) -> str:
    if isinstance(value, Window):
        return window_text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return short_bytes(value)
    return "unknown" if value is None else str(value)


def _limits_of_test(row: Row | SavedRow) -> dict[str, str | None]:
    limits = {}
    for name in LIMITS:
        if of_the_test(row.limits.origin.get(name)):
            limits[name] = getattr(row.limits, name)
    return limits


# Gains


def _from_last_gain(days: Days, figure: Figure) -> Days:
    begin = 0  # of the reference, which each gain over its first days begins anew
    for newest in range(1, len(days) - SUCCESSIVE + 1):
        reference = days[begin:newest][:DAYS]
        if reference and gained(reference, days[newest : newest + SUCCESSIVE], figure):
            begin = newest
    return days[begin:]


def gained(reference: Days, newest: Sequence[Sequence[Row | SavedRow]], figure: Figure) -> bool:
    """Return whether each of three days is better than a reference, by more than the limit."""
    limits = newest[-1][-1].limits
    if figure == "memory":
        growth = parse_growth(limits.max_peak_regression or USUAL_LIMIT)
        return min(_peaks(reference)) > growth.most(max(_peaks(newest)))
    saved = list(chain(*reference))
    measured = []
    for run in chain(saved, *newest):
        assert run.measurement is not None
        measured.append(run.measurement)
    # Corrected to the same launch overhead. Taken in order: those of `saved`, then day by day.
    logs = iter(corrected_logs(measured))
    whole = Reference([(run.file.utc.date(), next(logs)) for run in saved])
    means = []
    for day in newest:
        of_day: list[float] = []
        for _ in day:
            of_day += next(logs)
        means.append(fmean(of_day))
    margin = parse_margin(limits.max_regression or USUAL_LIMIT)
    return gains_restart(whole, means, math.log1p(margin.over(whole.latency)))


def _peaks(days: Sequence[Sequence[Row | SavedRow]]) -> list[int]:
    peaks: list[int] = []
    for run in chain(*days):
        assert run.footprint is not None
        peaks += peaks_of(run.footprint)
    return peaks
