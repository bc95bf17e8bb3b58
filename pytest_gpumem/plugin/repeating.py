"""`--gpumem-processes`: tests are measured in several fresh processes, and each row is judged over all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.footprint import with_further
from pytest_gpumem.judging.judge import is_failure, merged
from pytest_gpumem.judging.screen import LOOKS
from pytest_gpumem.plugin.gpus import VISIBLE, beginning_with
from pytest_gpumem.plugin.judging import begins_baseline, explained, undecided, why_text
from pytest_gpumem.plugin.junit import JUnit
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, may_measure, uses
from pytest_gpumem.plugin.reported import (
    BY_LIMITS_ATTRIBUTE,
    COMPLETE,
    PASSED,
    ROWS_ATTRIBUTE,
    failure_texts,
)
from pytest_gpumem.plugin.running import NOTHING, Feature
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.plugin.terminal import EVERY, on_a_terminal
from pytest_gpumem.plugin.tracing import WATCH, by_memory, memory_texts, with_lines
from pytest_gpumem.plugin.workers import refuse_workers
from pytest_gpumem.records.row import ENOUGH, Row
from pytest_gpumem.reporting.progress import of_processes
from pytest_gpumem.runs import RunError
from pytest_gpumem.settings import FURTHER_PROCESS, READS_CONTROLS
from pytest_gpumem.units import format_time

if TYPE_CHECKING:
    from pytest_gpumem.runs.experiment import Experiment
    from pytest_gpumem.runs.processes import ProcessRecord

AHEAD = max(
    0, min(2, (os.cpu_count() or 1) - 1)
)  # processes that get ready while another one measures
LEAST_SECONDS = 30.0
"""The least time for measuring again. It may take as long as the session took so far."""
BEFORE_A_DUET = 0.5
"""The same in the screen of a gate, as a share of the session's time so far: somebody waits for a gate."""


