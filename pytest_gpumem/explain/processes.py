"""The evidence of both sides: a few alternating pairs of fresh processes, and one more run of each side under a profiler."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pytest_gpumem.explain.evidence import SideEvidence, footprints_of, together
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.nsight import tools
from pytest_gpumem.nsight.counting import under_ncu
from pytest_gpumem.nsight.ncu import ACCESS_METRICS, PROFILE_METRICS
from pytest_gpumem.nsight.profile import results_of, under_tool
from pytest_gpumem.nsight.reading import by_row, read
from pytest_gpumem.nsight.recording import BadReport
from pytest_gpumem.outcomes import NoAnswer
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.row import Row
from pytest_gpumem.runs import child
from pytest_gpumem.runs.experiment import Experiment, Processes, pairs
from pytest_gpumem.runs.processes import environment_of
from pytest_gpumem.runs.worktree import Side as Tree
from pytest_gpumem.settings import CAUSES
from pytest_gpumem.units import format_time


@dataclass(frozen=True)
class SideRun:
    """One side's tests, ready to run."""

    tree: Tree
    other: Tree | None  # the other side, whose modules it must not see
    arguments: tuple[str, ...]  # pytest's
    tests: tuple[str, ...]  # node ids; empty for all that the arguments select
    environment: Mapping[str, str]  # all environment variables

    def command(self, results: Path) -> list[str]:
        """The command of the child, which writes its results and compares them with nothing: its baseline is a folder without runs."""
        (nothing := results.with_name("no-baseline")).mkdir(exist_ok=True)
        own = [f"--gpumem-baseline={nothing}", "-p", "no:cacheprovider"]
        return child.pytest_command(
            [*self.arguments, *own], tests=self.tests, results=results, python=self.tree.python
        )

    @property
    def variables(self) -> dict[str, str]:
        """The child's environment."""
        return environment_of(self.tree, self.other, self.environment)

    def under(self, command: Sequence[str], echo: Callable[[str], object]) -> child.CommandResult:
        """Run the command of a tool that runs them."""
        return under_tool(command, self.variables, echo, self.tree.folder)


def trace_needed(measured: Iterable[Measurement]) -> bool:
    """True if a measurement lacks figures that a trace has."""
    return any(one.activity is None or one.activity.not_counted is not None for one in measured)


def trace(run: SideRun, echo: Callable[[str], object]) -> dict[str, TestProfile]:
    """Run one side under Nsight Systems: kernels and copies of its measured launches, by row key.
    Raises `NoAnswer`: nsys is missing, or wrote no report that can be read.
    """
    program = tools.find(tools.NSYS, run.environment)
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        results, report = Path(folder, "results.json"), Path(folder, f"trace{tools.NSYS.report}")
        finished = run.under(
            tools.nsys_command(program, run.command(results), report, name=None, managed=False),
            echo,
        )
        problem = None
        if not report.exists():
            collected = report.with_suffix(tools.COLLECTED).exists()
            problem = (
                tools.nsys_trouble(finished.output, report, None, collected=collected)
                or "nsys wrote no report"
            )
        rows = results_of(results, finished, problem=problem, under=tools.NSYS.program).rows
        if problem is not None:
            raise NoAnswer(problem)
        try:
            found = by_row(read(report, run.environment), rows)
        except BadReport as error:
            raise NoAnswer(str(error)) from None
    if not found:
        raise NoAnswer(problem or "nsys recorded nothing in a measured launch of these tests")
    return found


def count(
    run: SideRun, echo: Callable[[str], object], *, hot: bool = False
) -> Mapping[str, TestProfile]:
    """Run one side under Nsight Compute: counters of its measured launches, by row key.
    `hot`: all of them are measured hot.
    Raises `NoAnswer`: ncu is missing, may not count, or saw no kernel.
    """
    metrics = [metric for metric in PROFILE_METRICS if metric not in tools.TRAFFIC_METRICS]
    # If ncu refuses the metrics of accesses, sectors per request alone tell the access pattern.
    return under_ncu(
        run.command,
        run.environment,
        lambda command: run.under(command, echo),
        metrics=metrics,
        optional=ACCESS_METRICS,
        hot=hot,
    ).profiles


Echo = Callable[
    [str], object
]  # receives each line of progress, and of the output of pytest and the profilers

WATCH = ("--gpumem-footprint=trace",)
MOST_REASONS = 3  # reasons in the message that a side measured nothing


@dataclass(frozen=True)
class ExplainRequest:
    """The tests to measure, and how."""

    tests: tuple[str, ...]  # node ids; empty for all that the arguments select
    arguments: tuple[str, ...]  # pytest's
    pairs: int  # processes of each side
    counters: bool  # run both sides under ncu too
    traces: bool | None = None  # run both sides under nsys too; None: if CUPTI could not watch
    tree: Tree | None = None  # as of `Processes`
    seconds: float | None = None
    """After which the processes are ended; None: they come to their end."""


def measure_sides(
    trees: Mapping[str, Tree],
    request: ExplainRequest,
    environment: Mapping[str, str],
    echo: Echo,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, SideEvidence]:
    """The evidence of each side.
    `trees`: by `BASE` and `HEAD`; head alone where base was measured before.
    Raises `UserError`: pytest did not accept its arguments or the device.
    Raises `NoAnswer`: a side measured none of the tests, or they take longer than they may.
    """
    rows, facts = _processes(trees, request, environment, echo, clock)
    return {
        name: _side(trees, name, request, rows[name], facts[name], environment, echo)
        for name in trees
    }


