"""The engine of runs: an experiment measures its sides in fresh processes, one at a time on the GPU.

An experiment has sides, a schedule that is its budget, and a judge. Who asks for the next process says which tests are still open, and
stops where none is. Repetitions (`--gpumem-processes`) have one side, this environment. A duet has base and head in pairs.

One rule for failed runs: a process that is in trouble, such as by a crash, runs again, up to the attempts of its experiment. The last
attempt counts as it is.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import count

import numpy as np

from pytest_gpumem.records.schema import to_plain
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.journal import Journal
from pytest_gpumem.runs.processes import BASE, HEAD, ProcessRecord, Turn, Worker, environment_of
from pytest_gpumem.runs.reading import others_on_the_gpu
from pytest_gpumem.runs.worktree import Side, held_folder, moved_word, remove_leftovers, spared

AHEAD = max(1, min(3, (os.cpu_count() or 2) - 1))  # processes that get ready while one measures
ATTEMPTS = 3  # runs of a process before it counts whatever happened to it


def pairs() -> Iterator[Turn]:
    """Pairs of base and head, without end: one coin a pair decides which side runs first. Each pair needs a coin of its own: with one coin
    for two pairs, noise of a period of about four processes fails unchanged code."""
    for number in count(1):
        first, second = (
            (BASE, HEAD) if np.random.default_rng([0, number]).random() < 0.5 else (HEAD, BASE)
        )
        yield Turn(number, first)
        yield Turn(number, second)


def crash(process: ProcessRecord) -> str | None:
    """The trouble of a process whose session broke off; None if it came to its end."""
    return process.error


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
    early: bool = False  # processes wait before they import test modules: some module opens the GPU when it is imported
    everything: bool = False  # records keep every sample and the text of each failure
    titles: Callable[[Turn], str] | None = None  # how messages name a process; None: by its side

    def __post_init__(self) -> None:
        self._waiting: dict[Turn, Worker] = {}
        self._running: Worker | None = None
        self._stack = contextlib.ExitStack()
        remove_leftovers()
        self._folder = held_folder(self._stack)
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
        attempt: int,
        variables: Mapping[str, str] | None = None,
        watch: Callable[[int], None] = lambda finished: None,
    ) -> ProcessRecord:
        """Let the process of `turns[0]` measure and get the next ones ready.
        `turns`: the process to run now, and those that will follow. Theirs are the same tests, or fewer.
        `tests`: node ids to run; None: all that were collected.
        `attempt`: number of this run of the turn, from 1 on.
        `variables`: of the environment, which the process has from then on.
        `watch`: gets the number of finished tests, every second and after each test.
        Raises `RunError`: pytest did not accept its arguments or the device, or a side imported the other's modules.
        """
        self.get_ready(turns[: 1 + self.ahead], tests)
        self._running = worker = self._waiting.pop(turns[0])
        try:
            return worker.run(tests, attempt, variables or {}, watch, everything=self.everything)
        finally:
            self._running = None
            worker.close()

    def wait_early(self) -> None:
        """From now on start processes that wait before they import test modules; those that wait are ended."""
        self.early = True
        self._end_waiting()

    def name(self, turn: Turn) -> str:
        """The process of a turn in messages."""
        return (
            f"{turn.side} ({self.sides[turn.side].title})"
            if self.titles is None
            else self.titles(turn)
        )

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
        other = next((one for name, one in self.sides.items() if name != turn.side), None)
        environment = environment_of(
            side, self.tree or other, self.environment, evidence=self.evidence
        )
        files = [file for file in self.files if (side.folder / file).exists()]
        tree = self.tree or self.sides.get(HEAD)
        arguments = (
            [*self.arguments]
            if tree is None
            else [moved_word(word, side, tree) for word in self.arguments]
        )
        job = {
            "early": self.early,
            "tests": tests,
            "lenient": turn.side == BASE,
            "cwd": str(side.folder) if side.path_from_cwd else None,
            "names": side.names,
            "roots": [
                str(path) for path in (side.folder, side.root, side.environment) if path is not None
            ],
            # A wheel has no tests: those of the working tree run with it.
            "foreign": [
                str(one.root)
                for one in (other, self.tree)
                if one is not None and side.path_from_cwd and one.path_from_cwd
            ],
            "spared": spared(),
            "arguments": ["--gpumem", *arguments, *files, f"--gpumem-baseline={self._nothing}"],
        }
        return Worker(turn, self.name(turn), side, job, environment, self._folder)


@dataclass
class Experiment:
    """The course of an experiment."""

    processes: Processes  # of its sides
    schedule: Iterable[Turn]  # all of its processes in their order: its budget
    journal: Journal | None = None  # gives finished processes and gets new ones
    _: KW_ONLY
    attempts: int = ATTEMPTS
    on_trouble: Callable[[ProcessRecord, str, bool], object] = lambda process, why, again: None
    """Is called with a process in trouble, the trouble, and whether the process runs again."""

    def __post_init__(self) -> None:
        """Raises `RunError`: the journal cannot be read."""
        self.finished: list[
            ProcessRecord
        ] = []  # all that were run, in their order, repeated ones too
        self.resumed = 0  # processes that the journal held
        self._coming = deque(self.schedule)
        self._left_out: dict[Turn, int] = defaultdict(int)  # attempts of a turn that do not count
        self._known: dict[Turn, list[ProcessRecord]] = defaultdict(list)
        for line in self.journal.lines if self.journal is not None else ():
            process = ProcessRecord.from_json(line)
            self._known[process.turn].append(process)
            self.resumed += 1

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.close()

    @property
    def coming(self) -> Sequence[Turn]:
        """The turns that are left."""
        return tuple(self._coming)

    def measure(
        self,
        tests: Sequence[str] | None = None,
        *,
        variables: Mapping[str, str] | None = None,
        trouble: Callable[[ProcessRecord], str | None] = crash,
        watch: Callable[[int], None] = lambda finished: None,
    ) -> ProcessRecord:
        """The process of the next turn: as the journal has it, or run now.
        `tests`, `variables`, `watch`: as for `Processes.run`.
        `trouble`: why a process is to be repeated; None if it counts.
        Raises `RunError`: as `Processes.run`; or the processes ran on different devices.
        """
        turn, known = self._coming[0], self._known[self._coming[0]]
        begun = self._left_out[turn]
        last = begun + self.attempts
        while True:
            fresh = len(known) <= begun
            process = (
                self.processes.run(self.coming, tests, begun + 1, variables, watch)
                if fresh
                else known[begun]
            )
            self._check_device(process)
            if fresh:
                known.append(process)
                if self.journal is not None:
                    self.journal.append(to_plain(process))
            self.finished.append(process)
            begun = max(begun + 1, process.attempt)
            if others_on_the_gpu(process) and not self.processes.early:
                self.processes.wait_early()
            if (why := trouble(process)) is None:
                break
            self.on_trouble(process, why, begun < last)
            if begun >= last:
                break
        self._coming.popleft()
        return process

    def again(self, processes: Iterable[ProcessRecord]) -> None:
        """Let the turns of these processes come again, in this order. Their attempts so far do not count."""
        for process in reversed(list(processes)):
            self._left_out[process.turn] = process.attempt
            self._coming.appendleft(process.turn)

    def _check_device(self, process: ProcessRecord) -> None:
        first = next((one.device for one in self.finished if one.device is not None), None)
        if first is None or process.device is None:
            return
        devices = [(one.key, one.uuid) for one in (first, process.device)]
        if devices[0] != devices[1]:
            names = (f"{key} {uuid or ''}".strip() for key, uuid in devices)
            raise RunError(
                f"the processes ran on different devices: {' and '.join(names)}; they can be compared on one GPU alone"
            )
