"""The accepted runs of each row: the runs since its last reset, the window to compare with, the first run, and what changed since. Pure.

An accepted change *resets* a row: earlier runs no longer count. The *window* holds the newest runs, so that the baseline follows the
machine. The *first* run shows how far the window has crept.

Rows whose driver, CUDA, sources or clocks changed are still compared: the change is a possible cause, which a reader must know. A different
GPU, MIG profile or ECC mode makes figures incomparable; these are part of the baseline's key. Rows of another mode, target or sampler are
not compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import key_of

WINDOW = 20  # default number of newest runs of a row to compare with


@dataclass(frozen=True)
class Process:
    """The process that measured accepted rows."""

    id: str  # unique: a copy of its file is not a second process
    utc: datetime  # when it was accepted
    revision: str | None  # revision of the measured code, with "-dirty" for uncommitted changes; None if unknown
    device: DeviceFacts  # the device at that time, with its driver and CUDA versions
    sequence: int = 0  # as `Content.sequence`
    mode: str | None = None  # the session's mode, which a test may override; None if unknown


@dataclass(frozen=True)
class Accepted:
    """One row of one run, of one process or of several (`--gpumem-processes`)."""

    nodeid: str  # pytest's id of the test
    measurement: Measurement  # reduced: each placement holds its median only
    process: Process
    reset: str | None = None  # `Reset.id` of the reset that the row was accepted after; None before the first one
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
class AcceptedFootprint:
    """The footprint of one row of one run."""

    nodeid: str  # pytest's id of the test
    label: str  # label of the part of the test; empty for the whole
    footprint: Footprint  # reduced: without its course over time
    process: Process
    reset: str | None = None  # as `Accepted.reset`

    @property
    def key(self) -> str:
        """As `Row.key`."""
        return key_of(self.nodeid, self.label)


@dataclass(frozen=True)
class Reset:
    """The acceptance of a change of a row: from then on only later runs count."""

    id: str
    key: str  # `Row.key` of the row that changed
    reason: str  # why it was accepted, as whoever accepted it wrote
    who: str  # who accepted it; `store.IMPROVED` for a gain that --gpumem-save accepted
    utc: datetime
    revision: str | None = None  # revision of the accepted code
    sequence: int = 0  # as `Content.sequence`


@dataclass(frozen=True)
class Content:
    """One file: a run, or an acceptance."""

    key: str  # `DeviceFacts.key` of the device. The file belongs into the folder of that name.
    process: Process | None  # None in a file of `gpumem accept`, which measured nothing
    id: str  # unique to the file
    utc: datetime  # when it was written, by the clock of the machine that wrote it
    revision: str | None  # as `Process.revision`; of the accepted code in a file of `gpumem accept`
    sequence: int  # one more than the highest number that the writer had read
    rows: tuple[Accepted, ...] = ()
    footprints: tuple[AcceptedFootprint, ...] = ()
    resets: tuple[Reset, ...] = ()
    rejected: tuple[str, ...] = ()
    """By `Row.key`: rows that show the revision to be slower than their baseline. Earlier runs of the revision leave it."""

    @property
    def nodeids(self) -> dict[str, str]:
        """The node id of each row, by its key: of those with times, then of those with footprints."""
        return {row.key: row.nodeid for row in self.rows} | {one.key: one.nodeid for one in self.footprints}

    @property
    def processes(self) -> int:
        """Number of processes of the run."""
        return 0 if self.process is None else max((row.processes for row in self.rows), default=1)


@dataclass(frozen=True)
class History:
    """The accepted runs of one row."""

    accepted: tuple[Accepted, ...]  # the window: one item a run, oldest first
    reason: str | None = None  # why the window is empty
    first: Accepted | None = None  # the first run since the reset; None while it is the only one

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Measurements of the window, oldest first."""
        return tuple(one.measurement for one in self.accepted)

    @property
    def first_measurement(self) -> Measurement | None:
        """Measurement of the first run; None while it is the only one."""
        return self.first.measurement if self.first is not None else None


