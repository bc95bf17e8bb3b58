"""The saved runs of each row, and those of them that make its reference. Pure.

A *reference* belongs to one identity of a row: GPU model, driver and CUDA, how the row is measured,
and what was accepted of it. It is made of the runs of the first `DAYS` UTC dates with this
identity. Three successive saved days, each faster than the reference before them by more than the
limit, begin it anew.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from itertools import chain
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import fields, replace

from pytest_gpumem.baselines.acceptances import Acceptances, Figure
from pytest_gpumem.judging.finding import window_text
from pytest_gpumem.judging.footprint import peaks_of
from pytest_gpumem.judging.judge import clocks_agree
from pytest_gpumem.judging.latencies import corrected_logs, readings
from pytest_gpumem.judging.reference import DAYS, SUCCESSIVE, Reference, gains_restart
from pytest_gpumem.limits import LIMITS, of_the_test
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits, Measurement, Window
from pytest_gpumem.records.record import Record
from pytest_gpumem.records.row import Past, Row, key_of
from pytest_gpumem.units import parse_growth, parse_margin, short_bytes

USUAL_LIMIT = "5%"
"""Limit of a row without one, for what begins a reference anew."""


class SavedProcess(Record, frozen=True, kw_only=True):
    """The run that measured saved rows."""

    id: str  # Unique: a copy of its file is not a second run
    utc: Annotated[datetime, Meta(tz=True)]  # When it was saved, in UTC
    device: DeviceFacts  # The device at that time, with its driver and CUDA versions
    revision: str | None = None
    """Revision of the measured code, with "-dirty" for uncommitted changes; None if unknown."""
    mode: str | None = None  # The session's mode, which a test may override; None if unknown


_UNKNOWN: dict[Any, Any] = {str: "unknown GPU", bool: False, int: 0, float: 0.0}
_NO_DEVICE = DeviceFacts(
    **{item.name: _UNKNOWN.get(item.type, (0, 0)) for item in fields(DeviceFacts) if item.required}
)
NOT_SAVED = SavedProcess(id="", utc=datetime.max.replace(tzinfo=timezone.utc), device=_NO_DEVICE)
"""Of a row that is not saved yet, and in the rows of a file, which has its process once."""


class SavedRow(Record, frozen=True):
    """A row of a run: its times, its memory, or both."""

    nodeid: str  # pytest's id of the test
    label: str = ""  # As `Row.label`
    measurement: Measurement | None = None  # Reduced: each placement has its median only
    footprint: Footprint | None = None  # Reduced: without its course over time
    limits: Limits = Limits()  # Those of the row in this run
    test_source: str | None = None  # As `Row.test_source`
    accepted_time: str = ""  # `Acceptances.digest` of the accepted time; empty for nothing
    accepted_memory: str = ""  # The same of the accepted memory
    process: SavedProcess = NOT_SAVED

    @property
    def key(self) -> str:
        """As `Row.key`."""
        return key_of(self.nodeid, self.label)

    def accepted(self, figure: Figure) -> str:
        """Return the digest of what was accepted of a figure."""
        return self.accepted_time if figure == "time" else self.accepted_memory

    def has(self, figure: Figure) -> bool:
        """Return whether the run saved this figure of the row."""
        saved = self.measurement if figure == "time" else self.footprint
        return saved is not None


class SavedRun(SavedProcess, frozen=True, kw_only=True):
    """One file: a run."""

    written_by: str = ""  # The version of the plugin
    rows: tuple[SavedRow, ...] = ()

    @property
    def processes(self) -> int:
        """Number of processes of the run."""
        numbers = [1]
        for row in self.rows:
            if row.measurement is not None:
                numbers.append(1 + len(row.measurement.further))
        return max(numbers)


Days = Sequence[Sequence[SavedRow]]  # the runs of each date, oldest first


@dataclass(frozen=True)
class Baseline:
    """All saved rows of one kind of device, for a session on such a device.

    A figure of a row, "time" or "memory", has a reference of its own.
    """

    rows: Mapping[str, tuple[SavedRow, ...]] = field(default_factory=dict)
    """By row key: its runs, oldest first."""
    processes: int = 0  # number of processes in the files that count
    note: str | None = None  # why it is empty, and which other devices have baselines there
    left_out: str | None = None  # which files do not count, and why
    device: DeviceFacts | None = None
    """The session's device. None for files that somebody compares by hand: the driver and the
    acceptances of the newest run count."""
    acceptances: Acceptances = field(default_factory=Acceptances)  # of the session's project
    _known: dict[tuple[Any, ...], Days] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """What `_days` returned."""

    def reference_runs(self, row: Row, figure: Figure = "time") -> tuple[SavedRow, ...]:
        """Return the runs that make the reference of a row's figure, oldest first.

        Empty: the row is new, and `why_new` says why.
        """
        return tuple(chain.from_iterable(self._days(row, figure)[:DAYS]))

    def reference_footprints(self, row: Row) -> tuple[SavedRow, ...]:
        """Return the runs that make the reference of a row's memory, oldest first."""
        return self.reference_runs(row, "memory")

    def enters(self, row: Row, figure: Figure, today: date) -> bool:
        """Return whether a figure is to be saved: its reference is not full, or it gained.

        So is one of the day after a gain, and one whose test has other limits, which a gate
        compares with those of the newest run.
        """
        days = self._days(row, figure)
        reference, later = days[:DAYS], days[DAYS:]
        if len(reference) < DAYS or reference[-1][0].process.utc.date() == today:
            return True
        if _limits_of_test(row) != _limits_of_test(days[-1][-1]):
            return True
        if gained(reference, [[_unsaved(row)]] * SUCCESSIVE, figure):
            return True
        before = [day for day in later if day[0].process.utc.date() < today]
        return bool(before) and gained(reference, [before[-1]] * SUCCESSIVE, figure)

    def measured_differently(self, row: Row) -> bool:
        """Return whether a measured row is new because it is measured in another way.

        A launch that moves more bytes is not: it does more work, and its time says by how much.
        """
        runs = self._saved(row.key, "time")
        if not runs or row.measurement is None or self.reference_runs(row):
            return False
        then, now = _way(runs[-1], "time"), _way(row, "time")
        before, after = then.pop("declared bytes"), now.pop("declared bytes")
        if then != now or before == after:
            return then != now
        return before is None or after is None or after < before

    def why_new(self, row: Row, figure: Figure = "time") -> str:
        """Return why a figure of a row has no reference."""
        runs = self._saved(row.key, figure)
        if not runs:
            return self.note or "the baseline holds no such row"
        then, before, after = runs[-1].process.device, _way(runs[-1], figure), _way(row, figure)
        if self.device is not None:
            before |= {"driver": then.driver, "CUDA": then.cuda}
            after |= {"driver": self.device.driver, "CUDA": self.device.cuda}
        words = []
        for name, value in before.items():
            if value != after[name]:
                words.append(f"{name} {' -> '.join(_texts(value, after[name]))}")
        accepted = self.acceptances.digest(row.key, figure)
        if self.device is not None and accepted != runs[-1].accepted(figure):
            acceptance = self.acceptances.file_of(row.key, figure)
            if acceptance is None:
                words.append(f"an accepted change of its {figure} was taken back")
            else:
                why = f"{acceptance.who}: {acceptance.reason}"
                words.append(f"a change of its {figure} was accepted ({why})")
        return f"{', '.join(words)}: a new reference begins"

    def _saved(self, key: str, figure: Figure) -> list[SavedRow]:
        return [run for run in self.rows.get(key, ()) if run.has(figure)]

    def _days(self, row: Row, figure: Figure) -> Days:
        """Return the runs from the begin of a figure's reference on, by their date."""
        way = _way(row, figure)
        identity = (row.key, figure, *way.values())
        if identity in self._known:
            return self._known[identity]
        alike = [run for run in self._saved(row.key, figure) if _way(run, figure) == way]
        if not alike:
            return []
        device, accepted = alike[-1].process.device, alike[-1].accepted(figure)
        if self.device is not None:
            device, accepted = self.device, self.acceptances.digest(row.key, figure)
        by_date: dict[date, list[SavedRow]] = {}
        for run in alike:
            then = run.process.device
            same_software = (then.driver, then.cuda) == (device.driver, device.cuda)
            if same_software and run.accepted(figure) == accepted:
                by_date.setdefault(run.process.utc.date(), []).append(run)
        days = [by_date[day] for day in sorted(by_date)]
        begin = 0
        for end in range(SUCCESSIVE + 1, len(days) + 1):
            newest = end - SUCCESSIVE
            if newest > begin and gained(days[begin:newest][:DAYS], days[newest:end], figure):
                begin = newest
        self._known[identity] = days[begin:]
        return self._known[identity]

    # All runs

    def saved(self, row: Row) -> tuple[SavedRow, ...]:
        """Return all runs of a row, oldest first."""
        return self.rows.get(row.key, ())

    def past(self, row: Row) -> tuple[Past, ...]:
        """Return the runs of a row in its mode, oldest first, for a plot."""
        points = []
        for run in self.saved(row):
            then, process = run.measurement, run.process
            if then is None or row.measurement is None or then.mode != row.measurement.mode:
                continue
            points.append(Past(process.utc, then.latency, then.half_width, process.revision))
        return tuple(points)

    def expected(self, mode: str | None) -> dict[str, SavedRow]:
        """Return by key the rows that a session in this mode measures, if it runs all tests.

        `mode`: None for an unknown one.
        """
        expected = {}
        for key in self.rows:
            runs = self._saved(key, "time")
            modes = {run.process.mode for run in runs}
            if runs and (mode is None or None in modes or mode in modes):
                expected[key] = runs[-1]
        return expected


