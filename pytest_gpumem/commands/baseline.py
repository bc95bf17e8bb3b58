"""The command `gpumem baseline` on saved runs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.baselines.history import RunFile
from pytest_gpumem.commands import examples, json_option, terminal, test_option, write_json
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.screen import mean_latency
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import selects
from pytest_gpumem.reporting.columns import Columns, Line
from pytest_gpumem.units import did_you_mean, format_time, short_bytes

if TYPE_CHECKING:
    from pytest_gpumem.baselines.storage import Storage

FOLDER = ".benchmarks"  # pytest-benchmark's storage, the default place of baselines
VARIABLE = "GPUMEM_BASELINE"

place_option = click.option(
    "--baseline",
    metavar="PLACE",
    help=f"Folder or URL of the baselines, as --gpumem-baseline. Default: {VARIABLE}, else {FOLDER}.",
)


def opened(baseline: str | None) -> Storage:
    """The place of the baselines that a command works on."""
    from pytest_gpumem.baselines.storage import storage

    return storage(baseline or os.environ.get(VARIABLE) or FOLDER)


def devices(place: Storage) -> list[str]:
    """Keys of the devices that a command works on. Raises `UserError`: there are none, or the store cannot be reached."""
    found = place.devices()
    if not found:
        raise UserError(f"there are no baselines in {place}; give their place with --baseline")
    return found


@click.group(
    no_args_is_help=False,
    short_help="List, copy and tidy the saved runs.",
    epilog=examples("gpumem baseline list --baseline s3://bucket/baselines"),
)
def baseline() -> None:
    """List the saved runs of --gpumem-baseline, copy them between places, and remove those that no comparison needs."""


@baseline.command(
    "list",
    short_help="List every run and every accepted change.",
    epilog=examples(
        "gpumem baseline list", "gpumem baseline list --test tests/test_a.py::test_triad"
    ),
)
@place_option
@test_option
@json_option("Write them as JSON.")
def list_(baseline: str | None, tests: tuple[str, ...], file: Path | None) -> None:
    """List the files of the baselines, oldest first: runs, and changes that somebody accepted with who and why.

    With --test, list the runs and changes of each row of the test, with its latency and its peak of memory.
    """
    place = opened(baseline)
    found = [
        (key, path, content) for key in devices(place) for path, content in _by_age(place, key)
    ]
    if tests:
        lines = _of_tests(place, tests, [(key, content) for key, _, content in found])
        write_json(file, lines)
        return
    for key in dict.fromkeys(key for key, _, _ in found):
        _table(
            key,
            "file",
            ("time, UTC", "revision", "rows"),
            [
                (path.name, _figures(content), _remark(content))
                for of, path, content in found
                if of == key
            ],
        )
    write_json(file, [_file(key, path, content) for key, path, content in found])


def _of_tests(
    place: Storage, tests: Sequence[str], stored: Sequence[tuple[str, RunFile]]
) -> list[dict[str, Any]]:
    """Print the runs and changes of the rows that the tests select; the same as plain values.
    Raises `UserError`: a test selects no row.
    """
    lines: dict[tuple[str, str, str], dict[str, Any]] = {}
    used = set[str]()

    def at(key: str, content: RunFile, row: str, nodeid: str, **figures: object) -> None:
        if not (selecting := [test for test in tests if names_row(test, row, nodeid)]):
            return
        used.update(selecting)
        about = {
            "gpu": key,
            "row": row,
            "utc": content.utc.isoformat(timespec="seconds"),
            "revision": content.revision,
        }
        lines.setdefault((key, row, content.id), about).update(figures)

    for key, content in stored:
        for row in content.rows:
            seconds = mean_latency([row.measurement])
            at(
                key,
                content,
                row.key,
                row.nodeid,
                mode=row.measurement.mode,
                latency_s=seconds,
                processes=row.processes,
            )
        for one in content.footprints:
            at(key, content, one.key, one.nodeid, peak_bytes=one.footprint.peak)
        for reset in content.resets:
            at(key, content, reset.key, reset.key, accepted_by=reset.who, reason=reset.reason)
    if unknown := next((test for test in tests if test not in used), None):
        names = [name for _, content in stored for pair in content.nodeids.items() for name in pair]
        raise UserError(
            f"--test: {unknown}: no row in {place} belongs to it{did_you_mean(unknown, names, cutoff=0.5)}"
        )
    for key in dict.fromkeys(key for key, _ in stored):
        of_gpu = sorted(
            (line for line in lines.values() if line["gpu"] == key),
            key=lambda line: str(line["row"]),
        )
        _table(
            key,
            "row",
            ("time, UTC", "revision", "latency", "peak"),
            [_shown(line) for line in of_gpu],
        )
    return list(lines.values())


def _shown(line: Mapping[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """A row of a run for `_table`."""
    latency = format_time(line["latency_s"]) if "latency_s" in line else ""
    peak = short_bytes(line["peak_bytes"]) if "peak_bytes" in line else ""
    accepted = f"accepted by {line['accepted_by']}: {line['reason']}" if "reason" in line else ""
    when = line["utc"][:19].replace("T", " ")
    return line["row"], (when, (line["revision"] or "")[:12], latency, peak), accepted


@baseline.command(
    short_help="Copy the runs of one place to another.",
    epilog=examples(
        "gpumem baseline push .benchmarks s3://bucket/baselines    # from this machine to the store",
        "gpumem baseline push s3://bucket/baselines .benchmarks    # and back",
    ),
)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
def push(source: str, target: str) -> None:
    """Copy the runs that TO lacks from FROM, each a folder or a URL. Every file is read and checked first."""
    from pytest_gpumem.baselines.storage import storage
    from pytest_gpumem.baselines.store import copy

    there, place = storage(target), storage(source)
    if not place.devices():
        raise UserError(f"there are no baselines in {place}")
    for key, count in copy(place, there).items():
        click.echo(printable(f"{key}: {counted(count, 'file')} copied from {place} to {there}"))


@baseline.command(
    short_help="Remove runs that no comparison needs.",
    epilog=examples("gpumem baseline prune --keep 60 --dry-run"),
)
@place_option
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=60,
    metavar="N",
    help="Newest runs of each row that stay. Default: 60.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(baseline: str | None, keep: int, dry_run: bool) -> None:
    """Remove old runs. No comparison over the newest N runs of a row changes by it.

    The first run of a row, the last accepted change and the newest file stay. With --gpumem-baseline-of only some runs count: keep more
    than the window.
    """
    from pytest_gpumem.baselines.store import files, surplus

    place = opened(baseline)
    for key in devices(place):
        found = dict(files(place, key))
        names = [path.name for path in surplus(found, keep)]
        if names and not dry_run:
            place.remove(key, names)
        verb = "would be removed" if dry_run else "removed"
        click.echo(
            printable(f"{key}: {len(names)} of {counted(len(found), 'file')} {verb} from {place}")
        )


def _by_age(place: Storage, key: str) -> list[tuple[Path, RunFile]]:
    from pytest_gpumem.baselines.store import files

    return sorted(files(place, key), key=lambda one: (one[1].sequence, one[1].utc, one[1].id))


def _file(key: str, path: Path, content: RunFile) -> Mapping[str, object]:
    device = content.process.device if content.process is not None else None
    return {
        "gpu": key,
        "file": path.name,
        "utc": content.utc.isoformat(timespec="seconds"),
        "revision": content.revision,
        "sequence": content.sequence,
        "driver": device.driver if device is not None else None,
        "rows": sorted(content.nodeids),
        "resets": [
            {"row": one.key, "who": one.who, "reason": one.reason} for one in content.resets
        ],
    }


def _figures(content: RunFile) -> tuple[str, ...]:
    return (
        f"{content.utc:%Y-%m-%d %H:%M:%S}",
        (content.revision or "")[:12],
        str(len(content.nodeids) or ""),
    )


def _remark(content: RunFile) -> str:
    faster = sum(not reset.accepted for reset in content.resets)
    accepted = Counter(
        f"accepted by {reset.who}: {reset.reason}" for reset in content.resets if reset.accepted
    )
    parts = [f"{counted(faster, 'row')} faster"] if faster else []
    return "; ".join(
        [*parts, *(f"{text} ({counted(count, 'row')})" for text, count in accepted.items())]
    )


def _table(
    key: str, name: str, headings: Sequence[str], lines: Sequence[tuple[str, tuple[str, ...], str]]
) -> None:
    """Print the lines of one device: each a name, figures, and a remark below."""
    if not lines:
        return

    shown = [
        Line(row, figures, below=(remark,) if remark else ())
        for row, figures, remark in printable(list(lines))
    ]
    width, colour = terminal()
    click.echo(f"{printable(key)}:\n{Columns(name, headings, '', shown).drawn(width, colour)}")


def names_row(test: str, key: str, nodeid: str) -> bool:
    """True if TEST is the row's name, or selects its node id as pytest's command line would."""
    return test == key or selects(test, nodeid)
