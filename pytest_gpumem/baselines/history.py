"""What a baseline knows about each row: the processes of its epoch, the window that is compared with, and its first run. Pure.

An *epoch* of a row begins where a change of it was accepted; what was measured before says nothing of it any more. The *window* are its
newest runs, so that the baseline follows the machine; its *first* run shows what the window has crept away from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import key_of

WINDOW = 20
"""Newest runs of a row that are compared with, where nobody says otherwise."""


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
    sequence: int = 0
    """As `layout.Content.sequence`."""
    mode: str | None = None
    """The session's mode, which a test may have overridden; None if unknown."""


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
    sequence: int = 0
    """As `layout.Content.sequence`."""


@dataclass(frozen=True)
class Rejection:
    """A revision was shown to be slower than the baseline of a row: its earlier runs leave it."""

    key: str
    """`Row.key` of the row."""
    revision: str
    """Of the code that is slower."""
    sequence: int
    """Of its file; only runs with a lower one leave."""


@dataclass(frozen=True)
class History:
    """What a baseline knows about one row, as far as it can be compared."""

    accepted: tuple[Accepted, ...]
    """The window: one for each run, oldest first."""
    reason: str | None = None
    """Why there are none that can be compared."""
    first: Accepted | None = None
    """The first run of the epoch; None while it is the only one."""

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Of the window, oldest first."""
        return tuple(one.measurement for one in self.accepted)

    @property
    def first_measurement(self) -> Measurement | None:
        """Of the first run; None while it is the only one."""
        return self.first.measurement if self.first is not None else None


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
    """Newest runs of a row that are compared with."""
    sequence: int = 0
    """The highest of all files, also of those that do not count."""
    dated_ahead: str | None = None
    """Which files are dated ahead of this machine's clock."""

    def history(self, row_key: str, comparable: Callable[[Measurement], bool]) -> History:
        """The newest rows of a key and its epoch.

        Args:
            row_key: `Row.key` of a measurement.
            comparable: whether a past measurement can be compared with it. Where none can, the window holds the others, which say why.
        """
        rows = self.rows.get(row_key, ())
        alike = tuple(one for one in rows if comparable(one.measurement))
        if rows:
            return History((alike or rows)[-self.window :], first=alike[0] if len(alike) > 1 else None)
        return History((), self._nothing(row_key))

    def expected(self, mode: str) -> dict[str, Accepted]:
        """By row key: what a session in this mode measures, if it runs all tests as the accepted processes did."""
        return {key: rows[-1] for key, rows in self.rows.items() if any(row.process.mode in (None, mode) for row in rows)}

    def accepted(self, row_key: str) -> str | None:
        """That a change of a row was accepted and nothing measured since; None where that is not so."""
        epoch = self.epochs.get(row_key)
        if epoch is None or self.rows.get(row_key):
            return None
        return f"a change of it was accepted on {epoch.utc:%Y-%m-%d} ({epoch.reason}), and no process since"

    def _nothing(self, row_key: str) -> str:
        if (accepted := self.accepted(row_key)) is not None:
            return accepted
        if before := self.before.get(row_key):
            return f"its {before} accepted processes are of an epoch that no file here begins"
        return self.note or f"none of the {self.processes} accepted processes holds {row_key}"


def _order(one: Process | Epoch) -> tuple[int, datetime, str]:
    """By what its writer had seen; the clock orders only what did not see each other, and files of before there was a number."""
    return one.sequence, one.utc, one.id


def assemble(
    rows: Iterable[Accepted], epochs: Iterable[Epoch], processes: int, window: int, rejections: Iterable[Rejection] = ()
) -> Baseline:
    """A baseline of all that counts.

    Args:
        rows: of any process and epoch, in any order.
        epochs: in any order; the last of a row is the one that is on.
        processes: of the files that count.
        window: newest runs of a row that are compared with.
        rejections: in any order.
    """
    rows = sorted(rows, key=lambda row: _order(row.process))
    # Files without a sequence number are from before keys had backslashes.
    old_keys: dict[str, set[str]] = {}
    for row in rows:
        old_keys.setdefault(f"{row.nodeid}[{row.label}]" if row.label else row.nodeid, set()).add(row.key)
    current: dict[str, Epoch] = {}
    for epoch in sorted(epochs, key=_order):
        for key in {epoch.key} if epoch.sequence else old_keys.get(epoch.key, {epoch.key}):
            current[key] = replace(epoch, key=key)
    by_key: dict[str, list[Accepted]] = {}
    before: dict[str, int] = {}
    for row in rows:
        on = current.get(row.key)
        if row.epoch == (on.id if on is not None else None):
            by_key.setdefault(row.key, []).append(row)
        else:
            before[row.key] = before.get(row.key, 0) + row.processes
    for rejection in rejections:
        found = by_key.get(rejection.key, [])
        kept = [row for row in found if row.process.revision != rejection.revision or row.process.sequence >= rejection.sequence]
        # A revision is not slower than itself: where the baseline has no other, the rejection was noise.
        if any(row.process.revision != rejection.revision for row in kept):
            by_key[rejection.key] = kept
    return Baseline({key: tuple(found) for key, found in by_key.items()}, processes, epochs=current, before=before, window=window)
