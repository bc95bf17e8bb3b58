"""The line of the user's code behind each allocation, by Python stacks, and the references to an array that is kept, in words.

Source: gc.get_referrers, which knows what the garbage collector tracks. References from C code do not show.
"""

from __future__ import annotations

import gc
import linecache
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import CellType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, NamedTuple

from pytest_gpumem.devices.memory_events import AllocationEvent, Frame
from pytest_gpumem.records.footprint import MemoryPlace, Site

MOST_SITES = 20  # sites that a footprint has by bytes at the peak, and again by bytes kept
LONGEST_CODE = 120  # characters of a line of code that are shown

PACKAGE = str(Path(__file__).resolve().parent.parent)
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
    return not file.startswith((PACKAGE, *_STANDARD)) and not any(
        part in _INSTALLED for part in _parts(file)
    )


@cache
def is_pytests(file: str) -> bool:
    """True for a file of pytest: what started it leads to no allocation and to no call."""
    return "_pytest" in _parts(file)


def users_frames(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames of the user's code from the test or fixture on; those of other code where there are none."""
    called = max((place for place, frame in enumerate(stack) if is_pytests(frame[0])), default=-1)
    stack = stack[called + 1 :] or stack
    found = tuple(frame for frame in stack if is_users(frame[0]))
    return (
        found
        or tuple(frame for frame in stack if not frame[0].startswith(("<", PACKAGE)))
        or tuple(stack)
    )


def sites(
    at_peak: Iterable[AllocationEvent],
    kept: Iterable[AllocationEvent],
    root: Path,
    referrers: Callable[[AllocationEvent], tuple[str, ...]] = lambda _: (),
) -> tuple[Site, ...]:
    """The lines that allocated what lived at the peak or is kept, largest first.
    `at_peak`, `kept`: have stacks.
    `referrers`: tells what refers to an allocation that is kept.
    """
    groups: dict[tuple[str, int, str, str, MemoryPlace], _Group] = {}

    def group(of: AllocationEvent) -> _Group:
        file, line, function = users_frames(of.stack)[-1] if of.stack else ("", 0, "")
        return groups.setdefault((file, line, function, *of.series), _Group())

    for one in at_peak:
        group(one).at_peak.append(one)
    for one in kept:
        group(one).kept.append(one)
    made = [found.site(key, root, referrers) for key, found in groups.items()]
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
    if not allocated.stack or not patterns:
        return False
    file, line, _function = users_frames(allocated.stack)[-1]
    return is_named(shown_path(file, root), line, patterns)


class _Group:
    """Allocations of one line."""

    def __init__(self) -> None:
        self.at_peak: list[AllocationEvent] = []
        self.kept: list[AllocationEvent] = []

    def site(
        self,
        key: tuple[str, int, str, str, MemoryPlace],
        root: Path,
        referrers: Callable[[AllocationEvent], tuple[str, ...]],
    ) -> Site:
        file, line, function, library, kind = key
        largest = max((*self.at_peak, *self.kept), key=lambda one: one.nbytes)
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
            stack=tuple(
                f"{shown_path(name, root)}:{number} in {where}"
                for name, number, where in users_frames(largest.stack)
            ),
            referrers=tuple(
                dict.fromkeys(
                    text.replace(f"{root}/", "") for one in self.kept for text in referrers(one)
                )
            ),
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


DEEPEST = 12  # references that are followed from an array to a name. Each costs a pass over all objects: 10 to 50 ms.
MOST = 3  # references to one object that are named
_WIDEST = 100  # objects that are followed at once: an object that everything refers to says nothing

_NO_KEY = object()


class _Way(NamedTuple):
    """A way from an object to the array."""

    begin: Any  # the object
    path: str  # from it to the array: ".weights['w'][3]"
    key: Any = _NO_KEY  # of a dictionary, the key that the way begins with, and `path` lacks: whose attributes it holds is not known yet


def referrers_of(target: Any, ignored: Collection[int] = ()) -> tuple[str, ...]:
    """How an object is reached, such as "`cache['x'][3]` of the module app"; at most `MOST`, the shortest ways first.
    `ignored`: `id` of objects that refer to it and do not count. Frames of this package never do.
    """
    seen = {id(target), *ignored}
    found: list[str] = []
    level = [_Way(target, "")]
    for _ in range(DEEPEST):
        following: list[_Way] = []
        begins = [way.begin for way in level]
        seen |= {id(level), id(begins), id(following), id(found)}
        for held, holder in _steps(level, begins, seen):
            names = [text for way in held[:MOST] if (text := _named(holder, way)) is not None]
            found += names
            if not names and len(following) < _WIDEST:
                following.append(_onward(holder, held[0]))
        if len(found) >= MOST or not following:
            break
        level = following
    return tuple(dict.fromkeys(found))[:MOST]


def _steps(
    level: list[_Way], begins: list[Any], seen: set[int]
) -> Iterator[tuple[list[_Way], Any]]:
    """Each holder of objects of a level, with the ways from these objects."""
    holders = gc.get_referrers(*begins)
    ways = {id(way.begin): way for way in level}
    for holder in holders:
        if (
            id(holder) in seen
            or isinstance(holder, _Way)
            or (isinstance(holder, FrameType) and _is_ours(holder))
        ):
            continue
        seen.add(id(holder))
        if held := [ways[id(one)] for one in gc.get_referents(holder) if id(one) in ways]:
            yield held, holder


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def _named(holder: Any, way: _Way) -> str | None:
    """The whole way, if it ends in something that has a name; None where it goes on."""
    path = _path(way)
    if isinstance(holder, FrameType):
        name = next((name for name, value in holder.f_locals.items() if value is way.begin), "?")
        kept = (
            ", which an exception's traceback keeps"
            if any(isinstance(one, TracebackType) for one in gc.get_referrers(holder))
            else ""
        )
        return f"`{name}{path}`, a local variable of {holder.f_code.co_name} ({holder.f_code.co_filename}:{holder.f_lineno}){kept}"
    if isinstance(holder, dict) and (module := _module_of(holder)) is not None:
        return f"`{_key_in(holder, way.begin)}{path}` of the module {module}"
    if isinstance(holder, ModuleType):
        return f"`{path.lstrip('.')}` of the module {holder.__name__}"
    if isinstance(holder, FunctionType):
        return f"`{_variable_of(holder, way)}` of the function {holder.__qualname__}"
    if type(holder).__name__ == "FixtureDef":
        return f"the value of the fixture {getattr(holder, 'argname', '?')}"
    return None


def _onward(holder: Any, way: _Way) -> _Way:
    """The way from a holder that has no name."""
    path, held = _path(way), way.begin
    if isinstance(holder, dict):
        return _Way(holder, path, _key_in(holder, held))
    if isinstance(holder, (list, tuple)):
        return _Way(
            holder,
            f"[{next((index for index, one in enumerate(holder) if one is held), '?')}]{path}",
        )
    attributes = _attributes(holder)
    if attributes is held:  # the dictionary of its attributes
        return _Way(holder, f".{way.key}{way.path}")
    if isinstance(holder, (CellType, MethodType, TracebackType)):
        return _Way(holder, path)
    names = [name for name, value in (attributes or {}).items() if value is held]
    names += [name for name in _slots(holder) if getattr(holder, name, None) is held]
    return _Way(holder, f".{names[0]}{path}" if names else path)


def _path(way: _Way) -> str:
    if way.key is _NO_KEY:
        return way.path
    key = (
        repr(way.key)
        if isinstance(way.key, (str, int, float, bool, bytes))
        else type(way.key).__name__
    )
    return f"[{key}]{way.path}"


def _attributes(holder: Any) -> dict[str, Any] | None:
    """The dictionary of an object's attributes; of a class the one that it shows as a proxy."""
    found = getattr(holder, "__dict__", None)
    if isinstance(holder, type):
        return next(
            (
                one
                for one in gc.get_referents(holder)
                if isinstance(one, dict) and one.get("__module__") == holder.__module__
            ),
            None,
        )
    return found if isinstance(found, dict) else None


def _variable_of(function: FunctionType, way: _Way) -> str:
    """The closure's variable by which a function holds something, or the path into its defaults."""
    index, bracket, rest = way.path[1:].partition("]")
    if way.begin is function.__closure__ and bracket and index.isdigit():
        return function.__code__.co_freevars[int(index)] + rest
    return _path(way).lstrip(".")


def _key_in(holder: dict[Any, Any], held: Any) -> Any:
    return next((key for key, value in holder.items() if value is held), "?")


def _module_of(holder: dict[Any, Any]) -> str | None:
    name = holder.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return name if module is not None and vars(module) is holder else None


def _slots(holder: Any) -> Iterator[str]:
    for kind in type(holder).__mro__:
        slots = vars(kind).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
