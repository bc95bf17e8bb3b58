"""The command `gpumem read`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from pytest_gpumem.commands import examples, json_option, write_json
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.nsight.recording import BadReport, Recording
from pytest_gpumem.outcomes import Exit, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.profile import Besides, TestProfile
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import profiles_to_json
from pytest_gpumem.records.uses import CopyUse, KernelUse
from pytest_gpumem.result_files import load_results
from pytest_gpumem.units import format_bytes, format_share, format_time


def text(recording: Recording) -> str:
    """A paragraph for each measurement."""
    recording, lines = printable(recording), []
    for one in recording.profiles:
        lines += [*_profile(one), ""]
    if rest := list(_besides("outside of all tests", recording.outside)):
        lines += [*rest, ""]
    lines += [f"note: {note}" for note in recording.notes]
    return "\n".join(lines).rstrip("\n")


def _profile(one: TestProfile) -> Iterator[str]:
    launches = "" if one.launches is None else f"  {counted(one.launches, 'launch')}"
    yield f"{one.key}{launches}" if one.kernels or one.copies or one.launches else f"{one.key}  outside of its measurements"
    for kernel in one.kernels:
        yield from _kernel(kernel)
    for copy in (*one.copies, *one.memsets):
        yield f"  {_copy(copy)}"
    clocks = [f"{name} {hz / 1e6:.0f} MHz" for name, hz in (("SM", one.sm_clock_hz), ("memory", one.memory_clock_hz)) if hz is not None]
    if clocks:
        yield f"  clocks: {', '.join(clocks)}"
    if one.set_aside is not None:
        yield f"  L2 set aside: {format_bytes(one.set_aside)}"
    for line in _besides("besides", one.rest):
        yield f"  {line}"


def _kernel(kernel: KernelUse) -> Iterator[str]:
    shape = f"{_shape(kernel.grid)} x {_shape(kernel.block)}"
    yield f"  {kernel.name}"
    yield f"    {counted(kernel.launches, 'launch')} of {shape} threads, {format_time(kernel.nanoseconds_each / 1e9)} each"
    figures = []
    for name, nbytes in (("read", kernel.dram_read), ("written", kernel.dram_written)):
        if nbytes is not None:
            figures.append(f"DRAM {name} {format_bytes(round(nbytes / kernel.launches))}")
    for name, share in (("L2 hit rate", kernel.l2_hit_rate), ("of reads", kernel.l2_read_hit_rate), ("occupancy", kernel.occupancy)):
        if share is not None:
            figures.append(f"{name} {format_share(share)}")
    for name, sectors in (("load", kernel.sectors_per_request), ("store", kernel.sectors_per_store)):
        if sectors:
            figures.append(f"{sectors:.3g} sectors per {name}")
    if figures:
        yield f"    {', '.join(figures)}"


def _copy(copy: CopyUse) -> str:
    sides = f"{copy.source} to {copy.destination}" if copy.source else copy.destination
    many = counted(copy.count, "memset" if copy.kind == "memset" else f"{copy.kind} copy")
    return f"{many}, {sides}: {format_bytes(copy.nbytes)} in {format_time(copy.nanoseconds / 1e9)}"


def _besides(title: str, rest: Besides) -> Iterator[str]:
    parts = []
    if rest.kernels:
        nanoseconds = sum(kernel.nanoseconds for kernel in rest.kernels)
        parts.append(f"{counted(sum(k.launches for k in rest.kernels), 'kernel')} in {format_time(nanoseconds / 1e9)}")
    parts += [_copy(copy) for copy in (*rest.copies, *rest.memsets)]
    if parts:
        yield f"{title}: {'; '.join(parts)}"


def _shape(size: tuple[int, int, int]) -> str:
    x, y, z = size
    return str(x) if y == z == 1 else f"({x}, {y})" if z == 1 else f"({x}, {y}, {z})"


@click.command(
    "read",
    short_help="List the Nsight tools' figures of each test.",
    epilog=examples("gpumem read triad.nsys-rep", "gpumem read triad.ncu-rep --results out.json"),
)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--results", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="The --benchmark-json of the same run.")
@json_option("Write profiles as JSON.")
def read(files: tuple[Path, ...], results: Path | None, file: Path | None) -> int:
    """List the figures of each test in reports of Nsight Systems or Nsight Compute.

    A FILE is a .nsys-rep or its SQLite export, a .ncu-rep, or the output of `ncu --csv --page raw`. Listed are kernels with times and
    shapes, copies by kind of memory; for Nsight Compute also DRAM bytes, L2 hit rates, sectors per request,
    occupancy and clocks. --results adds test ids and the number of launches to the kernels of Nsight Compute.
    """
    from pytest_gpumem.nsight import reading
    from pytest_gpumem.nsight.tools import ToolMissing

    rows: tuple[Row, ...] = ()
    if results is not None:
        try:
            rows = load_results(results).document.rows
        except UserError as error:
            raise UserError(f"--results: {error}") from None
    read_ones, code = [], Exit.FINE
    for path in files:
        try:
            found = reading.read(path, os.environ)
        except (BadReport, ToolMissing) as error:
            click.echo(printable(f"gpumem: {error}"), err=True)
            code = max(code, Exit.NO_VERDICT if isinstance(error, ToolMissing) else Exit.USAGE)
            continue
        read_ones.append((path, replace(found, profiles=reading.with_results(found.profiles, rows))))
    for number, (path, found) in enumerate(read_ones):
        version = f" {found.tool_version}" if found.tool_version else ""
        click.echo(f"{'' if not number else chr(10)}{printable(f'{path} ({found.tool}{version})')}\n\n{text(found)}")
    if read_ones:
        write_json(file, profiles_to_json(profile for _, found in read_ones for profile in found.profiles))
    return code
