"""The command `gpumem compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from pytest_gpumem.baselines.compare import Compared, Pair, compare_sides
from pytest_gpumem.baselines.result_sets import UNKNOWN_GPU, Side
from pytest_gpumem.commands import examples, file_option, json_option, margin, terminal, write_json, write_named
from pytest_gpumem.judging.finding import bounds, change, counted
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.columns import Columns, Line, narrowed, wrapped
from pytest_gpumem.reporting.exports import written
from pytest_gpumem.reporting.row_facts import names_of
from pytest_gpumem.reporting.summary import OF_FILES, remedies
from pytest_gpumem.units import format_share, format_time

_HEADINGS = ("base", "head", "change", "between", "catches")
_SIMULATED, _BETWEEN = "(simulated)", "between"


def text(compared: Compared, base: Side, head: Side, *, width: int, colour: bool) -> str:
    """What each side is, one line for each row, what fails first, and a sentence for each FAIL; ASCII, without a trailing line break. What
    decides the other rows is told once for each group of them."""
    compared, base, head = printable((compared, base, head))
    compared = replace(compared, pairs=tuple(sorted(compared.pairs, key=_rank)))
    lines = [f"base: {_what(base)}", f"head: {_what(head)}"]
    if compared.forced is not None:
        lines.append(f"FORCED: {compared.forced}; no gate is passed by this")
    lines += compared.notes
    shown = [line for sentence in lines for line in wrapped(sentence, width)]
    shown.append(_table(compared, width, colour))
    simulated = " (simulated)" if any(pair.row.verdict.simulated for pair in compared.pairs) else ""
    failed = [row for row in compared.rows if row.verdict.outcome is Outcome.FAIL]
    after = [f"FAIL{simulated} {row.key}: {row.verdict.reason}" for row in failed]
    after += remedies(compared.rows, OF_FILES)
    after += [
        f"changed between the sides: {what} ({count} of {len(compared.rows)})"
        for what, count in Counter(what for row in compared.rows for what in row.changed).items()
    ]
    counts = Counter(_judged(pair) for pair in compared.pairs)  # in the order of the rows: FAIL first
    after.append(
        f"{counted(len(compared.pairs), 'row')}{simulated}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}"
    )
    return "\n".join([*shown, *(line for sentence in after for line in wrapped(sentence, width))])


def _table(compared: Compared, width: int, colour: bool) -> str:
    rows = list(zip(compared.pairs, names_of(compared.rows), strict=True))

    def columns(without: Sequence[str]) -> Columns:
        lines = []
        for pair, name in rows:
            figures = ["" if heading in without else text for heading, text in zip(_HEADINGS, _figures(pair), strict=True)]
            simulated = "" if not pair.row.verdict.simulated else " (sim)" if _SIMULATED in without else " (simulated)"
            lines.append(Line(name, figures, Text(_judged(pair) + simulated, style=pair.row.verdict.outcome.style)))
        return Columns("test", _HEADINGS, "verdict", lines)

    found, _ = narrowed(((_SIMULATED, 28), (_BETWEEN, 28)), width, columns)
    intervals = any(row.figures[_HEADINGS.index(_BETWEEN)] for row in found.rows)
    drawn = found.drawn(width, colour)
    return f"{drawn}\nbetween: one-sided bounds of the change, 99.9 % below and 99.5 % above" if intervals else drawn


def _figures(pair: Pair) -> tuple[str, ...]:
    found = pair.row.verdict.comparison
    base, head = ("" if seconds is None else format_time(seconds) for seconds in (pair.base, pair.head))
    if found is None:
        return base, head, "", "", ""
    return base, head, change(found.delta), " to ".join(bounds(found.low, found.high)), format_share(found.catches)


def _judged(pair: Pair) -> str:
    outcome = pair.row.verdict.outcome
    # A pass without a limit is none.
    return outcome.value if outcome is not Outcome.PASS or pair.row.limits.max_regression is not None else "no limit"


def _rank(pair: Pair) -> tuple[int, float]:
    verdict = pair.row.verdict
    return verdict.outcome.rank, -verdict.comparison.delta if verdict.comparison is not None else 0.0


_FIELDS = ("test", "outcome", "code", "base_s", "head_s", "delta", "delta_low", "delta_high", "catches", "simulated", "reason")


def fields(pair: Pair) -> dict[str, object]:
    """One row for programs: seconds, and shares as fractions."""
    row, verdict, found = pair.row, pair.row.verdict, pair.row.verdict.comparison
    change = (found.delta, found.low, found.high, found.catches) if found is not None else (None,) * 4
    code = verdict.code.value if verdict.code is not None else None
    return dict(zip(_FIELDS, (row.key, _judged(pair), code, pair.base, pair.head, *change, verdict.simulated, verdict.reason), strict=True))


def as_json(compared: Compared, base: Side, head: Side, *, code: int) -> dict[str, Any]:
    """The comparison as plain values."""
    rows = [fields(pair) for pair in sorted(compared.pairs, key=_rank)]
    sides = {"base": base.name, "head": head.name}
    return {"kind": "gpumem compare", "schema": 1, **sides, "forced": compared.forced, "exit": code, "rows": rows}


def as_csv(compared: Compared) -> str:
    """A line for each row."""
    return written([_FIELDS, *(list(fields(pair).values()) for pair in sorted(compared.pairs, key=_rank))])


def _what(side: Side) -> str:
    devices = " and ".join("an unknown GPU" if key == UNKNOWN_GPU.key else key for key in side.devices)
    drivers = sorted({facts.driver for facts in side.devices.values() if facts.driver is not None})
    driver = f", driver {' and '.join(drivers)}" if drivers else ""
    return f"{side.name}, {counted(side.processes, 'process')} on {devices}{driver}"


@click.command(
    short_help="Compare result files, without a GPU.",
    epilog=examples(
        "gpumem compare base.json head.json --max-regression 1%", "gpumem compare 'base-*.json' 'head-*.json'    # several processes a side"
    ),
)
@click.option(
    "--max-regression", metavar="MARGIN", callback=margin, help='Allowed slow-down, such as "1%". Default: the limit of each test.'
)
@click.option("--strict", is_flag=True, help="Exit with 6 unless every row has a limit and is a PASS of a real GPU.")
@file_option("--csv", "Write the rows as CSV.")
@json_option("Write the comparison as JSON.")
@click.option("--force", is_flag=True, help="Compare results of different GPUs too; the exit code is then 6 at best.")
@click.argument("sides", nargs=-1, metavar="BASE HEAD")
def compare(sides: tuple[str, ...], max_regression: str | None, strict: bool, csv: Path | None, file: Path | None, force: bool) -> int:
    """Compare result files, without a GPU: is HEAD slower than BASE?

    Each side is a file, a folder, or a quoted pattern such as "base-*.json": --benchmark-json files of this plugin or of stock
    pytest-benchmark, or files of a baseline. Each file of BASE is a run; the files of HEAD are the processes of one run.
    """
    from pytest_gpumem.baselines.result_sets import side

    if len(sides) != 2:
        raise click.UsageError(f"BASE and HEAD are two, not {len(sides)}; put a pattern such as 'base-*.json' into quotes.")
    first, second = (side(given) for given in sides)
    compared = compare_sides(first, second, max_regression, force=force)
    code = compared.exit_code(strict=strict)
    width, colour = terminal()
    click.echo(text(compared, first, second, width=width, colour=colour))
    if csv is not None:
        write_named("--csv", csv, as_csv(compared))
    write_json(file, as_json(compared, first, second, code=code))
    return code
