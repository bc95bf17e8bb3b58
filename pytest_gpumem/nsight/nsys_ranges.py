"""NVTX ranges of the domain `gpumem` in an export of Nsight Systems, and the range that a call was made in."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pytest_gpumem.nsight.nsys_tables import PROCESS, RANGES, Tables
from pytest_gpumem.nsight.recording import RangePlace, place_of
from pytest_gpumem.ranges import DOMAIN, MEASURE, NODEID_CATEGORY

CATEGORY, MARK, PUSH_POP, NEW_DOMAIN = 33, 34, 59, 75
"""Types of NVTX events that are read ("NVTX Event Type Values" of the SQLite schema)."""


@dataclass(eq=False)
class Range:
    """One push/pop range of the domain `gpumem`."""

    name: str
    start: int
    """Nanoseconds."""
    end: int
    """Nanoseconds; the end of the recording for a range that was never closed."""
    thread: int
    """Serialised id of its thread."""
    outer: Range | None = None
    """The range around it, on the same thread."""
    inner: list[Range] = field(default_factory=list)
    """The ranges directly within it."""

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

    Args:
        ranges: the ranges, in any order.
        marks: nanosecond, serialised thread and text of the marks with a test's node id.
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
        self._starts = {thread: [one.start for one in of_thread] for thread, of_thread in self._threads.items()}
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

    def next_start(self, one: Range) -> int | None:
        """The start of the next range of the thread after the end of this one; None without one."""
        starts = self._starts[one.thread]
        position = bisect_left(starts, one.end)
        return starts[position] if position < len(starts) else None


def ranges_of(tables: Tables) -> RangesByThread:
    """The ranges of an export.

    Events of creation name the domains. A recording that begins later has none. Then every domain with a range of a measured launch counts.
    """
    events = list(
        tables.rows(
            RANGES,
            ("start", "end", "eventType", "text", "globalTid", "domainId"),
            ("textId", "category"),
            f"eventType IN ({CATEGORY}, {MARK}, {PUSH_POP}, {NEW_DOMAIN})",
        )
    )
    last = max((time for start, end, *_ in events for time in (start, end) if time is not None), default=0)
    ranges: dict[tuple[int, int], list[Range]] = defaultdict(list)
    marks: dict[tuple[int, int], list[tuple[int, int, str, int | None]]] = defaultdict(list)
    ours, named, categories = set[tuple[int, int]](), set[tuple[int, int]](), set[tuple[int, int, int]]()
    for start, end, kind, text, thread, domain, registered, category in events:
        # A registered string is in textId, any other in text; earlier versions have an empty text beside a textId.
        name = text or tables.string(registered)
        process = (thread or 0) & PROCESS
        key = process, domain or 0
        if kind == NEW_DOMAIN:
            named.add(key)
            if name == DOMAIN:
                ours.add(key)
        elif kind == CATEGORY and name == NODEID_CATEGORY:
            categories.add((*key, category))
        elif kind == MARK:
            marks[key].append((start, thread or 0, name, category))
        elif kind == PUSH_POP and name:
            # A range that was never closed has no end, or one of 0.
            ranges[key].append(Range(name, start, end if end is not None and end >= start else last, thread or 0))
    for key, found in ranges.items():
        if key not in named and key[1] and any(one.name.endswith(f".{MEASURE}") for one in found):
            ours.add(key)
    # If an exporter leaves out the names of categories, all our marks are node ids.
    without_names = {key for key in ours if not any(one[:2] == key for one in categories)}
    nodeids = (
        (start, thread, text)
        for key in ours
        for start, thread, text, category in marks[key]
        if key in without_names or (*key, category) in categories
    )
    return RangesByThread((one for key in ours for one in ranges[key]), nodeids)
