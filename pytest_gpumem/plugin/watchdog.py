"""A watchdog: a forked copy of this process that ends it when it hangs, and does what it can no longer do.

A process that waits for a kernel that never ends runs no Python in its main thread: no handler of Ctrl-C, and where an extension keeps the
interpreter's lock, no other thread either. The copy has the whole state of the process at the fork, and is told what happened since.
"""

from __future__ import annotations

import faulthandler
import io
import math
import mmap
import os
import pickle
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection, Pipe, wait
from types import FrameType
from typing import Any, NoReturn

PATIENCE = 0.5  # seconds from an interrupt in which Python has to react; from a second interrupt in which the process has to end
WAIT_PATIENCE = 1.0  # seconds that a process which has reacted to an interrupt may stay in a wait for the device
END_PATIENCE = 10.0  # seconds that such a process has for all else, such as the teardown of fixtures
_LAST_SECONDS = 0.3  # seconds that the process has to exit with the code that the watchdog sends; then it is killed
_FINISH_SECONDS = 60.0  # seconds that `finish` may take
_STACKS_SECONDS = 0.3  # seconds that the process has to write its stacks
_NAME_BYTES = 1024
_TOLD_BYTES = 2**18
_TOLD = struct.Struct("QQ")
"""Ahead of what was told: bytes that were sent besides, and bytes that lie there."""
_STACKS_SIGNAL = getattr(signal, "SIGRTMAX", None)
"""Asks the process for its stacks; on Linux, where programs leave the last real-time signal alone."""


class Cause(Enum):
    """Why the watchdog acts."""

    TIMEOUT = auto()  # a limit was exceeded
    INTERRUPT = auto()  # the process did not react to an interrupt in time
    DEATH = auto()  # the process has ended by itself: a crash, `os._exit`, a signal


@dataclass(frozen=True)
class End:
    """The end of the process."""

    cause: Cause
    what: str = ""  # what the process did, as `Watchdog.limit` was told
    seconds: float = math.inf  # the limit
    entered: str = ""  # the name that was last given to `Watchdog.enter`
    stacks: str = ""  # the process's Python stacks, the most recent call first; for a time-out; empty if it could not write them


Finish = Callable[[End, list[Any]], int]
"""Called in a child of the copy: the end, and all that the process told. Returns the exit code of the process."""


