"""What a baseline knows about each row: the processes of its epoch, the window that is compared with, and the anchor. Pure.

An *epoch* of a row begins where a change of it was accepted; what was measured before says nothing of it any more. The *window* are its
newest processes, so that the baseline follows the machine; the *anchor* are its first ones, which show what the window has crept away
from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import key_of

WINDOW = 20
"""Newest processes of a row that are compared with, where nobody says otherwise."""
ANCHOR = 3
"""First processes of an epoch that its anchor consists of: fewer say nothing about their own spread."""


@dataclass(frozen=True)
class Process:
    """The process behind accepted rows."""

    id: str
    """Unique: a copy of its file is not a second process."""
    utc: datetime
    """When it was accepted."""
    revision: str | None
    """Of the code that was measured, with "-dirty" for uncommitted changes; None if unknown."""
    device: DeviceFacts
    """The device as it was then: driver and CUDA may have changed since."""


@dataclass(frozen=True)
class Accepted:
    """One row of one run: of a process, or of all that --gpumem-processes had."""

    nodeid: str
    """pytest's id of the test."""
    measurement: Measurement
    """Reduced: each placement holds its median alone."""
    process: Process
    epoch: str | None = None
    """`Epoch.id` of the one that it was accepted into; None: before any change was accepted."""
    test_source: str | None = None
    """As `Row.test_source`."""

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
        """Behind it: more than one of a run with --gpumem-processes."""
        return 1 + len(self.measurement.further)


@dataclass(frozen=True)
class Epoch:
    """The acceptance of a change: from then on only rows of this epoch are compared with."""

    id: str
    key: str
    """`Row.key` of the row that changed."""
    reason: str
    """Why it was accepted, in the words of whoever did."""
    who: str
    """Who accepted it, or what: an improvement is accepted by `--gpumem-save`."""
    utc: datetime
    revision: str | None = None
    """Of the code that was accepted."""


@dataclass(frozen=True)
class History:
    """What a baseline knows about one row, as far as it can be compared."""

    accepted: tuple[Accepted, ...]
    """The window: one for each run, oldest first."""
    reason: str | None = None
    """Why there are none that can be compared."""
    anchor: tuple[Accepted, ...] = ()
    """The first processes of the epoch; empty while the window is no longer than the anchor, and has not moved on from it."""
    processes: int = 0
    """Processes of the epoch that can be compared, those outside the window included."""

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Of the window, oldest first."""
        return tuple(one.measurement for one in self.accepted)


@dataclass(frozen=True)
class Baseline:
    """All accepted rows of one kind of device."""

    rows: Mapping[str, tuple[Accepted, ...]] = field(default_factory=dict)
    """By row key: those of the row's epoch, one for each run, oldest first."""
    processes: int = 0
    """Of the files that count."""
    note: str | None = None
    """Why it is empty, and which other devices have baselines there."""
    epochs: Mapping[str, Epoch] = field(default_factory=dict)
    """By row key: the epoch that is on; rows whose change was never accepted have none."""
    before: Mapping[str, int] = field(default_factory=dict)
    """By row key: accepted processes of other epochs."""
    left_out: str | None = None
    """Which files do not count, and why."""
    window: int = WINDOW
    """Newest processes of a row that are compared with."""

    def history(self, row_key: str, mode: str) -> History:
        """What may be compared with a measurement: the newest rows of its key and epoch that were measured in its mode."""
        rows = self.rows.get(row_key, ())
        alike = tuple(one for one in rows if one.measurement.mode == mode)
        if alike:
            processes = sum(one.processes for one in alike)
            window = tuple(reversed(_first(tuple(reversed(alike)), self.window)))
            return History(window, anchor=_first(alike, ANCHOR) if processes > ANCHOR else (), processes=processes)
        if rows:
            return History((), f"its rows are {' and '.join(sorted({one.measurement.mode for one in rows}))}; this one is {mode}")
        return History((), self._nothing(row_key))

    def _nothing(self, row_key: str) -> str:
        if (epoch := self.epochs.get(row_key)) is not None:
            return f"a change of it was accepted on {epoch.utc:%Y-%m-%d} ({epoch.reason}), and no process since"
        if before := self.before.get(row_key):
            return f"its {before} accepted processes are of an epoch that no file here begins"
        return self.note or f"none of the {self.processes} accepted processes holds {row_key}"


def _first(rows: Sequence[Accepted], processes: int) -> tuple[Accepted, ...]:
    """The first rows that make up so many processes; a run of several is taken whole."""
    found, count = list[Accepted](), 0
    for row in rows:
        if count >= processes:
            break
        found.append(row)
        count += row.processes
    return tuple(found)


def assemble(rows: Iterable[Accepted], epochs: Iterable[Epoch], processes: int, window: int) -> Baseline:
    """A baseline of all that counts.

    Args:
        rows: of any process and epoch, in any order.
        epochs: in any order; the newest of a row is the one that is on.
        processes: of the files that count.
        window: newest processes of a row that are compared with.
    """
    current: dict[str, Epoch] = {}
    for epoch in sorted(epochs, key=lambda e: (e.utc, e.id)):
        current[epoch.key] = epoch
    by_key: dict[str, list[Accepted]] = {}
    before: dict[str, int] = {}
    for row in sorted(rows, key=lambda r: (r.process.utc, r.process.id)):
        on = current.get(row.key)
        if row.epoch == (on.id if on is not None else None):
            by_key.setdefault(row.key, []).append(row)
        else:
            before[row.key] = before.get(row.key, 0) + row.processes
    return Baseline({key: tuple(found) for key, found in by_key.items()}, processes, epochs=current, before=before, window=window)
