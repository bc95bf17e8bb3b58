"""The line of the user's code behind each allocation and each wait."""

from __future__ import annotations

import linecache
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import FrameType

from pytest_gpumem.devices.memory_events import AllocationEvent, Line, Series
from pytest_gpumem.records.footprint import Site

MOST_SITES = 20  # sites that a footprint has by bytes at the peak, and again by bytes kept
LONGEST_CODE = 120  # characters of a line of code that are shown

PACKAGE = str(Path(__file__).resolve().parent.parent)
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")


def line_of(frame: FrameType | None) -> Line:
    """Return the user's innermost line from a frame on. In a thread of C code, such as PyTorch's autograd, it has no file, and the name of
    the thread."""
    return innermost(_lines(frame)) or ("", 0, _name_of_thread())


def _lines(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def innermost(lines: Iterable[Line]) -> Line | None:
    """Return the first line of the user's code, up to pytest's; where there is none, that of a library.
    `lines`: of a stack, the innermost first.
    """
    of_library: Line | None = None
    for line in lines:
        file = line[0]
        if is_pytests(file):
            break
        if is_users(file):
            return line
        if of_library is None and not file.startswith(("<", PACKAGE)):
            of_library = line
    return of_library


def _name_of_thread() -> str:
    """The system's name of this thread, such as "pt_autograd_0"."""
    try:
        return (
            Path(f"/proc/self/task/{threading.get_native_id()}/comm")
            .read_text(encoding="utf-8")
            .strip()
        )
    except OSError:
        return threading.current_thread().name


@cache
def _parts(file: str) -> tuple[str, ...]:
    return Path(file).parts


@cache
def is_users(file: str) -> bool:
    """True for a file that is neither the standard library's, nor an installed package's, nor this package's."""
    if file.startswith("<"):
        return False
    return not file.startswith((PACKAGE, *_STANDARD)) and not any(
        part in _INSTALLED for part in _parts(file)
    )


@cache
def is_pytests(file: str) -> bool:
    """True for a file of pytest: what started it leads to no allocation and to no call."""
    return "_pytest" in _parts(file)


def sites(
    at_peak: Iterable[AllocationEvent], kept: Iterable[AllocationEvent], root: Path
) -> tuple[Site, ...]:
    """The lines that allocated what lived at the peak or is kept, largest first. `at_peak`, `kept`: have lines."""
    groups: dict[tuple[Line, Series], _Group] = {}
    for one in at_peak:
        groups.setdefault((one.line, one.series), _Group()).at_peak.append(one)
    for one in kept:
        groups.setdefault((one.line, one.series), _Group()).kept.append(one)
    made = [group.site(line, series, root) for (line, series), group in groups.items()]
    both = attrgetter("at_peak"), attrgetter("kept")
    shown = {
        id(site)
        for of in both
        for site in sorted(made, key=of, reverse=True)[:MOST_SITES]
        if of(site)
    }
    return tuple(
        sorted(
            (site for site in made if id(site) in shown),
            key=lambda site: (-site.at_peak, -site.kept, site.file, site.line),
        )
    )


def is_named(file: str, line: int, patterns: Sequence[str]) -> bool:
    """True if a pattern such as "conftest.py:*" names a line. `file`: as `shown_path` gives it; without one, the line is unknown."""
    place = f"{file}:{line}"
    return bool(file) and any(
        fnmatchcase(place, pattern) or fnmatchcase(place, f"*/{pattern}") for pattern in patterns
    )


def is_allowed(allocated: AllocationEvent, patterns: Sequence[str], root: Path) -> bool:
    """True if a pattern names the line that allocated, as `sites` has it."""
    file, line, _function = allocated.line
    return is_named(shown_path(file, root), line, patterns)


class _Group:
    """Allocations of one line."""

    def __init__(self) -> None:
        self.at_peak: list[AllocationEvent] = []
        self.kept: list[AllocationEvent] = []

    def site(self, at: Line, series: Series, root: Path) -> Site:
        file, line, function = at
        library, kind = series
        return Site(
            file=shown_path(file, root),
            line=line,
            function=function,
            code=code_of(file, line),
            library=library,
            kind=kind,
            at_peak=_sum(self.at_peak),
            at_peak_count=len(self.at_peak),
            kept=_sum(self.kept),
            kept_count=len(self.kept),
        )


def code_of(file: str, line: int) -> str:
    """The text of a line; empty if it cannot be read."""
    if not file:
        return ""
    linecache.checkcache(file)  # a file may have been written since it was read last
    return linecache.getline(file, line).strip()[:LONGEST_CODE]


def _sum(allocations: Iterable[AllocationEvent]) -> int:
    return sum(one.nbytes for one in allocations)


@cache
def shown_path(file: str, root: Path) -> str:
    """A file relative to the root folder or to the folder of installed packages, where it lies in one: the same on every machine."""
    path = Path(file)
    if (
        installed := [place for place, part in enumerate(path.parts) if part in _INSTALLED]
    ) and path.is_absolute():
        return Path(*path.parts[installed[-1] + 1 :]).as_posix()
    return path.relative_to(root).as_posix() if file and path.is_relative_to(root) else file
