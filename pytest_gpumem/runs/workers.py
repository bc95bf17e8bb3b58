"""Fresh processes of base and head, one at a time on the GPU, while the next ones collect their tests and import their libraries.

Base and head run in pairs, each pair in an order of its own.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

import pytest_gpumem
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import SchemaError, document_from_json, from_plain
from pytest_gpumem.revisions import of_no_hook
from pytest_gpumem.runs import DuetError
from pytest_gpumem.runs.child import Background, for_a_part, name_of
from pytest_gpumem.runs.worktree import Side, held_folder, moved_path, spared
from pytest_gpumem.settings import OPTIONS, Role, of_role

BASE, HEAD = "base", "head"


class Turn(NamedTuple):
    """One process of the schedule."""

    round: int  # number of its pair, from 1 on
    side: str  # `BASE` or `HEAD`


def turns(seed: int) -> Iterator[Turn]:
    """All processes in their order, without end: one coin a pair decides which side runs first. Each pair needs a coin of its own: with one
    coin for two pairs, noise of a period of about four processes fails unchanged code."""
    for number in count(1):
        first, second = (BASE, HEAD) if np.random.default_rng([seed, number]).random() < 0.5 else (HEAD, BASE)
        yield Turn(number, first)
        yield Turn(number, second)


SCRIPT = Path(pytest_gpumem.__file__).resolve().parent / "plugin" / "duet_worker.py"
READY_SECONDS = 1800.0  # seconds that a process may take to collect its tests: the first one of a side may compile CUDA sources
WORK_SECONDS = 3600.0  # seconds that a process may take to measure
END_SECONDS = 60.0  # seconds that a process may take to end after its last line
REFUSED: Mapping[str, str] = {
    "--benchmark-json": "the duet reads that file itself; --json writes its results",
    **{option.flag: "a duet saves nothing into a baseline" for option in of_role(Role.SAVING)},
    **{option.flag: "a duet's processes are no runs of their own; --json writes its results" for option in of_role(Role.OUTPUT)},
    **{option.flag: "a duet sweeps nothing" for option in of_role(Role.SWEEP)},
    **{option.flag: "a duet has fresh processes of its own" for option in of_role(Role.PROCESSES)},
    "--gpumem-baseline": "a duet compares with BASE alone",
    "--gpumem-memory-limit": "a duet's two processes share the card",
    **dict.fromkeys(("-n", "--numprocesses"), "a duet measures one process at a time"),
}
"""Arguments of pytest that a duet does not accept, and why."""


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One finished process."""

    turn: Turn
    attempt: int  # 1, or more if it was repeated
    utc: str  # when it got the GPU, ISO 8601
    seconds: float  # from then to its end
    pid: int
    error: str | None = None  # why there are no rows at all
    device: DeviceFacts | None = None  # None where nothing was measured
    settings: dict[str, Any] = {}
    rows: tuple[Row, ...] = ()  # each placement stands as its median
    outcomes: dict[str, tuple[str, str]] = {}
    """By node id of each test that did not pass: "failed" or "skipped", and why."""
    strict: bool = False  # the side's ini file asks for strictness

    @property
    def simulated(self) -> bool:
        """True if its device was simulated."""
        return self.device is not None and self.device.simulated

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> Process:
        """The process of a line of the journal. Raises `DuetError`: it is no such line."""
        try:
            return from_plain(plain, Process)
        except SchemaError as error:
            raise DuetError(f"the journal holds a process that cannot be read: {error}") from None


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments that a process of a duet does not accept. Raises `DuetError`: names the argument and why."""
    for argument in arguments:
        if (why := REFUSED.get(name_of(argument))) is not None:
            raise DuetError(f"{argument} among pytest's arguments: {why}")


def accepted(arguments: Sequence[str]) -> list[str]:
    """A run's arguments without those that a process of a duet does not accept, each with its value."""
    flags = {option.flag for option in OPTIONS if option.is_flag}
    left: list[str] = []
    words = iter(arguments)
    for word in words:
        name = name_of(word)
        if name not in REFUSED:
            left.append(word)
        elif word == name and name not in flags:
            next(words, None)  # its value stands apart
    return left


def environment_of(side: Side, other: Side, environment: Mapping[str, str], *, evidence: bool = False) -> dict[str, str]:
    """Variables of a process that measures one of two sides: it is no run of its own, and sees nothing of the other side."""
    own = for_a_part(of_no_hook(environment), evidence=evidence)
    path = moved_path(environment, side, other.root)
    return own if path is None else own | {"PYTHONPATH": path}


