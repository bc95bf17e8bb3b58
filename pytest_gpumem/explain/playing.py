"""Both sides measured: a few alternating pairs of fresh processes, in which a launch is watched too, and counters where there are some."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pytest_gpumem.explain.evidence import ExplainError, NothingMeasured, SideEvidence, together
from pytest_gpumem.explain.profiling import NotCounted, Run, count, needed, results_of, trace
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import device_from_json
from pytest_gpumem.runs import DuetError, child
from pytest_gpumem.runs.schedule import BASE, HEAD, turns
from pytest_gpumem.runs.workers import Workers, with_medians
from pytest_gpumem.runs.worktree import Side as Tree

WATCHING = "--gpumem-explain"
MOST_REASONS = 3
"""Of tests that did not measure, that are said."""


@dataclass(frozen=True)
class Asked:
    """What is to be measured."""

    tests: tuple[str, ...]
    """Node ids; empty for all that the arguments select."""
    arguments: tuple[str, ...]
    """pytest's."""
    pairs: int
    """Processes of each side."""
    counters: bool
    """Run both sides under ncu as well."""
    traces: bool | None = None
    """Run both sides under nsys as well; None: where CUPTI did not tell of copies or pages."""
    seed: int = 0
    """Of the order of base and head."""


def play(
    base: Tree, head: Tree, asked: Asked, environment: Mapping[str, str], echo: Callable[[str], object]
) -> tuple[SideEvidence, SideEvidence]:
    """Measure both sides.

    Raises:
        ExplainError: pytest did not accept its arguments or the device.
        NothingMeasured: a side measured none of the tests.
    """
    trees = {BASE: base, HEAD: head}
    try:
        rows, facts = _processes(trees, asked, environment, echo)
    except DuetError as error:
        raise ExplainError(str(error)) from None
    sides = {}
    for name, tree in trees.items():
        by_key: dict[str, list[Row]] = {}
        for row in rows[name]:
            if row.measurement is not None:
                by_key.setdefault(row.key, []).append(row)
        other = next(one for which, one in trees.items() if which != name)
        sides[name] = _side(name, tree, other, asked, by_key, facts[name], environment, echo)
    return sides[BASE], sides[HEAD]


def _processes(
    trees: Mapping[str, Tree], asked: Asked, environment: Mapping[str, str], echo: Callable[[str], object]
) -> tuple[dict[str, list[Row]], dict[str, DeviceFacts]]:
    """The rows of all processes of each side, oldest first, and the device of each side."""
    files = sorted({nodeid.partition("::")[0] for nodeid in asked.tests})
    workers = Workers(trees, (*asked.arguments, WATCHING), files, environment, ahead=max(1, min(2, (os.cpu_count() or 2) - 1)))
    rows: dict[str, list[Row]] = {BASE: [], HEAD: []}
    outcomes: dict[str, Mapping[str, tuple[str, str]]] = {}
    facts: dict[str, DeviceFacts] = {}
    schedule = list(islice(turns(asked.seed), 2 * asked.pairs))
    try:
        for number, turn in enumerate(schedule):
            process = workers.run(schedule[number:], asked.tests or None, 1)
            if process.error is not None:
                raise NothingMeasured(f"{turn.side} ({trees[turn.side].what}) crashed: {process.error}")
            if not process.rows and not process.outcomes:
                # The next processes of this side would find no more.
                raise NothingMeasured(f"{turn.side} ({trees[turn.side].what}) measured nothing: {absent(asked.tests)}")
            if process.facts:
                facts[turn.side] = device_from_json(dict(process.facts))
            rows[turn.side] += process.rows
            outcomes[turn.side] = process.outcomes
            failed = "".join(f"; {nodeid} {why}" for nodeid, why in _why(process.outcomes))
            echo(f"gpumem: process {number + 1} of {len(schedule)}, {turn.side}, {process.seconds:.1f} s{failed}")
            if number == 1:
                _check_first_pair(trees, rows, outcomes)
    finally:
        workers.close()
    return rows, facts


