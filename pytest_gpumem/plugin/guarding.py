"""This process's side of its guardian: what it tells, and what ends it."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from pytest_gpumem.plugin import guardian
from pytest_gpumem.plugin.guardian import STACKS_SIGNAL, TAKEN

_STATE_BYTES = 1024


class Termination(KeyboardInterrupt):
    """SIGTERM ends the session, which writes its results."""


def terminate(number: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM."""
    __tracebackhide__ = True  # pytest names the line that was interrupted
    for one in _guardians:
        one.handled(number)
    raise Termination("SIGTERM")


class Guardian:
    """Starts a guardian, and tells it what happens. A forked child tells nothing."""

    def __init__(
        self,
        here: Path,
        arguments: Sequence[str] | None = None,
        *,
        leave: Path | None = None,
        gone: int | None = None,
        writing: int | None = None,
    ) -> None:
        """
        `here`: its working folder.
        `arguments`: of the pytest that writes the results. Without them the guardian leaves the last words of a test that did not end: in
        the folder `leave`, see `left`, else on the standard error.
        `gone`: a descriptor that becomes readable when nobody needs this process any longer: as an interrupt.
        `writing`: a descriptor that the guardian holds open until all is written.
        """
        self._pid = os.getpid()
        # Files without a name, which end with the last process that has them open.
        self._journal = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (closed by `close`)
        state = os.memfd_create("gpumem state")
        os.ftruncate(state, _STATE_BYTES)
        self._state = mmap.mmap(state, _STATE_BYTES)
        if not _guardians:
            self._stacks = os.memfd_create("gpumem stacks")
            faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        else:  # of a session in a test: a process has one file for its stacks
            self._stacks = _guardians[0]._stacks
        self._exits = _Exits.of_this_process()
        reads, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        own = [
            self._journal.fileno(),
            state,
            self._stacks,
            self._exits.writes,
            -1 if gone is None else gone,
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, *map(str, (self._pid, *own))],
            cwd=here,
            stdin=reads,
            pass_fds=[one for one in (*own, writing) if one is not None and one >= 0],
            start_new_session=True,  # signals of the terminal reach this process, which passes them on
        )
        os.close(state)
        os.close(reads)
        self.tell(
            "job",
            list(map(str, sys.path)),
            sys.argv,
            arguments,
            None if leave is None else str(leave),
        )
        _guardians.append(self)
        self._rests = True  # it was sent last that there is no limit
        self._exit = os._exit
        os._exit = self._left  # type: ignore[assignment]
        self.renew()
        if arguments is None:
            self._send("outlived")  # another process sees the death of this one

    def renew(self) -> None:
        """Pass signals on to the guardian, unless another library has taken Python's way for it, as asyncio does for a while."""
        if not self._watched():
            return
        with suppress(ValueError):  # not in the main thread
            before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            if before not in (-1, self._pipe):
                signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._interrupt)

    def limit(self, seconds: float, what: str, *, waits: bool = False) -> None:
        """From now on this process has so many seconds until the next call, and handles a signal within `PATIENCE`.
        `seconds`: infinite for no limit of time.
        `what`: what it does, for the message.
        `waits`: it waits for the device, and runs no code of others.
        """
        if self._watched():
            self._exits.obey()  # only now: a thread makes a later fork warn
            self._rests = False
            self._send("limit", seconds, waits, " ".join(what.split())[:300])

    def rest(self) -> None:
        """From now on there is no limit."""
        if not self._rests:
            self._rests = True
            self._send("rest")

    def tell(self, *record: object) -> None:
        """Add a record to the journal: a word, and values of Python's own types. The process has handled a signal, if there was one."""
        if self._watched():
            with suppress(OSError):  # no space is left
                self._journal.write(pickle.dumps(record))

    def enter(self, name: str) -> None:
        """Note the NVTX range that the process is in."""
        if self._pipe >= 0 and os.getpid() == self._pid:
            encoded = name.encode()[: _STATE_BYTES - TAKEN - 2] + b"\0"
            self._state[TAKEN + 1 : TAKEN + 1 + len(encoded)] = encoded

    def handled(self, number: int) -> None:
        """Python handles a signal: the process is about to end."""
        self._rests = False
        self._exits.obey()
        self._send("handled", number)

    def outlived(self) -> None:
        """From now on, the end of this process needs no action."""
        if self._watched():
            os._exit = self._exit
            self._send("outlived")

    def close(self) -> None:
        """End the guardian; a second call does nothing."""
        if not self._watched():
            return
        self._process.kill()
        self._process.wait()
        os._exit = self._exit
        with suppress(ValueError):  # not in the main thread
            if signal.getsignal(signal.SIGINT) == self._interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        _hear_nothing()
        _guardians.remove(self)
        if not _guardians:
            faulthandler.unregister(STACKS_SIGNAL)
            os.close(self._stacks)
        self._journal.close()
        os.close(self._pipe)
        self._pipe = -1

    def _watched(self) -> bool:
        """False if there is nothing to tell. Does not return once the guardian has taken over: it ends this process."""
        if self._pipe < 0 or os.getpid() != self._pid:
            return False
        while self._state[TAKEN] and self._process.poll() is None:
            time.sleep(0.1)
        return True

    def _send(self, *words: object) -> None:
        # short enough to be written whole
        line = "\t".join(map(str, words)).encode(errors="replace") + b"\n"
        while self._watched():
            try:
                os.write(self._pipe, line)
            except BlockingIOError:  # the guardian has not read the last ones yet
                time.sleep(0.001)
                continue
            except OSError:  # the guardian was killed: the session goes on without it
                pass
            return

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True  # pytest names the line that was interrupted
        self.handled(number)
        signal.default_int_handler(number, frame)

    def _left(self, status: int) -> None:
        """In place of `os._exit`: the results are written first, and the exit code says that a test failed."""
        if self._pipe >= 0 and os.getpid() == self._pid:
            self._exits.obey()
            self._send("left", status)
            while self._process.poll() is None:
                time.sleep(0.1)
        self._exit(status)


