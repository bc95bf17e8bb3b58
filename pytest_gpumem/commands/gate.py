"""The command `gpumem gate`: what a pipeline runs for a pull request."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.commands import (
    base_python_option,
    examples,
    margin,
    pytest_arguments,
    say,
    terminal,
)
from pytest_gpumem.commands.duet import ended_by_signals, play
from pytest_gpumem.files import write_whole
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.options import OptionRole, of_role
from pytest_gpumem.outcomes import Exit, Outcome, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import Document
from pytest_gpumem.result_files import load_results
from pytest_gpumem.revisions import RevisionError, ancestry

if TYPE_CHECKING:
    from pytest_gpumem.baselines.acceptances import Acceptances
    from pytest_gpumem.runs.conclusion import Conclusion
    from pytest_gpumem.runs.duet import DuetResult
    from pytest_gpumem.runs.gate import GateRequest, GateResult
    from pytest_gpumem.runs.rows import RowFilter
    from pytest_gpumem.runs.worktree import Side

FOLDER = Path("gpumem-results")  # default of --output
RESULTS, JUNIT, DUET, CREEP = "results.json", "junit.xml", "duet.json", "creep.json"
REPORT, SUMMARY = "report.html", "summary.md"
FILES = (RESULTS, JUNIT, DUET, CREEP, REPORT, SUMMARY)  # of the folder
MARKER = ".gitignore"  # file of a folder that a gate made; it hides the folder from git
MARKER_TEXT = "# made by gpumem gate, which replaces its own files in this folder\n*\n"
SHOWN = 3  # tests that the advice to accept names


@click.command(
    short_help="Check a pull request against its base, in a pipeline.",
    epilog=examples(
        "gpumem gate origin/main                       # in a pull request's pipeline",
        "gpumem gate origin/main --strict -- tests/gpu # only PASS of every limit is green",
        "gpumem gate origin/main --screen-only         # without the duet",
    ),
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=FOLDER,
    help=f"Folder of results, report and summary. Default: {FOLDER}.",
)
@click.option(
    "--max-regression",
    metavar="MARGIN",
    callback=margin,
    help='Allowed slow-down of tests without a limit of their own, such as "1%".',
)
@click.option(
    "--screen-only",
    is_flag=True,
    help="Decide no row by a duet: a FAIL stands, and an open row is no verdict.",
)
@base_python_option
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 6 unless each row with a limit is a PASS, of a real GPU.",
)
@click.option(
    "--accept-from-change",
    is_flag=True,
    help="Count what the change accepts, by files that it adds to .gpumem/accepted, up to their "
    "sizes.",
)
@click.argument("base", metavar="BASE")
@pytest_arguments
def gate(
    output: Path,
    max_regression: str | None,
    screen_only: bool,
    base_python: str | None,
    strict: bool,
    accept_from_change: bool,
    base: str,
    pytest_arguments: tuple[str, ...],
) -> int:
    """Compare a change with BASE, a git revision: for pipelines of pull requests.

    Collects the tests that the merge base of BASE and HEAD has, and holds each test to its limits.
    Runs the tests of the change. Each row that is not plainly PASS against its reference is
    measured in a duet, which decides: with the merge base, and for a creep with the oldest
    revision of the reference. Writes results, a report and a Markdown summary into a folder, and
    under GitHub Actions the job's summary and annotations.
    """
    from pytest_gpumem.baselines.acceptances import Acceptances
    from pytest_gpumem.runs.gate import Gate, GateRequest
    from pytest_gpumem.runs.session import Files

    _check_arguments(pytest_arguments, output)
    begun = time.monotonic()
    try:
        merge_base = ancestry(base, (), Path.cwd()).merge_base
    except RevisionError as error:
        raise click.UsageError(f"BASE: {error}.") from None
    every, added = _acceptances(merge_base)
    # A limit of a test wins over this one, in the session and in the duet.
    if max_regression is not None:
        pytest_arguments = (*pytest_arguments, f"--gpumem-max-regression={max_regression}")
    _prepare(output)
    request = GateRequest(
        base,
        merge_base,
        pytest_arguments,
        Files(output / RESULTS, output / JUNIT, output / REPORT),
        added if accept_from_change else Acceptances(),
        _without(every, () if accept_from_change else added.files),
        base_python,
        screen_only,
        strict,
    )
    with ended_by_signals():
        result = Gate(request, partial(_play, output, pytest_arguments), _log).run()
    if added.files and not accept_from_change:
        lines = []
        for name in added.files:
            lines.append(f"{name} does not count: the gate has no --accept-from-change")
        result = replace(result, conclusion=_with_lines(result.conclusion, lines))
    _write_files(output, request, result)
    _print(output, request, result, time.monotonic() - begun)
    return result.conclusion.code


def _acceptances(merge_base: str) -> tuple[Acceptances, Acceptances]:
    """The acceptances of the project, and those of them that the change adds."""
    from pytest_gpumem.baselines.acceptances import acceptances

    every = acceptances(Path.cwd())
    return every, every.added_since(merge_base)


def _without(every: Acceptances, names: Collection[str]) -> Acceptances:
    from pytest_gpumem.baselines.acceptances import Acceptances

    files = {name: file for name, file in every.files.items() if name not in names}
    return Acceptances(files, Path.cwd())


def _with_lines(conclusion: Conclusion, lines: Sequence[str]) -> Conclusion:
    return replace(conclusion, lines=(*lines, *conclusion.lines))


def _log(sentence: str) -> None:
    say(f"gpumem gate: {sentence}", err=True)


def _play(
    output: Path,
    arguments: Sequence[str],
    side: Side,
    wanted: RowFilter,
    oldest: str | None,
) -> DuetResult:
    """A duet of a side with the working tree. `oldest`: its revision, if the side is not BASE."""
    from pytest_gpumem.runs.pairs import PEAK
    from pytest_gpumem.runs.processes import BASE, HEAD
    from pytest_gpumem.runs.worktree import working_tree

    limits = (wanted.limits or {}).values()
    if any(getattr(of_row, PEAK) is not None for of_row in limits):
        # Two processes of a row differ by the lines that allocate.
        arguments = [*arguments, "--gpumem-footprint=trace"]
    sides = {BASE: side, HEAD: working_tree(Path.cwd())}
    file = output / (DUET if oldest is None else CREEP)
    _, result = play(sides, wanted, arguments, file=file, evidence=True)
    return result


def _check_arguments(arguments: Sequence[str], output: Path) -> None:
    """Refuse options that a gate sets itself. Raises `click.UsageError`: the option and why."""
    why = f"the gate writes into {output}; see --output"
    refused = dict.fromkeys(
        ("--benchmark-json", "--junitxml", "--junit-xml", "--gpumem-report"), why
    )
    for option in of_role(OptionRole.SAVING):
        refused[option.flag] = "a gate saves nothing into a baseline"
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in refused:
            raise click.UsageError(f"{name} among pytest's arguments: {refused[name]}.")


# The folder of results


def _prepare(output: Path) -> None:
    """Make the folder, and remove the files of an earlier gate.

    Raises `click.UsageError`: it holds files, and no marker of a gate; nothing is touched.
    """
    marker = output / MARKER
    try:
        made = marker.is_file() and marker.read_text(encoding="utf-8") == MARKER_TEXT
        if output.exists() and any(output.iterdir()) and not made:
            raise click.UsageError(
                f"--output: {output} holds files that no gate wrote; accepted is an empty or a new "
                "folder, or one that a gate made."
            )
        output.mkdir(parents=True, exist_ok=True)
        write_whole(marker, MARKER_TEXT)
        for name in FILES:
            (output / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--output: cannot write {output}: {error.strerror or error}") from None


def _write(path: Path, text: str) -> None:
    """Write a file of the folder. Raises `UserError`: it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"--output: cannot write {path}: {error.strerror or error}") from None


