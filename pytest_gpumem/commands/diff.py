"""The command `gpumem diff`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from pytest_gpumem.commands import examples, file_option, json_option, terminal, write_json, write_named
from pytest_gpumem.explain.what_ran import differences
from pytest_gpumem.judging.finding import change, counted
from pytest_gpumem.printable import printable
from pytest_gpumem.records.measurement import Traffic
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.what_ran import WhatRan
from pytest_gpumem.reporting.columns import Columns, Line, wrapped
from pytest_gpumem.reporting.exports import written
from pytest_gpumem.result_files import Results, load_results
from pytest_gpumem.units import format_bytes, format_time

_Value = float | int | str | None


FIGURES = {
    "latency_s": "measurement.latency",
    "moved_bytes": "measurement.traffic",
    "gpu_page_faults": "measurement.migrations.launch.gpu_faults",
    "migrated_bytes": "measurement.migrations.launch.migrated",
    "kernels": "measurement.what_ran.kernels",
    "copies": "measurement.what_ran.copies",
    "copied_bytes": "measurement.what_ran.copied_bytes",
    "syncs": "measurement.what_ran.syncs",
    "registers": "measurement.what_ran.registers",
    "spill_bytes": "measurement.what_ran.spill",
    "ran": "measurement.what_ran.digest",
    "peak_bytes": "footprint.peak",
    "driver_peak_bytes": "footprint.driver_peak",
    "kept_bytes": "footprint.kept",
    "reserved_bytes": "footprint.reserved",
    "allocations": "footprint.allocations",
    "largest_allocation_bytes": "footprint.largest",
}
"""The compared figures by name, each with its place in a row. `ran` is the digest of what one launch ran."""
_TIME = "latency_s"


@dataclass(frozen=True)
class Pair:
    """A row that both sides have."""

    key: str
    figures: dict[str, tuple[_Value, _Value]]  # by the names of `FIGURES`, base and head; without those that neither side knows
    ran: tuple[str, ...]  # what ran differently, in words

    @property
    def changed(self) -> dict[str, tuple[_Value, _Value]]:
        """The exact figures that both sides know, and that differ: all but the time."""
        known = {name: pair for name, pair in self.figures.items() if name != _TIME and None not in pair}
        return {name: (base, head) for name, (base, head) in known.items() if base != head}


@dataclass(frozen=True)
class Diff:
    """Two runs side by side."""

    pairs: tuple[Pair, ...]
    base_only: tuple[str, ...]  # keys of rows that head lacks
    head_only: tuple[str, ...]  # keys of rows that base lacks


def diff_of(base: Sequence[Row], head: Sequence[Row]) -> Diff:
    """The rows of two runs side by side, in the order of head."""
    before = {row.unique_key: row for row in base}
    now = {row.unique_key: row for row in head}
    pairs = tuple(_pair(before[key], row) for key, row in now.items() if key in before)
    return Diff(pairs, tuple(key for key in before if key not in now), tuple(key for key in now if key not in before))


def _figure(row: Row, place: str) -> _Value:
    """A figure of a row; None where it is unknown."""
    found: Any = row
    for name in place.split("."):
        found = getattr(found, name)
        if found is None:
            return None
        if isinstance(found, WhatRan) and not found.order and not place.endswith(".digest"):
            return None  # no launch was watched
    return found.reads + found.writes if isinstance(found, Traffic) else found


def _pair(base: Row, head: Row) -> Pair:
    figures = {name: (_figure(base, place), _figure(head, place)) for name, place in FIGURES.items()}
    launches = [row.measurement.what_ran for row in (base, head) if row.measurement is not None]
    # What a side did not watch would look like steps that are gone.
    watched = [one for one in launches if one is not None and one.not_watched is None]
    ran = tuple(one.text for one in differences(*watched)) if len(watched) == 2 else ()
    return Pair(head.unique_key, {name: pair for name, pair in figures.items() if pair != (None, None)}, ran)


def as_json(found: Diff) -> dict[str, Any]:
    """All figures of all rows; null where a side does not know one."""
    rows = [
        {
            "row": pair.key,
            "figures": {name: {"base": base, "head": head} for name, (base, head) in pair.figures.items()},
            "ran_differently": list(pair.ran),
        }
        for pair in found.pairs
    ]
    return {"rows": rows, "base_only": list(found.base_only), "head_only": list(found.head_only)}


def as_csv(found: Diff) -> str:
    """A line for each figure of each row, and one for each row that one side lacks."""
    lines: list[tuple[_Value, ...]] = [("row", "figure", "base", "head")]
    lines += [(pair.key, name, base, head) for pair in found.pairs for name, (base, head) in pair.figures.items()]
    lines += [(pair.key, "ran_differently", None, text) for pair in found.pairs for text in pair.ran]
    lines += [(key, "row", True, False) for key in found.base_only] + [(key, "row", False, True) for key in found.head_only]
    return written(lines)


def as_text(found: Diff, sides: Sequence[str], *, width: int, colour: bool, everything: bool = False) -> str:
    """A table of the figures that differ, or of all, by row.
    `everything`: also rows and figures that do not differ.
    """
    found, sides = printable((found, tuple(sides)))
    lines: list[Line | Text] = []
    same = 0
    for pair in found.pairs:
        changed = pair.figures if everything else pair.changed
        if not changed and not pair.ran:
            same += 1
            continue
        lines.append(Text(pair.key, style="bold"))
        shown = dict.fromkeys([*([_TIME] if _TIME in pair.figures else []), *changed])
        lines += [_line(name, *pair.figures[name]) for name in shown]
        lines += [Text(f"    {text}") for text in pair.ran]
    drawn = [Columns("figure", ("base", "head", "change"), "", lines).drawn(width, colour)] if lines else []
    parts = [f"{counted(len(found.pairs), 'row')} on both sides, {same} with the same counts, bytes and code"]
    parts += [f"only in base: {key}" for key in found.base_only] + [f"only in head: {key}" for key in found.head_only]
    named = (line for name, side in zip(("base", "head"), sides, strict=True) for line in wrapped(f"{name}: {side}", width))
    return "\n".join([*named, *drawn, *parts])


def _line(name: str, base: _Value, head: _Value) -> Line:
    shown = name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")
    share = ""
    if isinstance(base, (int, float)) and isinstance(head, (int, float)) and base > 0 and base != head:
        share = change(head / base - 1)
    return Line(f"  {shown}", (_text(name, base), _text(name, head), share))


def _text(name: str, value: _Value) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    if name == _TIME:
        return format_time(value)
    if name.endswith("_bytes"):
        return f"-{format_bytes(-int(value))}" if value < 0 else format_bytes(int(value))
    return str(value)


def _side(file: Path, results: Results) -> str:
    facts = results.document.device
    revision = f", {results.revision[:10]}" if results.revision is not None else ""
    return f"{file}, {results.utc}{revision}, {facts.key}"


@click.command(
    short_help="Show two runs side by side: counts, bytes, code and times.",
    epilog=examples("gpumem diff base.json head.json", "gpumem diff base.json head.json --csv diff.csv"),
)
@file_option("--csv", "Write all figures as CSV.")
@json_option("Write all figures as JSON.")
@click.option("--all", "everything", is_flag=True, help="List rows and figures that do not differ too.")
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("head", type=click.Path(path_type=Path))
def diff(csv: Path | None, file: Path | None, everything: bool, base: Path, head: Path) -> None:
    """Show the rows of BASE and HEAD side by side.

    Both are --benchmark-json files of sessions with --gpumem. Listed are the counts and bytes that differ (kernels, copies,
    synchronisations, registers, memory, page faults) and what one launch ran differently, with the time beside them. A difference of
    times is not judged: gpumem compare does that. JSON and CSV have all figures, in SI units.
    """
    first, second = load_results(base), load_results(head)
    found = diff_of(first.document.rows, second.document.rows)
    width, colour = terminal()
    sides = (_side(base, first), _side(head, second))
    click.echo(as_text(found, sides, width=width, colour=colour, everything=everything))
    if csv is not None:
        write_named("--csv", csv, as_csv(found))
    write_json(file, as_json(found))
