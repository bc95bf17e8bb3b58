"""Forks of this process before it has a context: what their children do on the GPU is not read. Later children cannot use the GPU."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

FORKED = "not read: the test forked"


class Forks:
    """Counts them from now on. `unfinished`: None while there is no context."""

    def __init__(self, unfinished: Callable[[], bool | None]) -> None:
        self.count = 0
        self._unfinished = unfinished
        reference = weakref.WeakMethod(self._forking)

        def forking() -> None:
            method = reference()
            if method is not None:
                method()

        os.register_at_fork(before=forking)

    def _forking(self) -> None:
        if self._unfinished() is None:
            self.count += 1
