"""The command `gpumem compare`."""

from __future__ import annotations

import os
import shutil
import sys

import click


@click.command()
@click.option("--max-regression", metavar="MARGIN", help='Allowed slow-down, such as "1%". Default: what each test was held to.')
@click.option("--strict", is_flag=True, help="Exit with 6 unless every row was held to a limit and passed, on a real GPU.")
@click.option("--force", is_flag=True, help="Compare results of different GPUs too; the exit code is then 6 at best.")
@click.argument("sides", nargs=-1, metavar="BASE HEAD")
def compare(sides: tuple[str, ...], max_regression: str | None, strict: bool, force: bool) -> int:
    """Compare result files, without a GPU: is HEAD slower than BASE?

    Each is a file, a folder, or a quoted pattern such as "base-*.json": --benchmark-json files of this plugin or of stock
    pytest-benchmark, or files of a baseline. Every file is one run.

    Exits with 1 where something got slower. With 6 where nothing is common to both or --force was needed, and under --strict where not
    every row passed.
    """
    from pytest_gpumem.compare.pairs import compare_sides
    from pytest_gpumem.compare.report import text
    from pytest_gpumem.compare.sides import SideError, side
    from pytest_gpumem.reporting.terminal import wants_colour
    from pytest_gpumem.units import QuantityError, parse_margin

    if len(sides) != 2:
        raise click.UsageError(f"BASE and HEAD are two, not {len(sides)}; put a pattern such as 'base-*.json' into quotes.")
    if max_regression is not None:
        try:
            parse_margin(max_regression)
        except QuantityError as error:
            raise click.UsageError(f"--max-regression: {error}.") from None
    try:
        first, second = (side(given) for given in sides)
        compared = compare_sides(first, second, max_regression, force=force)
    except (SideError, QuantityError) as error:
        raise click.ClickException(str(error)) from None
    width = shutil.get_terminal_size((120, 24)).columns
    click.echo(text(compared, first, second, width=width, colour=wants_colour(sys.stdout, os.environ)))
    return compared.exit_code(strict=strict)
