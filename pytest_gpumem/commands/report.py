"""The command `gpumem report`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from pytest_gpumem.baselines.layout import LayoutError, read
from pytest_gpumem.commands import examples
from pytest_gpumem.printable import printable
from pytest_gpumem.records.result_file import FileError, ResultsError, content, parsed, revision_of, time_of
from pytest_gpumem.records.row import Row, key_of
from pytest_gpumem.records.schema import is_time
from pytest_gpumem.reporting.plots.samples import Past

MOST = 60
"""Newest files and processes of a row that are shown."""


_T = TypeVar("_T")


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


class _Document(msgspec.Struct):
    device: _Key
    rows: list[_Row]


class _Info(msgspec.Struct):
    id: str | None = None
    dirty: bool | None = None


class _Results(msgspec.Struct):
    gpumem: _Document
    datetime: str | None = None
    commit_info: _Info | None = None


class _Kind(msgspec.Struct):
    """What tells the kinds of files apart; empty where a key is missing."""

    gpumem: msgspec.Raw = msgspec.Raw()
    schema: msgspec.Raw = msgspec.Raw()
    benchmarks: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True)
class _Found:
    """A row of another run."""

    key: str
    mode: str
    past: Past


@dataclass(frozen=True)
class Earlier:
    """What was found in a folder."""

    past: dict[str, list[Past]]
    """By `Row.key` as it is printed, oldest first."""
    files: int
    """That count."""
    left_out: tuple[str, ...]
    """Which do not, and why, a sentence each."""


def earlier(folder: Path, key: str, rows: Sequence[Row], own: Path) -> Earlier:
    """The history of some rows.

    Args:
        folder: is searched with the folders in it for `.json` files; or one such file.
        key: of the device; files of others are left out.
        rows: whose history is wanted, in the mode in which they were measured.
        own: the file that the rows are from, which is no history of itself.

    Raises:
        ResultsError: nothing there, or a file that is damaged.
    """
    modes = {printable(row.key): row.measurement.mode for row in rows if row.measurement is not None}
    found: dict[str, list[Past]] = {}
    files = others = foreign = 0
    for path in _paths(folder):
        if path.resolve() == own.resolve():
            continue
        taken = _rows(path)
        if taken is None:
            foreign += 1
            continue
        device, of = taken
        if device != key:
            others += 1
            continue
        files += 1
        for one in of:
            if modes.get(name := printable(one.key)) == one.mode:
                found.setdefault(name, []).append(one.past)
    why = ((others, f"of other devices than {key}"), (foreign, "without results of this plugin"))
    said = tuple(f"{count} file{'s' * (count > 1)} {what} left out" for count, what in why if count)
    return Earlier({name: sorted(past, key=lambda one: one.utc)[-MOST:] for name, past in found.items()}, files, said)


def _paths(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise ResultsError(f"{folder}: no such file or folder")
    found = sorted(path for path in folder.rglob("*.json") if path.is_file())
    if not found:
        raise ResultsError(f"{folder}: a folder without a .json file")
    return found


def _rows(path: Path) -> tuple[str, Iterable[_Found]] | None:
    """The device's key and the rows of a file; None where it is of something else."""
    try:
        text = content(path)
        kind = _decoded(text, _Kind)
    except msgspec.ValidationError:  # JSON, but no object
        return None
    except FileError as error:
        raise ResultsError(f"{path}: {error}") from None
    except msgspec.DecodeError as error:  # a number that is not finite
        raise ResultsError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ResultsError(f"{path}: nested too deeply") from None
    results, baseline = bool(bytes(kind.gpumem)), bool(bytes(kind.schema)) and not bytes(kind.benchmarks)
    if not results and not baseline:
        return None
    try:
        return _of_results(path, _decoded(text, _Results)) if results else _of_baseline(text)
    except (msgspec.DecodeError, LayoutError, FileError) as error:
        raise ResultsError(f"{path}: {' '.join(str(error).split())}") from None


def _decoded(text: bytes, kind: type[_T]) -> _T:
    """Raises `FileError` for what is no JSON, and `msgspec.ValidationError` for what is no `kind`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Slower, but reads the lone surrogates that stand for a file name which is no UTF-8.
        return msgspec.json.decode(json.dumps(printable(parsed(text))).encode(), type=kind)


def _of_results(path: Path, run: _Results) -> tuple[str, Iterator[_Found]]:
    utc = time_of(run.datetime, path)
    info = run.commit_info
    revision = revision_of({"id": info.id, "dirty": info.dirty}) if info is not None else None
    return run.gpumem.device.key, (
        _Found(key_of(row.nodeid, row.label), taken.mode, Past(utc, taken.latency, taken.half_width, revision, file=True))
        for row in run.gpumem.rows
        if not row.failed and (taken := row.measurement) is not None and is_time(taken.latency)
    )


def _of_baseline(text: bytes) -> tuple[str, Iterator[_Found]]:
    stored = read(text)
    return stored.key, (
        _Found(
            row.key, row.measurement.mode, Past(row.process.utc, row.measurement.latency, row.measurement.half_width, row.process.revision)
        )
        for row in stored.rows
    )


@click.command(short_help="Make an HTML report of result files.", epilog=examples("gpumem report out.json"))
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
    from pytest_gpumem.records.result_file import ResultsError, load_results
    from pytest_gpumem.reporting.html import page

    if results.is_dir():
        raise click.ClickException(f"{results}: a folder; accepted is a --benchmark-json file of a session with --gpumem")
    path = output if output is not None else results.with_suffix(".html")
    if path.resolve() == results.resolve():
        raise click.UsageError(f"-o {path}: is RESULTS itself.")
    if (why := unwritable(path)) is not None:
        raise click.ClickException(f"-o: cannot write {path}: {why}")
    try:
        shown = load_results(results)
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
