"""Which line of the user's code allocated what: Python stacks, and their grouping by line. Pure."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from pytest_gpumem.devices.memory_events import Accounts, Allocated, Frame
from pytest_gpumem.records.footprint import MemoryPlace, Site

MOST_SITES = 20
"""Sites that a footprint has by bytes at the peak, and again by bytes kept."""
LONGEST_CODE = 120
"""Characters of a line of code that are shown."""

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")


def python_stack(skip: int = 0) -> tuple[Frame, ...]:
    """The Python frames of this thread, the innermost last. `skip`: innermost frames to leave out, besides that of this function."""
    found: list[Frame] = []
    frame = sys._getframe(skip + 1)
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(found))


@cache
def _parts(file: str) -> tuple[str, ...]:
    return Path(file).parts


@cache
def is_users(file: str) -> bool:
    """True for a file that is neither the standard library's, nor an installed package's, nor this package's."""
    if file.startswith("<"):
        return False
    return not file.startswith((_PACKAGE, *_STANDARD)) and not any(part in _INSTALLED for part in _parts(file))


def users_frames(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of the user's code from the test or fixture on; those of other code where there are none."""
    called = max((place for place, frame in enumerate(stack) if "_pytest" in _parts(frame[0])), default=-1)
    stack = stack[called + 1 :] or stack  # what started pytest leads to no allocation
    found = tuple(frame for frame in stack if is_users(frame[0]))
    return found or tuple(frame for frame in stack if not frame[0].startswith(("<", _PACKAGE))) or tuple(stack)


def sites(accounts: Accounts, root: Path, referrers: Callable[[Allocated], tuple[str, ...]] = lambda _: ()) -> tuple[Site, ...]:
    """The lines that allocated what lived at the peak or is kept, largest first.

    Args:
        accounts: of the test; its allocations have stacks.
        referrers: tells what refers to an allocation that is kept.
    """
    groups: dict[tuple[str, int, str, str, MemoryPlace], _Group] = {}

    def group(of: Allocated) -> _Group:
        file, line, function = users_frames(of.stack)[-1] if of.stack else ("", 0, "")
        return groups.setdefault((file, line, function, of.library, of.kind), _Group())

    for one in accounts.at_peak:
        group(one).at_peak.append(one)
    for one in accounts.kept:
        group(one).kept.append(one)
    made = [found.site(key, root, referrers) for key, found in groups.items()]
    shown = {id(site) for of in (_at_peak, _kept) for site in sorted(made, key=of, reverse=True)[:MOST_SITES] if of(site)}
    return tuple(sorted((site for site in made if id(site) in shown), key=lambda site: (-site.at_peak, -site.kept, site.file, site.line)))


def _at_peak(site: Site) -> int:
    return site.at_peak


def _kept(site: Site) -> int:
    return site.kept


class _Group:
    """Allocations of one line."""

    def __init__(self) -> None:
        self.at_peak: list[Allocated] = []
        self.kept: list[Allocated] = []

    def site(self, key: tuple[str, int, str, str, MemoryPlace], root: Path, referrers: Callable[[Allocated], tuple[str, ...]]) -> Site:
        file, line, function, library, kind = key
        largest = max((*self.at_peak, *self.kept), key=lambda one: one.nbytes)
        return Site(
            file=shown_path(file, root),
            line=line,
            function=function,
            code=_code(file, line),
            library=library,
            kind=kind,
            at_peak=_sum(self.at_peak),
            at_peak_count=len(self.at_peak),
            kept=_sum(self.kept),
            kept_count=len(self.kept),
            stack=tuple(f"{shown_path(name, root)}:{number} in {where}" for name, number, where in users_frames(largest.stack)),
            referrers=tuple(dict.fromkeys(text.replace(f"{root}/", "") for one in self.kept for text in referrers(one))),
        )


def _code(file: str, line: int) -> str:
    """The text of a line; empty if it cannot be read."""
    if not file:
        return ""
    linecache.checkcache(file)  # a file may have been written since it was read last
    return linecache.getline(file, line).strip()[:LONGEST_CODE]


def _sum(allocations: Iterable[Allocated]) -> int:
    return sum(one.nbytes for one in allocations)


def shown_path(file: str, root: Path) -> str:
    """A file relative to the root folder or to the folder of installed packages, where it lies in one: the same on every machine."""
    path = Path(file)
    if (installed := [place for place, part in enumerate(path.parts) if part in _INSTALLED]) and path.is_absolute():
        return Path(*path.parts[installed[-1] + 1 :]).as_posix()
    return path.relative_to(root).as_posix() if file and path.is_relative_to(root) else file