def _write_files(output: Path, request: GateRequest, result: GateResult) -> None:
    """Write results, report and summary with the verdicts of the gate."""
    from pytest_gpumem.reporting import html, markdown
    from pytest_gpumem.reporting.concerns import summarise, workflow_commands
    from pytest_gpumem.reporting.run import Run

    conclusion, document = result.conclusion, result.session.document
    remarks = _lines(result)
    if document is None:
        _write(output / SUMMARY, "".join(f"{line}\n" for line in printable(remarks)))
        return
    _write_results(output / RESULTS, document, conclusion)
    shown = load_results(output / RESULTS)
    run = Run(
        conclusion.rows,
        document.device,
        document.settings,
        shown.utc,
        shown.revision,
        remarks=remarks,
    )
    if result.baseline is not None:
        past = {row.key: result.baseline.past(row) for row in run.rows}
        run = replace(run, past=past, footprints=result.baseline.newest_footprints)
    summary = markdown.page(run)
    _write(output / SUMMARY, summary)
    if run.rows:
        _write(output / REPORT, html.page(run))
    note = summarise(summary, os.environ)
    if note is not None:
        click.echo(printable(note), err=True)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in workflow_commands(run.rows, result.session.places):
            click.echo(line)


def _write_results(path: Path, document: Document, conclusion: Conclusion) -> None:
    """Write the verdicts of the gate into the results of its session."""
    from pytest_gpumem.records.schema import document as to_document
    from pytest_gpumem.reporting.exports import figures

    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"--output: cannot read {path}: {error.strerror or error}") from None
    rows, missing = conclusion.rows, conclusion.missing
    value["gpumem"] |= to_document(document.device, rows, document.settings, missing)
    of_rows = {(row.range_name, row.label): figures(row, document.device) for row in rows}
    for benchmark in value.get("benchmarks", ()):
        info = benchmark.get("extra_info", {})
        if "gpumem" in info:
            before = info["gpumem"]
            name = (before["range"], before.get("label", ""))
            info["gpumem"] = of_rows.get(name, before)
    _write(path, json.dumps(value, allow_nan=False, indent=1) + "\n")


