"""Calls of this process, added up for the tests and their parts: both devices report each call at its end to the windows that are open."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from pytest_gpumem.devices.allocation_sites import (
    PACKAGE,
    code_of,
    is_named,
    is_pytests,
    is_users,
    shown_path,
)
from pytest_gpumem.records.calls import Calls, WaitLine
from pytest_gpumem.records.uses import CopyUse, copies_together
from pytest_gpumem.records.what_ran import Step, StepKind

_WORDS = {StepKind.KERNEL: "kernels", StepKind.COPY: "copies", StepKind.MEMSET: "memsets"}


class CallLog:
    """Takes the calls of the process for the windows that are open. Threads report at once; a lock keeps the sums whole."""

    def __init__(self) -> None:
        # garbage that is collected meanwhile may free memory, which is a call
        self.lock = threading.RLock()
        self.windows: tuple[CallWindow, ...] = ()  # without any, calls do not matter

    def _add(self, *counts: tuple[object, float]) -> None:
        with self.lock:
            for window in self.windows:
                sums = window.sums
                for key, count in counts:
                    sums[key] += count  # type: ignore[assignment]

    def launched(self, *, on_default: bool) -> None:
        """A kernel was queued: as `ran`, in the least time."""
        with self.lock:
            for window in self.windows:
                window.sums["kernels"] += 1
                if on_default:
                    window.sums["default"] += 1

    def ran(
        self, step: Step, *, count: int = 1, first: bool = False, on_default: bool = False
    ) -> None:
        """Work was queued. `first`: inside a first use. `on_default`: on the legacy default stream."""
        word = _WORDS.get(step.kind)
        if word is None:
            return
        if first:
            self._add((("first", word), count))
            return
        copy = (
            "copy",
            step.name,
            step.source or "unknown",
            step.memory or "unknown",
            step.nbytes or 0,
        )
        self._add(
            (copy if step.kind is StepKind.COPY else word, count),
            *((("default", count),) if on_default else ()),
        )

    def waited(
        self,
        call: str,
        of: str,
        seconds: float,
        *,
        sure: bool = True,
        first: bool = False,
        frame: FrameType | None = None,
    ) -> None:
        """The host waited, or may have waited, in a call that ends now. `first`: inside a first use. `frame`: where the line is looked for
        from on; None: the caller."""
        if first:
            self.used_first("waits")
        elif self.windows:
            key = (*_line(frame or sys._getframe(1)), call, of, sure)
            with self.lock:
                for window in self.windows:
                    known = window.waits.setdefault(key, [0, 0.0])
                    known[0] += 1
                    known[1] += seconds

    def used_first(self, word: str) -> None:
        """Something was used for the first time: "modules", or a call inside."""
        self._add((("first", word), 1))

    def missed(self, why: str) -> None:
        """Calls were not counted: the windows that are open have less than there was."""
        self._add((("missed", why), 1))

    def open(self) -> CallWindow:
        """Count from now on."""
        window = CallWindow(self)
        with self.lock:
            self.windows = (*self.windows, window)
        return window


class CallWindow:
    """The calls from its begin on, until it is closed."""

    def __init__(self, log: CallLog) -> None:
        self._log = log
        self.sums: Counter[object] = Counter()
        """Counts by word, by ("copy", kind, memory and bytes), by ("first", word) and by ("missed", reason)."""
        self.waits: dict[tuple[Any, ...], list[Any]] = {}
        """By line and call: how often, and the seconds together."""

    def close(self) -> None:
        """Count no further; a second call does nothing."""
        with self._log.lock:
            self._log.windows = tuple(one for one in self._log.windows if one is not self)

    def read(self, root: Path, allowed: Sequence[str] = (), *, strict: bool = False) -> Calls:
        """What was called so far.
        `root`: files are shown relative to it.
        `allowed`: lines that may wait, such as "conftest.py:*".
        `strict`: calls that may wait are waits.
        """
        with self._log.lock:
            found, waits = Counter(self.sums), [(key, *known) for key, known in self.waits.items()]

        def of(kind: str) -> list[tuple[Any, ...]]:
            return [
                (*key[1:], count)
                for key, count in found.items()
                if isinstance(key, tuple) and key[0] == kind
            ]

        return Calls(
            kernels=found["kernels"],
            copies=copies_together(
                CopyUse(kind, source, to, count, count * nbytes, 0)
                for kind, source, to, nbytes, count in sorted(of("copy"))
            ),
            memsets=found["memsets"],
            default_stream=found["default"],
            waiting=tuple(
                _wait(key, count, seconds, root, allowed) for key, count, seconds in waits
            ),
            strict=strict,
            first_use=dict(of("first")),
            not_counted=next((why for why, _ in of("missed")), None),
        )


def _wait(
    key: tuple[Any, ...], count: int, seconds: float, root: Path, allowed: Sequence[str]
) -> WaitLine:
    file, line, function, call, of, sure = key
    shown = shown_path(file, root)
    return WaitLine(
        shown,
        line,
        function,
        code_of(file, line),
        call,
        of,
        count,
        seconds,
        sure,
        is_named(shown, line, allowed),
    )


def _line(frame: FrameType | None) -> tuple[str, int, str]:
    """The user's innermost line from a frame on, as `users_frames` finds it in a stack. A thread of C code, such as PyTorch's autograd,
    has frames of this package alone."""
    other: FrameType | None = None
    while frame is not None and not is_pytests(file := frame.f_code.co_filename):
        if is_users(file):
            return file, frame.f_lineno, frame.f_code.co_name
        if other is None and not file.startswith(("<", PACKAGE)):
            other = frame
        frame = frame.f_back
    if other is None:
        return "", 0, _name_of_thread()
    return other.f_code.co_filename, other.f_lineno, other.f_code.co_name


def _name_of_thread() -> str:
    """The system's name of this thread, such as "pt_autograd_0"."""
    try:
        return (
            Path(f"/proc/self/task/{threading.get_native_id()}/comm")
            .read_text(encoding="utf-8")
            .strip()
        )
    except OSError:
        return threading.current_thread().name


class CallSource(Protocol):
    """Reports the calls of this process into its log."""

    @property
    def log(self) -> CallLog: ...
    @property
    def running(self) -> bool: ...
    def start(self) -> str | None:
        """Report from now on, unless it does already; the reason if it cannot."""

    def stop(self) -> None:
        """Report no longer; a second call does nothing."""


@contextmanager
def calls_counted(source: CallSource) -> Iterator[Callable[[], Calls]]:
    """Count the calls inside the block, or until the source is stopped; yields what tells them. Afterwards it runs if it ran before."""
    running = source.running
    why, window = source.start(), source.log.open()

    def read() -> Calls:
        return Calls(not_counted=why) if why is not None else window.read(Path())

    try:
        yield read
    finally:
        window.close()
        if not running:
            source.stop()
        elif not source.running:
            source.log.missed("a part of the calls was not followed")
            source.start()


class PlainCalls:
    """A source whose log somebody else fills, as a simulated device. `report`: is given the log, or None."""

    def __init__(self, report: Callable[[CallLog | None], None]) -> None:
        self.log = CallLog()
        self.running = False
        self._report = report

    def start(self) -> str | None:
        self._report(self.log)
        self.running = True
        return None

    def stop(self) -> None:
        self._report(None)
        self.running = False