class Watchdog:
    """The process's side. A message is a write to a pipe, which wakes the copy. What is told lies in shared memory until it acts."""

    def __init__(self, finish: Finish, *, gone: int | None = None) -> None:
        """Start the copy.
        `finish`: called in the copy once the process is to end, or has ended.
        `gone`: a descriptor that becomes readable when nobody needs the process any longer: as an interrupt.
        """
        self._pid = os.getpid()
        # The first byte: the copy has taken over. Then a name, ended by a null byte; `_TOLD`, and what was told, pickled.
        self._shared = mmap.mmap(-1, _NAME_BYTES + _TOLD.size + _TOLD_BYTES)
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._connection, there = Pipe()
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        _watchdogs.append(self)
        self._obeys = False
        self._rests = True  # it was sent last that there is no limit
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else both processes write what it holds
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads: the copy needs no lock of theirs
            self._copy = os.fork()
        if self._copy == 0:
            self._connection.close()
            os.close(self._wakeup)
            _Copy(self._pid, there, self._signals, gone, self._shared, self._stacks.fileno(), finish).run()
        there.close()
        os.close(self._signals)
        if _STACKS_SIGNAL is not None:
            faulthandler.register(_STACKS_SIGNAL, self._stacks, all_threads=True)
        self.hear_interrupts()

    def hear_interrupts(self) -> None:
        """Pass interrupts on to the copy, unless another library has taken Python's way for it, as asyncio does for a while."""
        if os.getpid() != self._pid:
            return
        with suppress(ValueError):  # not in the main thread
            before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            if before not in (-1, self._wakeup):
                signal.set_wakeup_fd(before, warn_on_full_buffer=False)

    def limit(self, seconds: float, what: str, *, waits: bool = False) -> None:
        """From now on this process has so many seconds until the next call, and reacts to an interrupt within `PATIENCE`.
        `seconds`: infinite for no limit of time.
        `what`: what it does, for the message.
        `waits`: it waits for the device, and runs no code of others.
        """
        if not self._obeys and os.getpid() == self._pid:  # only now: a thread makes a later fork warn
            self._obeys = True
            threading.Thread(target=self._obey, name="gpumem-watchdog", daemon=True).start()
        with suppress(ValueError):  # not in the main thread
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._react)
        self._rests = False
        self._send("limit", seconds, what, waits)

    def rest(self) -> None:
        """From now on there is no limit, and Python handles interrupts."""
        if self._rests:
            return
        self._rests = True
        self._send("rest")
        with suppress(ValueError):
            if signal.getsignal(signal.SIGINT) == self._react:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def tell(self, value: object) -> None:
        """Tell the copy what happened. The process has reacted to an interrupt, if there was one."""
        if not self._watched():
            return
        data = pickle.dumps(value)
        sent, length = _TOLD.unpack_from(self._shared, _NAME_BYTES)
        begin = _NAME_BYTES + _TOLD.size
        if length + len(data) <= _TOLD_BYTES:
            self._shared[begin + length : begin + length + len(data)] = data
            length += len(data)
        else:
            data = self._shared[begin : begin + length] + data
            self._send("tell", data)
            sent, length = sent + len(data), 0
        _TOLD.pack_into(self._shared, _NAME_BYTES, sent, length)

    def reacted(self) -> None:
        """Python handles an interrupt: the process is about to end."""
        self._rests = False
        self._send("reacted")

    def outlived(self) -> None:
        """From now on, the death of this process needs no action."""
        self._send("outlived")

    def enter(self, name: str) -> None:
        """Note the range that the process is in."""
        if os.getpid() == self._pid:
            encoded = name.encode()[: _NAME_BYTES - 2] + b"\0"
            self._shared[1 : 1 + len(encoded)] = encoded

    def close(self) -> None:
        """End the copy; a second call does nothing."""
        if self._connection.closed or os.getpid() != self._pid:
            return
        self.rest()
        self._send("over")
        until = time.monotonic() + _LAST_SECONDS
        while not _reaped(self._copy):
            if time.monotonic() > until:
                with suppress(ProcessLookupError):
                    os.kill(self._copy, signal.SIGKILL)
                until = math.inf
            time.sleep(0.001)
        with suppress(ValueError):
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, self._wakeup):
                signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        _watchdogs.remove(self)
        if _STACKS_SIGNAL is not None:
            faulthandler.unregister(_STACKS_SIGNAL)
            for outer in _watchdogs[-1:]:
                faulthandler.register(_STACKS_SIGNAL, outer._stacks, all_threads=True)
        self._connection.close()
        os.close(self._wakeup)
        self._stacks.close()

    def _watched(self) -> bool:
        if self._connection.closed or os.getpid() != self._pid:  # a forked child of a test
            return False
        while self._shared[0] and not _reaped(self._copy):  # the copy has taken over: it ends this process
            time.sleep(0.1)
        return True

    def _send(self, *message: object) -> None:
        if self._watched():
            with suppress(OSError):  # the copy was killed: the session goes on without it
                self._connection.send((_told_bytes(self._shared), *message))

    def _react(self, number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True  # pytest names the line that was interrupted
        self.reacted()
        signal.default_int_handler(number, frame)

    def _obey(self) -> None:
        try:
            code = self._connection.recv()
        except (EOFError, OSError):
            return
        os._exit(code)


_watchdogs: list[Watchdog] = []  # of this process: of its session, and of those that tests start inside it


def _hear_nothing() -> None:
    """In a forked child, whose interrupts are not the process's."""
    with suppress(ValueError):  # not in the main thread
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, *(one._wakeup for one in _watchdogs)):
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hear_nothing)


def _told_bytes(shared: mmap.mmap) -> int:
    """Bytes that were told so far."""
    sent, length = _TOLD.unpack_from(shared, _NAME_BYTES)
    return int(sent + length)


def _unpickled(data: bytes) -> list[Any]:
    stream, found = io.BytesIO(data), list[Any]()
    while stream.tell() < len(data):
        found.append(pickle.load(stream))
    return found


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # a test waited for all children
        return True


