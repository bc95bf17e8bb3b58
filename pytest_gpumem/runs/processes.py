"""One fresh process of an experiment: how it is started, what it is told, and the record of its run.

The process is the script `SCRIPT`, with which pytest runs; the tree under test brings its own plugin.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

import pytest_gpumem
from pytest_gpumem.limits import YES
from pytest_gpumem.options import OptionRole, of_role
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import SchemaError, document_from_json, from_plain
from pytest_gpumem.revisions import of_no_hook
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.child import Background, ending, for_a_part, name_of
from pytest_gpumem.runs.worktree import Side, moved_path

BASE, HEAD = "base", "head"
SCRIPT = Path(pytest_gpumem.__file__).resolve().parent / "plugin" / "experiment_process.py"
READY_SECONDS = 1800.0  # seconds that a process may take to collect its tests: the first one of a side may compile CUDA sources
WORK_SECONDS = 3600.0  # seconds that a process may measure without an answer
END_SECONDS = 60.0  # seconds that a process may take to end after its last line
RAN = (
    Exit.FINE,
    Exit.FAILED,
    Exit.NO_TESTS,
)  # pytest's exit codes of a session that came to its end
REFUSED: Mapping[str, str] = {
    "--benchmark-json": "the duet reads that file itself; --json writes its results",
    **{
        option.flag: "a duet saves nothing into a baseline" for option in of_role(OptionRole.SAVING)
    },
    **{
        option.flag: "a duet's processes are no runs of their own; --json writes its results"
        for option in of_role(OptionRole.OUTPUT)
    },
    **{
        option.flag: "a duet has fresh processes of its own"
        for option in of_role(OptionRole.PROCESSES)
    },
    "--gpumem-baseline": "a duet compares with BASE alone",
    **dict.fromkeys(("-n", "--numprocesses"), "a duet measures one process at a time"),
}
"""Arguments of pytest that a duet does not accept, and why. A process ignores them, whoever gives them."""


class Turn(NamedTuple):
    """One process of a schedule."""

    round: int  # number of its pair; of a repetition, the number of the process
    side: str  # `BASE` or `HEAD`


class ProcessRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The record of a process's run."""

    turn: Turn
    attempt: int  # 1, or more if it was repeated
    utc: str  # when it got the GPU, ISO 8601
    seconds: float  # from then to its end
    pid: int
    error: str | None = None  # how its session broke off; a session that came to its end has none
    device: DeviceFacts | None = None  # None where nothing was measured
    settings: dict[str, Any] = {}
    rows: tuple[
        Row, ...
    ] = ()  # each placement stands as its median, unless the experiment keeps everything
    outcomes: dict[str, tuple[str, str]] = {}
    """By node id of each test that did not pass: "failed" or "skipped", and why."""
    strict: bool = False  # the side's ini file asks for strictness
    name: str = ""  # for messages, such as "base (revision main)"
    failed_as_a_whole: str | None = None
    """The last words of a session that failed, and no test of it did."""
    texts: dict[
        str, str
    ] = {}  # by node id of each failed test, the whole text, if the experiment keeps everything
    finished: frozenset[str] = frozenset()
    """Node ids of the tests that it reported to their end, if the experiment keeps everything."""

    @property
    def simulated(self) -> bool:
        """True if its device was simulated."""
        return self.device is not None and self.device.simulated

    @cached_property
    def by_key(self) -> dict[str, Row]:
        """Its rows by `Row.key`."""
        return {row.key: row for row in self.rows}

    def failure_of(self, nodeid: str) -> str | None:
        """Why a test failed in this process, whose experiment keeps everything; None if it did not."""
        if (text := self.texts.get(nodeid)) is not None:
            return f"{self.name}: {nodeid}\n{text}"
        if self.error is not None and nodeid not in self.finished:
            return f"{self.name} {self.error}, before it reported this test"
        return None

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> ProcessRecord:
        """The process of a line of the journal. Raises `RunError`: it is no such line."""
        try:
            return from_plain(plain, ProcessRecord)
        except SchemaError as error:
            raise RunError(f"the journal holds a process that cannot be read: {error}") from None


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments that a process of a duet does not accept. Raises `RunError`: names the argument and why."""
    for argument in arguments:
        if (why := REFUSED.get(name_of(argument))) is not None:
            raise RunError(f"{argument} among pytest's arguments: {why}")


def environment_of(
    side: Side, other: Side | None, environment: Mapping[str, str], *, evidence: bool = False
) -> dict[str, str]:
    """Variables of a process that measures one side: it is no run of its own, and sees nothing of the other side, if there is one."""
    own = for_a_part(environment, evidence=evidence)
    if other is None:
        return own
    path = moved_path(environment, side, other.root)
    return of_no_hook(own) | ({} if path is None else {"PYTHONPATH": path})


class Worker:
    """One process: it collects its tests and imports their libraries while others measure, and waits for its turn."""

    def __init__(
        self,
        turn: Turn,
        name: str,
        side: Side,
        job: dict[str, Any],
        environment: Mapping[str, str],
        within: Path,
    ) -> None:
        """Start it.
        `name`: for messages.
        `job`: as the script takes it, without what is this process's own.
        `within`: the folder for its files.
        """
        self.turn = turn
        self._name = name
        self._child = child = Background(within)
        # The last of an option counts: these replace the arguments' own. One word each: pytest looks for its root folder among all words
        # that are paths, and rows are named from there.
        own = [f"--benchmark-storage=file://{child.folder}", f"--benchmark-json={child.results}"]
        job = {
            **job,
            "reads": child.reads,
            "writes": child.writes,
            "arguments": [*job["arguments"], *own],
        }
        # Unbuffered: what a process printed before it crashed is its last words.
        child.start([side.python, "-u", str(SCRIPT), json.dumps(job)], environment, side.folder)

    def run(
        self,
        tests: Sequence[str] | None,
        attempt: int,
        variables: Mapping[str, str],
        watch: Callable[[int], None] = lambda finished: None,
        *,
        everything: bool = False,
    ) -> ProcessRecord:
        """Let it measure, and wait for its end; arguments as for `Processes.run`. Raises `RunError`: see there."""
        child = self._child
        answers = _Answers()
        answers.take_until("ready", lambda: child.hear(READY_SECONDS, lambda: watch(0)), watch)
        utc, begun = (
            datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            time.perf_counter(),
        )
        if answers.ready:
            child.tell({"tests": tests, "variables": dict(variables)})
            answers.take_until(
                "exit",
                lambda: child.hear(WORK_SECONDS, lambda: watch(len(answers.finished))),
                watch,
            )
        code = child.wait(END_SECONDS)
        seconds = time.perf_counter() - begun
        done = ProcessRecord(
            self.turn,
            attempt,
            utc,
            seconds,
            child.pid,
            strict=answers.strict,
            outcomes=answers.outcomes,
            name=self._name,
        )
        if everything:
            done = replace(done, texts=answers.texts, finished=frozenset(answers.finished))
        if answers.strays:
            raise RunError(
                f"{self._name} did not run its own code: {answers.strays[0]}; install the project for editing, "
                "or remove the other side from PYTHONPATH"
            )
        if answers.exit is None:
            return replace(done, error=f"{ended_with(code)}: {self._errors()}")
        if answers.exit in (Exit.INTERNAL_ERROR, Exit.USAGE) and not answers.ready:
            raise RunError(f"{self._name}: pytest ended with {answers.exit}: {self._errors()}")
        if answers.exit not in RAN:
            done = replace(done, error=f"{ended_with(answers.exit)}: {self._errors()}")
        elif answers.exit == Exit.FAILED and not any(
            outcome == "failed" for outcome, _ in answers.outcomes.values()
        ):
            done = replace(done, failed_as_a_whole=child.last_output())
        return self._with_rows(done, everything)

    def _with_rows(self, done: ProcessRecord, everything: bool) -> ProcessRecord:
        """The rows from pytest's results, which it writes only if a test measured."""
        if not self._child.results.exists() or not self._child.results.stat().st_size:
            return done
        try:
            document = document_from_json(
                json.loads(self._child.results.read_text(encoding="utf-8")).get("gpumem")
            )
        except (
            ValueError,
            AttributeError,
        ) as error:  # SchemaError and JSONDecodeError are ValueErrors
            kind = (
                "results of another version of this plugin"
                if isinstance(error, SchemaError)
                else "no results"
            )
            raise RunError(f"{self._name} wrote {kind}: {error}") from None
        rows = document.rows if everything else map(with_medians, document.rows)
        return replace(done, device=document.device, settings=document.settings, rows=tuple(rows))

    def _errors(self) -> str:
        """The last errors that pytest printed, else its last lines."""
        lines = [line.strip() for line in self._child.last_output().splitlines() if line.strip()]
        # pytest's parser names the mistake on the line after its usage, and Python the signal of a crash before its stack.
        begins, parser = ("ERROR", "E  ", "Fatal Python error"), ": error: "
        errors = [
            line
            for line in lines
            if (line.startswith(begins) and "usage:" not in line) or parser in line
        ]
        errors = [
            line.removeprefix("E  ").strip().removeprefix("pytest.main(): error: ")
            for line in errors
        ]
        return " | ".join((errors or lines)[-3:]) or "it printed nothing"

    def close(self) -> None:
        """End it and its children."""
        self._child.close()


