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
from pytest_gpumem.baselines.result_sets import UNKNOWN_GPU, SideResults
from pytest_gpumem.commands import examples, json_option, margin, terminal, write_json
from pytest_gpumem.judging import differences
from pytest_gpumem.judging.expectations import lost
from pytest_gpumem.judging.finding import bounds, change, counted
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.what_ran import WhatRan
from pytest_gpumem.reporting.columns import Columns, Line, wrapped
from pytest_gpumem.reporting.differences import describe
from pytest_gpumem.reporting.row import names_of
from pytest_gpumem.reporting.table import remedies
from pytest_gpumem.reporting.terminal import missing_lines
from pytest_gpumem.units import format_share, format_time, sizes

_HEADINGS = ("base", "head", "change", "between", "catches")
MOST = 20  # rows whose figures are listed

_Value = float | int | str | None


def text(
    compared: SetComparison, base: SideResults, head: SideResults, *, width: int, colour: bool
) -> str:
    """What each side is, one line for each row, the figures that differ, what fails first, and a sentence for each FAIL; ASCII, without a
    trailing line break. What decides the other rows is told once for each group of them."""
    compared, base, head = printable((compared, base, head))
    compared = replace(compared, pairs=tuple(sorted(compared.pairs, key=_rank)))
    lines = [f"base: {_what(base)}", f"head: {_what(head)}"]
    if compared.forced is not None:
        lines.append(f"FORCED: {compared.forced}; no gate is passed by this")
    lines += compared.notes
    shown = [line for sentence in lines for line in wrapped(sentence, width)]
    shown += [_table(compared, width, colour)] if compared.pairs else []
    shown += _differing(compared, width, colour)
    simulated = " (simulated)" if any(pair.row.verdict.simulated for pair in compared.pairs) else ""
    failed = [row for row in compared.rows if row.verdict.outcome is Outcome.FAIL]
    after = [f"FAIL{simulated} {row.key}: {row.verdict.reason}" for row in failed]
    after += remedies(compared.rows, {})
    after += [
        f"changed between the sides: {what} ({count} of {len(compared.rows)})"
        for what, count in Counter(what for row in compared.rows for what in row.changed).items()
    ]
    after += missing_lines(compared.missing, OF_FILES_LOST)
    counts = Counter(
        pair.row.verdict.outcome.word for pair in compared.pairs
    )  # in the order of the rows: FAIL first
    if compared.no_verdict is not None and not failed:
        after.append(f"no verdict: {compared.no_verdict}")
    if gone := len(lost(compared.missing)):
        counts = Counter({"lost": gone}) + counts
    after.append(
        f"{counted(counts.total(), 'row')}{simulated}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}"
    )
    return "\n".join([*shown, *(line for sentence in after for line in wrapped(sentence, width))])


OF_FILES_LOST = "compare runs of the same tests; gpumem accept TEST --scope removed takes a measurement out of a baseline"


def _table(compared: SetComparison, width: int, colour: bool) -> str:
    lines = []
    for pair, name in zip(compared.pairs, names_of(compared.rows), strict=True):
        verdict = pair.row.verdict
        simulated = " (simulated)" if verdict.simulated else ""
        text = Text(f"{verdict.outcome.word}{simulated}", style=verdict.outcome.style)
        lines.append(Line(name, _times(pair), text))
    return Columns("test", _HEADINGS, "verdict", lines).drawn(width, colour)


def _times(pair: Pair) -> tuple[str, ...]:
    """The figures of the table; of a row without times those of its peak of memory."""
    if pair.base is None and pair.head is None:
        base, head = _figure(pair.before, FIGURES[_PEAK]), _figure(pair.row, FIGURES[_PEAK])
        return (*_texts(_PEAK, base, head), _share(base, head), "", "")
    found = pair.row.verdict.comparison
    shown = ("" if seconds is None else format_time(seconds) for seconds in (pair.base, pair.head))
    if found is None:
        return *shown, "", "", ""
    return (
        *shown,
        change(found.delta),
        " to ".join(bounds(found.low, found.high)),
        format_share(found.catches),
    )


def _rank(pair: Pair) -> tuple[int, float]:
    verdict = pair.row.verdict
    return (
        verdict.outcome.rank,
        -verdict.comparison.delta if verdict.comparison is not None else 0.0,
    )


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
"""The exact figures by name, each with its place in a row. `ran` is the digest of what one launch ran."""
_PEAK = "peak_bytes"


def figures(pair: Pair) -> dict[str, tuple[_Value, _Value]]:
    """The exact figures of a row by name, of base and of head; without those that neither side knows."""
    found = {
        name: (_figure(pair.before, place), _figure(pair.row, place))
        for name, place in FIGURES.items()
    }
    return {name: both for name, both in found.items() if both != (None, None)}


def _figure(row: Row | None, place: str) -> _Value:
    """A figure of a row; None where it is unknown."""
    found: Any = row
    for name in place.split("."):
        found = None if found is None else getattr(found, name)
        if found is None:
            return None
        if isinstance(found, WhatRan) and not found.order and not place.endswith(".digest"):
            return None  # no launch was watched
    return found.reads + found.writes if isinstance(found, MovedBytes) else found


