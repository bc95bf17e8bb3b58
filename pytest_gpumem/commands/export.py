"""The commands `gpumem export`: results in the formats of other programs; and `gpumem schema`: the JSON Schema of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import click

from pytest_gpumem.commands import examples
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import json_schema
from pytest_gpumem.reporting.exports import bencher, github_action_benchmark, of_rows
from pytest_gpumem.result_files import load_results

FORMATS: Mapping[str, Callable[[Iterable[Row], DeviceFacts], str]] = MappingProxyType(
    {"csv": of_rows, "bmf": bencher, "github-action-benchmark": github_action_benchmark}
)
"""By the name of a format, the text of rows in it."""


@click.command(
    short_help="Write results as CSV, or for services that keep charts.", epilog=examples("gpumem export csv results.json > results.csv")
)
@click.argument("format", type=click.Choice(list(FORMATS)))
@click.argument("results", type=click.Path(path_type=Path), metavar="RESULTS")
def export(format: str, results: Path) -> None:
    """Print RESULTS, a --benchmark-json file of a session with --gpumem, in another format.

    csv has a line for each measurement, with figures in SI units and shares as fractions. bmf is Bencher's format, and
    github-action-benchmark is the format of that action's tool customSmallerIsBetter: their names end with the device, so that charts do
    not mix cards.
    """
    document = load_results(results).document
    click.echo(FORMATS[format](document.rows, document.device), nl=False)


@click.command(short_help="Print the JSON Schema of results.", epilog=examples("gpumem schema > gpumem.schema.json"))
def schema() -> None:
    """Print the JSON Schema of results, the value of the key "gpumem" in a --benchmark-json file."""
    click.echo(json.dumps(json_schema(), indent=1))