class _Answers:
    """The lines of one process so far."""

    def __init__(self) -> None:
        self.ready = self.strict = False
        self.exit: int | None = None  # pytest's exit code, once the session has ended
        self.strays: list[str] = []
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.texts: dict[str, str] = {}
        self.finished: dict[str, None] = {}

    def take_until(
        self, word: str, hear: Callable[[], dict[str, Any] | None], watch: Callable[[int], None]
    ) -> None:
        """Take lines until one has this word, the session ends, or nothing more comes."""
        while (line := hear()) is not None:
            self._take(line)
            if "finished" in line:
                watch(len(self.finished))
            if word in line or self.exit is not None:
                return

    def _take(self, line: Mapping[str, Any]) -> None:
        if "ready" in line:
            self.ready, self.strict = True, str(line["strict"]).lower() in YES
        elif "finished" in line:
            self.finished[line["finished"]] = None
        elif "nodeid" in line:
            nodeid, outcome = line["nodeid"], line["outcome"]
            # The first failure is the cause of those that follow.
            if self.outcomes.get(nodeid, ("", ""))[0] != "failed":
                self.outcomes[nodeid] = outcome, line["why"]
                self.texts |= {nodeid: line["text"]} if outcome == "failed" else {}
        elif "exit" in line:
            self.exit, self.strays = line["exit"], line["strays"]


def ended_with(code: int) -> str:
    """How a session broke off: "ended with exit code 7", "ended by SIGKILL"."""
    how = ending(code)
    return how if how.startswith("ended") else f"ended with {how}"


def with_medians(row: Row) -> Row:
    """The row with each placement as its median: all that a comparison takes."""
    measurement = row.measurement
    if measurement is None:
        return row
    return replace(
        row,
        measurement=replace(
            measurement, placements=tuple((median,) for median in measurement.medians)
        ),
    )