class _Copy:
    """The copy's side."""

    def __init__(
        self, process: int, connection: Connection, signals: int, gone: int | None, shared: mmap.mmap, stacks: int, finish: Finish
    ) -> None:
        self._process = process
        self._connection = connection
        self._signals: int | None = signals
        self._gone = gone
        self._shared = shared
        self._stacks = stacks
        self._finish = finish
        self._death: int | None = None
        """Becomes readable when the process ends; without it, the connection tells, whose end a child of the process may keep open."""
        with suppress(AttributeError, OSError):
            self._death = os.pidfd_open(process)
        self._told: list[Any] = []
        self._sent = 0  # bytes of what was told that were sent
        self._progress = 0  # bytes that were told when it last looked
        self._limit: tuple[float, float, str, bool] | None = None
        """When the limit ends, on the monotonic clock, with its seconds, what it is of, and whether it is a wait for the device."""
        self._interrupt = math.inf  # when the patience with an interrupt ends
        self._reacted = False  # since the last progress, Python has handled an interrupt
        self._interrupts = 0  # interrupts that reached the process since then
        self._outlived = False

    def run(self) -> NoReturn:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches the process, which passes it on
            end = self._watch()
            if end is not None:
                code = self._carry_out(end)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _watch(self) -> End | None:
        """Wait until the process is to end, or has ended; None if there is nothing to do."""
        while True:
            now = time.monotonic()
            if now >= self._interrupt and not self._progressed(_told_bytes(self._shared)):
                return self._hung(Cause.INTERRUPT)
            if self._limit is not None and now >= self._limit[0]:
                return self._hung(Cause.TIMEOUT)
            due = min(self._interrupt, math.inf if self._limit is None else self._limit[0])
            sources = [one for one in (self._connection, self._signals, self._gone, self._death) if one is not None]
            ready = wait(sources, None if due == math.inf else due - now)
            if self._signals in ready:  # first: the process tells of its reaction after it
                assert self._signals is not None
                numbers = os.read(self._signals, 4096)
                self._hear_signals(numbers.count(signal.SIGINT))
                if not numbers:
                    self._signals = None
            elif self._connection in ready:
                try:
                    message = self._connection.recv()
                except (EOFError, OSError):
                    return self._died()
                if message[1:] == ("over",):
                    return None
                self._hear(*message)
            elif self._death in ready:
                return self._died()
            elif self._gone in ready:
                self._gone = None
                if not self._reacted:
                    os.kill(self._process, signal.SIGINT)

    def _hear_signals(self, interrupts: int) -> None:
        self._progressed(_told_bytes(self._shared))
        self._interrupts += interrupts
        if interrupts and ((self._limit is not None and not self._reacted) or self._interrupts > 1):
            self._interrupt = min(self._interrupt, time.monotonic() + PATIENCE)

    def _progressed(self, told: int) -> bool:
        """Note how much was told; true if it is more than before: Python ran, and has reacted to any interrupt."""
        if told == self._progress:
            return False
        self._progress, self._reacted, self._interrupts, self._interrupt = told, False, 0, math.inf
        return True

    def _hear(self, told: int, kind: str, *values: Any) -> None:
        self._progressed(told)
        if kind == "limit":
            seconds, what, waits = values
            self._limit = (time.monotonic() + seconds, seconds, what, waits)
        elif kind == "rest":
            self._limit = None
        elif kind == "tell":
            (data,) = values
            self._told += _unpickled(data)
            self._sent += len(data)
            self._progressed(self._sent)
        elif kind == "reacted":
            self._reacted = True
        elif kind == "outlived":
            self._outlived = True
        if kind in ("limit", "rest", "reacted"):  # Python runs
            patience = WAIT_PATIENCE if self._limit is not None and self._limit[3] else END_PATIENCE
            patience = PATIENCE if self._interrupts > 1 else patience
            self._interrupt = time.monotonic() + patience if self._reacted else math.inf

    def _died(self) -> End | None:
        return None if self._outlived else End(Cause.DEATH, "" if self._limit is None else self._limit[2], entered=self._entered())

    def _hung(self, cause: Cause) -> End:
        self._shared[0] = 1
        _, seconds, what, _ = self._limit or (math.inf, math.inf, "", False)
        return End(cause, what, seconds, self._entered(), self._asked_stacks() if cause is Cause.TIMEOUT else "")

    def _entered(self) -> str:
        return self._shared[1:_NAME_BYTES].partition(b"\0")[0].decode(errors="replace")

    def _asked_stacks(self) -> str:
        """The process's stacks, which a signal handler in C writes."""
        if _STACKS_SIGNAL is None:
            return ""
        with suppress(OSError):
            os.kill(self._process, _STACKS_SIGNAL)
        until, size = time.monotonic() + _STACKS_SECONDS, 0
        while time.monotonic() < until:
            time.sleep(0.02)
            before, size = size, os.fstat(self._stacks).st_size
            if size and size == before:
                break
        return os.pread(self._stacks, size, 0).decode(errors="replace")

    def _carry_out(self, end: End) -> int:
        code = self._finished(end)
        if end.cause is not Cause.DEATH:
            with suppress(OSError):
                self._connection.send(code)
            wait([self._connection if self._death is None else self._death], _LAST_SECONDS)
            with suppress(OSError):
                os.kill(self._process, signal.SIGKILL)
        return code

    def _finished(self, end: End) -> int:
        """The exit code of `finish`, in a process of its own: whatever becomes of it, the hung process is ended."""
        sent, length = _TOLD.unpack_from(self._shared, _NAME_BYTES)
        begin = _NAME_BYTES + _TOLD.size
        told = self._told + (_unpickled(self._shared[begin : begin + length]) if sent == self._sent else [])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = self._finish(end, told)
            except BaseException:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with suppress(OSError, ValueError):
                        stream.flush()
                os._exit(code)
        until = time.monotonic() + _FINISH_SECONDS
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid == child:
                return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
