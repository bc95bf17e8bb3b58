"""Arguments of kernels as text, so that unchanged code gives equal text: a pointer is named by its
kind of memory, and words that differ between unchanged launches are left out.

A text has the argument's words of four bytes, the lowest first: "100000 0" is 1048576 as 64 bits,
"device -" a pointer, and "?" a word that is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

WORD = 4
POINTER = 8
LEAST_ADDRESS = 2**32
"""With unified virtual addressing a 64-bit process has no memory of CUDA below."""
PATTERN = r"^[0-9a-z?-]{1,9}( [0-9a-z?-]{1,9})*$"
"""Of the text of an argument in a file."""
_LEFT_OUT = "?"


def text(value: bytes, offset: int, memory: Callable[[int], str | None]) -> str:
    """Return the text of an argument.
    `value`: its bytes.
    `offset`: of its first byte in the kernel's parameters; pointers are aligned there.
    `memory`: the kind of memory at an address; None where there is none of CUDA.
    """
    words = []
    at = 0
    while at < len(value):
        if (offset + at) % POINTER == 0 and at + POINTER <= len(value):
            address = int.from_bytes(value[at : at + POINTER], "little")
            kind = memory(address) if address >= LEAST_ADDRESS else None
            if kind is not None:
                words += [kind, "-"]
                at += POINTER
                continue
        words.append(f"{int.from_bytes(value[at : at + WORD], 'little'):x}")
        at += WORD
    return " ".join(words)


def hidden(first: str, second: str, *, differing: bool = False) -> str:
    """Return the first text without the words that the second leaves out or, if `differing`,
    has other values of. Texts of different sizes stay whole."""
    words, others = first.split(), second.split()
    if len(words) != len(others):
        return first
    for index, other in enumerate(others):
        if other == _LEFT_OUT or (differing and words[index] != other):
            words[index] = _LEFT_OUT
    return " ".join(words)


def in_words(words: Sequence[str]) -> str:
    """Return some words of a text for a reader: a number in decimal, or a kind of memory."""
    if all(set(word) <= set("0123456789abcdef") for word in words):
        return str(int("".join(word.zfill(2 * WORD) for word in reversed(words)), 16))
    return " ".join(word for word in words if word != "-")
