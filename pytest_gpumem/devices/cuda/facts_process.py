"""A short process that calls cuInit and reads a device's facts, so that the process of the tests does not call it.

Children by fork of a process that called cuInit cannot use CUDA (cuInit's error CUDA_ERROR_NOT_INITIALIZED in the child).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SECONDS = 60.0
"""How long the driver may take to answer."""

_ROOT = Path(__file__).resolve().parents[3]
# Standard library and installed packages come before the folders of the project's tests, whose modules may have their names.
_PROGRAM = (
    "import sys; sys.path[:] = [sys.argv[2], *filter(None, sys.path), *sys.argv[3:]]; "
    "from pytest_gpumem.devices.cuda.facts import answer; answer(int(sys.argv[1]))"
)


class NoAnswer(Exception):
    """The process gave no answer. The message is one line with the reason."""


class FactsProcess:
    """Runs `facts.answer(index)` in a process of its own; starts at once.

    Raises:
        NoAnswer: no process can be started.
    """

    def __init__(self, index: int) -> None:
        command = [sys.executable, "-c", _PROGRAM, str(index), str(_ROOT), *filter(None, sys.path)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:  # such as an interpreter inside another program, which has no file of its own
            raise NoAnswer(f"{sys.executable!r} cannot be started to ask the NVIDIA driver: {error.strerror}") from None

    def answer(self) -> bytes:
        """The line that it printed.

        Raises:
            NoAnswer: it took longer than `SECONDS`, or ended without a line.
        """
        try:
            out, errors = self._process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"the NVIDIA driver did not answer within {SECONDS:.0f} s") from None
        finally:
            self.close()
        lines = out.splitlines()
        if self._process.returncode or not lines:
            reason = errors.decode(errors="replace").strip().splitlines() or ["no message"]
            raise NoAnswer(f"the process that asks the NVIDIA driver ended with {self._process.returncode}: {reason[-1]}")
        return lines[-1]

    def close(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._process.wait()
