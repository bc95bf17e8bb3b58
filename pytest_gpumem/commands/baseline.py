"""The commands on accepted runs: `gpumem baseline`, for people, and `gpumem accept`, which resets a row."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.baselines.acceptance import untrusted
from pytest_gpumem.baselines.history import Content
from pytest_gpumem.commands import examples, json_option, terminal, write_json
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.screen import mean_latency
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import selects
from pytest_gpumem.reporting.columns import Columns, Line
from pytest_gpumem.revisions import DIRTY, head
from pytest_gpumem.units import did_you_mean, format_bytes, format_time

if TYPE_CHECKING:
    from pytest_gpumem.baselines.storage import Storage

FOLDER = ".benchmarks"  # pytest-benchmark's storage, the default place of baselines
VARIABLE = "GPUMEM_BASELINE"
WHO = ("GITHUB_ACTOR", "GITLAB_USER_LOGIN")  # variables in which a CI names whoever started it

place_option = click.option(
    "--baseline", metavar="PLACE", help=f"Folder or URL of the baselines, as --gpumem-baseline. Default: {VARIABLE}, else {FOLDER}."
)
gpu_option = click.option("--gpu", metavar="KEY", help="Only of this GPU, by the name of its folder. Default: every GPU.")
_json_option = json_option("Write them as JSON.")


def opened(baseline: str | None) -> Storage:
    """The place of the baselines that a command works on."""
    from pytest_gpumem.baselines.storage import storage

    return storage(baseline or os.environ.get(VARIABLE) or FOLDER)


def devices(place: Storage, gpu: str | None) -> list[str]:
    """Keys of the devices that a command works on.
    Raises `UserError`: there are none, or not the one that was asked for; or the store cannot be reached.
    """
    found = place.devices()
    if not found:
        raise UserError(f"there are no baselines in {place}; give their place with --baseline")
    if gpu is not None and gpu not in found:
        raise UserError(f"--gpu: there is no baseline of {gpu!r} in {place}; there are {', '.join(found)}")
    return [key for key in found if gpu in (None, key)]


@click.group(
    no_args_is_help=False,
    short_help="List, copy and tidy the accepted runs.",
    epilog=examples("gpumem baseline list --baseline s3://bucket/baselines"),
)
def baseline() -> None:
    """List the accepted runs of --gpumem-baseline, copy them between places, and remove those that no comparison needs."""


@baseline.command("list", short_help="List every run and every accepted change.", epilog=examples("gpumem baseline list"))
@place_option
@gpu_option
@_json_option
def list_(baseline: str | None, gpu: str | None, file: Path | None) -> None:
    """List the files of the baselines, oldest first: runs, and changes that somebody accepted with who and why."""
    place = opened(baseline)
    found = [(key, path, content) for key in devices(place, gpu) for path, content in _by_age(place, key)]
    for key in dict.fromkeys(key for key, _, _ in found):
        lines = [(path.name, _figures(content), _remark(content)) for of, path, content in found if of == key]
        _table(key, "file", ("time, UTC", "revision", "rows"), lines)
    write_json(file, [_file(key, path, content) for key, path, content in found])


@baseline.command(short_help="Show the accepted runs of one test.", epilog=examples("gpumem baseline show tests/test_a.py::test_triad"))
@place_option
@gpu_option
@_json_option
@click.argument("test", metavar="TEST")
def show(baseline: str | None, gpu: str | None, file: Path | None, test: str) -> None:
    """Show the accepted runs and changes of TEST: a node id, a row's name with its label, or a file or class with all its tests."""
    place = opened(baseline)
    stored = [(key, content) for key in devices(place, gpu) for _, content in _by_age(place, key)]
    lines: dict[tuple[str, str, str], dict[str, Any]] = {}

    def at(key: str, content: Content, row: str, **figures: object) -> None:
        about = {"gpu": key, "row": row, "utc": content.utc.isoformat(timespec="seconds"), "revision": content.revision}
        lines.setdefault((key, row, content.id), about).update(figures)

    for key, content in stored:
        for row in content.rows:
            if _names(test, row.key, row.nodeid):
                at(key, content, row.key, mode=row.measurement.mode, latency_s=mean_latency([row.measurement]), processes=row.processes)
        for one in content.footprints:
            if _names(test, one.key, one.nodeid):
                at(key, content, one.key, peak_bytes=one.footprint.peak)
        for reset in content.resets:
            if _names(test, reset.key, reset.key):
                at(key, content, reset.key, accepted_by=reset.who, reason=reset.reason)
    if not lines:
        raise UserError(f"{test}: no row in {place} belongs to it")
    for key in dict.fromkeys(key for key, _ in stored):
        shown = []
        for line in sorted((line for line in lines.values() if line["gpu"] == key), key=lambda line: str(line["row"])):
            latency = format_time(line["latency_s"]) if "latency_s" in line else ""
            peak = format_bytes(line["peak_bytes"]) if "peak_bytes" in line else ""
            accepted = f"accepted by {line['accepted_by']}: {line['reason']}" if "reason" in line else ""
            when = line["utc"][:19].replace("T", " ")
            shown.append((line["row"], (when, (line["revision"] or "")[:12], latency, peak), accepted))
        _table(key, "row", ("time, UTC", "revision", "latency", "peak"), shown)
    write_json(file, list(lines.values()))


