"""The commands `gpumem export`: results in the formats of other programs; and `gpumem schema`: the JSON Schema of results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from pytest_gpumem.commands import examples

if TYPE_CHECKING:
    from pytest_gpumem.history.data import History
    from pytest_gpumem.result_files import Results


def _csv(results: Results) -> str:
    from pytest_gpumem.reporting.exports import of_rows

    return of_rows(results.document.rows, results.document.device)


def _bmf(results: Results) -> str:
    from pytest_gpumem.reporting.exports import bencher

    return bencher(results.document.rows, results.document.device)


def _github(results: Results) -> str:
    from pytest_gpumem.reporting.exports import github_action_benchmark

    return github_action_benchmark(results.document.rows, results.document.device)


FORMATS: Mapping[str, Callable[[Results], str]] = MappingProxyType({"csv": _csv, "bmf": _bmf, "github-action-benchmark": _github})
"""By the name of a format, the text of results in it."""


@dataclass(frozen=True)
class Export:
    """A file that has a history."""

    help: str
    made: Callable[[History, datetime], str | memoryview | Iterator[bytes]]
    """Its content. The time is the start of the period whose changes come first."""


def _page(history: History, since: datetime) -> str:
    from pytest_gpumem.history.page import page

    return page(history, since)


def _of_history(name: str) -> Callable[[History, datetime], str | memoryview | Iterator[bytes]]:
    def made(history: History, since: datetime) -> str | memoryview | Iterator[bytes]:
        from pytest_gpumem.history import exports

        content: str | memoryview | Iterator[bytes] = getattr(exports, name)(history)
        return content

    return made


OF_HISTORY: Mapping[str, Export] = MappingProxyType(
    {
        "html": Export("A page with a line for each figure of each test, in one file.", _page),
        "csv": Export("A line for each value, in SI units.", _of_history("csv")),
        "parquet": Export("The same as an Apache Parquet file. Needs the extra parquet.", _of_history("parquet")),
        "openmetrics": Export("The last values, as text for Prometheus.", _of_history("openmetrics")),
        "bmf": Export("The last values, in Bencher's format.", _of_history("bmf")),
    }
)
"""By the name of an option of `gpumem history`, the file that it writes."""


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
    from pytest_gpumem.result_files import ResultsError, load_results

    try:
        text = FORMATS[format](load_results(results))
    except ResultsError as error:
        raise click.ClickException(str(error)) from None
    click.echo(text, nl=False)


@click.command(short_help="Print the JSON Schema of results.", epilog=examples("gpumem schema > gpumem.schema.json"))
def schema() -> None:
    """Print the JSON Schema of results, the value of the key "gpumem" in a --benchmark-json file."""
    from pytest_gpumem.records.schema import json_schema

    click.echo(json.dumps(json_schema(), indent=1))
