"""The guardian of a session: a light process that ends it when it hangs, and has its results written whatever ends it.

A process that waits for a kernel that never ends runs no Python in its main thread, and where an extension keeps the interpreter's lock, in
no other thread either. A crash writes nothing. One pipe, the guardian's standard input, tells it all: lines of text from the process, the
numbers of signals from Python's handler in C, and its end once the process has died. It runs this file as a script, with few modules of
Python's own library.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

TERMINATED = 128 + signal.SIGTERM  # the exit code of a session that SIGTERM ended
RESUMES = "_GPUMEM_RESUMES"  # by a guardian, for the pytest that writes the results: the descriptor of the journal
TAKEN = 0  # byte of the file of the state that the guardian sets before it ends the process; then comes the NVTX range, up to a null byte
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Asks the process for its stacks: programs leave the last real-time signal alone. There is no guardian where that is missing."""

PATIENCE = 0.5
"""Seconds in which Python has to handle a signal, where there is a limit of time or the signal is SIGTERM. In a wait for the device, and
from a second signal on, the process has to end in that time."""
END_PATIENCE = 10.0  # seconds that a process has to end once it handles a signal, such as for the teardown of fixtures
_LAST_SECONDS = 0.3
"""Seconds that the process has to exit with the guardian's exit code; then it is killed."""
_STACKS_SECONDS = 0.3  # seconds that the process has to write its stacks
_WRITING_SECONDS = 60.0  # seconds that the results may take
_RESUME = """
import pickle, sys
with open(sys.argv[1], "rb") as journal: _, sys.path[:], sys.argv, arguments, _ = pickle.load(journal)
import pytest
sys.exit(pytest.main(arguments))
"""


def records(journal: int) -> Iterator[tuple[Any, ...]]:
    """The records of a journal: tuples that begin with a word. The last one may be cut off: it is removed."""
    import pickle

    with open(f"/proc/self/fd/{journal}", "rb") as file:
        whole = 0
        while True:
            try:
                record = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                os.ftruncate(journal, whole)
                return
            whole = file.tell()
            yield record


def left(folder: str | os.PathLike[str], nodeid: str) -> str:
    """The file for the last words of a test, in a folder for all: JSON of the end, or a report, pickled."""
    import hashlib

    return os.path.join(folder, hashlib.sha256(nodeid.encode("utf-8", "surrogatepass")).hexdigest())


def why(end: dict[str, Any]) -> str:
    """One line on a test that did not end."""
    within = f"; last NVTX range: {end['range']}" if end["range"] else ""
    if end["cause"] == "death":
        return f"gpumem: the process ended in this test, by a crash, a signal or _exit of C{within}"
    if end["cause"] == "left":
        return f"gpumem: the process ended in this test, by os._exit({end['what']}){within}"
    limit = "" if math.isinf(end["seconds"]) else f" within {end['seconds']:g} s (--gpumem-timeout)"
    return f"gpumem: hung: {end['what']} did not end{limit}, and the process was ended{within}"


def of_tests(stacks: str) -> str:
    """The stacks of threads without those frames that every test has."""
    kept = []
    for thread in stacks.strip().split("\n\n"):
        lines = thread.splitlines()
        outer = next(
            (at for at, line in enumerate(lines) if f"{os.sep}_pytest{os.sep}" in line), len(lines)
        )
        kept.append("\n".join(lines[:outer]))
    return "\n\n".join(kept)


