"""The command `gpumem report`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import click

from pytest_gpumem.commands import examples, file_option, write_named
from pytest_gpumem.files import load_results
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.reporting.conclusion import Run, missing_lines
from pytest_gpumem.reporting.html import page
from pytest_gpumem.reporting.output_formats import as_csv, as_json

FORMATS: Mapping[str, Callable[[Run], str]] = {"csv": as_csv, "json": as_json}
"""By the name of an option: the text of its file."""


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
@click.argument("results", type=click.Path(path_type=Path), metavar="RESULTS")
def report(results: Path, output: Path | None, **files: Path | None) -> None:
    """Write an HTML page about RESULTS, a --benchmark-json file of a session with --gpumem, or the
    files that are named. Needs no GPU.

    The page is one file that loads nothing else: summary, verdicts, plots, and every test with its
    samples, placements and conditions.
    """
    if results.is_dir():
        raise UserError(
            f"{results}: a folder; accepted is a --benchmark-json file of a session with --gpumem"
        )
    chosen: dict[str, tuple[Path, Callable[[Run], str]]] = {}
    for name, file in files.items():
        if file is not None:
            chosen[f"--{name}"] = file, FORMATS[name]
    if output is not None or not chosen:  # the page is the default
        chosen["-o"] = output or results.with_suffix(".html"), page
    names = {results.resolve(): "RESULTS itself"}
    for option, (path, _) in chosen.items():
        if path.resolve() in names:
            raise click.UsageError(f"{option} {path}: is {names[path.resolve()]}.")
        names[path.resolve()] = f"the file of {option}"
    loaded = load_results(results)
    document = loaded.document
    run = Run(
        document.rows,
        document.device,
        document.settings,
        loaded.utc,
        loaded.revision,
        remarks=missing_lines(document.missing),
    )
    for option, (path, text) in chosen.items():
        write_named(option, path, text(run))
