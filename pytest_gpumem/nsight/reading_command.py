"""The command `gpumem read`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.printable import printable

if TYPE_CHECKING:
    from pytest_gpumem.records.row import Row

UNREADABLE = 6
"""Nothing could be read, as "nothing counted" of other commands."""


@click.command("read")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--results", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="The --benchmark-json of the same run.")
@click.option("--json", "as_json", is_flag=True, help="Write profiles as JSON.")
def read(files: tuple[Path, ...], results: Path | None, as_json: bool) -> int:
    """Say what Nsight Systems or Nsight Compute recorded of each test.

    A FILE is a .nsys-rep or its SQLite export, a .ncu-rep, or what `ncu --csv --page raw` wrote. Shown are kernels with times and shapes,
    copies by kind of memory, migrations and page faults, and of Nsight Compute DRAM bytes, L2 hit rates, sectors per request, occupancy
    and clocks. With --results, Nsight Compute's kernels are known by launch and test id too.

    Exits with 6 where a file cannot be read.
    """
    from pytest_gpumem.nsight import reading
    from pytest_gpumem.nsight.reading_text import text
    from pytest_gpumem.nsight.sqlite_tables import BadReport
    from pytest_gpumem.nsight.tools import ToolMissing
    from pytest_gpumem.records.profile import profiles_to_json
    from pytest_gpumem.records.result_file import FileError, content, document_in, parsed

    rows: tuple[Row, ...] = ()
    if results is not None:
        try:
            rows = document_in(parsed(content(results))).rows
        except FileError as error:
            raise click.UsageError(f"--results: {results}: {error}.") from None
    read_ones, broken = [], False
    for file in files:
        try:
            found = reading.read(file, os.environ)
        except (BadReport, ToolMissing) as error:
            click.echo(printable(f"gpumem: {error}"), err=True)
            broken = True
            continue
        read_ones.append((file, replace(found, profiles=reading.with_results(found.profiles, rows))))
    if as_json:
        click.echo(json.dumps(profiles_to_json(profile for _, found in read_ones for profile in found.profiles), indent=2))
    else:
        for number, (file, found) in enumerate(read_ones):
            version = f" {found.tool_version}" if found.tool_version else ""
            click.echo(f"{'' if not number else chr(10)}{printable(f'{file} ({found.tool}{version})')}\n\n{text(found)}")
    return UNREADABLE if broken else 0
