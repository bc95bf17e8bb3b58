"""The commands `gpumem profile nsys` and `gpumem profile ncu`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_gpumem.commands import examples, log, pytest_arguments, test_option
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.printable import printable

if TYPE_CHECKING:
    from pytest_gpumem.nsight.profile import ProfileRequest

_Command = TypeVar("_Command", bound=Callable[..., Any])
MOST = 20  # names of ranges that are printed


def _words(_context: click.Context, option: click.Parameter, written: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(written))
    except ValueError as error:
        raise click.UsageError(f"{option.opts[0]}: {written!r}: {error}.") from None


def _options(command: _Command) -> _Command:
    """The options of both tools."""
    for add in (
        pytest_arguments,
        click.option(
            "--tool-options",
            "options",
            default="",
            metavar="WORDS",
            callback=_words,
            help='Further options of the tool, such as "--set full"; they replace those that this command gives it.',
        ),
        click.option(
            "-o",
            "--output",
            "report",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="The report. Default: a new one in the working directory, named after its one test, else gpumem.",
        ),
        test_option,
    ):
        command = add(command)
    return command


@click.group(
    no_args_is_help=False, short_help="Profile tests with Nsight Systems or Nsight Compute."
)
def profile() -> None:
    """Profile tests with Nsight Systems or Nsight Compute.

    Runs pytest with --gpumem under the tool, with few samples as plain launches, and prints the command that it ran. Times are not
    comparable in such a run, so tests that assert them may fail in it.
    """


@profile.command(
    short_help="Record a time line by Nsight Systems.",
    epilog=examples("gpumem profile nsys --test tests/test_a.py::test_triad -o triad.nsys-rep"),
)
@_options
def nsys(
    tests: tuple[str, ...],
    report: Path | None,
    options: tuple[str, ...],
    pytest_arguments: tuple[str, ...],
) -> int:
    """Record a time line by Nsight Systems: CUDA calls, kernels, copies, and the tests' ranges; page faults where a test has managed
    buffers.

    Records the range of the test if one is selected, else the whole run. GPUMEM_NSYS names the tool; else it is looked for on the PATH
    and where installers put it.
    """
    from pytest_gpumem.nsight.profile import ProfileRequest
    from pytest_gpumem.nsight.tools import NSYS

    return _profiled(ProfileRequest(NSYS, pytest_arguments, tests, report, options))


@profile.command(
    short_help="Collect counters by Nsight Compute.",
    epilog=examples(
        'gpumem profile ncu --test tests/test_a.py::test_triad --tool-options "--set full"'
    ),
)
@_options
def ncu(
    tests: tuple[str, ...],
    report: Path | None,
    options: tuple[str, ...],
    pytest_arguments: tuple[str, ...],
) -> int:
    """Collect counters of each measured launch by Nsight Compute.

    Only the measured launches of the selected tests are profiled; clocks are left alone, and the caches are emptied before each. GPUMEM_NCU
    names the tool; else it is looked for on the PATH and where installers put it.
    """
    from pytest_gpumem.nsight.profile import ProfileRequest
    from pytest_gpumem.nsight.tools import NCU

    return _profiled(ProfileRequest(NCU, pytest_arguments, tests, report, options))


def _profiled(request: ProfileRequest) -> int:
    from pytest_gpumem.nsight.profile import profiled
    from pytest_gpumem.nsight.tools import opening
    from pytest_gpumem.runs.child import ending

    report = profiled(request, os.environ, log)
    count = len(report.tests)
    of = f"{count} tests" if count > 1 else report.tests[0].nodeid
    click.echo(printable(f"wrote {report.file}: {of}, by {report.program} {report.version}"))
    for line in opening(report.program, report.file, report.tests[0].name if count > 1 else None):
        click.echo(printable(line))
    if count > 1:
        more = (
            f" and {count - MOST} more: the results have them as range_name" if count > MOST else ""
        )
        click.echo(
            f"ranges of the tests: {', '.join(one.name for one in report.tests[:MOST])}{more}"
        )
    if report.exit_code < 0:
        log(f"gpumem: {report.program} was {ending(report.exit_code)}: its report may not be whole")
        return Exit.FAILED
    if report.exit_code:
        log(
            f"gpumem: pytest ended with exit code {report.exit_code}: tests failed, or it was stopped; its output is above"
        )
        return Exit.FAILED
    return Exit.FINE
