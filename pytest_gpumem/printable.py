"""Make text from tests, result files and profilers safe to print.

A line break in a test id may be read as a command of a CI service, an escape sequence controls the
terminal, a lone surrogate cannot be encoded.
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
    r"""Return a text, or a record or collection with texts, with escapes such as `\n`, `\x1b` and
    `\u202e` for each character that is not printable; the same value where there is none."""
    return _printable(value)  # type: ignore[no-any-return]


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return _escaped(value)
    if isinstance(value, PurePath):
        text = str(value)
        return value if text.isprintable() else type(value)(_escaped(text))
    if isinstance(value, (tuple, list)):
        return _sequence(value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, msgspec.Struct):
        changes = _changes(value, value.__struct_fields__)
        return msgspec.structs.replace(value, **changes) if changes else value
    if is_dataclass(value) and not isinstance(value, type):
        changes = _changes(value, [field.name for field in fields(value)])
        if changes:
            value = copy.copy(value)
            for name, text in changes.items():
                object.__setattr__(value, name, text)  # also of a frozen dataclass
    return value


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    escaped = text
    for character in set(text):
        if not character.isprintable():
            escaped = escaped.replace(character, character.encode("unicode_escape").decode())
    return type(text)(escaped)


def _sequence(value: Any) -> Any:
    if value and isinstance(value[0], (float, int)):  # samples, of which there are many
        return value
    items = [_printable(item) for item in value]
    if all(item is old for item, old in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*items)
    return type(value)(items)


def _changes(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields that are not printable, escaped."""
    changes = {}
    for name in names:
        old = getattr(value, name)
        new = _printable(old)
        if new is not old:
            changes[name] = new
    return changes
