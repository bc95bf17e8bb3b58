"""The command `gpumem schema`."""

from __future__ import annotations

import json

import click

from pytest_gpumem.commands import examples


@click.command(short_help="Print the JSON Schema of results.", epilog=examples("gpumem schema > gpumem.schema.json"))
def schema() -> None:
    """Print the JSON Schema of results, the value of the key "gpumem" in a --benchmark-json file."""
    from pytest_gpumem.records.schema import json_schema

    click.echo(json.dumps(json_schema(), indent=1))
