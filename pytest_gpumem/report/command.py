"""The command `gpumem report`."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_gpumem.printable import printable


@click.command(
    epilog="Examples:  gpumem report results.json   ·   gpumem report results.json -o report.html --history .benchmarks",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="The page. Default: beside RESULTS, with .html.")
@click.option(
    "--history",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Other result files, or a baseline: each row is shown over the files, or over the processes of the baseline.",
)
@click.argument("results", type=click.Path(path_type=Path), metavar="RESULTS")
def report(results: Path, output: Path | None, history: Path | None) -> None:
    """Write a page about RESULTS, a --benchmark-json file of a session with --gpumem. Needs no GPU.

    The page is one HTML file that loads nothing: summary, verdicts, plots, and every test with its samples, placements, conditions and
    history.
    """
    from pytest_gpumem.files import unwritable, write_whole
    from pytest_gpumem.report.past import earlier
    from pytest_gpumem.report.results import ResultsError, load
    from pytest_gpumem.reporting.html import page

    if results.is_dir():
        raise click.ClickException(f"{results}: a folder; accepted is a --benchmark-json file of a session with --gpumem")
    path = output if output is not None else results.with_suffix(".html")
    if path.resolve() == results.resolve():
        raise click.UsageError(f"-o {path}: is RESULTS itself.")
    if (why := unwritable(path)) is not None:
        raise click.ClickException(f"-o: cannot write {path}: {why}")
    try:
        shown = load(results)
        document = shown.document
        found = earlier(history, document.device.key, document.rows, results) if history is not None else None
    except ResultsError as error:
        raise click.ClickException(str(error)) from None
    text = page(
        document.rows,
        document.device,
        document.settings,
        utc=shown.utc,
        past=found.past if found is not None else None,
        sweeps=shown.sweeps,
        revision=shown.revision,
    )
    try:
        write_whole(path, text)
    except OSError as error:
        raise click.ClickException(f"-o: cannot write {path}: {error.strerror or error}") from None
    if found is not None:
        left_out = "".join(f"; {said}" for said in found.left_out)
        click.echo(printable(f"history of {found.files} file{'s' * (found.files != 1)} from {history}{left_out}"))
    click.echo(printable(f"wrote {path}"))
