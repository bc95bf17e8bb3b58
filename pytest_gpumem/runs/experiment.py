"""The processes of an experiment: fresh ones of its sides, which measure one at a time on the GPU.

A duet has base and head in pairs; `--gpumem-processes` has this environment alone. The next
processes start, collect and import while one measures.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from pytest_gpumem.runs.processes import BASE, HEAD, ProcessRecord, Turn, Worker, environment_of
from pytest_gpumem.runs.worktree import (
    Side,
    moved_word,
    remove_leftovers,
    spared,
    temporary_folder,
)

AHEAD = max(1, min(3, (os.cpu_count() or 2) - 1))  # processes that get ready while one measures


@dataclass
class Processes:
    """Starts the processes of an experiment, a few ahead of their turn, and lets them measure one after another."""

    sides: Mapping[str, Side]
    arguments: Sequence[str]  # pytest's
    files: Sequence[str]  # further test files to collect, on each side that has them
    environment: Mapping[str, str]
    _: KW_ONLY
    ahead: int = AHEAD  # processes that get ready while one measures
    evidence: bool = False  # the processes record what a launch runs
    tree: Side | None = None  # the working tree if it is neither side: they import nothing of it
    early: bool = False  # processes wait before they import test modules, which may open the GPU
    everything: bool = False  # records keep every sample and the text of each failure
    titles: Callable[[Turn], str] | None = None  # how messages name a process; None: by its side

    def __post_init__(self) -> None:
        self._waiting: dict[Turn, Worker] = {}
        self._running: Worker | None = None
        self._stack = contextlib.ExitStack()
        remove_leftovers()
        self._folder = temporary_folder(self._stack)
        self._nothing = self._folder / "no-baseline"
        self._nothing.mkdir()

    def get_ready(self, turns: Iterable[Turn], tests: Sequence[str] | None) -> None:
        """Start the processes of these turns that are not started yet.

        `tests`: node ids of all tests that may be theirs; None: all that the arguments select.
        """
        for turn in turns:
            if turn not in self._waiting:
                self._waiting[turn] = self._worker(turn, tests)

    def run(
        self,
        turns: Sequence[Turn],
        tests: Sequence[str] | None,
        attempt: int = 1,
        watch: Callable[[int], None] = lambda finished: None,
    ) -> ProcessRecord:
        """Let the process of `turns[0]` measure and get the next ones ready.

        `turns`: the process to run now, and those that may follow, with the same tests or fewer.
        `tests`: node ids to run; None: all that were collected.
        `attempt`: number of this run of the turn, from 1 on.
        `watch`: gets the number of finished tests, every second and after each test.
        Raises `RunError`: pytest did not accept its arguments or the device, or a side imported
        modules of the other.
        """
        self.get_ready(turns[: 1 + self.ahead], tests)
        self._running = worker = self._waiting.pop(turns[0])
        try:
            process = worker.run(tests, attempt, watch, everything=self.everything)
        finally:
            self._running = None
            worker.close()
        if not self.early and _sees_others(process):
            # Those that wait may have opened the GPU by an import: begin them anew.
            self.early = True
            self._end_waiting()
        return process

    def name(self, turn: Turn) -> str:
        """The process of a turn in messages."""
        if self.titles is not None:
            return self.titles(turn)
        return f"{turn.side} ({self.sides[turn.side].title})"

    def close(self) -> None:
        """End all processes, also one that runs for another thread."""
        if (running := self._running) is not None:
            running.close()
        self._end_waiting()
        self._stack.close()

    def _end_waiting(self) -> None:
        while self._waiting:
            self._waiting.popitem()[1].close()

    def _worker(self, turn: Turn, tests: Sequence[str] | None) -> Worker:
        side = self.sides[turn.side]
        others = [other for name, other in self.sides.items() if name != turn.side]
        if self.tree is not None:
            others.append(self.tree)
        environment = environment_of(side, others, self.environment, evidence=self.evidence)
        tree = self.tree or self.sides.get(HEAD)
        arguments = list(self.arguments)
        if tree is not None:
            arguments = [moved_word(word, side, tree) for word in arguments]
        files = [file for file in self.files if (side.folder / file).exists()]
        roots = [side.folder, side.root]
        if side.environment is not None:
            roots.append(side.environment)
        job = {
            "early": self.early,
            "tests": tests,
            "lenient": turn.side == BASE,
            "cwd": str(side.folder),
            "roots": [str(path) for path in roots],
            "foreign": [str(other.root) for other in others],
            "spared": spared(),
            "arguments": ["--gpumem", *arguments, *files, f"--gpumem-baseline={self._nothing}"],
        }
        return Worker(turn, self.name(turn), side, job, environment, self._folder)


def _sees_others(process: ProcessRecord) -> bool:
    """True if some row saw another process on the device."""
    for row in process.rows:
        if row.measurement is None:
            continue
        seen = list(row.measurement.conditions)
        if row.measurement.during is not None:
            seen.append(row.measurement.during)
        if any(conditions.other_processes for conditions in seen):
            return True
    return False
