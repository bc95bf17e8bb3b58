"""The commands `gpumem profile` and `gpumem explain`, by Nsight Systems and Nsight Compute."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.commands import Command, examples, log, pytest_arguments, test_option
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.printable import printable

if TYPE_CHECKING:
    from pytest_gpumem.nsight.tools import Tool


def _words(_context: click.Context, option: click.Parameter, written: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(written))
    except ValueError as error:
        raise click.UsageError(f"{option.opts[0]}: {written!r}: {error}.") from None


def _options(command: Command) -> Command:
    for add in (
        pytest_arguments,
        click.option(
            "--tool-options",
            "options",
            default="",
            metavar="WORDS",
            callback=_words,
            help='Further options of the tool, such as "--set full"; they replace those that this '
            "command gives it.",
        ),
        click.option(
            "-o",
            "--output",
            "file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="The report. Default: a new one in the working directory, named after its one "
            "test, else gpumem.",
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

    Runs pytest with --gpumem under the tool, with few samples as plain launches, and prints the
    command that it ran, the figures, and how to open the report. Times are not comparable in such a
    run, so tests that assert them may fail in it.
    """


@profile.command(
    short_help="Record a time line by Nsight Systems.",
    epilog=examples("gpumem profile nsys --test tests/test_a.py::test_triad -o triad.nsys-rep"),
)
@_options
def nsys(**call: Any) -> int:
    """Record a time line by Nsight Systems: CUDA calls, kernels, copies, and the tests' ranges;
    page faults where a test has managed buffers.

    Records the range of the test if one is selected, else the whole run, and prints `nsys stats` of
    it. GPUMEM_NSYS names the tool; else it is looked for on the PATH and where installers put it.
    """
    from pytest_gpumem.nsight.tools import NSYS

    return _profile(NSYS, **call)


@profile.command(
    epilog=examples(
        'gpumem profile ncu --test tests/test_a.py::test_triad --tool-options "--set full"'
    ),
)
@_options
def ncu(**call: Any) -> int:
    """Collect counters of each measured launch by Nsight Compute.

    Only the measured launches of the selected tests are profiled; clocks are left alone, and the
    caches are emptied before each. Prints bytes of DRAM, the L2 hit rate, sectors by request and
    more of each kernel. GPUMEM_NCU names the tool; else it is looked for on the PATH and where
    installers put it.
    """
    from pytest_gpumem.nsight.tools import NCU

    return _profile(NCU, **call)


def _profile(
    tool: Tool,
    tests: tuple[str, ...],
    file: Path | None,
    options: tuple[str, ...],
    pytest_arguments: tuple[str, ...],
) -> int:
    from pytest_gpumem.nsight.profile import figures, write_report
    from pytest_gpumem.nsight.tools import opening
    from pytest_gpumem.runs.processes import ending

    report = write_report(tool, pytest_arguments, tests, file, options, os.environ, log)
    for line in figures(report, os.environ):
        click.echo(printable(line))
    count = len(report.tests)
    tests_text = f"{count} tests" if count > 1 else report.tests[0].nodeid
    click.echo(printable(f"wrote {report.file}: {tests_text}, by {report.program}"))
    for line in opening(report.program, report.file):
        click.echo(printable(line))
    if report.exit_code < 0:
        how = ending(report.exit_code)
        log(f"gpumem: {report.program} was {how}: its report may not be whole")
    elif report.exit_code:
        log(
            f"gpumem: pytest ended with exit code {report.exit_code}: tests failed, or it was "
            "stopped; its output is above"
        )
    return Exit.FAILED if report.exit_code else Exit.FINE


@click.command(
    short_help="List the counters of a test that differ from BASE.",
    epilog=examples("gpumem explain --base main tests/test_a.py::test_triad"),
)
@click.option("--base", metavar="REV", required=True, help="The git revision to compare with.")
@click.argument("test", metavar="TEST")
@pytest_arguments
def explain(base: str, test: str, pytest_arguments: tuple[str, ...]) -> int:
    """List what differs in TEST between the revision BASE and the working tree.

    Both sides run once under Nsight Compute, and once more without it. Lists the counters that
    differ by more than 5 %, with both values, and what ran differently. Where this user may not
    read counters, Nsight Systems times the kernels instead.
    """
    from pytest_gpumem.nsight.explain import explain as explained

    explanation = explained(base, test, pytest_arguments, os.environ, log)
    for note in explanation.notes:
        log(f"gpumem: {note}")
    _show(f"differ by more than 5 % by {explanation.tool}", explanation.counters)
    _show("ran differently", explanation.ran)
    return Exit.FAILED if explanation.failed else Exit.FINE


def _show(title: str, lines: dict[str, list[str]]) -> None:
    click.echo(f"{title}:" if lines else f"{title}: nothing")
    for place, differences in lines.items():
        click.echo(printable(f"  {place}"))
        for difference in differences:
            click.echo(printable(f"    {difference}"))
