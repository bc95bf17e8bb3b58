"""Run workers in fresh processes, one at a time on the GPU, while the next ones import their libraries.

A worker is a process that speaks three lines: it imports what it needs, touches no GPU, and prints `ready`; it waits for `go` on its
standard input; it works and prints its answer as one line of JSON. Whatever else it or its libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import IO, Any, TypeVar

T = TypeVar("T")

READY = "ready"
GO = "go"
EXIT_SECONDS = 60.0
"""Seconds that a worker may take to end after its answer."""
DYING_SECONDS = 5.0
"""Seconds that a worker gets to end by itself once it has failed, so that its own exit status is told."""
SHOWN = 2000
"""Characters of a failed worker's last words that are kept."""


@dataclass(frozen=True)
class Outcome:
    """The result of one job."""

    job: dict[str, Any]
    answer: dict[str, Any] | None
    """None if the worker failed."""
    error: str | None
    """Why it failed, with the end of its standard error."""
    seconds: float
    """From `go` to the end of the process."""


def serve(prepare: Callable[[], T], work: Callable[[T], dict[str, Any]]) -> None:
    """A worker's whole life: prepare, say so, wait, work, answer, end.

    Args:
        prepare: imports and looks things up; must not create a CUDA context, because another worker is measuring.
        work: takes what `prepare` gave and returns the answer, which JSON can hold.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepared = prepare()
    answers.write(READY + "\n")
    answers.flush()
    if sys.stdin.readline().strip() != GO:
        return
    answers.write(json.dumps(work(prepared)) + "\n")
    answers.flush()
    sys.stderr.flush()
    # Not through the libraries' own clean-up, which costs GPU time and may crash: the driver frees what the process held.
    os._exit(0)


class _Worker:
    def __init__(self, job: dict[str, Any], command: list[str]) -> None:
        self.job = job
        self._errors: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed by `close`)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
        )

    def run(self, timeout: float) -> Outcome:
        """Wait until it is ready, let it go, and take its answer. `timeout` holds for each of the two waits."""
        said = self._line(timeout)
        if said.strip() != READY:
            return self._failed("did not get ready", time.perf_counter())
        begun = time.perf_counter()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(GO + "\n")
            self._process.stdin.flush()
        except OSError:
            return self._failed("died while it waited", begun)
        line = self._line(timeout)
        try:
            answer = json.loads(line)
        except ValueError:
            return self._failed("gave no answer", begun)
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return self._failed(f"answered but did not end within {EXIT_SECONDS:g} s", begun)
        return Outcome(self.job, answer, None, time.perf_counter() - begun)

    def _line(self, timeout: float) -> str:
        """The next line that it prints; nothing if it ended, or was ended because time ran out."""
        assert self._process.stdout is not None
        self._expired = False
        timer = threading.Timer(timeout, self._expire)
        timer.start()
        try:
            return self._process.stdout.readline()
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()

    def _failed(self, what: str, begun: float) -> Outcome:
        if self._expired:
            what += " in time"
        try:
            code = self._process.wait(0 if self._expired else DYING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read()[-SHOWN:].strip()
        return Outcome(
            self.job,
            None,
            f"the worker {what} (exit status {code}): {words or 'it said nothing'}",
            time.perf_counter() - begun,
        )

    def close(self) -> None:
        """End it, if it still runs, and free what it needed."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):  # "go" could not be written to a dead worker
                    stream.close()


def one_after_another(
    jobs: Iterable[dict[str, Any]],
    command: Callable[[dict[str, Any]], list[str]],
    *,
    ahead: int,
    timeout: float,
) -> Generator[Outcome, None, None]:
    """Run jobs in their order, each in a fresh process, one at a time.

    Args:
        jobs: taken lazily, `ahead` of them before they are needed.
        command: the command line of a job's worker.
        ahead: workers that get ready while another works.
        timeout: seconds that a worker may take to get ready, and again to answer; it is killed then.

    Workers that are not needed any more are ended when the generator is closed.
    """
    waiting: deque[_Worker] = deque()
    source = iter(jobs)
    try:
        while True:
            while len(waiting) <= ahead and (job := next(source, None)) is not None:
                waiting.append(_Worker(job, command(job)))
            if not waiting:
                return
            worker = waiting[0]
            outcome = worker.run(timeout)
            worker.close()
            waiting.popleft()
            yield outcome
    finally:
        for worker in waiting:
            worker.close()
