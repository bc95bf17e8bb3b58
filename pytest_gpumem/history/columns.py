"""The figures of all runs on one kind of card as columns of numbers, in a file of the user's cache folder.

Each file of a store is read once. A figure that is the same in all runs, as most bytes and counts are, takes one number.
"""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import msgspec
import numpy as np
from numpy.typing import NDArray
from platformdirs import user_cache_path

from pytest_gpumem.baselines.history import Content
from pytest_gpumem.baselines.layout import read_checked
from pytest_gpumem.baselines.storage import Storage
from pytest_gpumem.baselines.store import load_file, paths, refuse_copy
from pytest_gpumem.collector import uncollected
from pytest_gpumem.files import write_whole
from pytest_gpumem.history.figures import LATENCY, METRICS, of_footprint, of_measurement
from pytest_gpumem.result_files import FileError

VERSION = 2  # of the cache's format
AT_ONCE = 32  # files whose figures are held in dictionaries before they become columns


class Column(msgspec.Struct, frozen=True):
    """One run on one card: a file whose tests ran on several cards at once has several."""

    file: str  # name of its file
    id: str  # as `Content.id`
    when: str  # ISO 8601, UTC
    revision: str
    device: str  # name of the device
    simulated: bool
    card: str | None  # UUID of the card
    control: str | None  # source of the control kernels; None where they did not run
    dram: float | None  # their latency of DRAM, in seconds


class Mark(msgspec.Struct, frozen=True):
    """An accepted change of a test."""

    file: str
    test: str
    who: str
    why: str
    when: str


class _About(msgspec.Struct):
    version: int
    files: list[str]
    columns: list[Column]
    marks: list[Mark]
    rows: list[tuple[str, str]]


