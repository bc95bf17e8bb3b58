"""The command `gpumem duet`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.commands import (
    ROUNDS,
    examples,
    json_option,
    margin,
    pytest_arguments,
    rounds_option,
    terminal,
    test_option,
    write,
    write_json,
)
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.limits import YES
from pytest_gpumem.outcomes import Exit, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.result_files import load_results

if TYPE_CHECKING:
    from pytest_gpumem.runs.journal import Journal
    from pytest_gpumem.runs.reading import RowFilter
    from pytest_gpumem.runs.rounds import DuetProgress, DuetResult
    from pytest_gpumem.runs.worktree import Side


@click.command(
    short_help="Decide between base and head in alternating processes.",
    epilog=examples(
        "gpumem duet main                              # the working tree against main",
        "gpumem duet main --test tests/test_a.py::test_triad",
        "gpumem duet v1.2 --flagged run.json -- -k 'not slow'",
    ),
)
@click.option(
    "--head",
    metavar="PATH",
    help="Folder or wheel to compare with BASE. Default: the working tree.",
)
@test_option
@click.option(
    "--flagged", metavar="RESULTS", help="Compare what a run flagged, by its --benchmark-json file."
)
@click.option(
    "--max-regression",
    metavar="MARGIN",
    callback=margin,
    help='Allowed slow-down of tests without a limit of their own, such as "1%" (default).',
)
@rounds_option
@click.option(
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to resume from. Default: one in the temporary folder.",
)
@json_option("Write verdicts and all processes as JSON.")
@click.option(
    "--strict", is_flag=True, help="Exit with 6 unless every verdict is PASS, and of a real GPU."
)
@click.argument("base", metavar="BASE")
@pytest_arguments
def duet(
    base: str,
    tests: tuple[str, ...],
    flagged: str | None,
    file: Path | None,
    pytest_arguments: tuple[str, ...],
    **options: Any,
) -> int:
    """Decide whether head is slower than BASE: a git revision, a folder or a wheel.

    Both are measured by pytest in alternating fresh processes on one GPU, until every test is decided. After an
    interruption, the same command continues.
    """
    from pytest_gpumem.runs.processes import check_arguments
    from pytest_gpumem.runs.report import SCHEMA

    check_arguments(pytest_arguments)
    wanted = _wanted(tests, flagged)
    if wanted is None:
        click.echo(printable(f"nothing is flagged in {flagged}: there is nothing to compare"))
        write_json(
            file,
            {
                "kind": "gpumem duet",
                "schema": SCHEMA,
                "exit": int(Exit.FINE),
                "verdicts": [],
                "processes": [],
            },
        )
        return Exit.FINE
    code, _ = compare(base, wanted, pytest_arguments, file=file, **options)
    if file is not None:
        click.echo(printable(f"wrote {file}"))
    return code


def compare(
    base: str,
    wanted: RowFilter,
    pytest_arguments: Sequence[str],
    *,
    head: str | None = None,
    base_side: Side | None = None,
    max_regression: str | Mapping[str, str] | None = None,
    rounds_max: int = ROUNDS,
    journal: Path | None = None,
    file: Path | None = None,
    strict: bool = False,
    evidence: bool = False,
    again: str = "the same command goes on from there",
) -> tuple[int, DuetResult]:
    """Run a duet, print its verdicts and write them into `file`; the exit code and the result.
    `base`: a git revision, a folder or a wheel.
    `head`: folder or wheel; None: the working tree.
    `base_side`: base, where it is ready to run; head is the working tree then.
    `max_regression`: allowed slow-down of all of them, as written, or by row key; None: each test's own.
    `journal`: file to resume from; None: one in the temporary folder.
    `file`: for verdicts and all processes.
    `strict`: green takes a PASS of everything, on a real GPU.
    `evidence`: a test whose machine code is the same on both sides passes with fewer pairs.
    `again`: how to resume, printed after a signal.
    Raises `RunError`: it cannot be played as it was asked for.
    """
    from pytest_gpumem.runs import report
    from pytest_gpumem.runs.experiment import Processes
    from pytest_gpumem.runs.processes import BASE, HEAD
    from pytest_gpumem.runs.rounds import Duet
    from pytest_gpumem.runs.worktree import two_sides, working_tree

    begun, here = time.monotonic(), Path.cwd()
    strict = (
        strict
        or "--gpumem-strict" in pytest_arguments
        or os.environ.get("GPUMEM_STRICT", "").strip().lower() in YES
    )
    arguments = tuple(argument for argument in pytest_arguments if argument != "--gpumem-strict")
    with ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        ignored = [path.absolute() for path in (journal, file) if path is not None]
        if base_side is None:
            base_side, head_side = stack.enter_context(two_sides(base, head, here, ignored))
        else:
            head_side = working_tree(here, ignored)
        sides = {BASE: base_side, HEAD: head_side}
        asked = {
            "base": base_side.identity,
            "head": head_side.identity,
            "folder": str(here),
            "tests": sorted(wanted.keys or wanted.tests or ()),
            "max_regression": max_regression,
            "evidence": evidence,
            "pytest": list(arguments),
            "environment": _measured_under(os.environ),
        }
        kept = _journal(journal, asked, stack)
        files = sorted({nodeid.partition("::")[0] for nodeid in wanted.tests or ()})
        processes = Processes(sides, arguments, files, os.environ, evidence=evidence)
        stack.callback(processes.close)
        click.echo(report.named(sides), err=True)
        try:
            with _progress() as show:
                played = Duet(
                    sides,
                    processes,
                    kept,
                    wanted,
                    max_regression=max_regression,
                    rounds_max=rounds_max,
                    on_progress=show,
                ).play()
        except KeyboardInterrupt:
            if finished := kept.count():
                held = counted(finished, "process")
                click.echo(
                    printable(
                        f"gpumem duet: stopped; the journal {kept.path} holds {held}, and {again}"
                    ),
                    err=True,
                )
            raise
        seconds = time.monotonic() - begun
        code = report.exit_code(played, strict=strict or played.strict)
        _tell(played, sides, seconds)
        if file is not None:
            utc = datetime.now(timezone.utc).isoformat(timespec="seconds")
            document = report.to_json(played, sides, asked, utc=utc, seconds=seconds, code=code)
            write("--json", file, json.dumps(document, allow_nan=False, indent=1) + "\n")
        if played.open:
            click.echo(
                f"to go on with more pairs: the same command with --rounds-max {2 * rounds_max}"
            )
        elif journal is None:
            kept.remove()
        return code, played


def _journal(path: Path | None, asked: Mapping[str, Any], stack: ExitStack) -> Journal:
    """The journal of a duet, open until the stack is. One that nobody named is removed if nothing was measured."""
    from pytest_gpumem.runs.journal import Journal

    kept = Journal(path if path is not None else _default_journal(asked), asked)
    stack.callback(kept.close)
    if path is None:
        stack.callback(lambda: None if kept.lines else kept.remove())
    return kept


def _tell(played: DuetResult, sides: Mapping[str, Side], seconds: float) -> None:
    """Print the verdicts."""
    from pytest_gpumem.reporting.terminal import one_place
    from pytest_gpumem.runs import report

    width, colour = terminal()
    unnamed = None if one_place(sys.stdout, sys.stderr) else sides
    click.echo(report.text(played, unnamed, width=width, colour=colour, seconds=seconds))
    if not played.verdicts:
        click.echo(
            "nothing was measured: no test among those that were selected measures on the GPU"
        )


def _wanted(tests: tuple[str, ...], flagged: str | None) -> RowFilter | None:
    """The measurements to compare; None if a run's results flag none."""
    from pytest_gpumem.runs.reading import RowFilter

    if tests and flagged is not None:
        raise click.UsageError("--test and --flagged exclude each other.")
    if flagged is None:
        return RowFilter(frozenset(tests) if tests else None)
    rows = _flagged(Path(flagged))
    return RowFilter.of(rows) if rows else None