_guardians: list[
    Guardian
] = []  # of this process: of its session, and of those that tests start inside it
_masks = threading.local()  # the signals that a thread had blocked before it forked


def _hear_nothing() -> None:
    """Pass signals on to no guardian; another library keeps Python's way for them."""
    with suppress(ValueError):  # not in the main thread
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, *(one._pipe for one in _guardians)):
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def _before_fork() -> None:
    """A signal of the child waits until the child is ready for it."""
    _masks.own = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM} if _guardians else ()
    )


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.own)


def _in_child() -> None:
    """In a forked child, whose signals and whose end are not the process's."""
    _hear_nothing()
    with suppress(ValueError):
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for one in _guardians:
        with suppress(OSError):
            os.close(one._pipe)  # the guardian waits for its end
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


class _Request(ctypes.Structure):
    """`struct aiocb` of glibc and musl, with its `struct sigevent`."""

    _fields_ = [
        *(("descriptor", ctypes.c_int), ("operation", ctypes.c_int), ("priority", ctypes.c_int)),
        *(("buffer", ctypes.c_void_p), ("length", ctypes.c_size_t)),
        *(
            ("value", ctypes.c_void_p),
            ("signal", ctypes.c_int),
            ("notify", ctypes.c_int),
            ("function", ctypes.c_void_p),
        ),
        ("rest", ctypes.c_char * 256),
    ]


class _Exits:
    """Ends this process with the exit code that somebody writes to a pipe, also while a thread keeps the interpreter's lock.

    The C library reads the pipe in a thread of its own, into the argument of the function that it then calls there: `_exit`.
    """

    _own: _Exits | None = None

    @classmethod
    def of_this_process(cls) -> _Exits:
        if cls._own is None or cls._own._pid != os.getpid():
            cls._own = cls()
        return cls._own

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._reads, self.writes = os.pipe()  # both stay open: else the read would end
        self._request: _Request | None = None

    def obey(self) -> None:
        """Begin to read; a second call does nothing. Does nothing where the C library has no such call: there the guardian kills."""
        if self._request is not None:
            return
        self._request = request = _Request(
            descriptor=self._reads, length=4, notify=2, value=1
        )  # SIGEV_THREAD
        request.buffer = ctypes.addressof(request) + _Request.value.offset
        # The library's thread may begin after Python has let go of all objects at its end: from other memory it would read an exit code.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))
        for library in (None, "librt.so.1"):  # where it is before glibc 2.34
            with suppress(AttributeError, OSError):
                functions = ctypes.CDLL(library)
                request.function = ctypes.cast(functions._exit, ctypes.c_void_p).value
                functions.aio_read(ctypes.byref(request))
                return
