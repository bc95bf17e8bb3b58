"""The saved runs of each row, and those of them that make its reference. Pure.

A *reference* belongs to one identity of a row: GPU model, driver and CUDA, how the row is measured, and what was accepted of it. It is
made of the runs of the first `DAYS` UTC dates with this identity. Three successive saved days that are each faster than the reference
before them, by more than the limit, begin it anew.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from itertools import chain
from typing import TypeVar

from pytest_gpumem.baselines.acceptances import Acceptances
from pytest_gpumem.judging.finding import window_text
from pytest_gpumem.judging.footprint import peaks_of
from pytest_gpumem.judging.judge import clocks_agree
from pytest_gpumem.judging.latencies import corrected_logs, readings
from pytest_gpumem.judging.reference import DAYS, SUCCESSIVE, Reference, gains_restart
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import Past, Row, key_of
from pytest_gpumem.units import parse_growth, parse_margin, short_bytes

USUAL_LIMIT = "5%"
"""Limit of a row without one, for what begins a reference anew."""


@dataclass(frozen=True)
class SavedProcess:
    """The run that measured saved rows."""

    id: str  # unique: a copy of its file is not a second run
    utc: datetime  # when it was saved
    revision: str | None
    """Revision of the measured code, with "-dirty" for uncommitted changes; None if unknown."""
    device: DeviceFacts  # the device at that time, with its driver and CUDA versions
    mode: str | None = None  # the session's mode, which a test may override; None if unknown


@dataclass(frozen=True)
class SavedRow:
    """One row of one run, of one process or of several (`--gpumem-processes`)."""

    nodeid: str  # pytest's id of the test
    measurement: Measurement  # reduced: each placement has its median only
    process: SavedProcess
    test_source: str | None = None  # as `Row.test_source`
    limits: Limits = field(default_factory=Limits)  # those of the row in this run
    accepted: str = ""  # `Acceptances.digest` of the accepted time; empty for nothing

    @property
    def label(self) -> str:
        """Label of the measurement inside its test."""
        return self.measurement.label

    @property
    def key(self) -> str:
        """As `Row.key`."""
        return key_of(self.nodeid, self.label)

    @property
    def processes(self) -> int:
        """Number of processes of the run."""
        return 1 + len(self.measurement.further)


@dataclass(frozen=True)
class SavedFootprint:
    """The footprint of one row of one run."""

    nodeid: str  # pytest's id of the test
    label: str  # label of the part of the test; empty for the whole
    footprint: Footprint  # reduced: without its course over time
    process: SavedProcess
    limits: Limits = field(default_factory=Limits)  # those of the row in this run
    accepted: str = ""  # `Acceptances.digest` of the accepted memory; empty for nothing

    @property
    def key(self) -> str:
        """As `Row.key`."""
        return key_of(self.nodeid, self.label)


Saved = TypeVar("Saved", SavedRow, SavedFootprint)
Days = Sequence[Sequence[Saved]]  # the runs of each date, oldest first


@dataclass(frozen=True)
class RunFile:
    """One file: a run."""

    key: str  # `DeviceFacts.key` of the device. The file belongs into the folder of that name.
    process: SavedProcess
    rows: tuple[SavedRow, ...] = ()
    footprints: tuple[SavedFootprint, ...] = ()

    @property
    def processes(self) -> int:
        """Number of processes of the run."""
        return max((row.processes for row in self.rows), default=1)


@dataclass(frozen=True)
class Baseline:
    """All saved rows of one kind of device, for a session on such a device."""

    rows: Mapping[str, tuple[SavedRow, ...]] = field(default_factory=dict)
    """By row key: its runs, oldest first."""
    footprints: Mapping[str, tuple[SavedFootprint, ...]] = field(default_factory=dict)
    """By row key: the footprints of its runs, oldest first."""
    processes: int = 0  # number of processes in the files that count
    note: str | None = None  # why it is empty, and which other devices have baselines there
    left_out: str | None = None  # which files do not count, and why
    device: DeviceFacts | None = None
    """The session's device. None for files that somebody compares by hand: the driver and the
    acceptances of the newest run count."""
    acceptances: Acceptances = field(default_factory=Acceptances)  # of the session's project

    # Times

    def reference_runs(self, row: Row) -> tuple[SavedRow, ...]:
        """Return the runs that make the reference of a measured row, oldest first.

        Empty: the row is new, and `why_new` says why.
        """
        return tuple(chain.from_iterable(self.reference_days(row)))

    def reference_days(self, row: Row) -> list[list[SavedRow]]:
        """Return the same runs by their date."""
        days = self._days(row)
        return days[_begin(days, faster) :][:DAYS]

    def enters(self, row: Row, today: date) -> bool:
        """Return whether a measured row is worth saving: its reference is not full, or it gained."""
        days = self._days(row)
        days = days[_begin(days, faster) :]
        if len(days) < DAYS or (len(days) == DAYS and days[-1][0].process.utc.date() == today):
            return True
        assert row.measurement is not None
        now = SavedRow(row.nodeid, row.measurement, days[-1][-1].process, limits=row.limits)
        return _gained(days, [now], today, faster)

    def why_new(self, row: Row) -> str:
        """Return why a measured row has no reference."""
        runs = self.rows.get(row.key, ())
        if not runs:
            return self.note or "the baseline holds no such row"
        assert row.measurement is not None
        newest = runs[-1]
        parts = _changed_way(newest.measurement, row.measurement)
        return self._new(row.key, newest, parts, "time")

    def measured_differently(self, row: Row) -> bool:
        """Return whether a measured row is new because it is measured in another way."""
        runs = self.rows.get(row.key, ())
        if not runs or row.measurement is None or self.reference_runs(row):
            return False
        then, now = runs[-1].measurement, row.measurement
        if _way(then)[:-1] != _way(now)[:-1]:
            return True
        before, after = _nbytes(then), _nbytes(now)
        return before != after and (before is None or after is None or after < before)

    def _days(self, row: Row) -> list[list[SavedRow]]:
        """Return the runs of a row's identity by their date."""
        assert row.measurement is not None
        way = _way(row.measurement)
        runs = [run for run in self.rows.get(row.key, ()) if _way(run.measurement) == way]
        accepted = self.acceptances.digest(row.key, "time")
        return _by_date(_of_session(runs, self.device, accepted))

    # Memory

    def reference_footprints(self, row: Row) -> tuple[SavedFootprint, ...]:
        """Return the runs that make the reference of a row's memory, oldest first."""
        days = self._footprint_days(row)
        return tuple(chain.from_iterable(days[_begin(days, smaller) :][:DAYS]))

    def footprint_enters(self, row: Row, today: date) -> bool:
        """Return whether a row's memory is worth saving, as `enters`."""
        days = self._footprint_days(row)
        days = days[_begin(days, smaller) :]
        if len(days) < DAYS or (len(days) == DAYS and days[-1][0].process.utc.date() == today):
            return True
        assert row.footprint is not None
        process = days[-1][-1].process
        now = SavedFootprint(row.nodeid, row.label, row.footprint, process, row.limits)
        return _gained(days, [now], today, smaller)

    def why_memory_is_new(self, row: Row) -> str:
        """Return why a row has no reference of its memory."""
        runs = self.footprints.get(row.key, ())
        if not runs:
            return self.note or "the baseline holds no such row"
        assert row.footprint is not None
        parts = []
        if _watched(runs[-1].footprint) != _watched(row.footprint):
            parts.append("the driver's allocations are watched on one side only")
        return self._new(row.key, runs[-1], parts, "memory")

    def _footprint_days(self, row: Row) -> list[list[SavedFootprint]]:
        assert row.footprint is not None
        watched = _watched(row.footprint)
        runs = []
        for run in self.footprints.get(row.key, ()):
            if _watched(run.footprint) == watched:
                runs.append(run)
        accepted = self.acceptances.digest(row.key, "memory")
        return _by_date(_of_session(runs, self.device, accepted))

    def _new(
        self, key: str, newest: SavedRow | SavedFootprint, parts: list[str], figure: str
    ) -> str:
        """Return the sentence of `why_new`. `parts`: differences in how it is measured."""
        if self.device is not None:
            then = newest.process.device
            for name, before, now in (
                ("driver", then.driver, self.device.driver),
                ("CUDA", then.cuda, self.device.cuda),
            ):
                if before != now:
                    parts.append(f"{name} {before} -> {now}")
        acceptance = self.acceptances.file_of(key, "time" if figure == "time" else "memory")
        accepted = self.acceptances.digest(key, "time" if figure == "time" else "memory")
        if self.device is not None and accepted != newest.accepted:
            if acceptance is None:
                parts.append(f"an accepted change of its {figure} was taken back")
            else:
                why = f"{acceptance.who}: {acceptance.reason}"
                parts.append(f"a change of its {figure} was accepted ({why})")
        return f"{', '.join(parts) or 'other runs'}: a new reference begins"

    # All runs

    def saved(self, row: Row) -> tuple[SavedRow, ...]:
        """Return all runs of a row, oldest first."""
        return self.rows.get(row.key, ())

    def saved_footprints(self, row: Row) -> tuple[SavedFootprint, ...]:
        """Return the footprints of all runs of a row, oldest first."""
        return self.footprints.get(row.key, ())

    def past(self, row: Row) -> tuple[Past, ...]:
        """Return the runs of a row in its mode, oldest first, for a plot."""
        points = []
        for run in self.saved(row):
            then = run.measurement
            if row.measurement is not None and then.mode == row.measurement.mode:
                points.append(
                    Past(run.process.utc, then.latency, then.half_width, run.process.revision)
                )
        return tuple(points)

    @property
    def newest_footprints(self) -> dict[str, Footprint]:
        """By row key: the newest footprint."""
        return {key: runs[-1].footprint for key, runs in self.footprints.items()}

    def expected(self, mode: str | None) -> dict[str, SavedRow]:
        """Return by key the rows that a session in this mode measures, if it runs all tests.

        `mode`: None for an unknown one.
        """
        expected = {}
        for key, runs in self.rows.items():
            modes = {run.process.mode for run in runs}
            if mode is None or None in modes or mode in modes:
                expected[key] = runs[-1]
        return expected