# The terminal


def _lines(result: GateResult) -> list[str]:
    """What a reader should know, and the end last."""
    conclusion, document = result.conclusion, result.session.document
    simulated = document is not None and document.device.simulated
    return [*conclusion.lines, *_advice(conclusion), conclusion.result(simulated=simulated)]


def _advice(conclusion: Conclusion) -> list[str]:
    """A line with the command that accepts what makes a gate red, if something can be accepted."""
    from pytest_gpumem.baselines.accepting import changes_of
    from pytest_gpumem.reporting.concerns import worst_first

    if conclusion.code != Exit.FAILED:
        return []
    tests = []
    for row in worst_first(conclusion.rows):
        changes = changes_of(row)
        if row.test_error is not True and any(changes):
            tests.append(row.nodeid)
    tests += [omission.nodeid for omission in conclusion.missing if omission.may_be_meant]
    tests = list(dict.fromkeys(tests))
    if not tests:
        return []
    which = f" (the worst {SHOWN} of {len(tests)} tests)" if len(tests) > SHOWN else ""
    return [
        f"if it is meant, commit the file that this writes{which}, and run the gate with "
        f"--accept-from-change: gpumem accept {shlex.join(tests[:SHOWN])} --reason '...'"
    ]


def _print(output: Path, request: GateRequest, result: GateResult, seconds: float) -> None:
    from pytest_gpumem.reporting.columns import fitted
    from pytest_gpumem.reporting.concerns import ending
    from pytest_gpumem.reporting.summary import counts_text
    from pytest_gpumem.runs.report import rounded_duration

    written = [name for name in FILES if (output / name).exists()]
    if written:
        _log(f"{counted(len(written), 'file')} in {output}: {' '.join(written)}")
    for line in _lines(result):
        say(f"gpumem gate: {line}")
    document = result.session.document
    if result.conclusion.code != Exit.FAILED or document is None:
        return
    errors = {}
    for failure in result.session.failures:
        if not failure.not_run:
            errors[failure.nodeid] = failure.message
    rows = result.conclusion.rows
    device = document.device.name_and_driver
    lines = ending(rows, partial(_repeat, request), errors)
    lines += [
        f"{counts_text(rows)}; {rounded_duration(seconds)} on {device}",
        f"report: {output / REPORT}",
    ]
    for line in printable(lines):
        for part in fitted(line, terminal()[0]):
            click.echo(part)


def _repeat(request: GateRequest, row: Row) -> list[str]:
    """The command that measures a failing row again."""
    for result in row.verdict.limits:
        if result.limit == "max_regression" and result.outcome is Outcome.FAIL:
            return ["gpumem", "duet", request.base, "--test", row.nodeid]
    words = []
    for word in request.arguments:
        if word.startswith("-") or not Path(word.partition("::")[0]).exists():
            words.append(word)
    return ["pytest", "--gpumem", *words, row.nodeid]
