"""Processes of a duet without pytest, git or a device: latencies go in, what a worker would answer comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from committing import commit
from known_devices import H100
from measurements import measurement
from msgspec import UNSET

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Limits, Measurement, MovedBytes
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.runs.processes import BASE, HEAD, Processes, ProcessRecord
from pytest_gpumem.runs.worktree import Side, working_tree

SETTINGS = {
    "device": "cuda",
    "mode": "clean-cold",
    "sampler": "auto",
    "placements": 8,
    "precision": 0.001,
    "budget": 1.0,
}


class Turn(NamedTuple):
    """A process of a pair."""

    round: int
    side: str


def measured(latency: float, **changes: Any) -> Measurement:
    """A measurement of one placement."""
    return measurement(
        **{
            "placements": ((latency,),),
            "moved_bytes": MovedBytes(2, 1),
            "floor": 0.0,
            "overhead": 3e-6,
            **changes,
        }
    )


def row(
    nodeid: str, latency: float | None, code: Code | None = Code.NO_BASELINE, **changes: Any
) -> Row:
    """A row; no code: FAIL; no latency: nothing was measured.

    `changes` are of the row, those that it does not have of its measurement.
    """
    own = {name: changes.pop(name) for name in ("failed", "limits", "label") if name in changes}
    taken = None if latency is None else measured(latency, label=own.get("label", ""), **changes)
    outcome = {
        Code.NO_BASELINE: Outcome.NEW,
        Code.CONDITIONS: Outcome.UNDECIDED,
        None: Outcome.FAIL,
    }[code]
    return Row(
        nodeid,
        own.get("limits", Limits()),
        Verdict(outcome, "because", code=code),
        taken,
        own.get("label", ""),
        own.get("failed", False),
        # A FAIL is by its verdict.
        test_error=UNSET if code is None else own.get("failed", UNSET),
    )


def process(turn: Turn, rows: Sequence[Row], attempt: int = 1, **changes: Any) -> ProcessRecord:
    """A process on one device."""
    given: dict[str, Any] = {"device": H100, "settings": SETTINGS, "pid": 1, "seconds": 1.0}
    return ProcessRecord(
        side=turn.side,
        pair=turn.round,
        attempt=attempt,
        utc="2026-01-01T00:00:00",
        rows={one.key: one for one in rows},
        **{**given, **changes},
    )


Answer = Callable[[Turn, int], Sequence[Row] | ProcessRecord]


class Players(Processes):
    """Start no processes: each turn is answered by a function of the turn and the attempt."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.played: list[tuple[Turn, tuple[str, ...] | None]] = []
        """Each turn with the tests that it was to run."""

    def run(
        self,
        side: str,
        tests: Sequence[str] | None = None,
        *,
        pair: int = 1,
        attempt: int = 1,
        name: str = "",
    ) -> ProcessRecord:
        turn = Turn(pair, side)
        self.played.append((turn, None if tests is None else tuple(tests)))
        answer = self.answer(turn, attempt)
        if isinstance(answer, ProcessRecord):
            return answer
        kept = [one for one in answer if tests is None or one.nodeid in tests]
        return process(turn, kept, attempt, pid=len(self.played))


_FOLDER = TemporaryDirectory(prefix="gpumem-sides-")


@cache
def _repository() -> Path:
    folder = Path(_FOLDER.name)
    (folder / "a.py").write_text("")
    commit(folder)
    return folder


def sides(identity: str | None = None) -> dict[str, Side]:
    """Two sides with the files of a repository. `identity`: of another state."""
    side = working_tree(_repository())
    if identity is not None:
        side = replace(side, identity=identity)
    return {BASE: replace(side, title=BASE), HEAD: replace(side, title=HEAD)}
