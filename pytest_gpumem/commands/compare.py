"""The command `gpumem compare`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from pytest_gpumem.baselines.compare import Pair, SetComparison, compare_sides
from pytest_gpumem.baselines.history import UNKNOWN_GPU
from pytest_gpumem.baselines.result_sets import SideResults
from pytest_gpumem.commands import examples, json_option, margin, terminal, write_json
from pytest_gpumem.judging import differences
from pytest_gpumem.judging.expectations import lost
from pytest_gpumem.judging.finding import change, counted
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.what_ran import WhatRan
from pytest_gpumem.reporting.columns import Columns, Line, wrapped
from pytest_gpumem.reporting.differences import describe
from pytest_gpumem.reporting.summary import OF_FILES, remedies
from pytest_gpumem.reporting.terminal import missing_lines
from pytest_gpumem.units import format_share, format_time, sizes

HEADINGS = ("base", "head", "change", "noise hides")
MOST = 20  # rows whose figures are listed
OF_FILES_LOST = (
    "compare runs of the same tests; gpumem accept TEST --scope removed takes a measurement out of "
    "a baseline"
)

_Value = float | int | str | None


def text(
    compared: SetComparison, base: SideResults, head: SideResults, *, width: int, colour: bool
) -> str:
    """Return both sides, a line for each row, the figures that differ, and a sentence for each FAIL.

    ASCII, without a trailing line break. A group of rows that the same remedy decides has one line.
    """
    compared, base, head = printable((compared, base, head))
    compared = replace(compared, pairs=tuple(sorted(compared.pairs, key=_rank)))
    failed = [row for row in compared.rows if row.verdict.outcome is Outcome.FAIL]
    simulated = ""
    if any(row.verdict.simulated for row in compared.rows):
        simulated = " (simulated)"

    before = [f"base: {_what(base)}", f"head: {_what(head)}"]
    if compared.forced is not None:
        before.append(f"FORCED: {compared.forced}; no gate is passed by this")
    before += compared.notes

    after = []
    for row in failed:
        after.append(f"FAIL{simulated} {row.key}: {row.verdict.reason}")
    after += remedies(compared.rows, OF_FILES)
    changed = Counter(what for row in compared.rows for what in row.changed)
    for what, count in changed.items():
        after.append(f"changed between the sides: {what} ({count} of {len(compared.rows)})")
    after += missing_lines(compared.missing, OF_FILES_LOST)
    if compared.no_verdict is not None and not failed:
        after.append(f"no verdict: {compared.no_verdict}")
    after.append(_counts(compared, simulated))

    lines = [part for sentence in before for part in wrapped(sentence, width)]
    if compared.pairs:
        lines.append(_table(compared, width, colour))
    lines += _differing(compared, width, colour)
    lines += [part for sentence in after for part in wrapped(sentence, width)]
    return "\n".join(lines)


def _counts(compared: SetComparison, simulated: str) -> str:
    """Return "3 rows: 1 FAIL, 2 PASS"; the worst outcome comes first."""
    counts = Counter[str]()
    gone = len(lost(compared.missing))
    if gone:
        counts["lost"] = gone
    for row in compared.rows:
        counts[row.verdict.outcome.word] += 1
    words = [f"{count} {outcome}" for outcome, count in counts.items()]
    return f"{counted(counts.total(), 'row')}{simulated}: {', '.join(words)}"


def _table(compared: SetComparison, width: int, colour: bool) -> str:
    lines = []
    for pair in compared.pairs:
        verdict = pair.row.verdict
        word = f"{verdict.outcome.word}{' (simulated)' if verdict.simulated else ''}"
        lines.append(Line(pair.row.key, _times(pair), Text(word, style=verdict.outcome.style)))
    return Columns("test", HEADINGS, "verdict", lines).drawn(width, colour)


def _times(pair: Pair) -> tuple[str, ...]:
    """Return the figures of the table; of a row without times those of its peak of memory."""
    if pair.base is None and pair.head is None:
        base, head = _figure(pair.before, FIGURES[_PEAK]), _figure(pair.row, FIGURES[_PEAK])
        return (*_texts(_PEAK, base, head), _share(base, head), "")
    base_text = "" if pair.base is None else format_time(pair.base)
    head_text = "" if pair.head is None else format_time(pair.head)
    comparison = pair.row.verdict.comparison
    if comparison is None:
        return base_text, head_text, "", ""
    reach = "unknown" if comparison.reach is None else format_share(comparison.reach)
    return base_text, head_text, change(comparison.delta), reach


def _rank(pair: Pair) -> tuple[int, float]:
    comparison = pair.row.verdict.comparison
    slower = 0.0 if comparison is None else comparison.delta
    return pair.row.verdict.outcome.rank, -slower


# Counts, bytes and code

FIGURES = {
    "moved_bytes": "measurement.moved_bytes",
    "gpu_page_faults": "measurement.migrations.launch.gpu_faults",
    "migrated_bytes": "measurement.migrations.launch.migrated",
    "kernels": "measurement.what_ran.kernels",
    "copies": "measurement.what_ran.copies",
    "copied_bytes": "measurement.what_ran.copied_bytes",
    "waits": "measurement.what_ran.waits",
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
"""The exact figures by name, each with its place in a row. `ran` is the digest of a launch."""
_PEAK = "peak_bytes"


def figures(pair: Pair) -> dict[str, tuple[_Value, _Value]]:
    """Return the exact figures of base and of head by name, without those that neither knows."""
    known = {}
    for name, place in FIGURES.items():
        values = _figure(pair.before, place), _figure(pair.row, place)
        if values != (None, None):
            known[name] = values
    return known


def _figure(row: Row | None, place: str) -> _Value:
    """Return a figure of a row; None where it is unknown."""
    value: Any = row
    for name in place.split("."):
        if value is None:
            return None
        value = getattr(value, name)
        if isinstance(value, WhatRan) and not value.order and not place.endswith(".digest"):
            return None  # no launch was watched
    return value.reads + value.writes if isinstance(value, MovedBytes) else value


def ran_differently(pair: Pair) -> tuple[str, ...]:
    """Return what one launch ran differently, in words."""
    launches = []
    for row in (pair.before, pair.row):
        if row is None or row.measurement is None or row.measurement.what_ran is None:
            return ()
        if row.measurement.what_ran.not_watched is not None:
            return ()  # what was not watched would look like steps that are gone
        launches.append(row.measurement.what_ran)
    changed = differences.ran_differently(*launches)
    return tuple(describe(difference) for difference in changed)


def _differing(compared: SetComparison, width: int, colour: bool) -> list[str]:
    """Return a table of the figures that differ, by row, and the number of rows without any."""
    same, rows = 0, 0
    lines: list[Line | Text] = []
    for pair in compared.pairs:
        both = {name: values for name, values in figures(pair).items() if None not in values}
        differ = {name: values for name, values in both.items() if values[0] != values[1]}
        ran = ran_differently(pair)
        if not differ and not ran:
            same += bool(both)
            continue
        rows += 1
        if rows > MOST:
            continue
        lines.append(Text(pair.row.key, style="bold"))
        for name, values in differ.items():
            title = name.removesuffix("_bytes").replace("_", " ")
            lines.append(Line(f"  {title}", (*_texts(name, *values), _share(*values))))
        lines += [Text(f"    {difference}") for difference in ran]
    shown = []
    if lines:
        columns = Columns("figure", ("base", "head", "change"), "", lines)
        shown.append(columns.drawn(width, colour))
    if rows > MOST:
        more = counted(rows - MOST, "further row")
        shown.append(f"{more} with other counts, bytes or code: --json has them")
    if same:
        shown.append(f"{counted(same, 'row')} with the same counts, bytes and code")
    return shown


def _texts(name: str, *values: _Value) -> tuple[str, ...]:
    """Return figures in words; empty where a value is unknown."""
    known = [value for value in values if value is not None]
    words = [str(value) for value in known]
    if name.endswith("_bytes"):
        words = list(sizes(*(int(value) for value in known)))
    texts = []
    for value in values:
        texts.append("" if value is None else words.pop(0))
    return tuple(texts)


def _share(base: _Value, head: _Value) -> str:
    if not isinstance(base, (int, float)) or not isinstance(head, (int, float)):
        return ""
    return change(head / base - 1) if base > 0 and base != head else ""


# For programs


def fields(pair: Pair) -> dict[str, object]:
    """Return a row for programs: seconds, shares as fractions, and the exact figures.

    A figure is null where a side does not know it.
    """
    row, verdict, comparison = pair.row, pair.row.verdict, pair.row.verdict.comparison
    exact = {}
    for name, (base, head) in figures(pair).items():
        exact[name] = {"base": base, "head": head}
    return {
        "test": row.key,
        "outcome": verdict.outcome.value,
        "code": None if verdict.code is None else verdict.code.value,
        "base_s": pair.base,
        "head_s": pair.head,
        "change": None if comparison is None else comparison.delta,
        "reach": None if comparison is None else comparison.reach,
        "simulated": verdict.simulated,
        "reason": verdict.reason,
        "figures": exact,
        "ran_differently": list(ran_differently(pair)),
    }


def as_json(
    compared: SetComparison, base: SideResults, head: SideResults, *, code: int
) -> dict[str, Any]:
    """Return the comparison as plain values."""
    missing = []
    for omission in compared.missing:
        missing.append({"test": omission.key, **msgspec.to_builtins(omission)})
    return {
        "kind": "gpumem compare",
        "schema": 1,
        "base": base.name,
        "head": head.name,
        "forced": compared.forced,
        "exit": code,
        "rows": [fields(pair) for pair in sorted(compared.pairs, key=_rank)],
        "missing": missing,
    }


def _what(side: SideResults) -> str:
    devices = []
    for key in side.devices:
        devices.append("an unknown GPU" if key == UNKNOWN_GPU.key else key)
    drivers = sorted({facts.driver for facts in side.devices.values() if facts.driver is not None})
    driver = f", driver {' and '.join(drivers)}" if drivers else ""
    return f"{side.name}, {counted(side.processes, 'process')} on {' and '.join(devices)}{driver}"


@click.command(
    short_help="Compare result files, without a GPU.",
    epilog=examples(
        "gpumem compare base.json head.json --max-regression 1%",
        "gpumem compare 'base-*.json' 'head-*.json'    # several processes a side",
    ),
)
@click.option(
    "--max-regression",
    metavar="MARGIN",
    callback=margin,
    help='Allowed slow-down of tests without a limit of their own, such as "1%".',
)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 6 unless every row has a limit and is a PASS of a real GPU.",
)
@json_option("Write the comparison as JSON.")
@click.option(
    "--force",
    is_flag=True,
    help="Compare results of different GPUs too. Such a comparison never exits with 0.",
)
@click.argument("sides", nargs=-1, metavar="BASE HEAD")
def compare(
    sides: tuple[str, ...], max_regression: str | None, strict: bool, file: Path | None, force: bool
) -> int:
    """Judge HEAD against BASE as a session judges a run against its baseline, without a GPU.

    The limits of the tests apply to times, memory, counts and machine code. A row of BASE that HEAD
    lacks is lost. The command lists the figures that differ. Each side is a file, a folder, or a
    quoted pattern such as "base-*.json": --benchmark-json files of this plugin or of stock
    pytest-benchmark, or files of a baseline. Each file of BASE is a run; the files of HEAD are the
    processes of a run.
    """
    from pytest_gpumem.baselines.result_sets import side

    if len(sides) != 2:
        raise click.UsageError(
            f"BASE and HEAD are two, not {len(sides)}; put a pattern such as 'base-*.json' into "
            "quotes."
        )
    first, second = (side(given) for given in sides)
    compared = compare_sides(first, second, max_regression, force=force)
    code = compared.exit_code(strict=strict)
    width, colour = terminal()
    click.echo(text(compared, first, second, width=width, colour=colour))
    write_json(file, as_json(compared, first, second, code=code))
    return code