def _flagged(path: Path) -> list[Row]:
    """The rows that a run's screen flagged or could not decide.
    Raises `UserError`: the file cannot be read, or holds no results of this plugin.
    """
    from pytest_gpumem.runs.decision import flagged

    try:
        return flagged(load_results(path).document.rows)
    except UserError as error:
        raise UserError(f"--flagged: {error}") from None


def _measured_under(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what processes measure: those that a journal belongs to."""
    names = ("GPUMEM_", "PYTEST_ADDOPTS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
    return {name: value for name, value in sorted(environment.items()) if name.startswith(names)}


def _default_journal(asked: Mapping[str, Any]) -> Path:
    """The path that the same command finds again: its name follows from the arguments and the state of both sides."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir(), f"gpumem-duet-{user}-{digest}.jsonl")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a duet as Ctrl-C does: everything that was made for it is removed."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[Callable[[DuetProgress], None]]:
    """A bar on standard error; without a terminal a line for each event, and for each doubling of the rounds."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    from pytest_gpumem.runs.report import rounded_duration

    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal:
        shown: set[int] = set()

        def plain(now: DuetProgress) -> None:
            if now.note is not None:
                click.echo(printable(now.note), err=True)
            elif now.open and now.rounds.bit_count() == 1 and now.rounds not in shown:
                shown.add(now.rounds)
                click.echo(
                    f"round {now.rounds}: {now.open} undecided, at most {rounded_duration(now.at_most)} more",
                    err=True,
                )

        yield plain
        return
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("first pair", total=None, left="")

        def draw(now: DuetProgress) -> None:
            if now.note is not None:
                bar.console.print(printable(now.note), markup=False)
            if now.rounds:
                text = f"round {now.rounds} of at most {now.last}, {now.open} undecided"
                bar.update(
                    task,
                    description=text,
                    total=now.last,
                    completed=now.rounds,
                    left=f"at most {rounded_duration(now.at_most)} more",
                )

        yield draw