def assemble(runs: Iterable[SavedRun]) -> Baseline:
    """Build a baseline from runs in any order."""
    rows: dict[str, list[SavedRow]] = {}
    processes = 0
    for run in sorted(runs, key=lambda run: (run.utc, run.id)):
        processes += run.processes
        for row in run.rows:
            rows.setdefault(row.key, []).append(replace(row, process=run))
    return Baseline({key: tuple(of_row) for key, of_row in rows.items()}, processes)


def times_of(runs: Iterable[SavedRow]) -> list[tuple[date, Measurement]]:
    """Return the times of saved rows with the UTC dates of their runs."""
    times = []
    for run in runs:
        if run.measurement is not None:
            times.append((run.process.utc.date(), run.measurement))
    return times


def memory_of(runs: Iterable[SavedRow]) -> list[Footprint]:
    """Return the memory of saved rows."""
    return [run.footprint for run in runs if run.footprint is not None]


# Identity


def _unsaved(row: Row) -> SavedRow:
    return SavedRow(row.nodeid, row.label, row.measurement, row.footprint, row.limits)


def _way(row: Row | SavedRow, figure: Figure) -> dict[str, Any]:
    """Return how a figure of a row is measured, by the words for it."""
    if figure == "memory":
        assert row.footprint is not None
        # Else of libraries alone.
        return {"the driver's allocations watched": row.footprint.driver_peak is not None}
    measurement = row.measurement
    assert measurement is not None
    moved = measurement.moved_bytes
    return {
        "mode": measurement.mode,
        "sampler": measurement.sampler,
        "window": measurement.window or "none",
        "declared bytes": None if moved is None else moved.total,
    }


