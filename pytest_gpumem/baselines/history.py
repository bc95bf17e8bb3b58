"""The saved runs of each row: the runs since its last reset, the window to compare with, the first run, and what changed since. Pure.

An accepted change *resets* a row: earlier runs no longer count. The *window* holds the newest runs, so that the baseline follows the
machine. The *first* run shows how far the window has crept.

Rows whose driver, CUDA, sources or clocks changed are still compared: the change is a possible cause, which a reader must know. A different
GPU, MIG profile or ECC mode makes figures incomparable; these are part of the baseline's key. Rows of another mode, target or sampler are
not compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.judge import clocks_agree
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import ENOUGH, Past, Row, key_of

WINDOW = 20  # default number of newest runs of a row to compare with


@dataclass(frozen=True)
class SavedProcess:
    """The process that measured saved rows."""

    id: str  # unique: a copy of its file is not a second process
    utc: datetime  # when it was saved, by the clock of the machine that saved it
    revision: (
        str | None
    )  # revision of the measured code, with "-dirty" for uncommitted changes; None if unknown
    device: DeviceFacts  # the device at that time, with its driver and CUDA versions
    sequence: int = 0  # one more than the highest number that the writer had read
    mode: str | None = None  # the session's mode, which a test may override; None if unknown


@dataclass(frozen=True)
class SavedRow:
    """One row of one run, of one process or of several (`--gpumem-processes`)."""

    nodeid: str  # pytest's id of the test
    measurement: Measurement  # reduced: each placement holds its median only
    process: SavedProcess
    reset: str | None = None
    """`Reset.id` of the reset that the row was accepted after; None before the first one."""
    test_source: str | None = None  # as `Row.test_source`

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
    reset: str | None = None  # as `SavedRow.reset`

    @property
    def key(self) -> str:
        """As `Row.key`."""
        return key_of(self.nodeid, self.label)


Saved = TypeVar("Saved", SavedRow, SavedFootprint)


@dataclass(frozen=True)
class Reset:
    """A change of a row that a saved run took over, or a gain: earlier runs no longer count."""

    id: str
    key: str  # `Row.key` of the row that changed
    reason: str  # why it was accepted, as whoever accepted it wrote; of a gain, how large it is
    who: str  # who accepted it; `store.IMPROVED` for a gain
    utc: datetime
    revision: str | None = None  # revision of the saved run
    sequence: int = 0  # as `SavedProcess.sequence`
    accepted: tuple[
        str, ...
    ] = ()  # `Acceptance.digest` of each accepted change; none for a gain. A change is taken over once.


@dataclass(frozen=True)
class RunFile:
    """One file: a run."""

    key: str  # `DeviceFacts.key` of the device. The file belongs into the folder of that name.
    process: SavedProcess
    rows: tuple[SavedRow, ...] = ()
    footprints: tuple[SavedFootprint, ...] = ()
    resets: tuple[Reset, ...] = ()
    rejected: tuple[str, ...] = ()
    """By `Row.key`: rows that show the revision to be slower than their baseline. Earlier runs of the revision leave it."""

    @property
    def id(self) -> str:
        """As `SavedProcess.id`."""
        return self.process.id

    @property
    def utc(self) -> datetime:
        """As `SavedProcess.utc`."""
        return self.process.utc

    @property
    def revision(self) -> str | None:
        """As `SavedProcess.revision`."""
        return self.process.revision

    @property
    def sequence(self) -> int:
        """As `SavedProcess.sequence`."""
        return self.process.sequence

    @property
    def processes(self) -> int:
        """Number of processes of the run."""
        return max((row.processes for row in self.rows), default=1)


@dataclass(frozen=True)
class History:
    """The saved runs of one row."""

    accepted: tuple[SavedRow, ...]  # the window: one item a run, oldest first
    reason: str | None = None  # why the window is empty
    first: tuple[
        SavedRow, ...
    ] = ()  # the first runs since the reset, oldest first; none while there are no others

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Measurements of the window, oldest first."""
        return tuple(one.measurement for one in self.accepted)

    @property
    def first_measurements(self) -> tuple[Measurement, ...]:
        """Measurements of the first runs."""
        return tuple(one.measurement for one in self.first)