def assemble(files: Iterable[RunFile]) -> Baseline:
    """Build a baseline from files in any order."""
    rows: dict[str, list[SavedRow]] = {}
    footprints: dict[str, list[SavedFootprint]] = {}
    processes = 0
    for file in sorted(files, key=lambda file: (file.process.utc, file.process.id)):
        processes += file.processes
        for row in file.rows:
            rows.setdefault(row.key, []).append(row)
        for footprint in file.footprints:
            footprints.setdefault(footprint.key, []).append(footprint)
    return Baseline(
        {key: tuple(runs) for key, runs in rows.items()},
        {key: tuple(runs) for key, runs in footprints.items()},
        processes,
    )


# Identity


def _nbytes(measurement: Measurement) -> int | None:
    return None if measurement.moved_bytes is None else measurement.moved_bytes.total


def _way(measurement: Measurement) -> tuple[object, ...]:
    """Return how a row is measured; the bytes come last."""
    return measurement.mode, measurement.sampler, measurement.window, _nbytes(measurement)


def _watched(footprint: Footprint) -> bool:
    """Return whether the driver's allocations were seen, and not those of libraries alone."""
    return footprint.driver_peak is not None


def _changed_way(then: Measurement, now: Measurement) -> list[str]:
    """Return in words how a row is measured in another way."""
    parts = []
    if then.mode != now.mode:
        parts.append(f"mode {then.mode} -> {now.mode}")
    if then.sampler != now.sampler:
        parts.append(f"sampler {then.sampler} -> {now.sampler}")
    if then.window != now.window:
        was, is_now = ("none" if m.window is None else window_text(m.window) for m in (then, now))
        parts.append(f"window {was} -> {is_now}")
    if _nbytes(then) != _nbytes(now):
        was, is_now = (
            "unknown" if nbytes is None else short_bytes(nbytes)
            for nbytes in (_nbytes(then), _nbytes(now))
        )
        parts.append(f"declared bytes {was} -> {is_now}")
    return parts


