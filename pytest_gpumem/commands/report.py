"""The command `gpumem report`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.structs import replace

from pytest_gpumem.baselines.compare import compare_sides
from pytest_gpumem.baselines.layout import read
from pytest_gpumem.baselines.result_sets import side
from pytest_gpumem.commands import examples, write
from pytest_gpumem.files import unwritable
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.record import is_time
from pytest_gpumem.records.row import Row, key_of
from pytest_gpumem.records.schema import SchemaError, footprint_from_json
from pytest_gpumem.reporting.plots.runs import Past
from pytest_gpumem.result_files import FileError, content, load_results, parsed, revision_of, time_of
from pytest_gpumem.units import QuantityError

MOST = 60  # newest files and processes of a row that are shown


# The parts of a result file that a history needs: decoding all samples would take most of the time.
class _Key(msgspec.Struct):
    key: str


class _Measured(msgspec.Struct):
    mode: str
    latency: float
    half_width: float | None = None


class _Row(msgspec.Struct):
    nodeid: str
    label: str = ""
    failed: bool = False
    measurement: _Measured | None = None
    footprint: msgspec.Raw = msgspec.Raw(b"null")


class _Document(msgspec.Struct):
    device: _Key
    rows: list[_Row]


class _File(msgspec.Struct):
    """A JSON file: of results if it has `gpumem`, of a baseline if it has `schema` and no `benchmarks`."""

    gpumem: _Document | None = None
    schema: Any = None
    benchmarks: msgspec.Raw = msgspec.Raw()
    datetime: Any = None
    commit_info: Any = None


@dataclass(frozen=True)
class _Found:
    """A row of another run."""

    key: str
    utc: datetime
    mode: str = ""
    past: Past | None = None
    footprint: Footprint | msgspec.Raw | None = None  # as it is in the file: decoding takes time, and only the newest is shown


@dataclass(frozen=True)
class Earlier:
    """The history that a folder has."""

    past: dict[str, list[Past]]  # by `Row.key` as it is printed, oldest first
    footprints: dict[str, Footprint]  # by the same, of the newest run
    files: int  # number of files of this device
    left_out: tuple[str, ...]  # sentences about the other files


def earlier(folder: Path, key: str, rows: Sequence[Row], own: Path) -> Earlier:
    """The history of some rows.
    `folder`: is searched with its subfolders for `.json` files; or one such file.
    `key`: of the device; files of other devices are left out.
    `rows`: only measurements in the mode of these rows count.
    `own`: the file of these rows, which is no history.
    Raises `UserError`: there are no files, or one is damaged.
    """
    modes = {printable(row.key): row.measurement.mode for row in rows if row.measurement is not None}
    found: dict[str, list[Past]] = {}
    newest: dict[str, _Found] = {}
    files = others = foreign = 0
    for path in _paths(folder):
        if path.resolve() == own.resolve():
            continue
        content_of = _rows(path)
        if content_of is None:
            foreign += 1
        elif content_of[0] != key:
            others += 1
        else:
            files += 1
            for one in content_of[1]:
                name = printable(one.key)
                if one.past is not None and modes.get(name) == one.mode:
                    found.setdefault(name, []).append(one.past)
                if one.footprint is not None and (name not in newest or one.utc >= newest[name].utc):
                    newest[name] = one
    why = ((others, f"of other devices than {key}"), (foreign, "without results of this plugin"))
    left_out = tuple(f"{counted(count, 'file')} {reason} left out" for count, reason in why if count)
    past = {name: sorted(past, key=lambda one: one.utc)[-MOST:] for name, past in found.items()}
    return Earlier(past, {name: _footprint(one) for name, one in newest.items()}, files, left_out)


def _footprint(found: _Found) -> Footprint:
    if isinstance(found.footprint, Footprint):
        return found.footprint
    assert found.footprint is not None
    try:
        return printable(footprint_from_json(msgspec.json.decode(found.footprint)))
    except SchemaError as error:
        raise UserError(f"the footprint of {found.key}: {error}") from None


def _paths(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise UserError(f"{folder}: no such file or folder")
    found = sorted(path for path in folder.rglob("*.json") if path.is_file())
    if not found:
        raise UserError(f"{folder}: a folder without a .json file")
    return found


def _rows(path: Path) -> tuple[str, Iterable[_Found]] | None:
    """The device's key and the rows of a file; None for a file without results of this plugin."""
    try:
        text = content(path)
        try:
            file = _decoded(text)
        except msgspec.ValidationError:
            if text.lstrip().startswith(b"{"):
                raise
            return None  # JSON, but no object
        if file.gpumem is not None:
            return file.gpumem.device.key, _of_results(path, file, file.gpumem)
        if file.schema is not None and not bytes(file.benchmarks):
            return _of_baseline(text)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    except msgspec.DecodeError as error:  # a number that is not finite
        raise UserError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
    except FileError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    return None


