"""The command `gpumem compare`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from pytest_gpumem.baselines.compare import Pair, SetComparison, SideResults, compare_sides
from pytest_gpumem.commands import examples, json_option, margin, terminal, write_json
from pytest_gpumem.judging.differences import differences
from pytest_gpumem.judging.expectations import lost
from pytest_gpumem.judging.finding import change, counted
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.columns import Columns, Line, wrapped
from pytest_gpumem.reporting.differences import describe
from pytest_gpumem.reporting.row import mark, names_of
from pytest_gpumem.reporting.table import remedies
from pytest_gpumem.reporting.terminal import missing_lines
from pytest_gpumem.units import format_share, format_time, short_bytes, sizes

HEADINGS = ("base", "head", "change", "noise hides")
MOST = 20  # rows whose figures are listed


def text(
    compared: SetComparison, base: SideResults, head: SideResults, *, width: int, colour: bool
) -> str:
    """Return both sides, a line for each row, what differs, and a sentence for each FAIL.

    It has no trailing line break. A group of rows that the same remedy decides has one line.
    """
    compared, base, head = printable((compared, base, head))
    compared = replace(compared, pairs=tuple(sorted(compared.pairs, key=_rank)))
    failed = [row for row in compared.rows if row.verdict.outcome is Outcome.FAIL]
    simulated = mark(any(row.verdict.simulated for row in compared.rows))

    before = [f"base: {_what(base)}", f"head: {_what(head)}"]

    after = []
    for row in failed:
        after.append(f"FAIL{simulated} {row.key}: {row.verdict.reason}")
    after += remedies(compared.rows, store=False)
    after += missing_lines(compared.missing)
    if any(omission.may_be_meant for omission in compared.missing):
        after.append("compare runs of the same tests")
    if compared.no_verdict is not None and not failed:
        after.append(f"no verdict: {compared.no_verdict}")
    after.append(_counts(compared, simulated))

    lines = [part for sentence in before for part in wrapped(sentence, width)]
    if compared.pairs:
        lines.append(_table(compared, width, colour))
    lines += _differing(compared, width)
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
    for pair, name in zip(compared.pairs, names_of(compared.rows), strict=True):
        verdict = pair.row.verdict
        word = f"{verdict.outcome.word}{mark(verdict.simulated)}"
        lines.append(Line(name, _times(pair), Text(word, style=verdict.outcome.style)))
    return Columns("test", HEADINGS, "verdict", lines).drawn(width, colour)


def _times(pair: Pair) -> tuple[str, ...]:
    """Return the figures of the table; of a row without times those of its peak of memory."""
    if pair.base is None and pair.head is None:
        return _peaks(pair)
    base_text = "" if pair.base is None else format_time(pair.base)
    head_text = "" if pair.head is None else format_time(pair.head)
    comparison = pair.row.verdict.comparison
    if comparison is None:
        return base_text, head_text, "", ""
    reach = "unknown" if comparison.reach is None else format_share(comparison.reach)
    return base_text, head_text, change(comparison.delta), reach


def _peaks(pair: Pair) -> tuple[str, ...]:
    base = None if pair.before is None else pair.before.footprint
    head = pair.row.footprint
    if head is None:
        return ("", "", "", "")
    if base is None:
        return ("", short_bytes(head.peak), "", "")
    share = ""
    if base.peak > 0 and base.peak != head.peak:
        share = change(head.peak / base.peak - 1)
    return (*sizes(base.peak, head.peak), share, "")


def _rank(pair: Pair) -> tuple[int, float]:
    comparison = pair.row.verdict.comparison
    slower = 0.0 if comparison is None else comparison.delta
    return pair.row.verdict.outcome.rank, -slower


# What differs


def what_differs(pair: Pair) -> list[str]:
    """Return what differs between the sides of a row: bytes, counts, kernels and code."""
    base, head = pair.before, pair.row
    if base is None:
        return []
    lines = []
    if base.footprint is not None and head.footprint is not None:
        for name in ("peak", "kept"):
            was, now = getattr(base.footprint, name), getattr(head.footprint, name)
            if was != now:
                share = f" ({change(now / was - 1)})" if was > 0 else ""
                lines.append(f"{name} {' → '.join(sizes(was, now))}{share}")
    if base.measurement is not None and head.measurement is not None:
        for difference in differences(base.measurement, head.measurement):
            lines.append(describe(difference))
    return lines


def _differing(compared: SetComparison, width: int) -> list[str]:
    """Return what differs, by row, and the number of rows where nothing does."""
    lines = []
    rows = same = 0
    for pair in compared.pairs:
        differing = what_differs(pair)
        if pair.before is not None and not differing:
            same += 1
        if not differing:
            continue
        rows += 1
        if rows <= MOST:
            lines += wrapped(pair.row.key, width)
            for line in differing:
                lines += wrapped(f"  {line}", width)
    if rows > MOST:
        more = counted(rows - MOST, "further row")
        lines.append(f"{more} with other counts, bytes or code: --json has them")
    if same:
        lines.append(f"{counted(same, 'row')} with the same counts, bytes and code")
    return lines


# For programs


def fields(pair: Pair) -> dict[str, object]:
    """Return a row for programs: seconds, and shares as fractions."""
    row, verdict, comparison = pair.row, pair.row.verdict, pair.row.verdict.comparison
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
        "differences": what_differs(pair),
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
        "exit": code,
        "rows": [fields(pair) for pair in sorted(compared.pairs, key=_rank)],
        "missing": missing,
    }


def _what(side: SideResults) -> str:
    devices = " and ".join(side.devices)
    drivers = sorted({facts.driver for facts in side.devices.values() if facts.driver is not None})
    if drivers:
        devices += f", driver {' and '.join(drivers)}"
    return f"{side.name}, {counted(side.baseline.processes, 'process')} on {devices}"


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
@click.argument("sides", nargs=-1, metavar="BASE HEAD")
def compare(
    sides: tuple[str, ...], max_regression: str | None, strict: bool, file: Path | None
) -> int:
    """Judge HEAD against BASE as a session judges a run against its baseline, without a GPU.

    The limits of the tests apply to times, memory, counts and machine code. A row of BASE that HEAD
    lacks is lost. The command lists what differs. Each side is a file, a folder, or a
    quoted pattern such as "base-*.json": --benchmark-json files of sessions with --gpumem, or files
    of a baseline. Each file of BASE is a run; the files of HEAD are the processes of a run.
    """
    from pytest_gpumem.baselines.compare import side

    if len(sides) != 2:
        raise click.UsageError(
            f"BASE and HEAD are two, not {len(sides)}; put a pattern such as 'base-*.json' into "
            "quotes."
        )
    first, second = (side(given) for given in sides)
    compared = compare_sides(first, second, max_regression)
    code = compared.exit_code(strict=strict)
    width, colour = terminal()
    click.echo(text(compared, first, second, width=width, colour=colour))
    write_json(file, as_json(compared, first, second, code=code))
    return code
