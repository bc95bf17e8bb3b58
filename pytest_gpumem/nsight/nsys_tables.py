"""The tables of a SQLite export of Nsight Systems as plain rows, and its NVTX ranges of the domain `gpumem`.

An export has only the tables and columns that its version knows and that it recorded. Columns of later versions read as None. Versions
before 3 export a default where later ones have NULL ("SQLite Schema Reference" of the Nsight Systems user guide).
"""

from __future__ import annotations

import re
import sqlite3
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from pytest_gpumem.nsight.recording import BadReport, RangePlace, place_of
from pytest_gpumem.ranges import DOMAIN, MEASURE, NODEID_CATEGORY

NEWEST_SCHEMA = 3  # major version of the newest known schema; 3.24 is of Nsight Systems 2026.1. A minor version only adds.

PROCESS = ~0xFFFFFF
"""Mask of the bits that a serialised thread id (`globalTid`) shares with that of its process (`globalPid`), whatever their sign."""

KERNELS, COPIES, MEMSETS = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
)
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES, STRINGS, META = "NVTX_EVENTS", "StringIds", "META_DATA_EXPORT"

TEXTS = ("name", "text", "value")  # columns of text; all others have whole numbers
NEVER_NULL = ("start", "end", "bytes", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
"""Columns that every row needs, except the end of a range that was never closed."""


def process_of(global_id: int) -> int:
    """The process id in a serialised thread or process id."""
    return (global_id >> 24) & 0xFFFFFF


class Tables:
    """An exported SQLite file, opened for reading.
    Raises `BadReport`: it is missing, no SQLite, truncated, empty, not of Nsight Systems, or of a newer schema.
    """

    def __init__(self, path: Path) -> None:
        self.schema = ""  # version of the schema; empty if the file does not have it
        self._connection = _opened(path)
        try:
            kinds = dict(
                self._read("SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')")
            )
            self._names, self._views = (
                set(kinds),
                {name for name, kind in kinds.items() if kind == "view"},
            )
            if not self._names:
                raise BadReport(
                    "an empty SQLite file: the export was broken off, or nothing was recorded"
                )
            if STRINGS not in self._names or not self._names & {
                META,
                RANGES,
                KERNELS,
                CALLS,
                "TARGET_INFO_SESSION_START_TIME",
            }:
                raise BadReport(
                    "SQLite, but no export of Nsight Systems; accepted is what `nsys export --type sqlite` writes"
                )
            self._meta = dict(self.rows(META, ("name", "value")))
            self.schema = str(self._meta.get("EXPORT_SCHEMA_VERSION") or "")
            major = re.match(r"[0-9]+", self.schema)
            if major and int(major[0]) > NEWEST_SCHEMA:
                raise BadReport(
                    f"of schema {self.schema}, which is newer than {NEWEST_SCHEMA}.x; export it by an older nsys, or update pytest-gpumem"
                )
            self._strings: dict[int, str] = {
                key: value or "" for key, value in self.rows(STRINGS, ("id", "value"))
            }
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Tables:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    @property
    def version(self) -> str:
        """Version of the exporting Nsight Systems; empty if the file does not have it."""
        return str(self._meta.get("EXPORT_PRODUCT_VERSION") or "")

    def string(self, key: object) -> str:
        """The registered string of a number; empty without one."""
        return self._strings.get(key, "") if isinstance(key, int) else ""

    def enumeration(self, table: str, documented: dict[int, str]) -> dict[int, str]:
        """The names of an enumeration in the file, else as documented: early versions export no such tables."""
        return {
            **documented,
            **{key: name for key, name in self.rows(table, ("id", "name")) if name},
        }

    def rows(
        self, table: str, needed: Sequence[str], wanted: Sequence[str] = (), where: str = ""
    ) -> Iterator[tuple[Any, ...]]:
        """The rows of a table; none without the table.
        `needed`: columns that every known version has.
        `wanted`: further columns; None if this version does not have them.
        `where`: a condition in SQL.
        Raises `BadReport`: a needed column is missing, a value is of another type, or the file is broken.
        """
        if table not in self._names:
            return
        if table in self._views:
            # A view computes its rows, and may never end.
            raise BadReport(
                f"{table} is a view; in what `nsys export --type sqlite` writes it is a table"
            )
        present = {str(row[1]) for row in self._read(f'PRAGMA table_info("{table}")')}
        if missing := [name for name in needed if name not in present]:
            version = f"schema {self.schema}" if self.schema else "a schema without a version"
            raise BadReport(f"{table} has no column {', '.join(missing)}: {version} is unknown")
        self._check([name for name in (*needed, *wanted) if name in present], table, where)
        columns = ", ".join(
            f'"{name}"' if name in present else "NULL" for name in (*needed, *wanted)
        )
        yield from self._read(
            f'SELECT {columns} FROM "{table}"{f" WHERE {where}" if where else ""}'
        )

    def _check(self, columns: Sequence[str], table: str, where: str) -> None:
        """Refuse values of other types than the schema's: SQLite accepts any type in any column."""
        for name in columns:
            accepted = ["'text'" if name in TEXTS else "'integer'"]
            if name not in NEVER_NULL or (table, name) == (RANGES, "end"):
                accepted.append("'null'")
            wrong = f'typeof("{name}") NOT IN ({", ".join(accepted)})'
            condition = f"({where}) AND {wrong}" if where else wrong
            for (value,) in self._read(f'SELECT "{name}" FROM "{table}" WHERE {condition} LIMIT 1'):
                shown = "NULL" if value is None else repr(value)[:60]
                raise BadReport(
                    f"damaged: {table} has {shown} for {name}, accepted is {accepted[0][1:-1]}; export the report again"
                )

    def _read(self, statement: str) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._connection.execute(statement)
        except sqlite3.Error as error:
            raise BadReport(_reason(error)) from None


def _opened(path: Path) -> sqlite3.Connection:
    try:
        with path.open("rb") as file:
            begin = file.read(16)
    except OSError as error:
        raise BadReport(f"cannot be read: {error.strerror or error}") from None
    if not begin:
        raise BadReport("an empty file")
    if not begin.startswith(b"SQLite format 3"):
        raise BadReport("no SQLite; accepted is what `nsys export --type sqlite` writes")
    # Read-only, so that neither a journal appears beside somebody's report nor a lock is taken.
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return connection


def _reason(error: sqlite3.Error) -> str:
    text = str(error)
    if "malformed" in text or "disk I/O" in text or "not a database" in text:
        return f"cut off or damaged ({text}): export the report again"
    return f"cannot be read: {text}"


CATEGORY, MARK, PUSH_POP, NEW_DOMAIN = (
    33,
    34,
    59,
    75,
)  # types of NVTX events that are read ("NVTX Event Type Values" of the SQLite schema)


@dataclass(eq=False)
class Range:
    """One push/pop range of the domain `gpumem`."""

    name: str
    start: int  # nanoseconds
    end: int  # nanoseconds; the end of the recording for a range that was never closed
    thread: int  # serialised id of its thread
    outer: Range | None = None  # the range around it, on the same thread
    inner: list[Range] = field(default_factory=list)  # the ranges directly within it

    @property
    def path(self) -> tuple[str, ...]:
        """Names from the outermost range to this one."""
        return (*(self.outer.path if self.outer is not None else ()), self.name)

    @property
    def place(self) -> RangePlace:
        """The test and label that it belongs to."""
        place = place_of(self.path)
        assert place is not None
        return place

    @property
    def measuring(self) -> Range | None:
        """The measured launch that it is or lies in: the innermost `.measure` range."""
        if self.name.endswith(f".{MEASURE}"):
            return self
        return self.outer.measuring if self.outer is not None else None


class RangesByThread:
    """All ranges of the domain `gpumem`, with the node ids in marks.

    Ranges nest properly on a thread, because the last one pushed is the first one popped.
    `ranges`: the ranges, in any order.
    `marks`: nanosecond, serialised thread and text of the marks with a test's node id.
    """

    def __init__(self, ranges: Iterable[Range], marks: Iterable[tuple[int, int, str]]) -> None:
        self._threads: dict[int, list[Range]] = defaultdict(list)
        for one in sorted(ranges, key=lambda r: (r.start, -r.end)):
            self._threads[one.thread].append(one)
        for of_thread in self._threads.values():
            open_ones: list[Range] = []
            for one in of_thread:
                while open_ones and open_ones[-1].end <= one.start:
                    open_ones.pop()
                if open_ones:
                    one.outer = open_ones[-1]
                    one.outer.inner.append(one)
                open_ones.append(one)
        self._starts = {
            thread: [one.start for one in of_thread] for thread, of_thread in self._threads.items()
        }
        self._nodeids = {
            (thread & PROCESS, around.place.test): text
            for start, thread, text in marks
            if (around := self.around(thread, start, start)) is not None
        }

    def __iter__(self) -> Iterator[Range]:
        for of_thread in self._threads.values():
            yield from of_thread

    def __len__(self) -> int:
        return sum(map(len, self._threads.values()))

    def nodeid(self, process: int, test: str) -> str | None:
        """pytest's id of a test in a process (a serialised id); None without a mark."""
        return self._nodeids.get((process, test))

    def around(self, thread: int, start: int, end: int) -> Range | None:
        """The innermost range that contains all of a call, as in `nvtx_kern_sum`."""
        of_thread = self._threads.get(thread)
        if of_thread is None:
            return None
        position = bisect_right(self._starts[thread], start) - 1
        found: Range | None = of_thread[position] if position >= 0 else None
        while found is not None and found.end < end:
            found = found.outer
        return found


def _events(tables: Tables) -> list[tuple[int, int, int, str, int, int, int | None]]:
    """Start, end, kind, name, thread, domain and category of each event."""
    rows = list(
        tables.rows(
            RANGES,
            ("start", "end", "eventType", "text", "globalTid", "domainId"),
            ("textId", "category"),
            f"eventType IN ({CATEGORY}, {MARK}, {PUSH_POP}, {NEW_DOMAIN})",
        )
    )
    last = max(
        (time for start, end, *_ in rows for time in (start, end) if time is not None), default=0
    )
    return [
        # A range that was never closed has no end, or one of 0.
        # A registered string is in textId, any other in text; earlier versions have an empty text beside a textId.
        (
            start,
            last if not end or end < start else end,
            kind,
            text or tables.string(registered),
            thread or 0,
            domain or 0,
            category,
        )
        for start, end, kind, text, thread, domain, registered, category in rows
    ]


def ranges_of(tables: Tables) -> RangesByThread:
    """The ranges of an export. Events of creation name the domains. A recording that begins later has none. Then every domain with a range
    of a measured launch counts."""
    ranges: dict[tuple[int, int], list[Range]] = defaultdict(list)
    marks = list[tuple[tuple[int, int], int, int, str, int | None]]()
    names, categories = dict[tuple[int, int], str](), set[tuple[int, int, int | None]]()
    for start, end, kind, name, thread, domain, category in _events(tables):
        key = thread & PROCESS, domain
        if kind == NEW_DOMAIN:
            names[key] = name
        elif kind == CATEGORY and name == NODEID_CATEGORY:
            categories.add((*key, category))
        elif kind == MARK:
            marks.append((key, start, thread, name, category))
        elif kind == PUSH_POP and name:
            ranges[key].append(Range(name, start, end, thread))
    ours = _domains(names, ranges)
    # If an exporter leaves out the names of categories, all our marks are node ids.
    without_names = ours - {(process, domain) for process, domain, _ in categories}
    categories |= {(*key, category) for key, *_, category in marks if key in without_names}
    nodeids = (
        (start, thread, text)
        for key, start, thread, text, category in marks
        if key in ours and (*key, category) in categories
    )
    return RangesByThread((one for key in ours for one in ranges[key]), nodeids)


def _domains(
    names: Mapping[tuple[int, int], str], ranges: Mapping[tuple[int, int], Sequence[Range]]
) -> set[tuple[int, int]]:
    named = {key for key, name in names.items() if name == DOMAIN}
    unnamed = (key for key in ranges if key not in names and key[1])
    return named | {
        key for key in unnamed if any(one.name.endswith(f".{MEASURE}") for one in ranges[key])
    }