@dataclass(eq=False)
class Values:
    """One metric of all rows: a value, or none, in each column."""

    rows: NDArray[np.int32]  # indexes into `Columns.rows`
    present: NDArray[np.uint8]  # a bit a column, for each of `rows`
    constant: NDArray[np.float64]  # the value of each of `rows`; of no meaning for one in `varying`
    varying: NDArray[np.int32]  # indexes into `rows` of those whose values differ
    dense: NDArray[np.float64]  # their values, one a column, NaN where there is none

    @staticmethod
    def empty(columns: int) -> Values:
        """No rows."""
        return Values(
            np.empty(0, np.int32), np.empty((0, -(-columns // 8)), np.uint8), np.empty(0), np.empty(0, np.int32), np.empty((0, columns))
        )

    def mask(self, columns: int) -> NDArray[np.bool_]:
        """For each row and column, whether it has a value."""
        return np.unpackbits(self.present, axis=1, count=columns).view(bool)

    def extended(self, columns: int, new: Sequence[Mapping[int, float]]) -> Values:
        """These and the values of new columns, by row."""
        known = {int(row): at for at, row in enumerate(self.rows)}
        for row in sorted({row for column in new for row in column} - known.keys()):
            known[row] = len(known)
        block = np.full((len(known), len(new)), np.nan)
        for index, column in enumerate(new):
            block[[known[row] for row in column], index] = list(column.values())
        old, more = len(self.rows), len(known) - len(self.rows)
        present = np.concatenate([np.pad(self.mask(columns), ((0, more), (0, 0))), ~np.isnan(block)], axis=1)
        first = block[np.arange(old, len(known)), np.argmax(present[old:, columns:], axis=1)] if more else np.empty(0)
        constant = np.concatenate([self.constant, first])
        varies = np.zeros(len(known), bool)
        varies[self.varying] = True
        now = np.flatnonzero(~varies & ((block != constant[:, None]) & ~np.isnan(block)).any(axis=1)).astype(np.int32)
        grown = np.where(present[now, :columns], constant[now, None], np.nan)
        varying = np.concatenate([self.varying, now])
        dense = np.concatenate([np.concatenate([self.dense, grown]), block[varying]], axis=1)
        return Values(np.fromiter(known, np.int32, len(known)), np.packbits(present, axis=1), constant, varying, dense)

    def without(self, kept: NDArray[np.bool_]) -> Values:
        """These without some columns; `kept`: whether each one stays."""
        present = np.packbits(self.mask(len(kept))[:, kept], axis=1)
        return Values(self.rows, present, self.constant, self.varying, self.dense[:, kept])


class Columns:
    """The runs of one kind of card in a store."""

    def __init__(self) -> None:
        self.files: list[str] = []  # names of those that were read
        self.columns: list[Column] = []
        self.marks: list[Mark] = []
        self.rows: list[tuple[str, str]] = []
        """`Row.key`, and how its times were taken (mode and sampler); that is empty for figures that do not depend on it."""
        self.values: dict[str, Values] = {}  # by the name of a metric
        self._at: dict[tuple[str, str], int] = {}

    def add(self, contents: Iterable[tuple[str, Content]]) -> None:
        """Add files, by name."""
        before = len(self.columns)
        found: dict[str, list[dict[int, float]]] = defaultdict(list)
        for name, content in contents:
            self.files.append(name)
            self.marks += [Mark(name, one.key, one.who, one.reason, one.utc.isoformat(timespec="seconds")) for one in content.resets]
            if content.process is not None:
                self._add(name, content, found)
        new = len(self.columns) - before
        for metric in METRICS:
            blocks = found.get(metric, [])
            blocks += [{} for _ in range(new - len(blocks))]
            self.values[metric] = self.values.get(metric, Values.empty(before)).extended(before, blocks)

    def _add(self, name: str, content: Content, found: dict[str, list[dict[int, float]]]) -> None:
        process = content.process
        assert process is not None
        cards: dict[tuple[str | None, str | None], dict[str, dict[int, float]]] = {}
        latencies: dict[tuple[str | None, str | None], list[float]] = defaultdict(list)
        of: dict[str, tuple[str | None, str | None]] = {}
        for row in content.rows:
            test, taken = row.key, row.measurement.provenance
            controls = taken.controls if taken is not None else None
            card = (taken.card if taken is not None else process.device.uuid, controls.source if controls is not None else None)
            of[test] = card
            if controls is not None and controls.latency is not None:
                latencies[card].append(controls.latency)
            into = cards.setdefault(card, defaultdict(dict))
            at = self._row(test, "")
            for metric, value in of_measurement(row.measurement):
                into[metric][at] = value
            timed = into[LATENCY.name]
            timed[self._row(test, f"{row.measurement.mode}, {row.measurement.sampler}")] = timed.pop(at)
        usual = next(iter(cards), (process.device.uuid, None))
        for one in content.footprints:
            test = one.key
            into, at = cards.setdefault(of.get(test, usual), defaultdict(dict)), self._row(test, "")
            for metric, value in of_footprint(one.footprint):
                into[metric][at] = value
        for card, figures in cards.items():
            read = sorted(latencies[card])
            self.columns.append(
                Column(
                    file=name,
                    id=content.id,
                    when=content.utc.isoformat(timespec="seconds"),
                    revision=content.revision or "",
                    device=process.device.name,
                    simulated=process.device.simulated,
                    card=card[0],
                    control=card[1],
                    dram=read[len(read) // 2] if read else None,
                )
            )
            for metric in METRICS:
                found[metric].append(dict(figures.get(metric, {})))

    def _row(self, test: str, how: str) -> int:
        at = self._at.get((test, how))
        if at is None:
            at = self._at[test, how] = len(self.rows)
            self.rows.append((test, how))
        return at

    def remove(self, names: set[str]) -> None:
        """Remove files that the store has no more."""
        kept = np.array([column.file not in names for column in self.columns], bool)
        self.files = [name for name in self.files if name not in names]
        self.marks = [mark for mark in self.marks if mark.file not in names]
        self.columns = [column for column, stays in zip(self.columns, kept, strict=True) if stays]
        self.values = {metric: values.without(kept) for metric, values in self.values.items()}

    def to_bytes(self) -> bytes:
        """As the cache keeps them."""
        about = msgspec.json.encode(_About(VERSION, self.files, self.columns, self.marks, self.rows))
        arrays: dict[str, NDArray[Any]] = {"about": np.frombuffer(about, np.uint8)}
        for metric, values in self.values.items():
            arrays |= {f"{metric}/{name}": array for name, array in vars(values).items()}
        out = io.BytesIO()
        np.savez(out, **arrays)  # type: ignore[arg-type]
        return out.getvalue()

    @staticmethod
    def read(path: Path) -> Columns:
        """What `to_bytes` wrote; raises what NumPy and msgspec raise where it is another file."""
        own = Columns()
        with np.load(path, allow_pickle=False) as arrays:
            about = msgspec.json.decode(arrays["about"].tobytes(), type=_About)
            if about.version != VERSION:
                raise ValueError("another version")
            for metric in METRICS:
                if f"{metric}/rows" in arrays:
                    own.values[metric] = Values(*(arrays[f"{metric}/{one.name}"] for one in fields(Values)))
        own.files, own.columns, own.marks, own.rows = about.files, about.columns, about.marks, about.rows
        own._at = {row: at for at, row in enumerate(own.rows)}
        return own


def cache_file(place: Storage, key: str) -> Path:
    """The file that keeps the columns of one kind of card at a place."""
    return user_cache_path("pytest-gpumem") / "history" / f"{hashlib.sha256(str(place.at(key).absolute()).encode()).hexdigest()[:16]}.npz"


def columns_of(place: Storage, key: str) -> Columns:
    """The runs of one kind of card at a place, of which only the new files are read.
    Raises `BaselineError`: as `Store.load`.
    """
    there = {path.name: path for path in paths(place, key)}
    cache = cache_file(place, key)
    try:
        found = Columns.read(cache)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, msgspec.MsgspecError):
        found = Columns()
    known = set(found.files)
    if gone := known - there.keys():
        found.remove(gone)
    new = [path for name, path in there.items() if name not in known]
    for begin in range(0, len(new), AT_ONCE):
        with uncollected():
            found.add((path.name, _content(path, place.shown(path))) for path in new[begin : begin + AT_ONCE])
    seen: dict[str, str] = {}
    for column in found.columns:
        refuse_copy(seen, column.id, there[column.file], place)
    if new or gone:
        with suppress(OSError):  # it is read again
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_whole(cache, found.to_bytes())
    return found


def _content(path: Path, shown: str) -> Content:
    """The content of a file, checked by the digest in its name, else by the one inside."""
    with suppress(OSError, FileError):
        text = path.read_bytes()
        if path.stem.endswith(hashlib.sha256(text).hexdigest()[:16]):
            return read_checked(text)
    return load_file(path, shown)
