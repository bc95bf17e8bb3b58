"""Further fresh processes of a run (`--gpumem-processes`): the same pytest command again, one after another, for its rows alone."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pytest_gpumem.outcomes import Exit
from pytest_gpumem.records.row import Row
from pytest_gpumem.result_files import FileError, content, document_in, parsed
from pytest_gpumem.runs.child import Background, for_a_part, pytest_command
from pytest_gpumem.settings import FURTHER_REPORTS, FURTHER_TESTS, FURTHER_TURN

ENDED = {"ended": True}
"""Last line of the file of `FURTHER_REPORTS`; before it stand `nodeid`, `failure` (a text or null) and `finished` of each report."""
AHEAD = max(0, min(2, (os.cpu_count() or 1) - 1))  # processes that get ready while another one measures


class RepeatFailed(Exception):
    """A further process could not measure; one message with its last words."""


@dataclass(frozen=True)
class Further:
    """The rows and reports of a further process."""

    name: str  # such as "process 2 of 3 of --gpumem-processes"
    rows: Mapping[str, Row]  # by `Row.key`
    failures: Mapping[str, str]  # by node id: the text of each failed test
    finished: frozenset[str]  # node ids of the tests that it reported to their end
    broken: str | None = None  # how the process ended, if its session did not come to its end
    failed_as_a_whole: str | None = None  # its last words, if its session failed and no test of it did

    def failure_of(self, nodeid: str) -> str | None:
        """Why a test failed in this process; None if it did not."""
        if (text := self.failures.get(nodeid)) is not None:
            return f"{self.name}: {nodeid}\n{text}"
        if self.broken is not None and nodeid not in self.finished:
            return f"{self.name} {self.broken}, before it reported this test"
        return None


class Repeats:
    """Further fresh processes of a run, one after another on the GPU. To iterate runs them, and yields the rows and reports of each."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        count: int,
        device: str,
        *,
        environment: Mapping[str, str],
        only: Callable[[], list[str]] = list,
        watch: Callable[[int], None] | None = None,
    ) -> None:
        """Nothing is started yet.

        They save, report and compare nothing: such options are switched off, or write into a folder that is removed.
        `device`: baseline key of this process's device, which the others must have too.
        `only`: gives, before each process, the node ids of the tests that it runs; nothing: those that the arguments select.
        `watch`: gets, every second, the number of tests that the process which measures has finished.
        """
        self._arguments, self._folder, self._count, self._device = arguments, folder, count, device
        self._environment, self._only, self._watch = environment, only, watch
        self._begun = 0  # processes that were started
        self._waiting: deque[_Process] = deque()
        self._stack = ExitStack()

    def get_ready(self, most: int, tests: Sequence[str]) -> None:
        """Start processes until so many wait for their turn, or all are started.
        `tests`: node ids of all tests that may be theirs; none: all that the arguments select.
        """
        while len(self._waiting) < most and self._begun < self._count:
            name = f"process {self._begun + 2} of {self._count + 1} of --gpumem-processes"
            process = _Process(name, self._arguments, self._folder, {**self._environment, FURTHER_TESTS: json.dumps(tests)})
            self._stack.callback(process.close)
            self._waiting.append(process)
            self._begun += 1

    def __iter__(self) -> Iterator[Further]:
        """Run them; each ends before the next one measures. Raises `RepeatFailed`: a process did not measure, or did on another device."""
        with self._stack:
            for _ in range(self._count):
                self.get_ready(1 + AHEAD, self._only())  # the tests of later processes are fewer
                yield self._waiting.popleft().measure(self._only(), self._device, self._watch)

    def close(self) -> None:
        """End all processes."""
        self._stack.close()


class _Process:
    """One pytest, which collects its tests and imports their libraries while others measure."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._name = name
        self._child = child = Background()
        scratch = child.folder
        self._reports = scratch / "reports.jsonl"
        # The last of an option counts: these replace the arguments' own. One word each: pytest looks for its root folder among all words
        # that are paths, and rows are named from there.
        own = [f"--gpumem-baseline={scratch}", f"--benchmark-storage=file://{scratch}", f"--junitxml={scratch / 'junit.xml'}"]
        own += [f"--override-ini=cache_dir={scratch / 'cache'}"]
        further = {FURTHER_REPORTS: str(self._reports), FURTHER_TURN: str(child.reads)}
        command = pytest_command([*arguments, *own], results=child.results)
        child.start(command, for_a_part(environment) | further, folder, own_group=False)

    def measure(self, tests: Sequence[str], device: str, watch: Callable[[int], None] | None = None) -> Further:
        """Let it measure these tests, or all that it collected, and wait for its end. Raises `RepeatFailed`."""
        child = self._child
        child.tell(list(tests))
        seen = None if watch is None else partial(self._watched, watch)
        code, output = child.wait(watch=seen), child.last_output()
        ended, failures, finished = _reported(self._reports)
        broken = None if ended and code in (Exit.FINE, Exit.FAILED) else f"ended with {code}: {output}"
        measured = child.results.exists() and child.results.stat().st_size > 0
        if not (failures or finished) if broken else not measured:
            raise RepeatFailed(f"{self._name} ended with {code} and measured nothing: {output}")
        rows = _rows(child.results, device, self._name) if measured else {}
        failed = output if broken is None and code and not failures else None
        self.close()
        return Further(self._name, rows, failures, finished, broken, failed)

    def _watched(self, watch: Callable[[int], None]) -> None:
        watch(len(_reported(self._reports)[2]))

    def close(self) -> None:
        """End it if it still runs; a second call does nothing."""
        self._child.close()


def _rows(results: Path, device: str, name: str) -> dict[str, Row]:
    try:
        document = document_in(parsed(content(results)))
    except FileError as error:
        raise RepeatFailed(f"{name} wrote no rows: {error}") from None
    if document.device.key != device:
        raise RepeatFailed(f"{name} measured on {document.device.key}, this one is on {device}")
    return {row.key: row for row in document.rows}


def _reported(file: Path) -> tuple[bool, dict[str, str], frozenset[str]]:
    """The reports of a process: True if its session ended, the failures by node id, and the finished tests."""
    failures: dict[str, str] = {}
    finished: set[str] = set()
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for line in lines:
        try:
            report = json.loads(line)
        except ValueError:  # the process was killed while it wrote
            break
        if report == ENDED:
            return True, failures, frozenset(finished)
        if report["failure"] is not None:
            failures.setdefault(report["nodeid"], report["failure"])
        if report["finished"]:
            finished.add(report["nodeid"])
    return False, failures, frozenset(finished)
