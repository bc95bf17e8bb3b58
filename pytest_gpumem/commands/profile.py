"""The commands that run tests to look into them: `gpumem profile nsys` and `ncu`, `ranges`, `traffic` and `l2-sweep`."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_gpumem.commands import examples, json_option, log, pytest_arguments, terminal, test_option, write_json
from pytest_gpumem.judging.limits import COUNTERS, absolute
from pytest_gpumem.judging.traffic import Agreement, account
from pytest_gpumem.outcomes import Exit, Outcome
from pytest_gpumem.printable import printable

if TYPE_CHECKING:
    from pytest_gpumem.nsight.profile import ProfileRequest

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _options(command: _Command) -> _Command:
    """The options of both tools."""
    for add in (
        pytest_arguments,
        click.option("--force-overwrite", "overwrite", is_flag=True, help="Replace a report that is there."),
        click.option(
            "-o",
            "--output",
            "file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="The report. Default: named after its one test, else gpumem, in the working directory.",
        ),
        test_option,
    ):
        command = add(command)
    return command


@click.group(no_args_is_help=False, short_help="Profile tests with Nsight Systems or Nsight Compute.")
def profile() -> None:
    """Profile tests with Nsight Systems or Nsight Compute.

    Runs pytest with --gpumem under the tool, with few samples as plain launches, and prints the command that it ran. Times are not
    comparable in such a run, so tests that assert them may fail in it.
    """


@profile.command(
    short_help="Record a time line by Nsight Systems.",
    epilog=examples("gpumem profile nsys --test tests/test_a.py::test_triad -o triad.nsys-rep"),
)
@click.option("--um/--no-um", "managed", default=None, help="Record page faults of managed memory. Default: if a test has such buffers.")
@_options
def nsys(managed: bool | None, tests: tuple[str, ...], file: Path | None, overwrite: bool, pytest_arguments: tuple[str, ...]) -> int:
    """Record a time line by Nsight Systems: CUDA calls, kernels, copies, page faults, and the tests' ranges.

    Records the range of the test if one is selected, else the whole run. GPUMEM_NSYS names the tool; else it is looked for on the PATH
    and where installers put it.
    """
    from pytest_gpumem.nsight.profile import ProfileRequest
    from pytest_gpumem.nsight.tools import NSYS

    return _profiled(ProfileRequest(NSYS, pytest_arguments, tests, file, overwrite, {"managed": managed}))


@profile.command(epilog=examples("gpumem profile ncu --test tests/test_a.py::test_triad --set full"))
@click.option(
    "--clock-control", type=click.Choice(["none", "base"]), default="none", help="Lock clocks to base, or leave them alone. Default: none."
)
@click.option(
    "--cache-control", type=click.Choice(["all", "none"]), default="all", help="Empty caches before every pass over a kernel. Default: all."
)
@click.option("--set", "section_set", metavar="NAME", help="Set of sections, such as full. Default: the tool's.")
@click.option("--metrics", metavar="NAMES", help="Further metrics, separated by commas.")
@_options
def ncu(tests: tuple[str, ...], file: Path | None, overwrite: bool, pytest_arguments: tuple[str, ...], **options: Any) -> int:
    """Collect counters of each measured launch by Nsight Compute.

    Only the measured launches of the selected tests are profiled. GPUMEM_NCU names the tool; else it is looked for on the PATH and where
    installers put it.
    """
    from pytest_gpumem.nsight.profile import ProfileRequest
    from pytest_gpumem.nsight.tools import NCU

    return _profiled(ProfileRequest(NCU, pytest_arguments, tests, file, overwrite, options))


@click.command(short_help="List the NVTX ranges of tests.", epilog=examples("gpumem ranges -- tests/test_a.py"))
@json_option("Write them as JSON.")
@pytest_arguments
def ranges(file: Path | None, pytest_arguments: tuple[str, ...]) -> None:
    """List each test's NVTX range, and the options of nsys and ncu that select it.

    Collects the tests that pytest would run, and runs none: no device is needed.
    """
    from pytest_gpumem.nsight.profile import listing, select, to_json

    found = select(pytest_arguments, (), os.environ, log)
    click.echo(listing(found))
    write_json(file, to_json(found))


def _profiled(request: ProfileRequest) -> int:
    from pytest_gpumem.nsight.profile import profiled
    from pytest_gpumem.nsight.tools import opening
    from pytest_gpumem.runs.child import ending, shown

    report = profiled(request, os.environ, log)
    count = len(report.tests)
    of = f"{count} tests" if count > 1 else report.tests[0].nodeid
    click.echo(printable(f"wrote {report.file}: {of}, by {report.program} {report.version}"))
    for line in opening(report.program, report.file, report.tests[0].name if count > 1 else None):
        click.echo(printable(line))
    if count > 1:
        click.echo(printable(f"the other tests' filters: {shown(['gpumem', 'ranges', '--', *request.arguments, *request.tests])}"))
    if report.exit_code < 0:
        log(f"gpumem: {report.program} was {ending(report.exit_code)}: its report may not be whole")
        return Exit.FAILED
    if report.exit_code:
        log(f"gpumem: pytest ended with exit code {report.exit_code}: tests failed, or it was stopped; its output is above")
        return Exit.FAILED
    return Exit.FINE


@click.command(
    short_help="Compare declared bytes with counted ones.",
    epilog=examples("gpumem traffic --test tests/test_a.py::test_triad", "gpumem traffic --json traffic.json -- -k 'not slow'"),
)
@test_option
@json_option("Write the counts as JSON.")
@pytest_arguments
def traffic(tests: tuple[str, ...], file: Path | None, pytest_arguments: tuple[str, ...]) -> int:
    """Compare the bytes that tests declare with those that Nsight Compute counts.

    Runs pytest with --gpumem under ncu (GPUMEM_NCU, the PATH, or where CUDA's installers put it), with few launches of each
    measurement. Times are not comparable in such a run, so tests that assert them may fail in it.
    """
    from pytest_gpumem.nsight import counting
    from pytest_gpumem.reporting.table import traffic_table

    now = datetime.now(timezone.utc)
    found = counting.count(pytest_arguments, tests, os.environ, log, day=now.date().isoformat())
    width, colour = terminal()
    click.echo(traffic_table(found.rows, found.facts, width=width, colour=colour))
    if failed := sum(row.failed for row in found.rows):
        click.echo(f"{failed} of {len(found.rows)} rows are of tests that failed in this run, whose times a profiler changes")
    write_json(file, counting.to_json(found, utc=now.isoformat(timespec="seconds")))
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


@click.command(
    "l2-sweep",
    short_help="Find a test's best set-aside and hit ratio.",
    epilog=examples("gpumem l2-sweep tests/test_table.py::test_lookup --map l2.svg"),
)
@click.option("--map", "file", metavar="FILE", help="Draw the map into this SVG file too.")
@click.argument("test", metavar="TEST")
@pytest_arguments
def l2_sweep(test: str, file: str | None, pytest_arguments: tuple[str, ...]) -> None:
    """Find the best set-aside and hit ratio for the measurements of TEST, a node id, on a persisting_stream.

    Runs pytest with --gpumem-l2-sweep, which prints the map and sets the exit code.
    """
    if test.startswith("-"):
        raise click.UsageError(f"TEST is a pytest node id such as tests/test_table.py::test_lookup, not {test!r}.")
    drawing = [] if file is None else ["--gpumem-l2-sweep-map", file]
    from pytest_gpumem.runs.child import for_a_run, pytest_command, replace_this_process

    command = pytest_command([*pytest_arguments, test], options=["--gpumem-l2-sweep", *drawing])
    replace_this_process(command, for_a_run(os.environ))
