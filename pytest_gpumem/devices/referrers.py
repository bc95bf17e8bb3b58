"""What refers to a Python object, in words: the name, attribute, list, closure or traceback that keeps an array alive.

Source: gc.get_referrers, which knows what the garbage collector tracks. References from C code do not show.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import CellType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, NamedTuple

DEEPEST = 12
"""References that are followed from an array to a name. Each costs a pass over all objects: 10 to 50 ms."""
MOST = 3
"""References to one object that are named."""
_WIDEST = 100
"""Objects that are followed at once: an object that everything refers to says nothing."""

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_NO_KEY = object()


class _Way(NamedTuple):
    """A way from an object to the array."""

    begin: Any
    """The object."""
    path: str
    """From it to the array: ".weights['w'][3]"."""
    key: Any = _NO_KEY
    """Of a dictionary, the key that the way begins with, and `path` lacks: whose attributes it holds is not known yet."""


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


def _steps(level: list[_Way], begins: list[Any], seen: set[int]) -> Iterator[tuple[list[_Way], Any]]:
    """Each holder of objects of a level, with the ways from these objects."""
    holders = gc.get_referrers(*begins)
    ways = {id(way.begin): way for way in level}
    for holder in holders:
        if id(holder) in seen or isinstance(holder, _Way) or (isinstance(holder, FrameType) and _is_ours(holder)):
            continue
        seen.add(id(holder))
        if held := [ways[id(one)] for one in gc.get_referents(holder) if id(one) in ways]:
            yield held, holder


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def _named(holder: Any, way: _Way) -> str | None:
    """The whole way, if it ends in something that has a name; None where it goes on."""
    path = _path(way)
    if isinstance(holder, FrameType):
        name = next((name for name, value in holder.f_locals.items() if value is way.begin), "?")
        kept = ", which an exception's traceback keeps" if any(isinstance(one, TracebackType) for one in gc.get_referrers(holder)) else ""
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
        return _Way(holder, f"[{next((index for index, one in enumerate(holder) if one is held), '?')}]{path}")
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
    key = repr(way.key) if isinstance(way.key, (str, int, float, bool, bytes)) else type(way.key).__name__
    return f"[{key}]{way.path}"


def _attributes(holder: Any) -> dict[str, Any] | None:
    """The dictionary of an object's attributes; of a class the one that it shows as a proxy."""
    found = getattr(holder, "__dict__", None)
    if isinstance(holder, type):
        return next((one for one in gc.get_referents(holder) if isinstance(one, dict) and one.get("__module__") == holder.__module__), None)
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