@dataclass(frozen=True)
class Baseline:
    """All accepted rows of one kind of device."""

    rows: Mapping[str, tuple[Accepted, ...]] = field(default_factory=dict)  # by row key: the runs since the row's reset, oldest first
    processes: int = 0  # number of processes in the files that count
    note: str | None = None  # why it is empty, and which other devices have baselines there
    resets: Mapping[str, Reset] = field(default_factory=dict)  # by row key: the last reset. Rows that were never reset are missing.
    before: Mapping[str, int] = field(default_factory=dict)  # by row key: number of accepted processes from before the reset
    left_out: str | None = None  # which files do not count, and why
    window: int = WINDOW  # newest runs of a row to compare with
    sequence: int = 0  # the highest sequence number of all files, also of those that do not count
    dated_ahead: str | None = None  # which files are dated ahead of this machine's clock
    footprints: Mapping[str, tuple[AcceptedFootprint, ...]] = field(default_factory=dict)
    """By row key: the footprints of the runs since the row's reset, oldest first."""

    def history(self, row_key: str, comparable: Callable[[Measurement], bool]) -> History:
        """The newest runs of a row since its reset. Where none is `comparable`, the window holds the others."""
        rows = self.rows.get(row_key, ())
        alike = tuple(one for one in rows if comparable(one.measurement))
        if rows:
            return History((alike or rows)[-self.window :], first=alike[0] if len(alike) > 1 else None)
        return History((), self._nothing(row_key))

    def past_footprints(self, row_key: str) -> tuple[AcceptedFootprint, ...]:
        """The newest footprints of a row since its reset, oldest first, and the first of all."""
        found = self.footprints.get(row_key, ())
        return found if len(found) <= self.window else (found[0], *found[-self.window :])

    def expected(self, mode: str) -> dict[str, Accepted]:
        """By row key: the rows that a session in this mode measures if it runs the same tests as the accepted processes."""
        return {key: rows[-1] for key, rows in self.rows.items() if any(row.process.mode in (None, mode) for row in rows)}

    def accepted(self, row_key: str) -> str | None:
        """Reports an accepted change of a row that no run followed; None where there is none."""
        reset = self.resets.get(row_key)
        if reset is None or self.rows.get(row_key):
            return None
        return f"a change of it was accepted on {reset.utc:%Y-%m-%d} ({reset.reason}), and no process since"

    def _nothing(self, row_key: str) -> str:
        if (accepted := self.accepted(row_key)) is not None:
            return accepted
        if before := self.before.get(row_key):
            return f"its {before} accepted processes follow a reset whose file is not here"
        return self.note or "no accepted process holds it"


def _order(one: Process | Reset) -> tuple[int, datetime, str]:
    """By sequence number; the clock orders only files whose writers did not see each other."""
    return one.sequence, one.utc, one.id


def assemble(contents: Collection[Content], window: int = WINDOW, resets: Iterable[Reset] = ()) -> Baseline:
    """Build a baseline from the files that count, in any order.
    `window`: newest runs of a row to compare with.
    `resets`: of files that are not there.
    """
    every = [*resets, *(reset for content in contents for reset in content.resets)]
    current = {reset.key: reset for reset in sorted(every, key=_order)}

    def since_reset(one: Accepted | AcceptedFootprint) -> bool:
        return one.reset == (current[one.key].id if one.key in current else None)

    by_key: dict[str, list[Accepted]] = {}
    before: dict[str, int] = {}
    for row in sorted((row for content in contents for row in content.rows), key=lambda row: _order(row.process)):
        if since_reset(row):
            by_key.setdefault(row.key, []).append(row)
        else:
            before[row.key] = before.get(row.key, 0) + row.processes
    for one in contents:
        for key in one.rejected:
            found = by_key.get(key, [])
            kept = [row for row in found if row.process.revision != one.revision or row.process.sequence >= one.sequence]
            # Without another revision in the baseline the rejection was noise: a revision is not slower than itself.
            if any(row.process.revision != one.revision for row in kept):
                by_key[key] = kept
    of_memory: dict[str, list[AcceptedFootprint]] = {}
    footprints = (footprint for content in contents for footprint in content.footprints)
    for footprint in sorted(filter(since_reset, footprints), key=lambda footprint: _order(footprint.process)):
        of_memory.setdefault(footprint.key, []).append(footprint)
    return Baseline(
        {key: tuple(found) for key, found in by_key.items()},
        sum(content.processes for content in contents),
        resets=current,
        before=before,
        window=window,
        footprints={key: tuple(all_of) for key, all_of in of_memory.items()},
    )


CLOCKS = {"memory clock": ("memory_clock_hz", 0.01), "SM clock": ("sm_clock_hz", 0.05)}
"""The clocks whose changes are reported: the field of `Conditions`, and the smallest change, as a share. Bandwidth follows the memory
clock; the SM clock varies with temperature and power."""


def changes(measurement: Measurement, facts: DeviceFacts, test_source: str | None, window: Sequence[Accepted]) -> tuple[str, ...]:
    """Differences from any process of the window, as short phrases: "driver 580.95.05 -> 590.10". An unknown value is no difference.
    `window`: the runs to compare with, oldest first; those of another mode do not count. A change is reported until the window has moved
    past it.
    """
    window, phrases = [one for one in window if one.measurement.mode == measurement.mode], []
    for name, now, then in (
        ("driver", facts.driver, [one.process.device.driver for one in window]),
        ("CUDA", facts.cuda, [one.process.device.cuda for one in window]),
        ("the test's source", test_source, [one.test_source for one in window]),
        ("the kernel's source", measurement.kernel_source, [one.measurement.kernel_source for one in window]),
    ):
        # The newest known value that differs.
        if now is not None and (old := next((value for value in reversed(then) if value not in (None, now)), None)) is not None:
            phrases.append(name if name.endswith("source") else f"{name} {old} -> {now}")
    for name, (field_name, least) in CLOCKS.items():
        # After the samples; before them the device may be idle.
        own, *known = (getattr(one.conditions[-1], field_name) for one in (measurement, *(past.measurement for past in window)))
        if own and (known := [clock for clock in known if clock]) and abs(own / (usual := statistics.median(known)) - 1) > least:
            phrases.append(f"{name} {usual / 1e6:.0f} -> {own / 1e6:.0f} MHz")
    return tuple(phrases)
