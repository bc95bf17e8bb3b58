"""The command `gpumem traffic`."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path

import click

from pytest_gpumem.commands import examples, file_option, pytest_arguments, terminal, write
from pytest_gpumem.outcomes import Exit, Outcome
from pytest_gpumem.printable import printable


@click.command(
    short_help="Compare declared bytes with counted ones.",
    epilog=examples("gpumem traffic --test tests/test_a.py::test_triad", "gpumem traffic --json traffic.json -- -k 'not slow'"),
)
@click.option("--test", "tests", multiple=True, metavar="NODEID", help="Count this test only; may be given several times.")
@file_option("--json", "Write the counts; --gpumem-counted reads them.")
@pytest_arguments
def traffic(tests: tuple[str, ...], file: Path | None, pytest_arguments: tuple[str, ...]) -> int:
    """Compare the bytes that tests declare with those that Nsight Compute counts.

    Runs pytest with --gpumem under ncu (GPUMEM_NCU, the PATH, or where CUDA's installers put it), with few launches of each
    measurement. Times are not comparable in such a run, so tests that assert them may fail in it.
    """
    from pytest_gpumem.judging.limits import COUNTERS, absolute
    from pytest_gpumem.judging.traffic import Agreement, account
    from pytest_gpumem.nsight import counting
    from pytest_gpumem.reporting.table import traffic_table

    now = datetime.now(timezone.utc)
    try:
        # Results go to standard output, the output of pytest to standard error.
        found = counting.count(pytest_arguments, tests, os.environ, lambda line: click.echo(line, err=True), day=now.date().isoformat())
    except counting.CallError as error:
        raise click.UsageError(str(error)) from None
    except counting.NothingRecorded as error:
        click.echo(printable(f"gpumem: {error}"), err=True)
        return Exit.NO_VERDICT
    width, colour = terminal()
    click.echo(traffic_table(found.rows, found.facts, width=width, colour=colour))
    if failed := sum(row.failed for row in found.rows):
        click.echo(f"{failed} of {len(found.rows)} rows are of tests that failed in this run, whose times a profiler changes")
    if file is not None:
        write("--json", file, json.dumps(counting.to_json(found, utc=now.isoformat(timespec="seconds")), indent=1) + "\n")
        click.echo(printable(f"wrote {file}"))
    beyond = [
        printable(f"{row.key}: {finding.sentence}")
        for row in found.rows
        if row.measurement is not None
        for finding in absolute(row.measurement, row.limits, found.facts, names=COUNTERS)
        if finding.outcome is not Outcome.PASS
    ]
    for line in beyond:
        click.echo(line)
    accounts = [account(row.measurement, found.facts) for row in found.rows if row.measurement is not None]
    return Exit.FAILED if beyond or any(one is not None and one.finding is Agreement.WRONG for one in accounts) else 0
