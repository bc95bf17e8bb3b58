"""The deadline of a measurement: its process writes the stacks of its threads, and exits with 1.

A worker of pytest-xdist writes into a file, which the controller puts on the report of the test.
Any other process writes to its standard error, past pytest's capture.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from pytest_gpumem.plugin.workers import given

FOLDER = "last_words"  # what a worker is given: the folder of the files of `last_words`
_INTERPRETER_SECONDS = 1.0
"""Time after the limit for Python to write the hint; it cannot while C code keeps its lock."""


def last_words(folder: str | os.PathLike[str], nodeid: str) -> Path:
    """The file that a worker leaves if a test ends it: stacks, or the last report as JSON."""
    return Path(folder, hashlib.sha256(nodeid.encode("utf-8", "surrogatepass")).hexdigest())


class Deadline:
    """Limits the time of measurements in this process. Raises nothing: the process ends."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder = given(config, FOLDER)
        self._stderr = os.dup(2)  # pytest does not capture the copy
        self._hint: threading.Timer | None = None
        config.add_cleanup(partial(os.close, self._stderr))
        config.pluginmanager.register(self, "gpumem-deadline")

    @contextmanager
    def limit(self, item: pytest.Item, seconds: float) -> Iterator[None]:
        """Limit the time of a block. A limit of pytest-timeout on the test holds alone."""
        if hasattr(item, "cancel_timeout"):  # pytest-timeout's timer runs
            yield
            return
        if self._folder is None:
            self._hint = threading.Timer(seconds, self._end, [item.nodeid, seconds])
            self._hint.daemon = True
            self._hint.start()
            latest = seconds + _INTERPRETER_SECONDS
            faulthandler.dump_traceback_later(latest, exit=True, file=self._stderr)
            try:
                yield
            finally:
                self._hint.cancel()
                faulthandler.cancel_dump_traceback_later()
            return
        file = last_words(self._folder, item.nodeid)
        with file.open("wb") as stacks:
            faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()
                file.unlink(missing_ok=True)

    def pytest_enter_pdb(self) -> None:
        """Leave a debugged process alone."""
        faulthandler.cancel_dump_traceback_later()
        if self._hint is not None:
            self._hint.cancel()

    def _end(self, nodeid: str, seconds: float) -> None:
        hint = (
            f"\ngpumem: {nodeid}: a measurement did not end within {seconds:g} s "
            "(--gpumem-timeout), and the process ends. Rows that were not saved are lost; "
            "with --gpumem-isolate only this test fails.\n"
        )
        os.write(self._stderr, hint.encode(errors="backslashreplace"))
        faulthandler.dump_traceback_later(0.001, exit=True, file=self._stderr)