@dataclass(frozen=True)
class Baseline:
    """All saved rows of one kind of device."""

    rows: Mapping[str, tuple[SavedRow, ...]] = field(
        default_factory=dict
    )  # by row key: the runs since the row's reset, oldest first
    processes: int = 0  # number of processes in the files that count
    note: str | None = None  # why it is empty, and which other devices have baselines there
    resets: Mapping[str, Reset] = field(
        default_factory=dict
    )  # by row key: the last reset. Rows that were never reset are missing.
    before: Mapping[str, int] = field(
        default_factory=dict
    )  # by row key: number of saved processes from before the reset
    left_out: str | None = None  # which files do not count, and why
    window: int = WINDOW  # newest runs of a row to compare with
    sequence: int = 0  # the highest sequence number of all files, also of those that do not count
    dated_ahead: str | None = None  # which files are dated ahead of this machine's clock
    footprints: Mapping[str, tuple[SavedFootprint, ...]] = field(default_factory=dict)
    """By row key: the footprints of the runs since the row's reset, oldest first."""
    taken_over: frozenset[tuple[str, str]] = frozenset()
    """Accepted changes that a saved run took over: digest and row key."""

    def history(self, row_key: str, comparable: Callable[[Measurement], bool]) -> History:
        """The newest runs of a row since its reset. Where none is `comparable`, the window holds the others."""
        rows = self.rows.get(row_key, ())
        alike = tuple(one for one in rows if comparable(one.measurement))
        if rows:
            return History(
                (alike or rows)[-self.window :], first=alike[:ENOUGH] if len(alike) > ENOUGH else ()
            )
        return History((), self._nothing(row_key))

    def past_footprints(self, row_key: str) -> tuple[SavedFootprint, ...]:
        """The newest footprints of a row since its reset, oldest first, and the first of all."""
        found = self.footprints.get(row_key, ())
        return found if len(found) <= self.window else (found[0], *found[-self.window :])

    def past(self, row: Row) -> tuple[Past, ...]:
        """The runs of the window of a row, in its mode, oldest first, for a plot."""
        if row.measurement is None:
            return ()
        alike = [
            one
            for one in self.rows.get(row.key, ())
            if one.measurement.mode == row.measurement.mode
        ]
        return tuple(
            Past(
                one.process.utc,
                one.measurement.latency,
                one.measurement.half_width,
                one.process.revision,
            )
            for one in alike[-self.window :]
        )

    @property
    def newest_footprints(self) -> dict[str, Footprint]:
        """By row key: the newest footprint."""
        return {key: found[-1].footprint for key, found in self.footprints.items()}

    def expected(self, mode: str | None) -> dict[str, SavedRow]:
        """By row key: the rows that a session in this mode measures if it runs the same tests as the saved processes. None: unknown."""
        modes = (None, mode)
        return {
            key: rows[-1]
            for key, rows in self.rows.items()
            if mode is None or any(row.process.mode in modes for row in rows)
        }

    def accepted(self, row_key: str) -> str | None:
        """Reports an accepted change of a row that no saved run followed; None where there is none."""
        reset = self.resets.get(row_key)
        if reset is None or self.rows.get(row_key) or self.footprints.get(row_key):
            return None
        return (
            f"a change of it was accepted ({reset.who}: {reset.reason}), and no run was saved since"
        )

    def _nothing(self, row_key: str) -> str:
        if (accepted := self.accepted(row_key)) is not None:
            return accepted
        if before := self.before.get(row_key):
            return f"a reset whose file is not here comes before its {counted(before, 'saved process')}"
        return self.note or "no saved process holds it"


def _order(one: SavedProcess | Reset) -> tuple[int, datetime, str]:
    """By sequence number; the clock orders only files whose writers did not see each other."""
    return one.sequence, one.utc, one.id