def _texts(was: object, now: object) -> tuple[str, ...]:
    texts = _text(was), _text(now)
    if texts[0] == texts[1] and isinstance(was, int):
        return f"{was} B", f"{now} B"
    return texts


def _text(value: object) -> str:
    if isinstance(value, Window):
        return window_text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return short_bytes(value)
    return "unknown" if value is None else str(value)


def _limits_of_test(row: Row | SavedRow) -> dict[str, str | None]:
    """Return the limits that the test has by itself, and no option."""
    limits = {}
    for name in LIMITS:
        if of_the_test(row.limits.origin.get(name)):
            limits[name] = getattr(row.limits, name)
    return limits


# Gains


def gained(reference: Days, newest: Days, figure: Figure) -> bool:
    """Return whether each of three days is better than a reference, by more than the limit."""
    limits = newest[-1][-1].limits
    if figure == "memory":
        growth = parse_growth(limits.max_peak_regression or USUAL_LIMIT)
        return min(_peaks(reference)) > growth.most(max(_peaks(newest)))
    # All latencies at one launch overhead.
    measured = []
    for run in chain(*reference, *newest):
        assert run.measurement is not None
        measured.append(readings(run.measurement))
    logs = iter(corrected_logs(measured))
    before = []
    for day in reference:
        for run in day:
            before.append((run.process.utc.date(), [math.exp(log) for log in next(logs)]))
    means = []
    for day in newest:
        of_day: list[float] = []
        for _ in day:
            of_day += next(logs)
        means.append(statistics.fmean(of_day))
    whole = Reference(before)
    margin = parse_margin(limits.max_regression or USUAL_LIMIT)
    return gains_restart(whole, means, math.log1p(margin.over(whole.latency)))


def _peaks(days: Days) -> list[int]:
    """Return the peaks of all processes of some days."""
    peaks: list[int] = []
    for run in chain(*days):
        assert run.footprint is not None
        peaks += peaks_of(run.footprint)
    return peaks


# Changes since the reference

CLOCKS = {"memory clock": "memory_clock_hz", "SM clock": "sm_clock_hz"}
"""Clocks whose changes are reported: the fields of `Conditions`. Bandwidth follows the memory
clock, and work in registers and caches the SM clock."""


def changes(
    measurement: Measurement,
    facts: DeviceFacts,
    test_source: str | None,
    runs: Sequence[SavedRow],
) -> tuple[str, ...]:
    """Return differences from the newest run of a reference, in words: "the test's source".

    An unknown value is no difference. `runs`: oldest first.
    """
    if not runs or runs[-1].measurement is None:
        return ()
    run, past = runs[-1], runs[-1].measurement
    device = run.process.device
    words = []
    for name, then, now in (
        ("driver", device.driver, facts.driver),
        ("CUDA", device.cuda, facts.cuda),
    ):
        if then is not None and now is not None and then != now:
            words.append(f"{name} {then} -> {now}")
    for name, then, now in (
        ("the test's source", run.test_source, test_source),
        ("the kernel's source", past.kernel_source, measurement.kernel_source),
    ):
        if then is not None and now is not None and then != now:
            words.append(name)
    for name, field_name in CLOCKS.items():
        # After the samples; before them the device may be idle.
        usual = getattr(past.conditions[-1], field_name)
        clock = getattr(measurement.conditions[-1], field_name)
        if usual and clock and not clocks_agree(clock, usual):
            words.append(f"{name} {usual / 1e6:.0f} -> {clock / 1e6:.0f} MHz")
    return tuple(words)
