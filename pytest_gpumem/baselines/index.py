"""An index of the files of a store, row by row, in the user's cache folder: a session reads only the runs that it compares with.

The index has no figures. An entry belongs to one file, by its name, size and time of change; a file that is new or was touched is read
again. The index is made anew where it is missing, damaged or of another version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from platformdirs import user_cache_path

from pytest_gpumem.baselines.history import AnyFile, Reset, RunFile, SavedProcess
from pytest_gpumem.files import write_whole
from pytest_gpumem.judging import drift
from pytest_gpumem.judging.judge import how
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import ENOUGH
from pytest_gpumem.records.schema import device_from_json, device_to_json

VERSION = 2  # of the index; the layout of the files has its own
MANY = 50  # files from which an index pays
PARTS = 4  # parts of the difference between two variants of a card that are told apart


class ListedRow(NamedTuple):
    """One row of one file, without its figures. Fields as of `history.Accepted`."""

    key: str
    process: SavedProcess
    reset: str | None
    processes: int = 1
    group: str = ""  # rows of one group are compared with the same measurements


class IndexRun(AnyFile[ListedRow, ListedRow]):
    """One file without its figures."""


class _FileRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a file. Most files of a store hold the same."""

    rows: tuple[tuple[str, str | None, int, str], ...] = ()  # key, reset, processes and group
    footprints: tuple[tuple[str, str | None], ...] = ()


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    size: int
    changed: int  # when the file was changed, in nanoseconds
    id: str
    utc: datetime
    sequence: int
    revision: str | None
    key: str
    device: int  # index of its process's device
    mode: str | None
    held: int  # index of what it holds
    resets: tuple[
        tuple[str, str, str, str, tuple[str, ...]], ...
    ]  # id, key, reason, who and accepted
    rejected: tuple[str, ...]


class _Index(msgspec.Struct, array_like=True):
    version: int = VERSION
    devices: list[dict[str, Any]] = []
    held: list[_FileRows] = []
    entries: list[_Entry] = []


def listed(
    paths: Sequence[Path], read: Callable[[Path], RunFile], contents: dict[Path, RunFile]
) -> dict[Path, IndexRun]:
    """What each file of one folder holds, by path, in their order.
    `read`: reads and checks a file that the index does not have.
    `contents`: gets the files that were read, if there are few.
    """
    place = _place(paths[0].parent) if len(paths) >= MANY else None
    old = _Index() if place is None else _loaded(place)
    known = {entry.name: entry for entry in old.entries}
    devices, held = _Numbers(old.devices), _Numbers(old.held)
    processes = [device_from_json(device) for device in old.devices]
    entries, found, new = list[_Entry](), dict[Path, IndexRun](), len(paths) != len(known)
    for path in paths:
        size, changed = _touched(path)
        entry = known.get(path.name)
        if entry is None or (entry.size, entry.changed) != (size, changed):
            content, new = read(path), True
            if place is None:
                contents[path] = content
            entry = _entry(path.name, size, changed, content, devices, held)
            processes += [device_from_json(device) for device in devices.values[len(processes) :]]
        process = SavedProcess(
            entry.id, entry.utc, entry.revision, processes[entry.device], entry.sequence, entry.mode
        )
        found[path] = _of(entry, held.values[entry.held], process)
        entries.append(entry)
    if new and place is not None:
        # The next session makes it again. msgpack has no integers of more than 64 bits, and no names that are no text.
        with suppress(OSError, OverflowError, UnicodeEncodeError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(
                place, msgspec.msgpack.encode(_Index(VERSION, devices.values, held.values, entries))
            )
    return found


def _touched(path: Path) -> tuple[int, int]:
    """Size and time of change; of a file that cannot be looked at, values that no file has."""
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


class _Numbers:
    """Values, each with its index."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)
        self._numbers = {repr(value): number for number, value in enumerate(self.values)}

    def of(self, value: Any) -> int:
        """The index of a value, which is added if it is new."""
        number = self._numbers.setdefault(repr(value), len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


def _place(folder: Path) -> Path:
    name = hashlib.sha256(str(folder.absolute()).encode(errors="surrogateescape")).hexdigest()[:16]
    return user_cache_path("pytest-gpumem") / "indexes" / f"{name}.msgpack"


def _loaded(place: Path) -> _Index:
    try:
        found = msgspec.msgpack.decode(place.read_bytes(), type=_Index)
        devices, held = range(len(found.devices)), range(len(found.held))
        sound = all(entry.device in devices and entry.held in held for entry in found.entries)
        return found if found.version == VERSION and sound else _Index()
    except (OSError, msgspec.MsgspecError):
        return _Index()


def _entry(
    name: str, size: int, changed: int, content: RunFile, devices: _Numbers, held: _Numbers
) -> _Entry:
    process = content.process
    mode = process.mode
    return _Entry(
        name,
        size,
        changed,
        content.id,
        content.utc,
        content.sequence,
        content.revision,
        content.key,
        devices.of(device_to_json(process.device)),
        mode,
        held.of(
            _FileRows(
                tuple(
                    (row.key, row.reset, row.processes, _group(row.measurement, mode))
                    for row in content.rows
                ),
                tuple((one.key, one.reset) for one in content.footprints),
            )
        ),
        tuple((one.id, one.key, one.reason, one.who, one.accepted) for one in content.resets),
        content.rejected,
    )


def _of(entry: _Entry, held: _FileRows, process: SavedProcess) -> IndexRun:
    rows = tuple(
        ListedRow(key, process, reset, count, group) for key, reset, count, group in held.rows
    )
    footprints = tuple(ListedRow(key, process, reset) for key, reset in held.footprints)
    resets = tuple(
        Reset(id, key, reason, who, entry.utc, entry.revision, entry.sequence, accepted)
        for id, key, reason, who, accepted in entry.resets
    )
    return IndexRun(entry.key, process, rows, footprints, resets, entry.rejected)


def _group(measurement: Measurement, mode: str | None) -> str:
    """What `comparable` and `Baseline.expected` look at, with the variant of the card in parts finer than they tell apart."""
    controls, taken = measurement.controls, measurement.provenance
    variant = ""
    if controls is not None and controls.latency is not None:
        part = round(math.log(controls.latency) * PARTS / drift.LIMITS["latency"])
        variant = f"{controls.source} {part}"
    card = "" if taken is None else taken.card or ""
    return "|".join(
        (measurement.mode, *how(measurement), str(measurement.profiled), card, variant, mode or "")
    )


def needed(rows: Mapping[str, Sequence[ListedRow]], newest: int) -> dict[str, list[str]]:
    """By key, the ids of the first and the newest runs of a row, of each group, oldest first.
    `rows`: by key, those that count, oldest first.
    """
    found: dict[str, list[str]] = {}
    for key, every in rows.items():
        groups: dict[str, list[str]] = {}
        for row in every:
            groups.setdefault(row.group, []).append(row.process.id)
        chosen = {run for ids in groups.values() for run in (*ids[:ENOUGH], *ids[-newest:])}
        found[key] = [row.process.id for row in every if row.process.id in chosen]
    return found
