"""The command `gpumem history`: what became slower or larger, over many runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.commands import examples, file_option, say, terminal, write
from pytest_gpumem.commands.baseline import gpu_option
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.columns import Columns, Line

if TYPE_CHECKING:
    from pytest_gpumem.history.data import Change, History
    from pytest_gpumem.history.lines import ChangeLine

FILES = {
    "html": "A page with a line for each figure of each test, in one file.",
    "csv": "A line for each value, in SI units.",
    "parquet": "The same as an Apache Parquet file. Needs the extra parquet.",
    "openmetrics": "The last values, as text for Prometheus.",
    "bmf": "The last values, in Bencher's format.",
}
"""The options that name a file, with their help."""
DAYS = 30
SHOWN = 5  # tests of one run and one card that are named; the others are counted


def _time(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime:
    if value is None or (value.isdecimal() and len(value) < 6):
        return datetime.now(timezone.utc) - timedelta(days=int(value or DAYS))
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no time; accepted is a number of days, or a date such as 2026-10-01") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def _files(command: Callable[..., None]) -> Callable[..., None]:
    """The options of the files that are written."""
    for name, text in reversed(FILES.items()):
        command = file_option(f"--{name}", text)(command)
    return command


@click.command(
    short_help="List what became slower or larger over many runs.",
    epilog=examples(
        "gpumem history s3://bucket/history --html history.html", "gpumem history .benchmarks --since 90 --test tests/test_a.py"
    ),
)
@click.argument("where", metavar="WHERE")
@click.option("--since", callback=_time, metavar="TIME", help=f"List changes since then: days, or a date. Default: {DAYS} days.")
@click.option("--test", metavar="TEST", help="Only of this test, file or class, or of a row by its name.")
@gpu_option
@_files
def history(where: str, since: datetime, test: str | None, gpu: str | None, **files: Path | None) -> None:
    """List the lasting changes of the tests in WHERE, the folder or URL of --gpumem-record, of a baseline, or of both.

    Changes for the worse that nobody accepted come first, then accepted ones with who and why, then changes for the better. A change lies
    between the two commits that are named. Every change of a count or of bytes is listed; that of a time from 0.5 % on, if it lasts.

    The files hold all runs of these tests and GPUs, also those before --since.
    """
    from pytest_gpumem.history import query

    found = query.history(where, card=gpu, test=test)
    if not found.series:
        of = "".join(f" of {name}" for name in (test, gpu) if name is not None)
        raise UserError(f"{where}: there are no runs{of}; pytest --gpumem --gpumem-record {where} keeps one")
    for name, path in files.items():
        if path is not None:
            write(f"--{name}", path, _content(name, found, since))
    changes = query.recent(found, since)
    slower = [change for change in changes if change.worse]
    open_ = [change for change in slower if not change.accepted]
    for title, chosen in (
        ("slower or larger", open_),
        ("slower or larger, accepted", [change for change in slower if change.accepted]),
        ("faster or smaller", [change for change in changes if not change.worse]),
    ):
        for line in _lines(found, title, chosen):
            click.echo(line)
    tests = len({(one.card, one.test) for one in found.series})
    say(
        f"{counted(len(found.runs), 'run')} of {counted(tests, 'test')}; since {since:%Y-%m-%d}: {counted(len(open_), 'change')} for the "
        f"worse, {len(slower) - len(open_)} accepted, {len(changes) - len(slower)} for the better"
    )
    for path in files.values():
        if path is not None:
            click.echo(printable(f"wrote {path}"))


def _content(name: str, found: History, since: datetime) -> Any:
    """The content of a file of `FILES`."""
    if name == "html":
        from pytest_gpumem.history.page import page

        return page(found, since)
    from pytest_gpumem.history import exports

    return getattr(exports, name)(found)


def _lines(found: History, title: str, changes: Sequence[Change]) -> list[str]:
    """A table of changes; many tests that changed with the same run are counted."""
    from pytest_gpumem.history.lines import change_lines

    if not changes:
        return []
    of_run: dict[tuple[int, str], list[Change]] = defaultdict(list)
    for change in changes:
        one = found.series[change.series]
        of_run[int(one.runs[change.at]), one.metric].append(change)
    several = len({(one.card, one.variant) for one in found.series}) > 1 or any(run.simulated for run in found.runs)
    left = {id(change) for together in of_run.values() for change in together[SHOWN:]}
    rows = [_line(texts, several) for texts in change_lines(found, [change for change in changes if id(change) not in left])]
    for (run, metric), together in of_run.items():
        if (rest := len(together) - SHOWN) > 0:
            name = f"and {counted(rest, 'test')} more with the run of {found.runs[run].when:%Y-%m-%d %H:%M}"
            rows.append(Line(name, ("", metric, "", "", "", "")))
    width, colour = terminal()
    return [Columns(title, ("change", "figure", "level", "commits", "date", "card"), "", rows).drawn(width, colour), ""]


def _line(texts: ChangeLine, several: bool) -> Line:
    figures = (texts.size, texts.metric, texts.levels, texts.commits, texts.date, texts.card if several else "")
    return Line(texts.test, figures, below=[texts.judged] if texts.accepted else [])
