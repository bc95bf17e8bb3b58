"""Arguments of kernels as text, so that unchanged code gives equal text: addresses and bytes that mean nothing are left out. Pure.

The text of an argument has a token for each aligned word of eight bytes that it lies in, with a space between: the bytes as a hexadecimal
number without leading zeros, "??" for a byte that varies between unchanged launches, or what stands for an address. "0*12" is twelve
times "0".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

WORD = 8
MOST_ALIGNMENT = 256
"""Bytes by which every allocation is aligned (CUDA C++ Programming Guide, Device Memory Accesses); more is a library's choice."""
LEAST_ADDRESS = 2**32
"""Nobody is asked about smaller words: with unified virtual addressing a 64-bit process has no device memory there. If one had, its digests
would differ, and nothing would pass by them."""
VARIES = "varies"  # the text of an argument that the test says varies on purpose

_DIGITS = 2 * WORD
_UNKNOWN = "??"
_UNIT = WORD // 2  # bytes that are left out together


PATTERN = r"^(varies|(p\d{1,3}|h|[0-9a-f?]{1,16})(\*\d{1,4})?( (p\d{1,3}|h|[0-9a-f?]{1,16})(\*\d{1,4})?)*)$"
"""Of the text of an argument in a file."""
_MOST_WORDS = 2**15 // WORD  # CUDA's parameters of a kernel take less than 32 KiB


class Interval(NamedTuple):
    """Addresses of one allocation."""

    begin: int  # First address
    end: int  # Address behind the last one
    host: bool = False  # Plain memory of the host, whose place says nothing


class Addresses:
    """Tells words that are addresses of live memory from others. It asks once for each allocation.
    `ask`: the allocation that an address lies in; None if there is none.
    """

    def __init__(self, ask: Callable[[int], Interval | None]) -> None:
        self._ask = ask
        self._begins: list[int] = []
        self._found: list[Interval] = []
        self._others: set[int] = set()  # words that lie nowhere

    def token(self, word: int) -> str | None:
        """What stands for a word that is an address, or one past the last one of an allocation: "p256" with its alignment in bytes, "h" for
        plain memory of the host. None for other words."""
        if word < LEAST_ADDRESS:
            return None
        found = self._at(word) or self._at(word - 1)
        if found is None:
            return None
        return "h" if found.host else f"p{min(word & -word, MOST_ALIGNMENT)}"

    def _at(self, word: int) -> Interval | None:
        index = bisect_right(self._begins, word) - 1
        if index >= 0 and word < self._found[index].end:
            return self._found[index]
        if word in self._others:
            return None
        found = self._ask(word)
        if found is None:
            self._others.add(word)
            return None
        index = bisect_right(self._begins, found.begin)
        self._begins.insert(index, found.begin)
        self._found.insert(index, found)
        return found


def texts(
    block: bytes, parameters: Sequence[tuple[int, int]], address: Callable[[int], str | None]
) -> tuple[str, ...]:
    """The text of each argument.
    `block`: the block of parameters as the kernel reads it.
    `parameters`: offset and bytes of each, in order. What lies between them means nothing.
    `address`: what stands for a word that is an address; None for other words.
    """
    return tuple(
        _text(_tokens_of(block, offset, offset + size, address)) for offset, size in parameters
    )


def _tokens_of(
    block: bytes, begin: int, end: int, address: Callable[[int], str | None]
) -> list[str]:
    found = []
    while begin < end:
        stop = min(end, begin - begin % WORD + WORD)
        value = int.from_bytes(block[begin:stop], "little")
        token = address(value) if stop - begin == WORD else None
        found.append(token or f"{value:x}")
        begin = stop
    return found


def masked(one: str, other: str) -> str:
    """The text of an argument with "??" for each aligned four bytes in which two launches differ, or that either leaves out already. What
    is not initialised is mostly a half of some address, of which single bytes may agree by chance."""
    return _each(one, other, _masked)


LEAST_VALUES = 5  # different values from which on four bytes vary by themselves, if four of five runs have one of their own