def repetitions(
    session: GpuSession,
    count: int,
    gpu: str | None = None,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> Experiment:
    """Further processes of a session: the same command in this environment, up to `count` processes with this one.

    They save, report and compare nothing: this process judges the rows of all. None is repeated: a test that crashes now and then fails.
    `arguments`: beside the session's own.
    `gpu`: UUID of the GPU to measure on, for a worker had its own; None: that of this process.
    """
    from pytest_gpumem.runs.experiment import (
        Experiment,
        Processes,
    )  # here: most sessions need no further process
    from pytest_gpumem.runs.processes import HEAD, Turn
    from pytest_gpumem.runs.worktree import in_this_environment

    config = session.config
    environment = {
        **environment,
        FURTHER_PROCESS: READS_CONTROLS if session.reads_controls else "1",
    }
    if (order := beginning_with(gpu, session.chosen)) is not None:
        environment[VISIBLE] = order
    started = Processes(
        {HEAD: in_this_environment(config.invocation_params.dir)},
        [*map(str, config.invocation_params.args), *arguments],
        (),
        environment,
        ahead=AHEAD,
        evidence=session.evidence,  # bytes of arguments that differ between processes are told apart by it
        everything=True,
        titles=lambda turn: f"process {turn.round} of {count} of --gpumem-processes",
    )
    return Experiment(started, [Turn(number, HEAD) for number in range(2, count + 1)], attempts=1)


def repeat(
    experiment: Experiment,
    session: GpuSession,
    tests: Sequence[str] | None,
    watch: Callable[[int], None] = lambda finished: None,
) -> ProcessRecord:
    """The next of a session's further processes; arguments as for `Experiment.measure`.
    Raises `RunError`: it measured nothing, or on another device.
    """
    process = experiment.measure(tests, watch=watch)
    if process.device is None and not (process.error and (process.texts or process.finished)):
        why = process.error or process.failed_as_a_whole or "no test of it reached a measurement"
        raise RunError(f"{process.name} measured nothing: {why}")
    if process.device is not None and process.device.key != session.facts.key:
        raise RunError(
            f"{process.name} measured on {process.device.key}, this one is on {session.facts.key}"
        )
    return process


class RepeatFeature(Feature):
    """Runs the further processes before the tests of this one; registered only with more than one process."""

    def __init__(self, session: GpuSession) -> None:
        refuse_workers(session.config, "--gpumem-processes runs its processes one after another")
        self._session = session
        self._count = session.settings.processes or 1
        self._reported: set[str] = set()
        self._tests = 0  # that measure, or may
        self._begun = self._shown = (
            0.0  # when the first process began, and when the last line was written
        )

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        gpu = self._session
        self._tests = sum(map(may_measure, session.items))
        if not gpu.config.option.collectonly and not session.testsfailed and self._tests:
            total = gpu.settings.total_budget
            arguments = (
                [] if total is None else [f"--gpumem-budget={total / self._count!r} s total"]
            )
            self._begun = self._shown = time.monotonic()
            announce(gpu, self._line())
            try:
                with repetitions(gpu, self._count, arguments=arguments) as experiment:
                    while experiment.coming:
                        gpu.further.append(repeat(experiment, gpu, None, self._watch))
                        announce(gpu, self._line())
            except RunError as failed:
                raise pytest.exit.Exception(
                    f"gpumem: {failed}", returncode=pytest.ExitCode.TESTS_FAILED
                ) from None
        yield

    def _line(self, finished: int = 0) -> str:
        """`finished`: tests that the present process has finished."""
        return of_processes(
            len(self._session.further),
            self._count,
            finished,
            self._tests,
            time.monotonic() - self._begun,
        )

    def _watch(self, finished: int) -> None:
        if (
            not replace_line(self._session, self._line(finished))
            and time.monotonic() - self._shown >= EVERY
        ):
            self._shown = time.monotonic()
            announce(self._session, self._line(finished))

    def logged(self, report: pytest.TestReport) -> AbstractContextManager[None]:
        self._reported.add(report.nodeid)
        return NOTHING

    def waits(self, nodeid: str) -> bool:
        """False: a test has its last verdict when it ends."""
        return False

    def measure_again(self, session: pytest.Session) -> bool:
        """Nothing is left to measure; True if a further process failed in a way that no test of this process reports."""
        failed = False
        for process in self._session.further:
            remarks = [
                process.failure_of(nodeid)
                for nodeid in process.texts
                if nodeid not in self._reported
            ]
            remarks += (
                [f"{process.name} failed as a whole: {process.failed_as_a_whole}"]
                if process.failed_as_a_whole
                else []
            )
            self._session.remark(*(remark for remark in remarks if remark is not None))
            failed = failed or bool(remarks)
        return failed


class DecideFeature(Feature):
    """Measures rows again once all tests have ended, in further fresh processes: undecided ones, until `max_regression` decides them, and
    those of the first saves of a baseline.

    Registered with `--gpumem-processes auto`, in the process that has the rows. Rows are judged at the numbers of processes that `LOOKS`
    names, and once more where the time ends before the next of them.
    """

    def __init__(self, session: GpuSession, entries: JUnit) -> None:
        """`entries`: those of the tests in JUnit's file."""
        self._session = session
        self._entries = entries
        self._failed = False  # a test failed by a further process
        self._begun = time.monotonic()
        self._until = 0.0
        self._first: dict[str, Row] = {}
        """The rows that are measured again, by key, each as its own process measured it."""
        self._open: list[str] = []  # keys of those that are not decided
        self._environment: dict[str, str] = {}  # before fixtures changed it
        self._coming: list[str] = []
        """Node ids of the tests that measure, if processes may get ready while they run."""
        self._ready: dict[str | None, Experiment] = {}
        """By the UUID of their GPU, processes that got ready while tests ran."""

    def tests(self, session: pytest.Session) -> AbstractContextManager[None]:
        gpu = self._session
        self._environment = dict(os.environ)
        # If the test modules open the GPU, a process that waits would have a context there, as this one has by now.
        if (
            AHEAD
            and gpu.baseline.processes
            and gpu.measures
            and gpu.chosen.conditions().other_processes is None
        ):
            self._coming = [item.nodeid for item in session.items if uses(item, BENCHMARK_FIXTURE)]
        return NOTHING

    def waits(self, nodeid: str) -> bool:
        """True if the last verdict on a test, as it ended, is still to come."""
        gpu = self._session
        return gpu.rows.end(nodeid) == PASSED and any(
            undecided(row, gpu) for row in gpu.rows.of(nodeid)
        )

    def measure_again(self, session: pytest.Session) -> bool:
        """Measure the undecided rows again, and report the tests that fail by it; True if one does.
        Raises `KeyboardInterrupt` and `pytest.exit.Exception`: somebody ends the session.
        """
        gpu = self._session
        complete = (
            session.exitstatus in COMPLETE and not session.shouldstop and not session.shouldfail
        )
        try:
            if complete and not gpu.config.option.collectonly:
                self._first = {
                    row.key: row
                    for row in gpu.rows
                    if self.waits(row.nodeid) and undecided(row, gpu)
                }
                if self._first:
                    self._measure_again()
                self._trace()
        finally:
            for experiment in self._ready.values():
                experiment.processes.close()
        return self._failed

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        yield
        self._get_ready(item.nodeid)

    def _get_ready(self, nodeid: str) -> None:
        """Have processes get ready once a row of a test is undecided: to import its libraries takes longer than to measure it."""
        gpu = self._session
        if not self._coming or self._ready or gpu.rows.end(nodeid) != PASSED:
            return
        if (
            row := next((row for row in gpu.rows.of(nodeid) if undecided(row, gpu)), None)
        ) is not None:
            self._ready[_card(row)] = experiment = self._repetitions(_card(row))
            experiment.get_ready(
                AHEAD, [nodeid, *(one for one in self._coming if gpu.rows.end(one) is None)]
            )

    def _measure_again(self) -> None:
        gpu, now = self._session, time.monotonic()
        gpu.check_controls()
        gpu.close()  # its memory is for the other processes
        took = now - self._begun
        self._until = now + (BEFORE_A_DUET * took if gpu.duet_follows else max(LEAST_SECONDS, took))
        self._open = list(self._first)
        new = sum(begins_baseline(row, gpu) for row in self._first.values())
        what = [
            f"{counted(number, 'row')} {why}"
            for number, why in (
                (len(self._open) - new, "undecided"),
                (new, "whose baseline begins"),
            )
            if number
        ]
        announce(
            gpu,
            f"gpumem: {' and '.join(what)}, measured again in fresh processes, {self._left()} at most",
        )
        of_gpu: dict[
            str | None, list[str]
        ] = {}  # by the UUID of the GPU that they were measured on: workers have one each
        for key in self._open:
            of_gpu.setdefault(_card(self._first[key]), []).append(key)
        undecided_rows = list[str]()
        for card, keys in of_gpu.items():
            self._open = keys
            self._measure_on(card)
            undecided_rows += self._open
        self._fail(
            row
            for row in gpu.rows
            if row.key in undecided_rows and is_failure(row.verdict, gpu.settings.strict)
        )

    def _trace(self) -> None:
        """Run the tests that fail by their memory once more, for the lines that allocate it. A gate does so for itself, with its base."""
        from pytest_gpumem.reporting.concerns import CAUSE_SECONDS, EXPLAINED, worst_first

        gpu, begun = self._session, time.monotonic()
        rows = [
            row for row in worst_first(gpu.rows) if by_memory(row) and row.test_error is not True
        ][:EXPLAINED]
        if (
            not rows
            or gpu.settings.footprint == "trace"
            or gpu.duet_follows
            or gpu.lost_in is not None
        ):
            return

        def watch(_finished: int) -> None:
            if time.monotonic() - begun > CAUSE_SECONDS:
                raise RunError(f"they take longer than {format_time(CAUSE_SECONDS)}")

        tests = sorted({row.nodeid for row in rows})
        announce(
            gpu,
            f"gpumem: {counted(len(tests), 'test')} above a limit on memory, run once more for the lines that allocate it",
        )
        gpu.check_controls()
        gpu.close()  # its memory is for the other process
        try:
            with repetitions(gpu, 2, arguments=WATCH, environment=self._environment) as experiment:
                traced = repeat(experiment, gpu, tests, watch).by_key
        except RunError as failed:
            announce(gpu, f"gpumem: which lines allocate is not known: {failed}")
            return
        for row in rows:
            again = traced.get(row.key)
            if again is not None and again.footprint is not None and again.footprint.sites:
                lines = with_lines(replace(row, footprint=again.footprint), gpu).why
                gpu.rows.update(replace(row, why=lines))

    def _repetitions(self, card: str | None) -> Experiment:
        return repetitions(self._session, LOOKS[-1], card, environment=self._environment)

    def _measure_on(self, card: str | None) -> None:
        """Measure the open rows again, on one GPU, until they are decided or the time ends."""
        gpu, begun = self._session, time.monotonic()
        further: list[ProcessRecord] = []
        try:
            with self._ready.pop(card, None) or self._repetitions(card) as experiment:
                while self._open and experiment.coming:
                    process = repeat(experiment, gpu, self._tests())
                    further.append(process)
                    self._fail_as(process)
                    count = len(further) + 1
                    now = time.monotonic()
                    last = count == LOOKS[-1] or now >= self._until
                    if last or count in LOOKS:
                        fit = int(
                            (self._until - now) / (now - begun) * len(further)
                        )  # processes in the time that is left
                        self._judge(further, min(LOOKS[-1], count + fit))
                    if last:
                        break
                    if self._open:
                        line = f"gpumem: process {count} of at most {LOOKS[-1]}: {counted(len(self._open), 'row')} undecided"
                        replace_line(gpu, f"{line}, {self._left()} left")
        except RunError as failed:
            announce(
                self._session, f"gpumem: {counted(len(self._open), 'row')} not decided: {failed}"
            )

    def _tests(self) -> list[str]:
        return sorted({self._first[key].nodeid for key in self._open})

    def _fail_as(self, process: ProcessRecord) -> None:
        """Report the tests as failed that failed in another process."""
        for nodeid in self._tests():
            if (text := process.failure_of(nodeid)) is not None:
                self._report(nodeid, text)
                self._open = [key for key in self._open if self._first[key].nodeid != nodeid]

    def _judge(self, further: Sequence[ProcessRecord], most: int) -> None:
        """Judge the open rows over all their processes, and report the tests that fail by them.
        `most`: processes at most; rows that more than these would decide are given up.
        """
        gpu, failing = self._session, []
        for key in tuple(self._open):
            first, rows = self._first[key], [process.by_key for process in further]
            siblings = {
                row.label: row.measurement
                for row in gpu.rows
                if row.nodeid == first.nodeid and row.measurement is not None
            }
            measurement = (
                None if first.measurement is None else merged(first.measurement, key, rows)
            )
            footprint = (
                None if first.footprint is None else with_further(first.footprint, key, rows)
            )
            row = gpu.judged(replace(first, measurement=measurement, footprint=footprint), siblings)
            gpu.rows.update(row)
            # without processes that do not count
            begun = begins_baseline(row, gpu) and len(further) + 1 >= ENOUGH
            if begun or not undecided(row, gpu, most):
                self._open.remove(key)
                failing += [row] if is_failure(row.verdict, gpu.settings.strict) else []
        self._fail(failing)

    def _fail(self, rows: Iterable[Row]) -> None:
        """Report the tests of these rows as failed, in place of their report as passed."""
        gpu = self._session
        by_test: dict[str, list[Row]] = {}
        for row in rows:
            by_test.setdefault(row.nodeid, []).append(row)
        for nodeid, failing in by_test.items():
            found = [explained(row, gpu) for row in failing]
            for row in found:
                gpu.rows.update(with_lines(row, gpu))
            texts = [
                *failure_texts(found, gpu.facts),
                *memory_texts(found, gpu),
                *filter(None, map(why_text, found)),
            ]
            self._report(nodeid, "\n\n".join(texts), by_limits=True)

    def _report(self, nodeid: str, text: str, *, by_limits: bool = False) -> None:
        """Report a test as failed, in place of its report as passed."""
        gpu = self._session
        passed = gpu.rows.call(nodeid)
        assert passed is not None
        reporter = gpu.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None and passed in (shown := reporter.stats.get("passed", [])):
            shown.remove(passed)
        failed = copy(passed)
        failed.outcome, failed.longrepr, failed.duration = (
            "failed",
            text,
            0.0,
        )  # its time is reported
        setattr(failed, BY_LIMITS_ATTRIBUTE, by_limits)
        self._failed = True
        vars(failed).pop(
            ROWS_ATTRIBUTE, None
        )  # as a worker measured them; they were judged again since
        if nodeid in gpu.replays:  # in a worker, pytest-benchmark's statistics are off
            gpu.replays[nodeid].excuse()
        self._entries.report(failed)

    def _left(self) -> str:
        return f"{max(0.0, self._until - time.monotonic()):.0f} s"


def _card(row: Row) -> str | None:
    """The UUID of the GPU that measured a row."""
    provenance = None if row.measurement is None else row.measurement.provenance
    return None if provenance is None else provenance.card


def announce(session: GpuSession, line: str) -> None:
    """Write a line at once; not under -q."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and reporter.verbosity >= 0:
        if reporter.isatty:
            reporter.rewrite("", erase=True)  # the line of progress
        reporter.ensure_newline()
        if reporter._tw.width_of_current_line:  # after the letter of a test that is reported anew
            reporter._tw.line()
        reporter.write_line(line)


def replace_line(session: GpuSession, line: str) -> bool:
    """Replace the line of progress on a terminal. False if the output is no terminal."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or reporter.verbosity < 0 or not on_a_terminal(session.config, reporter):
        return False
    reporter.rewrite(line[: reporter._tw.fullwidth - 1], erase=True)
    return True