def _decoded(text: bytes) -> _File:
    """Raises `FileError` if the text is no JSON, and `msgspec.ValidationError` if it is no `_File`."""
    try:
        return msgspec.json.decode(text, type=_File)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Slower, but reads the lone surrogates that stand for a file name which is no UTF-8.
        return msgspec.json.decode(json.dumps(printable(parsed(text))).encode(), type=_File)


def _of_results(path: Path, file: _File, document: _Document) -> Iterator[_Found]:
    utc, revision = time_of(file.datetime, path), revision_of(file.commit_info)
    for row in document.rows:
        key, one = key_of(row.nodeid, row.label), row.measurement
        footprint = None if bytes(row.footprint) == b"null" else row.footprint
        if not row.failed and one is not None and is_time(one.latency):
            past = Past(utc, one.latency, one.half_width, revision, file=True)
            yield _Found(key, utc, one.mode, past, footprint)
        elif footprint is not None:
            yield _Found(key, utc, footprint=footprint)


def _of_baseline(text: bytes) -> tuple[str, Iterator[_Found]]:
    stored = read(text)
    pasts = ((row, Past(row.process.utc, row.measurement.latency, row.measurement.half_width, row.process.revision)) for row in stored.rows)
    rows = (_Found(row.key, past.utc, row.measurement.mode, past) for row, past in pasts)
    return stored.key, chain(rows, (_Found(one.key, one.process.utc, footprint=one.footprint) for one in stored.footprints))


def _against(base: str, results: Path, key: str, rows: Sequence[Row]) -> tuple[list[Row], dict[str, Footprint]]:
    """The rows of a run, judged against other results, and the footprints of these; rows that only the other results have come last."""
    other = side(base)
    compared = compare_sides(other, side(str(results)), None, force=False)
    judged = {row.key: row for row in compared.rows}
    own = [replace(row, verdict=judged[row.key].verdict) if row.key in judged and not row.failed else row for row in rows]
    footprints: dict[str, Footprint] = {}
    for file in other.files:
        footprints |= earlier(file.path, key, rows, results).footprints
    return [*own, *(row for row in compared.rows if row.measurement is None and row.key not in {one.key for one in rows})], footprints


@click.command(short_help="Make an HTML report of result files.", epilog=examples("gpumem report out.json"))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="The page. Default: beside RESULTS, with .html.")
@click.option(
    "--history",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of other result files, or of a baseline: each row is drawn over their runs.",
)
@click.option("--base", metavar="BASE", help="Results to compare with: a file, a folder or a quoted pattern, as gpumem compare takes.")
@click.argument("results", type=click.Path(path_type=Path), metavar="RESULTS")
def report(results: Path, output: Path | None, history: Path | None, base: str | None) -> None:
    """Write an HTML page about RESULTS, a --benchmark-json file of a session with --gpumem. Needs no GPU.

    The page is one file that loads nothing else: summary, verdicts, plots, and every test with its samples, placements, conditions and
    history.
    """
    from pytest_gpumem.reporting.html import page
    from pytest_gpumem.reporting.run import Run

    if results.is_dir():
        raise UserError(f"{results}: a folder; accepted is a --benchmark-json file of a session with --gpumem")
    path = output if output is not None else results.with_suffix(".html")
    if path.resolve() == results.resolve():
        raise click.UsageError(f"-o {path}: is RESULTS itself.")
    if (why := unwritable(path)) is not None:
        raise UserError(f"-o: cannot write {path}: {why}")
    shown = load_results(results)
    document = shown.document
    found = earlier(history, document.device.key, document.rows, results) if history is not None else None
    run = Run(document.rows, document.device, document.settings, shown.utc, shown.revision, sweeps=shown.sweeps)
    if found is not None:
        run = dataclasses.replace(run, past=found.past, footprints=found.footprints)
    try:
        if base is not None:
            rows, footprints = _against(base, results, document.device.key, document.rows)
            run = dataclasses.replace(run, rows=rows, footprints=footprints)
    except (UserError, QuantityError) as error:
        raise UserError(f"--base: {error}") from None
    write("-o", path, page(run))
    if found is not None:
        click.echo(printable("; ".join([f"history of {counted(found.files, 'file')} from {history}", *found.left_out])))
    click.echo(printable(f"wrote {path}"))