def varying(runs: Sequence[str]) -> str:
    """The text of the first run's argument with "??" for each aligned four bytes that have another value in most runs. A change of the code
    gives few values."""
    words = [tokens(text) for text in runs]
    if len({len(found) for found in words}) != 1:
        return runs[0]
    return _text([_varying(list(word)) for word in zip(*words, strict=True)])


def _varying(found: Sequence[str]) -> str:
    if len(set(found)) < LEAST_VALUES:
        return found[0]
    of_bytes = [_bytes(token) for token in found]
    known = [one for one in of_bytes if one is not None]
    if len(known) < len(found):
        return _UNKNOWN * WORD if _many(found) else found[0]
    halves = (["".join(one[at : at + _UNIT]) for one in known] for at in (0, _UNIT))
    return _number(
        [
            byte
            for half in halves
            for byte in ([_UNKNOWN] * _UNIT if _many(half) else _pairs(half[0]))
        ]
    )


def _many(values: Sequence[str]) -> bool:
    return len(set(values)) >= max(LEAST_VALUES, 0.8 * len(values))


def under(one: str, mask: str) -> str:
    """The text of an argument with "??" for each byte that `mask` leaves out."""
    return _each(one, mask, _under)


def unknown_bytes(text: str) -> int:
    """Number of bytes that an argument's text leaves out."""
    return sum(token.count(_UNKNOWN) for token in tokens(text))


def in_words(token: str) -> str:
    """A token for a reader: "256", "an address aligned to 256 bytes"; a word with unknown bytes is hexadecimal, such as "0x12??"."""
    if token.startswith("p"):
        return f"an address aligned to {token[1:]} bytes"
    if token == "h":
        return "an address of the host"
    if token == VARIES:
        return VARIES
    return f"0x{token}" if "?" in token else str(int(token, 16))


def tokens(text: str) -> list[str]:
    """The tokens of an argument's text, one a word."""
    found: list[str] = []
    for part in text.split():
        token, _, times = part.partition("*")
        found += [token] * min(int(times or 1), _MOST_WORDS - len(found))
    return found


def _text(found: Sequence[str]) -> str:
    runs = ((token, sum(1 for _ in run)) for token, run in groupby(found))
    return " ".join(token if times == 1 else f"{token}*{times}" for token, times in runs)


def _each(one: str, other: str, change: Callable[[str, str], str]) -> str:
    if one == other:
        return one
    first, second = tokens(one), tokens(other)
    if len(first) != len(second):  # of other types
        return one
    return _text([change(*pair) for pair in zip(first, second, strict=True)])


def _masked(one: str, other: str) -> str:
    if one == other:
        return one
    bytes_of = (_bytes(one), _bytes(other))
    if None in bytes_of:
        return _UNKNOWN * WORD
    first, second = bytes_of
    assert first is not None
    assert second is not None
    halves = ((first[at : at + _UNIT], second[at : at + _UNIT]) for at in (0, _UNIT))
    return _number(
        [
            byte
            for mine, theirs in halves
            for byte in (mine if mine == theirs else [_UNKNOWN] * _UNIT)
        ]
    )


def _under(one: str, mask: str) -> str:
    hides, found = _bytes(mask), _bytes(one)
    if hides is None or _UNKNOWN not in hides:
        return one
    if found is None:  # an address, of which a part cannot be left out
        return mask if all(byte == _UNKNOWN for byte in hides) else one
    return _number(
        [
            _UNKNOWN if hidden == _UNKNOWN else byte
            for byte, hidden in zip(found, hides, strict=True)
        ]
    )


def _bytes(token: str) -> list[str] | None:
    """The bytes of a word in hexadecimal, the highest first; None for an address."""
    if token[:1] in ("p", "h", "v"):
        return None
    return _pairs(token.zfill(_DIGITS))


def _pairs(digits: str) -> list[str]:
    return [digits[at : at + 2] for at in range(0, len(digits), 2)]


def _number(of_bytes: Sequence[str]) -> str:
    return "".join(of_bytes).lstrip("0") or "0"
