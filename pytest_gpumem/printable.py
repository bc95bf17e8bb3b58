"""Make text from tests, result files and profilers safe to print: a line break in a test id may be read as a command of a CI service, an
escape sequence controls the terminal, a lone surrogate cannot be encoded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


def printable(value: _T) -> _T:
    r"""Replace each character that is not printable by an escape: `\n`, `\x1b`, `\u202e`, `\udcff`.

    In a record, a list, a tuple or a mapping, all text is replaced. A value without such characters is returned unchanged.
    """
    made: Any = _printable(value)
    return made  # type: ignore[no-any-return]


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        if value.isprintable():
            return value
        return type(value)(
            "".join(
                one if one.isprintable() else one.encode("unicode_escape").decode() for one in value
            )
        )
    if isinstance(value, PurePath):
        return value if str(value).isprintable() else type(value)(_printable(str(value)))
    if isinstance(value, (tuple, list)):
        return _of_sequence(value)
    if isinstance(value, dict):
        return {_printable(key): _printable(one) for key, one in value.items()}
    if isinstance(value, msgspec.Struct):
        changed = _changed(value, value.__struct_fields__)
        return msgspec.structs.replace(value, **changed) if changed else value
    if is_dataclass(value) and not isinstance(value, type):
        changed = _changed(value, [field.name for field in fields(value)])
        if changed:
            value = copy.copy(value)
            for name, new in changed.items():
                object.__setattr__(value, name, new)  # also of a frozen one
    return value


def _of_sequence(value: Any) -> Any:
    if value and isinstance(value[0], (float, int)):  # samples, of which there are many
        return value
    made = [_printable(one) for one in value]
    if all(one is other for one, other in zip(made, value, strict=True)):
        return value
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)


def _changed(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """The fields that are not printable, as they are then."""
    given = ((name, getattr(value, name)) for name in names)
    return {name: new for name, old in given if (new := _printable(old)) is not old}