def _of_session(runs: Sequence[Saved], device: DeviceFacts | None, accepted: str) -> list[Saved]:
    """Return the runs with a driver, CUDA version and acceptance; None: those of the newest."""
    if not runs:
        return []
    if device is None:
        device, accepted = runs[-1].process.device, runs[-1].accepted
    alike = []
    for run in runs:
        then = run.process.device
        if (then.driver, then.cuda, run.accepted) == (device.driver, device.cuda, accepted):
            alike.append(run)
    return alike


# Days


def _by_date(runs: Iterable[Saved]) -> list[list[Saved]]:
    """Return the runs of each UTC date, oldest first."""
    days: dict[date, list[Saved]] = {}
    for run in runs:
        days.setdefault(run.process.utc.date(), []).append(run)
    return [days[day] for day in sorted(days)]


def _begin(days: Days[Saved], gained: Callable[[Days[Saved], Days[Saved]], bool]) -> int:
    """Return the index of the day on which the newest reference begins.

    `gained`: whether each of some newest days is better than the days of a reference.
    """
    begin = 0
    for end in range(SUCCESSIVE + 1, len(days) + 1):
        newest = end - SUCCESSIVE
        if newest > begin and gained(days[begin:newest][:DAYS], days[newest:end]):
            begin = newest
    return begin


