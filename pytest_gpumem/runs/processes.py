"""One fresh process of an experiment: how it starts, what it gets, and the record of its run.

The process is the script `SCRIPT`, with which pytest runs; the tree under test has its plugin.
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
from pytest_gpumem.records.schema import SchemaError, document_from_json
from pytest_gpumem.revisions import of_no_hook
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.child import Background, ending, for_a_part, name_of
from pytest_gpumem.runs.worktree import Side, python_path

BASE, HEAD = "base", "head"
SCRIPT = Path(pytest_gpumem.__file__).resolve().parent / "plugin" / "experiment_process.py"
READY_SECONDS = 1800.0  # to collect the tests: the first process of a side may compile CUDA sources
WORK_SECONDS = 3600.0  # to measure without an answer
END_SECONDS = 60.0  # to end after the last line
RAN = (Exit.FINE, Exit.FAILED, Exit.NO_TESTS)  # pytest's exit codes of a session that ended well


def _refused() -> dict[str, str]:
    refused = {
        "--benchmark-json": "the duet reads that file itself; --json writes its results",
        "--gpumem-baseline": "a duet compares with BASE alone",
    }
    for role, why in (
        (OptionRole.SAVING, "a duet saves nothing into a baseline"),
        (
            OptionRole.OUTPUT,
            "a duet's processes are no runs of their own; --json writes its results",
        ),
        (OptionRole.PROCESSES, "a duet has fresh processes of its own"),
    ):
        for option in of_role(role):
            refused[option.flag] = why
    for name in ("-n", "--numprocesses"):
        refused[name] = "a duet measures one process at a time"
    return refused


REFUSED: Mapping[str, str] = _refused()
"""Arguments of pytest that a duet refuses, and why. A process ignores them, whoever gives them."""


class Turn(NamedTuple):
    """One process of an experiment."""

    round: int  # number of its pair; with one side, the number of the process
    side: str  # `BASE` or `HEAD`


class ProcessRecord(msgspec.Struct, frozen=True, dict=True):
    """The record of a process's run."""

    turn: Turn
    attempt: int  # 1, or more if it was repeated
    utc: str  # when it got the GPU, ISO 8601
    seconds: float  # from then to its end
    pid: int
    error: str | None = None  # how its session broke off; None if it came to its end
    device: DeviceFacts | None = None  # None where nothing was measured
    settings: dict[str, Any] = {}
    rows: tuple[Row, ...] = ()  # in a duet, each placement is its median
    outcomes: dict[str, tuple[str, str]] = {}
    """By node id of each test that did not pass: "failed" or "skipped", and why."""
    strict: bool = False  # the side's ini file asks for strictness
    name: str = ""  # for messages, such as "base (revision main)"
    failed_as_a_whole: str | None = None
    """The last words of a session that failed, and no test of it did."""
    texts: dict[str, str] = {}  # by node id of each failed test, the whole text
    finished: frozenset[str] = frozenset()  # node ids of the tests that it reported to their end

    @property
    def simulated(self) -> bool:
        """True if its device was simulated."""
        return self.device is not None and self.device.simulated

    @cached_property
    def by_key(self) -> dict[str, Row]:
        """Its rows by `Row.key`."""
        return {row.key: row for row in self.rows}

    def failure_of(self, nodeid: str) -> str | None:
        """Return why a test failed in this process, or None."""
        if nodeid in self.texts:
            return f"{self.name}: {nodeid}\n{self.texts[nodeid]}"
        if self.error is not None and nodeid not in self.finished:
            return f"{self.name} {self.error}, before it reported this test"
        return None


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments that a process of a duet does not accept.

    Raises `RunError`: names the argument and why.
    """
    for argument in arguments:
        why = REFUSED.get(name_of(argument))
        if why is not None:
            raise RunError(f"{argument} among pytest's arguments: {why}")


def environment_of(
    side: Side, others: Sequence[Side], environment: Mapping[str, str], *, evidence: bool = False
) -> dict[str, str]:
    """Variables of a process that measures a side: it is no run, and sees nothing of the others."""
    variables = for_a_part(environment, evidence=evidence)
    path = python_path(environment, side, others)
    if path is not None:
        variables["PYTHONPATH"] = path
    return of_no_hook(variables) if others else variables


class Worker:
    """One process: it collects and imports while others measure, and waits for its turn."""

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
        `job`: as the script takes it, without the pipes and the files of this process.
        `within`: the folder for its files.
        """
        self.turn = turn
        self._name = name
        self._child = child = Background(within)
        # The last of an option counts: these replace the user's. One word each: pytest looks for
        # its root folder among all words that are paths.
        files = [f"--benchmark-storage=file://{child.folder}", f"--benchmark-json={child.results}"]
        job = {
            **job,
            "reads": child.reads,
            "writes": child.writes,
            "arguments": [*job["arguments"], *files],
        }
        # Unbuffered: what a process printed before it crashed is its last words.
        child.start([side.python, "-u", str(SCRIPT), json.dumps(job)], environment, side.folder)

    def run(
        self,
        tests: Sequence[str] | None,
        attempt: int,
        watch: Callable[[int], None] = lambda finished: None,
        *,
        everything: bool = False,
    ) -> ProcessRecord:
        """Let it measure, and wait for its end; arguments and errors as of `Processes.run`.

        `everything`: keep every sample.
        """
        answers = _Answers(self._child, watch)
        answers.read_until("ready", READY_SECONDS)
        utc = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        begun = time.perf_counter()
        if answers.ready:
            self._child.tell({"tests": tests})
            answers.read_until("exit", WORK_SECONDS)
        code = self._child.wait(END_SECONDS)
        record = ProcessRecord(
            self.turn,
            attempt,
            utc,
            time.perf_counter() - begun,
            self._child.pid,
            strict=answers.strict,
            outcomes=answers.outcomes,
            name=self._name,
            texts=answers.texts,
            finished=frozenset(answers.finished),
        )
        if answers.strays:
            raise RunError(
                f"{self._name} ran code of the other side: {answers.strays[0]}; --base-python names "
                "an environment that holds BASE"
            )
        if answers.exit is None:
            return replace(record, error=f"{ended_with(code)}: {self._errors()}")
        if answers.exit in (Exit.INTERNAL_ERROR, Exit.USAGE) and not answers.ready:
            raise RunError(f"{self._name}: pytest ended with {answers.exit}: {self._errors()}")
        failed = any(outcome == "failed" for outcome, _ in answers.outcomes.values())
        if answers.exit not in RAN:
            record = replace(record, error=f"{ended_with(answers.exit)}: {self._errors()}")
        elif answers.exit == Exit.FAILED and not failed:
            record = replace(record, failed_as_a_whole=self._child.last_output())
        return self._with_rows(record, everything)

    def _with_rows(self, record: ProcessRecord, everything: bool) -> ProcessRecord:
        """The rows from pytest's results, which it writes only if a test measured."""
        results = self._child.results
        if not results.exists() or not results.stat().st_size:
            return record
        try:
            plain = json.loads(results.read_text(encoding="utf-8")).get("gpumem")
            document = document_from_json(plain)
        except SchemaError as error:
            raise RunError(
                f"{self._name} wrote results of another version of this plugin: {error}"
            ) from None
        except (ValueError, AttributeError) as error:
            raise RunError(f"{self._name} wrote no results: {error}") from None
        rows = list(document.rows)
        if not everything:
            rows = [with_medians(row) for row in rows]
        return replace(record, device=document.device, settings=document.settings, rows=tuple(rows))

    def _errors(self) -> str:
        """The last errors that pytest printed, else its last lines."""
        lines, errors = [], []
        for printed in self._child.last_output().splitlines():
            line = printed.strip()
            if not line:
                continue
            lines.append(line)
            # pytest's parser names the mistake on the line after its usage, and Python the signal
            # of a crash before its stack.
            begins = line.startswith(("ERROR", "E  ", "Fatal Python error"))
            if (begins and "usage:" not in line) or ": error: " in line:
                error = line.removeprefix("E  ").strip()
                errors.append(error.removeprefix("pytest.main(): error: "))
        return " | ".join((errors or lines)[-3:]) or "it printed nothing"

    def close(self) -> None:
        """End it and its children."""
        self._child.close()