class Watch:
    """Waits for what ends the process, the parent of this one, and does what is then to do."""

    def __init__(
        self, process: int, journal: int, state: int, stacks: int, exits: int, gone: int
    ) -> None:
        """
        `process`: its id.
        `journal`, `state`, `stacks`: descriptors of files; see `records` and `TAKEN`.
        `exits`: a descriptor to which the exit code of the process is written.
        `gone`: as of `Guardian`; -1 for none.
        """
        self._process, self._journal, self._state = process, journal, state
        self._stacks, self._exits, self._gone = stacks, exits, gone
        self._size = 0  # of the journal when the process last was seen to go on
        self._data = b""  # read from the pipe, and not taken yet
        self._limit = (math.inf, math.inf, "", False)
        """When the limit ends, on the monotonic clock; its seconds, what it is of, and whether it is a wait for the device."""
        self._limited = False
        self._signals: list[int] = []  # that reached the process since it last went on
        self._handled = False  # Python handles them
        self._patience = math.inf  # when the patience with them ends
        self._outlived = False  # the death of the process needs no action

    def run(self) -> None:
        """Wait until the process is to end, or has ended, and carry it out."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        if self._gone >= 0:
            poll.register(self._gone, select.POLLIN)
        while True:
            now = time.monotonic()
            if now >= self._patience and not self._went_on():
                return self._end("signal")
            if now >= self._limit[0]:
                if not self._stopped():
                    return self._end("time-out")
                self._limit = (now + self._limit[1], *self._limit[1:])
            due = min(self._patience, self._limit[0])
            ready = poll.poll(None if due == math.inf else math.ceil((due - now) * 1000))
            if any(source == self._gone for source, _ in ready):
                poll.unregister(self._gone)
                if not self._handled and self._lives:
                    os.kill(self._process, signal.SIGINT)
            if all(source != 0 for source, _ in ready):
                continue
            if not (data := os.read(0, 1 << 16)):
                return self._died()
            for word, *values in self._messages(data):
                if word == "left":
                    self._limit = (math.inf, math.inf, values[0], False)
                    return self._end(word)
                self._take(word, *values)

    @property
    def _lives(self) -> bool:
        return os.getppid() == self._process

    def _messages(self, data: bytes) -> Iterator[list[str]]:
        """What was read: lines, whose words are parted by tabs and begin with a letter; any smaller byte is the number of a signal."""
        self._data += data
        while self._data:
            if self._data[0] <= 64:
                number, self._data = self._data[0], self._data[1:]
                if number in (signal.SIGINT, signal.SIGTERM):
                    yield ["signal", str(number)]
            elif b"\n" in self._data:
                line, _, self._data = self._data.partition(b"\n")
                yield line.decode().split("\t")
            else:
                return

    def _take(self, word: str, *values: str) -> None:
        self._went_on()
        now = time.monotonic()
        if word == "outlived":
            self._outlived = True
        elif word == "limit":
            seconds, waits, what = values
            self._limit, self._limited = (
                (now + float(seconds), float(seconds), what, waits == "True"),
                True,
            )
        elif word == "rest":
            self._limit, self._limited = (math.inf, math.inf, "", False), False
        elif word == "handled":
            self._handled = True
            self._signals = self._signals or [
                int(values[0])
            ]  # another library has taken Python's way for them
        elif word == "signal":
            self._signals.append(int(values[0]))
            if (
                (self._limited and not self._handled)
                or signal.SIGTERM in self._signals
                or len(self._signals) > 1
            ):
                self._patience = min(self._patience, now + PATIENCE)
        if self._handled and word != "signal":
            self._patience = now + (
                PATIENCE if self._limit[3] or len(self._signals) > 1 else END_PATIENCE
            )

    def _went_on(self) -> bool:
        """True if the journal has grown since the first signal: the process has handled it, and its tests went on."""
        size = os.fstat(self._journal).st_size
        if size == self._size:
            return False
        self._size, self._signals, self._handled, self._patience = size, [], False, math.inf
        return True

    def _stopped(self) -> bool:
        """True while the process is stopped, as by Ctrl-Z, or a debugger holds it."""
        try:
            with open(f"/proc/{self._process}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False

    def _died(self) -> None:
        while self._lives:  # it is about to die, or a test has closed the pipe
            if self._outlived:
                return
            time.sleep(0.01)
        if not self._outlived:
            self._end("death")

    # The end

    def _end(self, cause: str) -> None:
        """Have the results written, and end the process."""
        os.pwrite(self._state, b"\1", TAKEN)
        terminated = signal.SIGTERM in self._signals
        lived, written = self._lives, True
        try:
            written = self._tell(cause, terminated)
        finally:
            self._end_process(1 if cause != "signal" else TERMINATED if terminated else 2)
        if lived and not written:
            self._resume()  # with its memory and the device free

    def _tell(self, cause: str, terminated: bool) -> bool:
        """Tell how the process ended where its results are written. False if they could not be written."""
        import pickle

        (*_, arguments, leave), *told = records(self._journal)
        last = (
            os.pread(self._state, 1 << 16, TAKEN + 1).partition(b"\0")[0].decode(errors="replace")
        )
        end = {
            "cause": cause,
            "terminated": terminated,
            "seconds": self._limit[1],
            "what": self._limit[2],
            "range": last,
        }
        end |= _running(told) | {
            "stacks": self._asked_stacks() if cause in ("time-out", "left") else ""
        }
        if arguments is None:
            if end["test"] is not None and cause != "signal":
                _leave(end, leave)
            return True
        os.lseek(self._journal, 0, os.SEEK_END)
        os.write(self._journal, pickle.dumps(("end", end)))
        return self._resume()

    def _asked_stacks(self) -> str:
        """The process's stacks, the most recent call first, which a signal handler in C writes."""
        before = size = os.fstat(self._stacks).st_size
        if self._lives:
            os.kill(self._process, STACKS_SIGNAL)
            until = time.monotonic() + _STACKS_SECONDS
            while time.monotonic() < until:
                time.sleep(0.02)
                last, size = size, os.fstat(self._stacks).st_size
                if size > before and size == last:
                    break
        return os.pread(self._stacks, size - before, before).decode(errors="replace")

    def _resume(self) -> bool:
        """Have another pytest write the results. False if it could not."""
        import subprocess

        command = [sys.executable, "-c", _RESUME, f"/proc/self/fd/{self._journal}"]
        environment = {**os.environ, RESUMES: str(self._journal)}
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[self._journal],
                timeout=_WRITING_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode in (1, 2, TERMINATED)

    def _end_process(self, code: int) -> None:
        """End the process with an exit code, or kill it."""
        for kill in (False, True):
            if self._lives and kill:
                os.kill(self._process, signal.SIGKILL)
            elif self._lives:
                os.write(self._exits, code.to_bytes(4, sys.byteorder))
            until = time.monotonic() + _LAST_SECONDS
            while self._lives and time.monotonic() < until:
                time.sleep(0.005)


def _running(told: list[tuple[Any, ...]]) -> dict[str, Any]:
    """The test that runs, its phase, and when that began."""
    test, when, since = None, "setup", time.time()
    for word, *values in told:
        if word == "start":
            test, when = values[0], "setup"
        elif word == "phase":
            when, since = values
        elif word == "finish":
            test = None
    return {"test": test, "when": when, "since": since}


def _leave(end: dict[str, Any], folder: str | None) -> None:
    """Name the test to the process that started this one, or to its log."""
    import json

    if folder is None:
        print(
            f"{end['test']['nodeid']}: {why(end)}\n{of_tests(end['stacks'])}",
            file=sys.stderr,
            flush=True,
        )
        return
    file = left(folder, end["test"]["nodeid"])
    with open(f"{file}.part", "w", encoding="utf-8") as part:
        json.dump(end, part)
    os.replace(f"{file}.part", file)


if __name__ == "__main__":
    Watch(*map(int, sys.argv[1:])).run()
