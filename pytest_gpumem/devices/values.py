"""Seeded values that fill memory, and the comparison of two arrays, by NumPy.

Random values are a hash of the seed and the element's index alone (SplitMix64: Steele, Lea, Flood,
OOPSLA 2014): neither the kind of memory nor the size of the buffer changes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pytest_gpumem.devices.protocol import Unsupported

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
CHUNK = 1 << 20  # elements that NumPy handles at a time: its temporaries stay in the host's cache
_LEAST = 1e-30  # |expected| below it counts as it: the protocol's rule


def plain_type(dtype: str) -> tuple[str, int]:
    """The type as which an element is filled, and how many of it it holds: two floats for a complex
    number, bytes for what is rare."""
    element = np.dtype(dtype)
    if element.kind in "iu":
        return f"u{element.itemsize}", 1
    if element.kind == "c" and element.itemsize in (8, 16):
        return f"f{element.itemsize // 2}", 2
    if element.str[1:] in ("f2", "f4", "f8", "b1"):
        return element.str[1:], 1
    return "u1", element.itemsize


def start_of(seed: int) -> int:
    """A hash: the sequences of neighbouring seeds would overlap."""
    return int(_mixed(np.array([seed & (2**64 - 1)], dtype=np.uint64))[0])


def fill(out: Any, seed: int) -> None:
    """Fill a one-dimensional array of a plain type: floats uniform in [0, 1), integers of their
    full range, booleans 0 or 1."""
    start = np.uint64(start_of(seed))
    for first in range(0, out.size, CHUNK):
        piece = out[first : first + CHUNK]
        index = np.arange(first + 1, first + 1 + piece.size, dtype=np.uint64)
        z = _mixed(start + index * np.uint64(_GOLDEN))
        if piece.dtype.kind == "f":
            bits = {2: 11, 4: 24, 8: 53}[piece.dtype.itemsize]
            piece[:] = (z >> np.uint64(64 - bits)).astype(np.float64) * 2.0**-bits
        elif piece.dtype.kind == "b":
            piece[:] = z >> np.uint64(63)
        else:
            piece[:] = z.astype(piece.dtype)


def _mixed(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    return z ^ (z >> np.uint64(31))


def compared_type(dtype: Any) -> tuple[str, int]:
    """The type that an element is compared as, and how many of it an element holds."""
    element = np.dtype(dtype)
    if element.kind in "iub":
        return f"u{element.itemsize}", 1
    plain, parts = plain_type(element.str)
    if plain[0] != "f":
        raise Unsupported(f"elements of {element} cannot be compared")
    return plain, parts


def mismatch(actual: Any, expected: Any, tolerance: float) -> tuple[int, int] | None:
    """As `Content.mismatch`, of two flat arrays of equal type."""
    element, parts = compared_type(actual.dtype)
    actual, expected = actual.view(element), expected.view(element)
    count, first = 0, -1
    for start in range(0, actual.size, CHUNK):
        a, e = actual[start : start + CHUNK], expected[start : start + CHUNK]
        if element[0] == "u":
            differs = a != e
        else:
            x, y = a.astype(np.float64), e.astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                differs = ~((x == y) | (np.abs(x - y) <= tolerance * np.maximum(np.abs(y), _LEAST)))
        differing = int(np.count_nonzero(differs))
        if differing and first < 0:
            first = start + int(np.argmax(differs))
        count += differing
    return (count, first // parts) if count else None