class _Answers:
    """The lines of one process so far."""

    def __init__(self, child: Background, watch: Callable[[int], None]) -> None:
        self._child = child
        self._watch = watch  # gets the number of finished tests
        self.ready = False
        self.strict = False
        self.exit: int | None = None  # pytest's exit code, once the session has ended
        self.strays: list[str] = []
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.texts: dict[str, str] = {}
        self.finished: dict[str, None] = {}

    def read_until(self, word: str, seconds: float) -> None:
        """Read lines until a line has this word, the session ends, or nothing comes any more."""
        while self.exit is None:
            line = self._child.hear(seconds, lambda: self._watch(len(self.finished)))
            if line is None:
                return
            self._take(line)
            if "finished" in line:
                self._watch(len(self.finished))
            if word in line:
                return

    def _take(self, line: Mapping[str, Any]) -> None:
        if "ready" in line:
            self.ready = True
            self.strict = str(line["strict"]).lower() in YES
        elif "finished" in line:
            self.finished[line["finished"]] = None
        elif "nodeid" in line:
            nodeid, outcome = line["nodeid"], line["outcome"]
            # The first failure is the cause of those that follow.
            if self.outcomes.get(nodeid, ("", ""))[0] != "failed":
                self.outcomes[nodeid] = outcome, line["why"]
                if outcome == "failed":
                    self.texts[nodeid] = line["text"]
        elif "exit" in line:
            self.exit, self.strays = line["exit"], line["strays"]


def ended_with(code: int) -> str:
    """How a session broke off: "ended with exit code 7", "ended by SIGKILL"."""
    how = ending(code)
    return how if how.startswith("ended") else f"ended with {how}"


def with_medians(row: Row) -> Row:
    """Return the row with each placement as its median: all that a comparison takes."""
    measurement = row.measurement
    if measurement is None:
        return row
    placements = tuple((median,) for median in measurement.medians)
    return replace(row, measurement=replace(measurement, placements=placements))
