"""The commands `gpumem profile nsys`, `gpumem profile ncu` and `gpumem ranges`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_gpumem.commands import examples, pytest_arguments
from pytest_gpumem.outcomes import Exit
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
        click.option("--test", "tests", multiple=True, metavar="NODEID", help="Profile this test only; may be given several times."),
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
    short_help="A time line by Nsight Systems.", epilog=examples("gpumem profile nsys --test tests/test_a.py::test_triad -o triad.nsys-rep")
)
@click.option("--um/--no-um", "managed", default=None, help="Record page faults of managed memory. Default: if a test has such buffers.")
@_options
def nsys(managed: bool | None, tests: tuple[str, ...], file: Path | None, overwrite: bool, pytest_arguments: tuple[str, ...]) -> int:
    """A time line by Nsight Systems: CUDA calls, kernels, copies, page faults, and our ranges.

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
    """Counters of each measured launch by Nsight Compute.

    Only the measured launches of the selected tests are profiled. GPUMEM_NCU names the tool; else it is looked for on the PATH and where
    installers put it.
    """
    from pytest_gpumem.nsight.profile import ProfileRequest
    from pytest_gpumem.nsight.tools import NCU

    return _profiled(ProfileRequest(NCU, pytest_arguments, tests, file, overwrite, options))


@click.command(short_help="List the NVTX ranges of tests.", epilog=examples("gpumem ranges -- tests/test_a.py"))
@click.option("--json", "as_json", is_flag=True, help="Write them as JSON.")
@pytest_arguments
def ranges(as_json: bool, pytest_arguments: tuple[str, ...]) -> None:
    """List each test's NVTX range, and the options of nsys and ncu that select it.

    Collects the tests that pytest would run, and runs none: no device is needed.
    """
    from pytest_gpumem.nsight.profile import CallError, listing, select, to_json

    try:
        found = select(pytest_arguments, (), os.environ, _echo)
    except CallError as error:
        raise click.UsageError(f"{error}.") from None
    click.echo(json.dumps(to_json(found), indent=1) if as_json else listing(found))


def _echo(line: str) -> None:
    # Results go to standard output, the output of pytest and the tool to standard error.
    click.echo(printable(line), err=True)


def _profiled(request: ProfileRequest) -> int:
    from pytest_gpumem.nsight.profile import CallError, profiled
    from pytest_gpumem.nsight.tools import NothingRecorded, opening
    from pytest_gpumem.runs.child import ending

    try:
        report = profiled(request, os.environ, _echo)
    except CallError as error:
        raise click.UsageError(f"{error}.") from None
    except NothingRecorded as error:
        click.echo(printable(f"gpumem: {error}"), err=True)
        return Exit.NO_VERDICT
    count = len(report.tests)
    of = f"{count} tests" if count > 1 else report.tests[0].nodeid
    click.echo(printable(f"wrote {report.file}: {of}, by {report.program} {report.version}"))
    for line in opening(report.program, report.file, report.tests[0].name if count > 1 else None):
        click.echo(printable(line))
    if count > 1:
        click.echo(printable(f"the other tests' filters: {_ranges_call(request)}"))
    if report.exit_code < 0:
        click.echo(f"gpumem: {report.program} was {ending(report.exit_code)}: its report may not be whole", err=True)
        return Exit.FAILED
    if report.exit_code:
        click.echo(
            f"gpumem: pytest ended with exit code {report.exit_code}: tests failed, or it was stopped; its output is above", err=True
        )
        return Exit.FAILED
    return Exit.FINE


def _ranges_call(request: ProfileRequest) -> str:
    from pytest_gpumem.runs.child import shown

    return shown(["gpumem", "ranges", "--", *request.arguments, *request.tests])
