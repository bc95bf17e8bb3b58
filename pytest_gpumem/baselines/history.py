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
from datetime import date, datetime
from itertools import chain
from typing import Any, TypeVar

from msgspec.structs import fields

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
from pytest_gpumem.records.row import Past, Row, key_of
from pytest_gpumem.units import parse_growth, parse_margin, short_bytes

USUAL_LIMIT = "5%"
"""Limit of a row without one, for what begins a reference anew."""
_UNKNOWN: dict[Any, Any] = {str: "unknown GPU", bool: False, int: 0, float: 0.0}
UNKNOWN_GPU = DeviceFacts(
    **{item.name: _UNKNOWN.get(item.type, (0, 0)) for item in fields(DeviceFacts) if item.required}
)
"""The device of a file that names none."""


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
    _known: dict[tuple[Any, ...], list[list[Any]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """What `_days` returned."""

    def reference_runs(self, row: Row) -> tuple[SavedRow, ...]:
        """Return the runs that make the reference of a measured row, oldest first.

        Empty: the row is new, and `why_new` says why.
        """
        return tuple(chain.from_iterable(self._days(_now(row), self.rows)[:DAYS]))

    def reference_footprints(self, row: Row) -> tuple[SavedFootprint, ...]:
        """Return the runs that make the reference of a row's memory, oldest first."""
        return tuple(chain.from_iterable(self._days(_memory_now(row), self.footprints)[:DAYS]))

    def why_new(self, row: Row) -> str:
        """Return why a measured row has no reference."""
        return self._why_new(_now(row), self.rows)

    def why_memory_is_new(self, row: Row) -> str:
        """Return why a row has no reference of its memory."""
        return self._why_new(_memory_now(row), self.footprints)

    def enters(self, row: Row, today: date) -> bool:
        """Return whether a measured row is to be saved: its reference is not full, or it gained."""
        return _enters(self._days(_now(row), self.rows), _now(row), today)

    def memory_enters(self, row: Row, today: date) -> bool:
        """Return whether a row's memory is to be saved, as `enters`."""
        return _enters(self._days(_memory_now(row), self.footprints), _memory_now(row), today)

    def measured_differently(self, row: Row) -> bool:
        """Return whether a measured row is new because it is measured in another way.

        A launch that moves more bytes is not: it does more work, and its time says by how much.
        """
        runs = self.rows.get(row.key, ())
        if not runs or row.measurement is None or self.reference_runs(row):
            return False
        then, now = _way(runs[-1]), _way(_now(row))
        before, after = then.pop("declared bytes"), now.pop("declared bytes")
        if then != now or before == after:
            return then != now
        return before is None or after is None or after < before

    def _days(self, now: Saved, every: Mapping[str, tuple[Saved, ...]]) -> list[list[Saved]]:
        """Return the runs from the begin of a row's reference on, by their date."""
        way: dict[str, Any] = _way(now)
        identity = (now.key, _figure(now), *way.values())
        if identity in self._known:
            return self._known[identity]
        alike = [run for run in every.get(now.key, ()) if _way(run) == way]
        if not alike:
            return []
        device, accepted = alike[-1].process.device, alike[-1].accepted
        if self.device is not None:
            device, accepted = self.device, self.acceptances.digest(now.key, _figure(now))
        days: dict[date, list[Saved]] = {}
        for run in alike:
            then = run.process.device
            if (then.driver, then.cuda, run.accepted) == (device.driver, device.cuda, accepted):
                days.setdefault(run.process.utc.date(), []).append(run)
        ordered = [days[day] for day in sorted(days)]
        self._known[identity] = ordered[_begin(ordered) :]
        return self._known[identity]

    def _why_new(self, now: Saved, every: Mapping[str, tuple[Saved, ...]]) -> str:
        runs = every.get(now.key, ())
        if not runs:
            return self.note or "the baseline holds no such row"
        then, before, after = runs[-1].process.device, _way(runs[-1]), _way(now)
        if self.device is not None:
            before |= {"driver": then.driver, "CUDA": then.cuda}
            after |= {"driver": self.device.driver, "CUDA": self.device.cuda}
        words = []
        for name, value in before.items():
            if value != after[name]:
                words.append(f"{name} {_text(value)} -> {_text(after[name])}")
        figure = _figure(now)
        accepted = self.acceptances.digest(now.key, figure)
        acceptance = self.acceptances.file_of(now.key, figure)
        if self.device is not None and accepted != runs[-1].accepted:
            if acceptance is None:
                words.append(f"an accepted change of its {figure} was taken back")
            else:
                why = f"{acceptance.who}: {acceptance.reason}"
                words.append(f"a change of its {figure} was accepted ({why})")
        return f"{', '.join(words)}: a new reference begins"

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

_NOW = SavedProcess("", datetime.max, None, UNKNOWN_GPU)
"""Stands for the session's process in a row that is not saved yet."""


def _now(row: Row) -> SavedRow:
    assert row.measurement is not None
    return SavedRow(row.nodeid, row.measurement, _NOW, limits=row.limits)


def _memory_now(row: Row) -> SavedFootprint:
    assert row.footprint is not None
    return SavedFootprint(row.nodeid, row.label, row.footprint, _NOW, row.limits)


def _figure(saved: SavedRow | SavedFootprint) -> Figure:
    return "time" if isinstance(saved, SavedRow) else "memory"


def _way(saved: SavedRow | SavedFootprint) -> dict[str, Any]:
    """Return how a row is measured, by the words for it."""
    if isinstance(saved, SavedFootprint):
        # Else of libraries alone.
        return {"the driver's allocations watched": saved.footprint.driver_peak is not None}
    measurement = saved.measurement
    moved = measurement.moved_bytes
    return {
        "mode": measurement.mode,
        "sampler": measurement.sampler,
        "window": measurement.window or "none",
        "declared bytes": None if moved is None else moved.total,
    }


def _text(value: object) -> str:
    if isinstance(value, Window):
        return window_text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return short_bytes(value)
    return "unknown" if value is None else str(value)


# Days


def _begin(days: Days[Saved]) -> int:
    """Return the index of the day on which the newest reference begins."""
    begin = 0
    for end in range(SUCCESSIVE + 1, len(days) + 1):
        newest = end - SUCCESSIVE
        if newest > begin and gained(days[begin:newest][:DAYS], days[newest:end]):
            begin = newest
    return begin


def _enters(days: Days[Saved], now: Saved, today: date) -> bool:
    """Return whether a run enters: the reference is not full, it gained, or the day before did.

    So does a run whose test has other limits, which a gate compares with those of the newest run.
    `days`: those of the reference, and those saved after it.
    """
    reference, later = days[:DAYS], days[DAYS:]
    if len(reference) < DAYS or reference[-1][0].process.utc.date() == today:
        return True
    if _limits_of_test(now) != _limits_of_test(days[-1][-1]):
        return True
    if gained(reference, [[now]] * SUCCESSIVE):
        return True
    before = [day for day in later if day[0].process.utc.date() < today]
    return bool(before) and gained(reference, [before[-1]] * SUCCESSIVE)


def _limits_of_test(saved: SavedRow | SavedFootprint) -> dict[str, str | None]:
    """Return the limits that the test has by itself, and no option."""
    limits = {}
    for name in LIMITS:
        if of_the_test(saved.limits.origin.get(name)):
            limits[name] = getattr(saved.limits, name)
    return limits


def gained(reference: Days[Saved], newest: Days[Saved]) -> bool:
    """Return whether each of three days is better than a reference, by more than the limit."""
    last = newest[-1][-1]
    if isinstance(last, SavedFootprint):
        growth = parse_growth(last.limits.max_peak_regression or USUAL_LIMIT)
        return min(_peaks(reference)) > growth.most(max(_peaks(newest)))
    # All latencies at one launch overhead.
    measurements = []
    for run in chain(*reference, *newest):
        assert isinstance(run, SavedRow)
        measurements.append(readings(run.measurement))
    logs = iter(corrected_logs(measurements))
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
    margin = parse_margin(last.limits.max_regression or USUAL_LIMIT)
    return gains_restart(whole, means, math.log1p(margin.over(whole.latency)))


def _peaks(days: Days[Saved]) -> list[int]:
    """Return the peaks of all processes of some days."""
    peaks: list[int] = []
    for run in chain(*days):
        assert isinstance(run, SavedFootprint)
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
    """Return differences from the runs of a reference, in words: "the test's source".

    An unknown value is no difference. `runs`: oldest first; those of another mode do not count.
    """
    now = {
        "driver": facts.driver,
        "CUDA": facts.cuda,
        "the test's source": test_source,
        "the kernel's source": measurement.kernel_source,
    }
    others: dict[str, str] = {}  # the newest known value that differs
    clocks: dict[str, list[float]] = {name: [] for name in CLOCKS}
    for run in runs:
        if run.measurement.mode != measurement.mode:
            continue
        then = {
            "driver": run.process.device.driver,
            "CUDA": run.process.device.cuda,
            "the test's source": run.test_source,
            "the kernel's source": run.measurement.kernel_source,
        }
        for name, value in then.items():
            if value is not None and now[name] not in (None, value):
                others[name] = value
        for name, field_name in CLOCKS.items():
            # After the samples; before them the device may be idle.
            clock = getattr(run.measurement.conditions[-1], field_name)
            if clock:
                clocks[name].append(clock)
    words = []
    for name, new in now.items():
        if name in others:
            words.append(name if name.endswith("source") else f"{name} {others[name]} -> {new}")
    for name, field_name in CLOCKS.items():
        clock = getattr(measurement.conditions[-1], field_name)
        if clock and clocks[name]:
            usual = statistics.median(clocks[name])
            if not clocks_agree(clock, usual):
                words.append(f"{name} {usual / 1e6:.0f} -> {clock / 1e6:.0f} MHz")
    return tuple(words)
