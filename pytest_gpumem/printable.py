"""Make text from tests, result files and profilers safe to print: a line break may begin a command
of a CI service, an escape sequence controls the terminal, a lone surrogate cannot be encoded."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


def printable(value: _T) -> _T:
    r"""Return a text, record or collection with escapes such as `\n` for what is not printable."""
    return _printable(value)  # type: ignore[no-any-return]


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return _escaped(value)
    if isinstance(value, (tuple, list)):
        return _sequence(value)
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if not isinstance(value, msgspec.Struct):
        return value
    changes = {}
    for name in value.__struct_fields__:
        old = getattr(value, name)
        new = _printable(old)
        if new is not old:
            changes[name] = new
    return msgspec.structs.replace(value, **changes) if changes else value


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    escaped = text
    for character in set(text):
        if not character.isprintable():
            escaped = escaped.replace(character, character.encode("unicode_escape").decode())
    return escaped


def _sequence(value: Any) -> Any:
    if value and isinstance(value[0], (float, int)):  # samples, of which there are many
        return value
    items = [_printable(item) for item in value]
    if all(item is old for item, old in zip(items, value, strict=True)):
        return value
    return type(value)(items)