def _check_first_pair(
    trees: Mapping[str, Tree], rows: Mapping[str, Sequence[Row]], outcomes: Mapping[str, Mapping[str, tuple[str, str]]]
) -> None:
    """Refuse to go on where every test of a side skipped or failed before it measured: further processes would do the same."""
    without = [side for side in (BASE, HEAD) if all(row.measurement is None for row in rows[side])]
    if without:
        names = " and ".join(f"{side} ({trees[side].what})" for side in without)
        raise NothingMeasured(f"{names} measured nothing: {reasons([outcomes[side] for side in without]) or 'no test came to it'}")


def reasons(outcomes: Sequence[Mapping[str, tuple[str, str]]]) -> str:
    """Why tests did not measure, each reason once: "t.py::test_a skipped: no library", or "3 tests skipped: no library".

    Args:
        outcomes: of each side, by node id, as `Process.outcomes`.
    """
    tests: dict[str, dict[str, None]] = {}
    for of in outcomes:
        for nodeid, why in _why(of):
            tests.setdefault(why, {})[nodeid] = None
    said = [f"{next(iter(ids)) if len(ids) == 1 else f'{len(ids)} tests'} {why}" for why, ids in tests.items()]
    more = [f"and {len(said) - MOST_REASONS} further reasons"] if len(said) > MOST_REASONS else []
    return "; ".join([*said[:MOST_REASONS], *more])


def _why(outcomes: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Node ids with what became of them: "skipped: no library"."""
    # pytest puts its own word for it before the reason.
    return ((nodeid, f"{outcome}: {why.removeprefix('Skipped: ')}") for nodeid, (outcome, why) in outcomes.items())


def absent(tests: Sequence[str]) -> str:
    """Why nothing was measured where no test failed and none was skipped while it ran."""
    if not tests:
        return "it has no test that measures, or all of its modules are skipped"
    return f"it has no test {' or '.join(tests)}, or its module is skipped, such as without a library that it imports"


def alone(asked: Asked, environment: Mapping[str, str], echo: Callable[[str], object], tree: Tree) -> SideEvidence:
    """Measure one side, for a base that was measured before.

    Raises:
        NothingMeasured: nothing was measured.
    """
    by_key: dict[str, list[Row]] = {}
    facts = None
    run = Run(tree, tree, (WATCHING, *asked.arguments), asked.tests, environment)
    for number in range(asked.pairs):
        with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
            results = Path(folder, "results.json")
            finished = child.run(run.child(results), run.own, echo, folder=tree.folder)
            try:
                found = results_of(results, finished)
            except NotCounted as reason:
                raise NothingMeasured(f"head: {reason}") from None
        facts = found.device
        for row in found.rows:
            if row.measurement is not None:
                by_key.setdefault(row.key, []).append(with_medians(row))
        echo(f"gpumem: process {number + 1} of {asked.pairs}, head")
        if not by_key:
            raise NothingMeasured(f"head ({tree.what}) measured nothing: its tests skipped or failed; what pytest said is above")
    assert facts is not None
    return _side("head", tree, tree, asked, by_key, facts, environment, echo)


def _side(
    name: str,
    tree: Tree,
    other: Tree,
    asked: Asked,
    by_key: Mapping[str, list[Row]],
    facts: DeviceFacts,
    environment: Mapping[str, str],
    echo: Callable[[str], object],
) -> SideEvidence:
    measured = {key: together(found) for key, found in by_key.items()}
    run = Run(tree, other, asked.arguments, asked.tests, environment)
    profiles: dict[str, TestProfile] = {}
    traces: dict[str, TestProfile] = {}
    notes = []
    try:
        if asked.counters and not facts.simulated:
            profiles = count(run, echo, hot=all(one.mode == "hot" for one in measured.values()))
    except NotCounted as reason:
        notes.append(str(reason))
    try:
        if asked.traces or (asked.traces is None and not facts.simulated and needed(measured.values())):
            traces = trace(run, echo)
    except NotCounted as reason:
        notes.append(str(reason))
    nodeids = {key: found[-1].nodeid for key, found in by_key.items()}
    return SideEvidence(tree.what, facts, measured, nodeids, profiles, traces, tuple(notes))