def assemble(
    files: Collection[RunFile], window: int = WINDOW, resets: Iterable[Reset] = ()
) -> Baseline:
    """Build a baseline from files in any order.
    `window`: newest runs of a row to compare with.
    `resets`: of files that are not there.
    """
    every = [*resets, *(reset for one in files for reset in one.resets)]
    current = {reset.key: reset for reset in sorted(every, key=_order)}
    rows = _since_reset((row for one in files for row in one.rows), current)
    for one in files:
        rows |= _without_rejected(rows, one)
    before: dict[str, int] = {}
    for row in (row for one in files for row in one.rows):
        if not _follows(row, current):
            before[row.key] = before.get(row.key, 0) + row.processes
    footprints = _since_reset((footprint for one in files for footprint in one.footprints), current)
    return Baseline(
        {key: tuple(runs) for key, runs in rows.items()},
        sum(one.processes for one in files),
        resets=current,
        before=before,
        window=window,
        footprints={key: tuple(runs) for key, runs in footprints.items()},
        taken_over=frozenset((digest, reset.key) for reset in every for digest in reset.accepted),
    )


def _follows(row: SavedRow | SavedFootprint, resets: Mapping[str, Reset]) -> bool:
    """True if a row was saved after the last reset of its key."""
    return row.reset == (resets[row.key].id if row.key in resets else None)


def _since_reset(rows: Iterable[Saved], resets: Mapping[str, Reset]) -> dict[str, list[Saved]]:
    """By key, the rows since the last reset, oldest first."""
    found: dict[str, list[Saved]] = {}
    for row in sorted(rows, key=lambda row: _order(row.process)):
        if _follows(row, resets):
            found.setdefault(row.key, []).append(row)
    return found


CLOCKS = {"memory clock": "memory_clock_hz", "SM clock": "sm_clock_hz"}
"""The clocks whose changes are reported (`clocks_agree`): the fields of `Conditions`. Bandwidth follows the memory clock, and work in
registers and caches the SM clock."""


def _without_rejected(
    rows: Mapping[str, list[SavedRow]], file: RunFile
) -> dict[str, list[SavedRow]]:
    """By key, the rows that are left of those which a file rejects: the runs of its revision before it do not count."""
    left = {
        key: [
            row
            for row in rows.get(key, ())
            if row.process.revision != file.revision or row.process.sequence >= file.sequence
        ]
        for key in file.rejected
    }
    # Without another revision in the baseline the rejection was noise: a revision is not slower than itself.
    return {
        key: kept
        for key, kept in left.items()
        if any(row.process.revision != file.revision for row in kept)
    }


def changes(
    measurement: Measurement,
    facts: DeviceFacts,
    test_source: str | None,
    window: Sequence[SavedRow],
) -> tuple[str, ...]:
    """Differences from any process of the window, as short phrases: "driver 580.95.05 -> 590.10". An unknown value is no difference.
    `window`: the runs to compare with, oldest first; those of another mode do not count. A change is reported until the window has moved
    past it.
    """
    window, phrases = [one for one in window if one.measurement.mode == measurement.mode], []
    for name, now, then in (
        ("driver", facts.driver, [one.process.device.driver for one in window]),
        ("CUDA", facts.cuda, [one.process.device.cuda for one in window]),
        ("the test's source", test_source, [one.test_source for one in window]),
        (
            "the kernel's source",
            measurement.kernel_source,
            [one.measurement.kernel_source for one in window],
        ),
    ):
        # The newest known value that differs.
        if (
            now is not None
            and (old := next((value for value in reversed(then) if value not in (None, now)), None))
            is not None
        ):
            phrases.append(name if name.endswith("source") else f"{name} {old} -> {now}")
    return (*phrases, *_clock_changes(measurement, window))


def _clock_changes(measurement: Measurement, window: Sequence[SavedRow]) -> Iterator[str]:
    """The clocks that differ from the usual ones of the window."""
    for name, field_name in CLOCKS.items():
        # After the samples; before them the device may be idle.
        own, *known = (
            getattr(one.conditions[-1], field_name)
            for one in (measurement, *(past.measurement for past in window))
        )
        if (
            own
            and (known := [clock for clock in known if clock])
            and not clocks_agree(own, usual := statistics.median(known))
        ):
            yield f"{name} {usual / 1e6:.0f} -> {own / 1e6:.0f} MHz"