@baseline.command(short_help="Copy the runs of a folder to another place.", epilog=examples("gpumem baseline push s3://bucket/baselines"))
@place_option
@click.argument("target", metavar="TARGET")
def push(baseline: str | None, target: str) -> None:
    """Copy the runs that TARGET, a folder or a URL, lacks from the baseline to it. Every file is read and checked first."""
    _copy(opened(baseline), opened(target))


@baseline.command(short_help="Copy the runs of another place to a folder.", epilog=examples("gpumem baseline pull s3://bucket/baselines"))
@place_option
@click.argument("source", metavar="SOURCE")
def pull(baseline: str | None, source: str) -> None:
    """Copy the runs that the baseline lacks from SOURCE, a folder or a URL, to it. Every file is read and checked first."""
    _copy(opened(source), opened(baseline))


@baseline.command(short_help="Remove runs that no comparison needs.", epilog=examples("gpumem baseline prune --keep 60 --dry-run"))
@place_option
@gpu_option
@click.option("--keep", type=click.IntRange(1), default=60, metavar="N", help="Newest runs of each row that stay. Default: 60.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(baseline: str | None, gpu: str | None, keep: int, dry_run: bool) -> None:
    """Remove old runs. No comparison over the newest N runs of a row changes by it.

    The first run of a row, the last accepted change and the newest file stay. With --gpumem-baseline-of only some runs count: keep more
    than the window.
    """
    from pytest_gpumem.baselines.store import files, surplus

    place = opened(baseline)
    for key in devices(place, gpu):
        found = dict(files(place, key))
        names = [path.name for path in surplus(found, keep)]
        if names and not dry_run:
            place.remove(key, names)
        verb = "would be removed" if dry_run else "removed"
        click.echo(printable(f"{key}: {len(names)} of {counted(len(found), 'file')} {verb} from {place}"))


def _copy(source: Storage, target: Storage) -> None:
    from pytest_gpumem.baselines.store import copy

    if not source.recorded().devices():
        devices(source, None)
    for key, count in copy(source, target).items():
        click.echo(printable(f"{key}: {counted(count, 'file')} copied from {source} to {target}"))


def _by_age(place: Storage, key: str) -> list[tuple[Path, Content]]:
    from pytest_gpumem.baselines.store import files

    return sorted(files(place, key), key=lambda one: (one[1].sequence, one[1].utc, one[1].id))


def _file(key: str, path: Path, content: Content) -> Mapping[str, object]:
    device = content.process.device if content.process is not None else None
    return {
        "gpu": key,
        "file": path.name,
        "utc": content.utc.isoformat(timespec="seconds"),
        "revision": content.revision,
        "sequence": content.sequence,
        "driver": device.driver if device is not None else None,
        "rows": sorted(content.nodeids),
        "resets": [{"row": one.key, "who": one.who, "reason": one.reason} for one in content.resets],
    }


def _figures(content: Content) -> tuple[str, ...]:
    return f"{content.utc:%Y-%m-%d %H:%M:%S}", (content.revision or "")[:12], str(len(content.nodeids) or "")


def _remark(content: Content) -> str:
    if content.process is not None or not content.resets:
        return f"{counted(len(content.resets), 'row')} faster" if content.resets else ""
    first = content.resets[0]
    return f"accepted by {first.who}: {first.reason} ({counted(len(content.resets), 'row')})"


def _table(key: str, name: str, headings: Sequence[str], lines: Sequence[tuple[str, tuple[str, ...], str]]) -> None:
    """Print the lines of one device: each a name, figures, and a remark below."""
    if not lines:
        return

    shown = [Line(row, figures, below=(remark,) if remark else ()) for row, figures, remark in printable(list(lines))]
    width, colour = terminal()
    click.echo(f"{printable(key)}:\n{Columns(name, headings, '', shown).drawn(width, colour)}")


@click.command(
    short_help="Accept a change of a test: begin a new baseline.",
    epilog=examples('gpumem accept tests/test_a.py::test_triad --reason "checks bounds now"'),
)
@click.option("--reason", required=True, help="Why the change is right; pytest -v shows it until the next run is saved.")
@place_option
@gpu_option
@click.option("--who", metavar="NAME", help="Who accepts it. Default: whoever started the CI, else the user.")
@click.argument("tests", metavar="TEST...", nargs=-1, required=True)
def accept(tests: tuple[str, ...], reason: str, baseline: str | None, gpu: str | None, who: str | None) -> None:
    """Accept a change of TEST: reset its baseline, so that only later runs count.

    TEST is a node id, a row's name with its label, or a selection: a file, a class, or a test with all its parameters. Nothing is
    measured; the next run with --gpumem-save starts the new baseline.
    """
    from pytest_gpumem.baselines.store import reset, row_keys

    if not reason.strip():
        raise click.UsageError("--reason: it is empty; give the reason for the change.")
    if (fork := untrusted(os.environ)) is not None:
        raise UserError(f"cannot accept the code of a fork: {fork}")
    place = opened(baseline)
    stored = {key: row_keys(place, key) for key in devices(place, gpu)}
    for test in tests:
        if not any(_selected(rows, test) for rows in stored.values()):
            names = [name for rows in stored.values() for pair in rows.items() for name in pair]
            raise UserError(f"{test}: no row in {place} belongs to it{did_you_mean(test, names, cutoff=0.5)}")
    revision = head(Path.cwd())
    for key, rows in stored.items():
        if chosen := sorted({row for test in tests for row in _selected(rows, test)}):
            path = reset(place, key, chosen, reason.strip(), who or _who(os.environ), revision)
            click.echo(printable(f"{key}: reset the baseline of {', '.join(chosen)}; wrote {place.shown(path)}"))
    if revision is not None and revision.endswith(DIRTY):
        click.echo("there are uncommitted changes: runs with --gpumem-baseline-of ignore this; commit, then accept again")
    click.echo("run pytest --gpumem --gpumem-save to start the new baseline")


def _selected(rows: Mapping[str, str], test: str) -> list[str]:
    """Keys of the rows that TEST names; `rows`: node ids by key."""
    return [key for key, nodeid in rows.items() if _names(test, key, nodeid)]


def _names(test: str, key: str, nodeid: str) -> bool:
    """True if TEST is the row's name, or selects its node id as pytest's command line would."""
    return test == key or selects(test, nodeid)


def _who(environment: Mapping[str, str]) -> str:
    for name in WHO:
        if environment.get(name):
            return environment[name]
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return f"user {os.getuid()}" if hasattr(os, "getuid") else "unknown"