def _processes(
    trees: Mapping[str, Tree],
    request: ExplainRequest,
    environment: Mapping[str, str],
    echo: Echo,
    clock: Callable[[], float],
) -> tuple[dict[str, list[Row]], dict[str, DeviceFacts]]:
    """The rows of all processes of each side, oldest first, and the device of each side."""
    files = sorted({nodeid.partition("::")[0] for nodeid in request.tests})
    started = Processes(
        trees, (*request.arguments, *WATCH), files, {**environment, CAUSES: "1"}, tree=request.tree
    )
    schedule = [turn for turn in islice(pairs(0), 2 * request.pairs) if turn.side in trees]
    rows: dict[str, list[Row]] = {side: [] for side in trees}
    outcomes: dict[str, Mapping[str, tuple[str, str]]] = {}
    facts: dict[str, DeviceFacts] = {}
    begun = clock()

    def watch(_finished: int) -> None:
        if request.seconds is not None and clock() - begun > request.seconds:
            raise NoAnswer(f"they take longer than {format_time(request.seconds)}")

    with Experiment(started, schedule) as experiment:
        for number in range(1, len(schedule) + 1):
            process = experiment.measure(request.tests or None, watch=watch)
            name = started.name(process.turn)
            if process.error is not None:
                raise NoAnswer(f"{name} crashed: {process.error}")
            if not process.rows and not process.outcomes:
                # The next processes of this side would find no more.
                raise NoAnswer(f"{name} measured nothing: {_no_tests(request.tests)}")
            side = process.turn.side
            if process.device is not None:
                facts[side] = process.device
            rows[side] += process.rows
            outcomes[side] = process.outcomes
            failed = "".join(f"; {nodeid} {why}" for nodeid, why in _reasons(process.outcomes))
            echo(
                f"gpumem: process {number} of {len(schedule)}, {side}, {process.seconds:.1f} s{failed}"
            )
            if number == len(trees):
                _check_first_round(trees, rows, outcomes)
    return rows, facts


def _check_first_round(
    trees: Mapping[str, Tree],
    rows: Mapping[str, Sequence[Row]],
    outcomes: Mapping[str, Mapping[str, tuple[str, str]]],
) -> None:
    """End if no test of a side measured anything: further processes would not either."""
    without = [
        side
        for side in trees
        if all(row.measurement is None and row.footprint is None for row in rows[side])
    ]
    if without:
        names = " and ".join(f"{side} ({trees[side].title})" for side in without)
        raise NoAnswer(
            f"{names} measured nothing: {_summary(outcomes[side] for side in without) or 'no test reached a measurement'}"
        )


def _summary(outcomes: Iterator[Mapping[str, tuple[str, str]]]) -> str:
    """Why tests did not measure, each reason once: "t.py::test_a skipped: no library", or "3 tests skipped: no library"."""
    tests: dict[str, dict[str, None]] = {}
    for of_side in outcomes:
        for nodeid, why in _reasons(of_side):
            tests.setdefault(why, {})[nodeid] = None
    parts = [
        f"{next(iter(ids)) if len(ids) == 1 else f'{len(ids)} tests'} {why}"
        for why, ids in tests.items()
    ]
    more = (
        [f"and {counted(len(parts) - MOST_REASONS, 'further reason')}"]
        if len(parts) > MOST_REASONS
        else []
    )
    return "; ".join([*parts[:MOST_REASONS], *more])


def _reasons(outcomes: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Node ids with their outcomes: "skipped: no library"."""
    # pytest puts its own word before the reason.
    return (
        (nodeid, f"{outcome}: {why.removeprefix('Skipped: ')}")
        for nodeid, (outcome, why) in outcomes.items()
    )


def _no_tests(tests: Sequence[str]) -> str:
    if not tests:
        return "it has no test that measures, or all of its modules are skipped"
    return f"it has no test {' or '.join(tests)}, or its module is skipped, such as without a library that it imports"


def _side(
    trees: Mapping[str, Tree],
    name: str,
    request: ExplainRequest,
    rows: Sequence[Row],
    facts: DeviceFacts,
    environment: Mapping[str, str],
    echo: Echo,
) -> SideEvidence:
    """Profile a side, and add its profiles to its measurements."""
    tree = trees[name]
    other = next((one for side, one in trees.items() if side != name), None)
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        if row.measurement is not None:
            by_key.setdefault(row.key, []).append(row)
    measured = {key: together(found) for key, found in by_key.items()}
    run = SideRun(tree, other, request.arguments, request.tests, environment)
    profiles: Mapping[str, TestProfile] = {}
    traces: dict[str, TestProfile] = {}
    notes = []
    try:
        if request.counters and not facts.simulated:
            profiles = count(run, echo, hot=all(one.mode == "hot" for one in measured.values()))
    except NoAnswer as reason:
        notes.append(str(reason))
    try:
        if request.traces or (
            request.traces is None and not facts.simulated and trace_needed(measured.values())
        ):
            traces = trace(run, echo)
    except NoAnswer as reason:
        notes.append(str(reason))
    tests = {row.key: (row.nodeid, row.label) for row in rows}
    return SideEvidence(
        tree.title, facts, measured, tests, profiles, traces, tuple(notes), footprints_of(rows)
    )
