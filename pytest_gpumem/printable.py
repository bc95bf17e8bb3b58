"""Text that is safe to print, whatever it was made from.

Test ids, labels, reasons and file names come from anybody: test files, result files, reports of profilers. A line break among them would
begin a line of its own in a log, where a CI may take it for a command. An escape sequence would command the terminal. A lone surrogate
cannot be written at all.
"""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


def printable(value: _T) -> _T:
    r"""Text with every character that does not show shown as an escape: `\n`, `\x1b`, `\u202e`, `\udcff`.

    Of a record, a list, a tuple or a mapping, the same with all text in it replaced. What holds nothing to replace is returned as it is.
    """
    made: Any = _printable(value)
    return made  # type: ignore[no-any-return]


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        if value.isprintable():
            return value
        return type(value)("".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in value))
    if isinstance(value, PurePath):
        return value if str(value).isprintable() else type(value)(_printable(str(value)))
    if isinstance(value, (tuple, list)):
        if value and isinstance(value[0], (float, int)):  # samples, of which there are many
            return value
        made = [_printable(one) for one in value]
        if all(one is other for one, other in zip(made, value, strict=True)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {_printable(key): _printable(one) for key, one in value.items()}
    if isinstance(value, msgspec.Struct):
        given = ((name, getattr(value, name)) for name in value.__struct_fields__)
        changed = {name: new for name, old in given if (new := _printable(old)) is not old}
        return msgspec.structs.replace(value, **changed) if changed else value
    if is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in fields(value):
            old = getattr(value, field.name)
            if (new := _printable(old)) is not old:
                changed[field.name] = new
        if changed:
            value = copy.copy(value)
            for name, new in changed.items():
                object.__setattr__(value, name, new)  # also of a frozen one
    return value