@dataclass
class Workers:
    """Starts processes, a few ahead of their turn, and lets them measure one after another."""

    sides: Mapping[str, Side]
    arguments: Sequence[str]
    files: Sequence[str]  # further test files to collect, on each side that has them
    environment: Mapping[str, str]
    _: KW_ONLY
    ahead: int  # processes that get ready while one measures
    evidence: bool = False  # the processes record what a launch runs
    tree: Side | None = None  # the working tree if it is neither side: they import nothing of it
    early: bool = False  # processes wait before they import test modules: some module opens the GPU when it is imported

    def __post_init__(self) -> None:
        self._waiting: dict[Turn, _Worker] = {}
        self._stack = contextlib.ExitStack()
        self._folder = held_folder(self._stack)
        self._nothing = self._folder / "no-baseline"
        self._nothing.mkdir()

    def run(
        self, turns: Sequence[Turn], tests: Sequence[str] | None, attempt: int, ways: Mapping[str, Mapping[str, str]] | None = None
    ) -> Process:
        """Let the process of `turns[0]` measure and get the next ones ready.
        `turns`: the process to run now, and those that will follow.
        `tests`: node ids to run; None: all that were collected.
        `attempt`: number of this run of the turn, from 1 on.
        `ways`: by row key, mode and sampler that the process measures with, whatever its tests ask for.
        Raises `DuetError`: pytest did not accept its arguments or the device, or a side imported the other's modules.
        """
        for turn in turns[: 1 + self.ahead]:
            if turn not in self._waiting:
                self._waiting[turn] = self._worker(turn)
        worker = self._waiting.pop(turns[0])
        try:
            return worker.run(tests, attempt, ways or {})
        finally:
            worker.close()

    def wait_early(self) -> None:
        """From now on start processes that wait before they import test modules; those that wait are ended."""
        self.early = True
        self._end_waiting()

    def close(self) -> None:
        """End all processes."""
        self._end_waiting()
        self._stack.close()

    def _end_waiting(self) -> None:
        while self._waiting:
            self._waiting.popitem()[1].close()

    def _worker(self, turn: Turn) -> _Worker:
        side = self.sides[turn.side]
        other = next(one for name, one in self.sides.items() if name != turn.side)
        environment = environment_of(side, self.tree or other, self.environment, evidence=self.evidence)
        # -x would end a process at the first test that fails.
        arguments = ["--gpumem", *self.arguments, *(file for file in self.files if (side.folder / file).exists())]
        arguments += [f"--gpumem-baseline={self._nothing}"]
        arguments += ["--maxfail=0", "--continue-on-collection-errors", "-p", "no:randomly"]
        job = {
            "early": self.early,
            "cwd": str(side.folder) if side.path_from_cwd else None,
            "names": list(side.names),
            "roots": [str(path) for path in (side.folder, side.root, side.environment) if path is not None],
            # A wheel has no tests: those of the working tree run with it.
            "foreign": [str(one.root) for one in (other, self.tree) if one is not None and side.path_from_cwd and one.path_from_cwd],
            "spared": spared(),
            "arguments": arguments,
        }
        return _Worker(turn, side, job, environment, self._folder)


class _Worker:
    def __init__(self, turn: Turn, side: Side, job: dict[str, Any], environment: Mapping[str, str], within: Path) -> None:
        self.turn = turn
        self._side = side
        self._child = child = Background(within)
        pipes = {"reads": child.reads, "writes": child.writes}
        job = job | pipes | {"arguments": [*job["arguments"], f"--benchmark-json={child.results}"]}
        # Ctrl-C reaches the duet alone, which then ends its processes.
        child.start([side.python, str(SCRIPT), json.dumps(job)], environment, side.folder, own_group=True)

    def run(self, tests: Sequence[str] | None, attempt: int, ways: Mapping[str, Mapping[str, str]]) -> Process:
        child = self._child
        first = child.hear(READY_SECONDS)
        utc, begun = datetime.now(timezone.utc).isoformat(timespec="milliseconds"), time.perf_counter()
        done = Process(self.turn, attempt, utc, 0.0, child.pid)
        last = first
        if first is not None and first.get("ready"):
            child.tell({"tests": tests, "ways": ways})
            last = child.hear(WORK_SECONDS)
        code = child.wait(END_SECONDS)
        done = replace(done, seconds=time.perf_counter() - begun)
        if last is None or "exit" not in last:
            return replace(done, error=f"exit status {code}: {self._errors()}")
        if last["strays"]:
            raise DuetError(
                f"{self.turn.side} ({self._side.title}) did not run its own code: {last['strays'][0]}; install the project for editing, "
                "or remove the other side from PYTHONPATH"
            )
        if last["exit"] in (Exit.INTERNAL_ERROR, Exit.USAGE) and not (first or {}).get("ready"):
            raise DuetError(f"{self.turn.side} ({self._side.title}): pytest ended with {last['exit']}: {self._errors()}")
        outcomes = {name: (outcome, why) for name, (outcome, why) in last["outcomes"].items()}
        done = replace(done, outcomes=outcomes, strict=str((first or {}).get("strict")).lower() in ("1", "true", "yes", "on"))
        return self._with_rows(done)

    def _with_rows(self, done: Process) -> Process:
        """The rows from pytest's results, which it writes only if a test measured."""
        if not self._child.results.exists() or not self._child.results.stat().st_size:
            return done
        try:
            document = document_from_json(json.loads(self._child.results.read_text(encoding="utf-8")).get("gpumem"))
        except (ValueError, AttributeError) as error:  # SchemaError and JSONDecodeError are ValueErrors
            kind = "of another version of this plugin" if isinstance(error, SchemaError) else "no results"
            raise DuetError(f"{self.turn.side} ({self._side.title}) wrote {kind}: {error}") from None
        return replace(done, device=document.device, settings=document.settings, rows=tuple(map(with_medians, document.rows)))

    def _errors(self) -> str:
        """The last errors that pytest printed, else its last lines."""
        lines = [line.strip() for line in self._child.last_output().splitlines() if line.strip()]
        # pytest's parser names the mistake on the line after its usage.
        errors = [line for line in lines if (line.startswith(("ERROR", "E  ")) and "usage:" not in line) or ": error: " in line]
        return " | ".join((errors or lines)[-3:]) or "it printed nothing"

    def close(self) -> None:
        """End it and its children."""
        self._child.close()


def with_medians(row: Row) -> Row:
    """The row with each placement as its median: all that a comparison takes."""
    measurement = row.measurement
    if measurement is None:
        return row
    return replace(row, measurement=replace(measurement, placements=tuple((median,) for median in measurement.medians)))