def ran_differently(pair: Pair) -> tuple[str, ...]:
    """What one launch ran differently, in words."""
    launches = [
        row.measurement.what_ran
        for row in (pair.before, pair.row)
        if row is not None and row.measurement is not None
    ]
    # What a side did not watch would look like steps that are gone.
    watched = [one for one in launches if one is not None and one.not_watched is None]
    return tuple(map(describe, differences.ran_differently(*watched))) if len(watched) == 2 else ()


def _differing(compared: SetComparison, width: int, colour: bool) -> list[str]:
    """A table of the figures that differ, by row, and the number of rows without any."""
    known = [
        pair
        for pair in compared.pairs
        if any(None not in values for values in figures(pair).values())
    ]
    found = [(pair, _changed(pair), ran_differently(pair)) for pair in known]
    changed = [one for one in found if one[1] or one[2]]
    same = len(known) - len(changed)
    lines: list[Line | Text] = []
    for pair, differ, ran in changed[:MOST]:
        lines.append(Text(pair.row.key, style="bold"))
        lines += [
            Line(f"  {_name(name)}", (*_texts(name, *values), _share(*values)))
            for name, values in differ.items()
        ]
        lines += [Text(f"    {one}") for one in ran]
    drawn = (
        [Columns("figure", ("base", "head", "change"), "", lines).drawn(width, colour)]
        if lines
        else []
    )
    more = (
        [
            f"{counted(len(changed) - MOST, 'further row')} with other counts, bytes or code: --json has them"
        ]
        if len(changed) > MOST
        else []
    )
    return [
        *drawn,
        *more,
        *([f"{counted(same, 'row')} with the same counts, bytes and code"] if same else []),
    ]


def _changed(pair: Pair) -> dict[str, tuple[_Value, _Value]]:
    """The exact figures that both sides know, and that differ."""
    return {
        name: values
        for name, values in figures(pair).items()
        if None not in values and values[0] != values[1]
    }


def _name(figure: str) -> str:
    return figure.removesuffix("_bytes").replace("_", " ")


def _texts(name: str, *values: _Value) -> tuple[str, ...]:
    """Figures in words; empty where one is unknown."""
    known = [value for value in values if value is not None]
    words = iter(sizes(*map(int, known)) if name.endswith("_bytes") else map(str, known))
    return tuple("" if value is None else next(words) for value in values)


def _share(base: _Value, head: _Value) -> str:
    if (
        isinstance(base, (int, float))
        and isinstance(head, (int, float))
        and base > 0
        and base != head
    ):
        return change(head / base - 1)
    return ""


# For programs

_FIELDS = (
    "test",
    "outcome",
    "code",
    "base_s",
    "head_s",
    "change",
    "change_low",
    "change_high",
    "catches",
    "simulated",
    "reason",
)


def fields(pair: Pair) -> dict[str, object]:
    """One row for programs: seconds, and shares as fractions; and the exact figures, null where a side does not know one."""
    row, verdict, found = pair.row, pair.row.verdict, pair.row.verdict.comparison
    change = (
        (found.delta, found.low, found.high, found.catches) if found is not None else (None,) * 4
    )
    code = verdict.code.value if verdict.code is not None else None
    judged = (row.key, verdict.outcome.value, code)
    of_time = zip(
        _FIELDS,
        (*judged, pair.base, pair.head, *change, verdict.simulated, verdict.reason),
        strict=True,
    )
    exact = {name: {"base": base, "head": head} for name, (base, head) in figures(pair).items()}
    return {**dict(of_time), "figures": exact, "ran_differently": list(ran_differently(pair))}


def as_json(
    compared: SetComparison, base: SideResults, head: SideResults, *, code: int
) -> dict[str, Any]:
    """The comparison as plain values."""
    rows = [fields(pair) for pair in sorted(compared.pairs, key=_rank)]
    missing = [{"test": one.key, **msgspec.to_builtins(one)} for one in compared.missing]
    sides = {"base": base.name, "head": head.name}
    return {
        "kind": "gpumem compare",
        "schema": 1,
        **sides,
        "forced": compared.forced,
        "exit": code,
        "rows": rows,
        "missing": missing,
    }


def _what(side: SideResults) -> str:
    devices = " and ".join(
        "an unknown GPU" if key == UNKNOWN_GPU.key else key for key in side.devices
    )
    drivers = sorted({facts.driver for facts in side.devices.values() if facts.driver is not None})
    driver = f", driver {' and '.join(drivers)}" if drivers else ""
    return f"{side.name}, {counted(side.processes, 'process')} on {devices}{driver}"


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

    The limits of the tests apply to times, memory, counts and machine code. A row of BASE that HEAD lacks is lost. The command lists the
    figures that differ. Each side is a file, a folder, or a quoted pattern such as "base-*.json": --benchmark-json files of this plugin or
    of stock pytest-benchmark, or files of a baseline. Each file of BASE is a run; the files of HEAD are the processes of one run.
    """
    from pytest_gpumem.baselines.result_sets import side

    if len(sides) != 2:
        raise click.UsageError(
            f"BASE and HEAD are two, not {len(sides)}; put a pattern such as 'base-*.json' into quotes."
        )
    first, second = (side(given) for given in sides)
    compared = compare_sides(first, second, max_regression, force=force)
    code = compared.exit_code(strict=strict)
    width, colour = terminal()
    click.echo(text(compared, first, second, width=width, colour=colour))
    write_json(file, as_json(compared, first, second, code=code))
    return code
