"""The command `gpumem gate`: what a pipeline runs for a pull request."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from pytest_gpumem.baselines.acceptances import FOLDER as ACCEPTED
from pytest_gpumem.baselines.acceptances import (
    Acceptances,
    absolute_limits,
    acceptances,
    changes_of,
)
from pytest_gpumem.commands import (
    base_python_option,
    examples,
    max_regression_option,
    pytest_arguments,
    refuse,
    say,
    terminal,
    write,
)
from pytest_gpumem.commands.duet import REFUSED, ended_by_signals, play
from pytest_gpumem.files import ResultFile, write_whole
from pytest_gpumem.judging.expectations import possibly_intended
from pytest_gpumem.limits import TIME, of_the_test
from pytest_gpumem.outcomes import Exit, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records import function_of, schema
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting import html, markdown
from pytest_gpumem.reporting.conclusion import (
    EXPLAINED,
    Conclusion,
    Run,
    advice,
    conclusion_lines,
    counts_text,
    failing_rows,
    more,
    renamed,
    seen_from,
    session_of,
)
from pytest_gpumem.reporting.details import name_and_driver
from pytest_gpumem.reporting.row import figures
from pytest_gpumem.revisions import ancestry
from pytest_gpumem.runs.duet import Duet, RowFilter, rounded_duration
from pytest_gpumem.runs.gate import Gate
from pytest_gpumem.runs.processes import BASE, HEAD
from pytest_gpumem.runs.worktree import Side, working_tree
from pytest_gpumem.units import counted

FOLDER = Path("gpumem-results")  # default of --output
RESULTS, JUNIT = "results.json", "junit.xml"
REPORT, SUMMARY = "report.html", "summary.md"
FILES = (RESULTS, JUNIT, "duet.json", "creep-*.json", REPORT, SUMMARY)
MARKER = ".gitignore"  # file of a folder that a gate made; it hides the folder from git
MARKER_TEXT = "# made by gpumem gate, which replaces its own files in this folder\n*\n"


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
@max_regression_option
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
    help="Count what the change accepts, by its files in .gpumem/accepted, up to their sizes.",
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
    refused = dict.fromkeys(
        ("--benchmark-json", "--junitxml", "--junit-xml", "--gpumem-report"),
        f"the gate writes into {output}; see --output",
    )
    refused["--gpumem-save"] = "a gate saves nothing into a baseline"
    refuse(pytest_arguments, refused)
    begun = time.monotonic()
    merge_base = ancestry(base, (), Path.cwd()).merge_base
    # What is merged into BASE counts, what the change adds only with --accept-from-change.
    counting, left_out = acceptances(Path.cwd()), Acceptances()
    merged, added = counting.split_at(merge_base)
    if not accept_from_change:
        counting, added, left_out = merged, left_out, added
    # A limit of a test wins over this one, in the session and in the duet.
    if max_regression is not None:
        pytest_arguments = (*pytest_arguments, f"--gpumem-max-regression={max_regression}")
    _prepare(output)
    # One word each: pytest looks for its root folder among all words that are paths.
    options = (
        f"--junitxml={output / JUNIT}",
        "--override-ini=junit_family=xunit1",  # it says where each test is defined
        "-Wignore:Not saving anything",
    )
    run = Gate(
        base=base,
        merge_base=merge_base,
        arguments=pytest_arguments,
        options=options,
        accepted=added,
        all_accepted=counting,
        play=partial(_play, output, pytest_arguments),
        say=_log,
        base_python=base_python,
        screen_only=screen_only,
        strict=strict,
    )
    try:
        with ended_by_signals():
            conclusion = run.run()
    except KeyboardInterrupt:
        _log("stopped, no verdict")
        raise
    remarks = list(conclusion.remarks)
    for name in left_out.files:
        remarks.append(f"{ACCEPTED / name} does not count: add --accept-from-change")
    steps = _advice(conclusion, run, left_out, uncounted=not accept_from_change)
    conclusion = replace(conclusion, remarks=remarks, advice=steps)
    _write_files(output, conclusion, run)
    _print(output, conclusion, run, time.monotonic() - begun)
    return conclusion.code


def _log(sentence: str) -> None:
    say(f"gpumem gate: {sentence}", err=True)


def _play(
    output: Path, arguments: Sequence[str], side: Side, wanted: RowFilter, about: str
) -> Duet:
    if any(limits.max_peak_regression for limits in (wanted.limits or {}).values()):
        arguments = [*arguments, "--gpumem-footprint=on"]  # also where BASE has no such limit
    sides = {BASE: side, HEAD: working_tree(Path.cwd())}
    return play(sides, wanted, arguments, file=output / f"{about}.json", evidence=True)[1]


# The folder of results


def _prepare(output: Path) -> None:
    """Make the folder, and remove the files of an earlier gate."""
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
            for file in output.glob(name):
                file.unlink()
    except OSError as error:
        raise UserError(f"--output: cannot write {output}: {error.strerror or error}") from None


def _write_files(output: Path, conclusion: Conclusion, gate: Gate) -> None:
    results = gate.results
    if results is None:
        lines = [*conclusion.remarks, *conclusion_lines(conclusion, markdown.WIDTH)]
        write("--output", output / SUMMARY, "".join(f"{line}\n" for line in printable(lines)))
        return
    _write_results(output / RESULTS, results, conclusion)
    run = Run(
        conclusion.rows,
        results.document.device,
        results.document.settings,
        results.utc,
        results.revision,
        past={row.key: gate.baseline.past(row) for row in conclusion.rows},
        remarks=conclusion.remarks,
        conclusion=conclusion,
    )
    summary = markdown.page(run)
    write("--output", output / SUMMARY, summary)
    if run.rows:
        write("--output", output / REPORT, html.page(run))
    note = markdown.summarise(summary, os.environ)
    if note is not None:
        click.echo(printable(note), err=True)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        head = gate.of_head
        for line in markdown.workflow_commands(run.rows, Path(head.root), head.places):
            click.echo(line)


def _write_results(path: Path, results: ResultFile, conclusion: Conclusion) -> None:
    """Write the results of the session with the verdicts of the gate."""
    value, document = results.value, results.document
    rows, missing = conclusion.rows, conclusion.missing
    value["gpumem"] |= schema.document(document.device, rows, document.settings, missing)
    of_rows = {(row.range_name, row.label): figures(row, document.device) for row in rows}
    for benchmark in value.get("benchmarks", ()):
        info = benchmark.get("extra_info", {})
        if "gpumem" in info:
            before = info["gpumem"]
            name = (before["range"], before.get("label", ""))
            info["gpumem"] = of_rows.get(name, before)
    write("--output", path, json.dumps(value, allow_nan=False, indent=1) + "\n")


# What to do, and the terminal


def _advice(
    conclusion: Conclusion, gate: Gate, left_out: Acceptances, *, uncounted: bool
) -> list[str]:
    if conclusion.code != Exit.FAILED:
        return []
    failing = failing_rows(conclusion.rows)
    lost = [omission.nodeid for omission in conclusion.missing if possibly_intended(omission)]
    limits, repair = list[str](), list[str]()
    for row in failing:
        limits += absolute_limits(row)
    if lost:
        repair.append("bring the test back, by its name and not skipped")
    if gate.looser:
        repair.append("restore the limit")
    accept = _accept(conclusion, gate, left_out, lost)
    return advice(_repeat(gate, failing), limits, accept, repair, uncounted=uncounted)


def _accept(
    conclusion: Conclusion, gate: Gate, left_out: Acceptances, lost: list[str]
) -> list[str]:
    """Commands that accept what fails. A renamed test has one of its own."""
    loosened: dict[str, list[str]] = {}  # by row, options that accept all that is red
    for limit in gate.looser:
        words = loosened.setdefault(limit.key, [])
        words += ["--change", f"{limit.limit}={limit.now or 'none'}"]
    tests = list[str]()
    for row in failing_rows(conclusion.rows):
        for change in changes_of(row):
            if left_out.of(row.key, change.figure) is not None:
                continue  # the change accepts it
            if row.key in loosened:
                loosened[row.key] += ["--change", change.option]
            else:
                tests.append(row.nodeid)
    new_names, others = renamed(conclusion), []
    for test in dict.fromkeys([*tests, *lost]):
        if test in loosened and test in lost:
            loosened[test] += ["--change", "removed"]
        elif function_of(test) not in new_names:
            others.append(test)
    commands = [(others[:EXPLAINED], more(others))] if others else []
    commands += [([new, "--renamed-from", old], "") for old, new in new_names.items()]
    alike: dict[tuple[str, ...], list[str]] = {}
    for key, words in loosened.items():
        alike.setdefault(tuple(words), []).append(key)
    commands += [([*keys, *options], "") for options, keys in alike.items()]
    return [f"gpumem accept {shlex.join(words)} --reason '...'{rest}" for words, rest in commands]


def _repeat(gate: Gate, failing: Sequence[Row]) -> Iterator[str]:
    """Commands that repeat what fails, by a duet where it is compared."""
    in_session: dict[str, None] = {}
    in_duet: dict[tuple[str, ...], dict[str, None]] = {}  # by the words before
    for row in failing:
        if not any(changes_of(row)):
            in_session[seen_from(Path.cwd(), row.nodeid, Path(gate.of_head.root))] = None
            continue
        words = ["gpumem", "duet", gate.crept.get(row.nodeid, gate.base)]
        limit = row.limits.max_regression
        if limit and not of_the_test(row.limits.origin.get(TIME)):
            words += ["--max-regression", limit]
        if gate.base_python and row.nodeid not in gate.crept:
            words += ["--base-python", gate.base_python]
        in_duet.setdefault(tuple(words), {})[row.nodeid] = None
    # A duet refuses some arguments, and has an option for one.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in (*REFUSED, "--gpumem-max-regression"):
        parser.add_argument(name)
    arguments = parser.parse_known_args(gate.arguments)[1]
    if any(row.limits.max_peak_regression for row in failing):
        arguments.append("--gpumem-footprint=on")
    for command, tests in in_duet.items():
        words = list(command)
        for test in list(tests)[:EXPLAINED]:
            words += ["--test", test]
        if arguments:
            words += ["--", *arguments]
        yield shlex.join(words) + more(tests)
    if in_session:
        yield session_of(in_session, ["--gpumem", *gate.arguments], gate.of_head.paths)


def _print(output: Path, conclusion: Conclusion, gate: Gate, seconds: float) -> None:
    names: list[str] = []
    for name in FILES:
        names += [file.name for file in output.glob(name)]
    _log(f"{counted(len(names), 'file')} in {output}: {' '.join(names)}")
    for remark in conclusion.remarks:
        say(f"gpumem gate: {remark}")
    lines = conclusion_lines(conclusion, terminal()[0])
    click.echo("gpumem gate: " + "\n".join(lines))
    if gate.results is not None:
        counts = counts_text(conclusion.rows)
        device = name_and_driver(gate.results.document.device)
        click.echo(printable(f"{counts}; {rounded_duration(seconds)} on {device}"))
