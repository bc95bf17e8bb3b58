"""Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector off inside the block.

    While samples are taken it may free device memory, which waits for the device behind a held stream. While modules are imported, files
    are read or many series made, it searches again and again what has no cycles: a fifth of a session's start.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
