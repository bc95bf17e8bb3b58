"""The waits of a test, from CUPTI's callbacks at the ends of the driver's calls that wait.

Asynchronous copies of pageable memory may wait too, and are not seen.
Source: CUDA Driver API, API synchronization behavior.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from pytest_gpumem.devices.cuda.cupti import CALLBACKS, ApiCall, imported, words
from pytest_gpumem.devices.user_lines import Line, is_named, line_of, shown_path
from pytest_gpumem.records.footprint import WaitLine, Waits

CALLS = re.compile(
    r"(cu(?:CtxSynchronize|StreamSynchronize|EventSynchronize|MemFree|MemFreeHost"
    r"|Memcpy(?:HtoD|DtoH|HtoA|AtoH|2D|2DUnaligned|3D)?))(?:_v\d+)?"
)
"""The calls that wait, and their version: a free waits for the work that may use the memory, and so
does a copy of host memory. One with Async in its name does not match."""


@cache
def _calls() -> dict[str, str]:
    """The calls that wait, by the name that CUPTI has for each. Raises `NotCounted`."""
    calls = {}
    for name in imported().driver_api_trace_cbid.__members__:
        match = CALLS.fullmatch(name)
        if match is not None:
            calls[name] = match[1]
    return calls


class CudaWaits:
    """Counts the waits of this process by the innermost line of the user's code. It creates no
    context."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Line, str]] = Counter()
        self._lock = threading.RLock()  # garbage that is collected meanwhile may free memory
        self._missed = ""
        self._end: Callable[[], None] | None = None

    def start(self) -> None:
        """Count from now on. Raises `NotCounted`."""
        self.stop()
        self._counts.clear()
        self._missed = ""
        # At a call's end, once: a call that fails has not waited.
        names = tuple(_calls())
        self._end = CALLBACKS.add("DRIVER_API", names, self._waited, self._miss, begins=False)

    def stop(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()

    def read(self, root: Path, allowed: Sequence[str]) -> Waits:
        """What was counted. `root`: files are shown relative to it. `allowed`: lines that do not
        count, such as "conftest.py:*"."""
        if self._missed:
            return Waits(not_read=f"not read: {self._missed}")
        lines = []
        for (line, call), count in self._counts.items():
            if not is_named(line, allowed, root):
                file, number, function = line
                lines.append(WaitLine(shown_path(file, root), number, function, call, count))
        return Waits(tuple(lines))

    def _miss(self, why: str) -> None:
        self._missed = why

    def _waited(self, versioned: str, call: ApiCall) -> None:
        name = _calls()[versioned]
        if name == "cuMemFree" and not words(call.parameters, 1)[0]:
            return  # to free nothing waits for nothing
        line = line_of(sys._getframe(1))
        with self._lock:
            self._counts[line, name] += 1


WAITS = CudaWaits()