def _gained(
    days: Days[Saved],
    now: list[Saved],
    today: date,
    gained: Callable[[Days[Saved], Days[Saved]], bool],
) -> bool:
    """Return whether a run enters a full reference: it gained, or the day saved before it did.

    `days`: those of the reference, and those saved after it.
    """
    reference = days[:DAYS]
    if gained(reference, [now] * SUCCESSIVE):
        return True
    before = [day for day in days[DAYS:] if day[0].process.utc.date() < today]
    return bool(before) and gained(reference, [before[-1]] * SUCCESSIVE)


def faster(reference: Days[SavedRow], newest: Days[SavedRow]) -> bool:
    """Return whether each of three days is faster than a reference by more than the limit."""
    runs = list(chain(*reference, *newest))
    # All latencies at one launch overhead.
    logs = iter(corrected_logs([readings(run.measurement) for run in runs]))
    before = []
    for day in reference:
        for run in day:
            before.append((run.process.utc.date(), [math.exp(log) for log in next(logs)]))
    means = []
    for day in newest:
        means.append(statistics.fmean(chain.from_iterable([next(logs) for _ in day])))
    whole = Reference(before)
    written = newest[-1][-1].limits.max_regression or USUAL_LIMIT
    limit = math.log1p(parse_margin(written).over(whole.latency))
    return gains_restart(whole, means, limit)


def smaller(reference: Days[SavedFootprint], newest: Days[SavedFootprint]) -> bool:
    """Return whether each of three days takes less memory than a reference, beyond the limit."""
    before = min(chain(*[peaks_of(run.footprint) for run in chain(*reference)]))
    now = max(chain(*[peaks_of(run.footprint) for run in chain(*newest)]))
    written = newest[-1][-1].limits.max_peak_regression or USUAL_LIMIT
    return before > parse_growth(written).most(now)


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
    """Return differences from the runs of a reference, in words: "the test's source".

    An unknown value is no difference. `runs`: oldest first; those of another mode do not count.
    """
    alike = [run for run in runs if run.measurement.mode == measurement.mode]
    words = []
    for name, now, then in (
        ("driver", facts.driver, [run.process.device.driver for run in alike]),
        ("CUDA", facts.cuda, [run.process.device.cuda for run in alike]),
        ("the test's source", test_source, [run.test_source for run in alike]),
        (
            "the kernel's source",
            measurement.kernel_source,
            [run.measurement.kernel_source for run in alike],
        ),
    ):
        others = [value for value in then if value not in (None, now)]
        if now is not None and others:
            words.append(name if name.endswith("source") else f"{name} {others[-1]} -> {now}")
    for name, field_name in CLOCKS.items():
        # After the samples; before them the device may be idle.
        now_hz = getattr(measurement.conditions[-1], field_name)
        known = []
        for run in alike:
            clock = getattr(run.measurement.conditions[-1], field_name)
            if clock:
                known.append(clock)
        if now_hz and known:
            usual = statistics.median(known)
            if not clocks_agree(now_hz, usual):
                words.append(f"{name} {usual / 1e6:.0f} -> {now_hz / 1e6:.0f} MHz")
    return tuple(words)
