"""The command `gpumem report`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import click

from pytest_gpumem.baselines.compare import compare_sides, side
from pytest_gpumem.commands import examples, file_option, write_named
from pytest_gpumem.judging.verdict import OPEN, known, with_verdict
from pytest_gpumem.outcomes import Code, Outcome, UserError
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import ROW, LimitResult, Row
from pytest_gpumem.reporting.conclusion import Run
from pytest_gpumem.reporting.exports import as_csv, as_json
from pytest_gpumem.result_files import load_results
from pytest_gpumem.units import QuantityError

FORMATS: Mapping[str, Callable[[Run], str]] = MappingProxyType({"csv": as_csv, "json": as_json})
"""By the name of an option: the text of its file."""


def _against(base: str, results: Path, run: Run) -> Run:
    """A run whose rows are judged against other results, which are its earlier runs; rows that only
    the other results have come last."""
    other = side(base)
    compared = compare_sides(other, side(str(results)), None)
    judged = {row.key: row for row in compared.rows}
    rows = [
        _judged_as(row, judged[row.key]) if row.key in judged and not row.failed else row
        for row in run.rows
    ]
    lost = []
    for one in (one for one in compared.missing if one.what == ROW):
        why = LimitResult("", Outcome.UNDECIDED, Code.NOT_MEASURED, one.reason)
        lost.append(
            with_verdict(
                Row(one.nodeid, Limits(), OPEN, label=one.label),
                [why],
                simulated=run.facts.simulated,
            )
        )
    past = {row.key: other.baseline.past(row) for row in rows}
    return replace(run, rows=[*rows, *lost], past=past)


def _judged_as(row: Row, judged: Row) -> Row:
    return with_verdict(row, known(judged), comparison=judged.verdict.comparison)


@click.command(
    short_help="Make an HTML report, or files for other programs.",
    epilog=examples("gpumem report results.json", "gpumem report results.json --csv results.csv"),
)
@file_option(
    "-o", "The page. Default, if no other file is named: beside RESULTS, with .html.", "output"
)
@file_option("--csv", "A line for each row, in SI units.")
@file_option(
    "--json", "Times, bytes and counts for github-action-benchmark's tool customSmallerIsBetter."
)
@click.option(
    "--base",
    metavar="BASE",
    help="Earlier runs, which each row is compared with and drawn over: a file, a folder or a "
    "quoted pattern, as gpumem compare takes.",
)
@click.argument("results", type=click.Path(path_type=Path), metavar="RESULTS")
def report(results: Path, output: Path | None, base: str | None, **files: Path | None) -> None:
    """Write an HTML page about RESULTS, a --benchmark-json file of a session with --gpumem, or the
    files that are named. Needs no GPU.

    The page is one file that loads nothing else: summary, verdicts, plots, and every test with its
    samples, placements, conditions and earlier runs.
    """
    from pytest_gpumem.reporting.html import page

    if results.is_dir():
        raise UserError(
            f"{results}: a folder; accepted is a --benchmark-json file of a session with --gpumem"
        )
    chosen = {
        f"--{name}": (file, FORMATS[name]) for name, file in files.items() if file is not None
    }
    if output is not None or not chosen:
        chosen["-o"] = output or results.with_suffix(".html"), page
    for option, (path, _) in chosen.items():
        if path.resolve() == results.resolve():
            raise click.UsageError(f"{option} {path}: is RESULTS itself.")
    shown = load_results(results)
    document = shown.document
    run = Run(document.rows, document.device, document.settings, shown.utc, shown.revision)
    try:
        run = run if base is None else _against(base, results, run)
    except (UserError, QuantityError) as error:
        raise UserError(f"--base: {error}") from None
    for option, (path, text) in chosen.items():
        write_named(option, path, text(run))
