"""The command `gpumem`. Each subcommand hands on to the module that does the work.

Exit codes: 0 fine, 1 regression, wrong declaration, or tests that failed under a profiler, 3 an internal error, 4 usage, 6 no verdict under
strict, nothing counted, swept or profiled; 130 after Ctrl-C, 141 where nobody reads the output any more.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from pytest_gpumem.commands.accept import accept
from pytest_gpumem.commands.compare import compare
from pytest_gpumem.commands.completion import completion
from pytest_gpumem.commands.duet import duet
from pytest_gpumem.commands.explain import explain
from pytest_gpumem.commands.gate import gate
from pytest_gpumem.commands.profile import profile, ranges
from pytest_gpumem.commands.read import read
from pytest_gpumem.commands.report import report
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.terminal import wants_colour
from pytest_gpumem.settings import without

SUMMARIES = {
    "accept": "Begin a new baseline of a test, with a reason.",
    "compare": "Compare result files, without a GPU.",
    "completion": "Print what completes this command in a shell.",
    "doctor": "Say what this machine can measure, and what is amiss.",
    "duet": "Decide between base and head in alternating processes.",
    "explain": "Say why tests got slower.",
    "gate": "Hold a pull request to its base, in a pipeline.",
    "l2-sweep": "Find a test's best set-aside and hit ratio.",
    "profile": "Profile tests with Nsight Systems or Nsight Compute.",
    "ranges": "List the NVTX ranges of tests.",
    "read": "Say what Nsight's tools recorded of each test.",
    "report": "Make an HTML report of result files.",
    "schema": "Print the JSON Schema of results.",
    "traffic": "Compare declared bytes with counted ones.",
}
"""By command, what stands beside it in the list of all; click would cut its first sentence."""

EXAMPLES = {
    "accept": ('gpumem accept tests/test_a.py::test_triad --reason "checks bounds now"',),
    "compare": (
        "gpumem compare base.json head.json --max-regression 1%",
        "gpumem compare 'base-*.json' 'head-*.json'    # several processes a side",
    ),
    "completion": ("gpumem completion bash >> ~/.bashrc", "gpumem completion fish > ~/.config/fish/completions/gpumem.fish"),
    "doctor": ("gpumem doctor", "gpumem doctor --json > machine.json"),
    "duet": (
        "gpumem duet main                              # the working tree against main",
        "gpumem duet main --test tests/test_a.py::test_triad",
        "gpumem duet v1.2 --flagged run.json -- -k 'not slow'",
    ),
    "explain": (
        "gpumem explain --base main tests/test_a.py::test_triad",
        "gpumem explain base.json head.json            # without a GPU",
    ),
    "gate": (
        "gpumem gate origin/main                       # in a pull request's pipeline",
        "gpumem gate origin/main --strict -- tests/gpu # only PASS of every row is green",
        "gpumem gate origin/main --screen-only         # without the duet",
    ),
    "l2-sweep": ("gpumem l2-sweep tests/test_table.py::test_lookup --map l2.png",),
    "profile ncu": ("gpumem profile ncu --test tests/test_a.py::test_triad --set full",),
    "profile nsys": ("gpumem profile nsys --test tests/test_a.py::test_triad -o triad.nsys-rep",),
    "ranges": ("gpumem ranges -- tests/test_a.py",),
    "read": ("gpumem read triad.nsys-rep", "gpumem read triad.ncu-rep --results out.json"),
    "report": ("gpumem report out.json",),
    "schema": ("gpumem schema > gpumem.schema.json",),
    "traffic": ("gpumem traffic --test tests/test_a.py::test_triad", "gpumem traffic --json traffic.json -- -k 'not slow'"),
}
"""By command, calls that work as they stand."""


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands below a group, with what is typed for them."""
    for name, command in group.commands.items():
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


def dress(group: click.Group) -> None:
    """Give every command its line in the list and its examples."""
    for path, command in commands(group):
        if path in SUMMARIES:
            command.short_help = SUMMARIES[path]
        if path in EXAMPLES:
            # click fills paragraphs up, but not those that begin so.
            command.epilog = "\b\nExamples:\n" + "\n".join(f"  {example}" for example in EXAMPLES[path])


WRONG = 1
INTERNAL_ERROR = 3
"""As pytest's. Python's own 1 would say that something got slower."""
USAGE = 4
NO_VERDICT = 6
INTERRUPTED = 130
NOBODY_READS = 141
"""What a shell reports for SIGPIPE."""

_COLOURS = {"OK": "green", "warning": "yellow", "failure": "red"}


class _Commands(click.Group):
    """A group whose errors are one line, with the exit codes above; click's own usage errors exit with 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        dress(self)
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A file name may hold what the terminal's encoding has no character for.
                stream.reconfigure(errors="backslashreplace")
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx is not None else "gpumem"
            said = _in_one_line(error).rstrip(".")
            click.echo(f"gpumem: {said}{'' if said.endswith('?') else '.'} Try '{path} --help'.", err=True)
            sys.exit(USAGE)
        except click.ClickException as error:
            click.echo(f"gpumem: {_in_one_line(error)}", err=True)
            sys.exit(USAGE)
        except BrokenPipeError:
            # Whoever read the output has enough of it, as in `gpumem ... | head`; Python would complain once more while it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(NOBODY_READS)
        except click.Abort:
            sys.exit(INTERRUPTED)
        except Exception as error:
            traceback.print_exc()
            click.echo(f"gpumem: internal error, no verdict: {type(error).__name__}: {' '.join(str(error).split())}", err=True)
            sys.exit(INTERNAL_ERROR)
        sys.exit(code if isinstance(code, int) else 0)


def _in_one_line(error: click.ClickException) -> str:
    return printable(" ".join(error.format_message().split()))


@click.group(cls=_Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pytest-gpumem", prog_name="gpumem", message="%(prog)s %(version)s")
def main() -> None:
    """CUDA memory performance: what this machine can measure, and what was measured."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can measure, and what is missing for the rest.

    Exits with 0 also where only the simulated device can be used; the report says so.
    """
    from pytest_gpumem import doctor as examination

    report = examination.examine()
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
        return
    colour = wants_colour(sys.stdout, os.environ)
    for line in examination.text(report):
        status, gap, rest = line.partition(" ")
        click.echo(click.style(status, fg=_COLOURS[status]) + gap + rest if colour and status in _COLOURS else line)


@main.command()
def schema() -> None:
    """Print the JSON Schema of results: of the value of the key "gpumem" in a --benchmark-json file."""
    from pytest_gpumem.records.json_schema import json_schema

    click.echo(json.dumps(json_schema(), indent=1))


@main.command()
@click.option("--test", "tests", multiple=True, metavar="NODEID", help="Count this test only; may be given several times.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write what was counted; --gpumem-counted reads it.")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- PYTEST_ARGUMENTS")
def traffic(tests: tuple[str, ...], file: Path | None, pytest_arguments: tuple[str, ...]) -> int:
    """Compare the bytes that tests declare with those that Nsight Compute counts.

    Runs pytest with --gpumem under ncu (GPUMEM_NCU, the PATH, or where CUDA's installers put it), with few launches of each
    measurement. Times are not comparable in such a run, so tests that assert them may fail in it.

    Exits with 1 where a declaration is wrong: above what was counted where no cache can account for it. With 6 where nothing could
    be counted.
    """
    from pytest_gpumem.files import unwritable, write_whole
    from pytest_gpumem.judging.traffic import Finding, account
    from pytest_gpumem.nsight import counting
    from pytest_gpumem.nsight.tools import ToolMissing
    from pytest_gpumem.reporting.traffic import table

    if file is not None and (why := unwritable(file)) is not None:
        raise click.UsageError(f"--json: {file}: {why}.")
    now = datetime.now(timezone.utc)
    try:
        # Results go to standard output, what pytest prints to standard error.
        found = counting.count(pytest_arguments, tests, os.environ, lambda line: click.echo(line, err=True), day=now.date().isoformat())
    except counting.BadCall as error:
        raise click.UsageError(str(error)) from None
    except (ToolMissing, counting.NothingCounted) as error:
        click.echo(printable(f"gpumem: {error}"), err=True)
        return NO_VERDICT
    width = shutil.get_terminal_size((120, 24)).columns
    click.echo(table(found.rows, found.facts, width=width, colour=wants_colour(sys.stdout, os.environ)))
    if failed := sum(row.failed for row in found.rows):
        click.echo(f"{failed} of {len(found.rows)} rows are of tests that failed in this run, whose times a profiler changes")
    if file is not None:
        try:
            write_whole(file, json.dumps(counting.to_json(found, utc=now.isoformat(timespec="seconds")), indent=1) + "\n")
        except OSError as error:
            raise click.ClickException(f"--json: cannot write {file}: {error.strerror or error}") from None
        click.echo(printable(f"wrote {file}"))
    said = [account(row.measurement, found.facts) for row in found.rows if row.measurement is not None]
    return WRONG if any(one is not None and one.finding is Finding.WRONG for one in said) else 0


@main.command("l2-sweep")
@click.option("--map", "file", metavar="FILE", help="Draw the map into this PNG or SVG too; needs matplotlib.")
@click.argument("test", metavar="TEST")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST_ARGUMENTS]")
def l2_sweep(test: str, file: str | None, pytest_arguments: tuple[str, ...]) -> None:
    """Find the set-aside and hit ratio that suit what TEST, a node id, measures on a persisting_stream.

    Hands on to pytest with --gpumem-l2-sweep, which prints the map, and whose exit code this ends with; 6 where nothing was swept.
    """
    if test.startswith("-"):
        raise click.UsageError(f"TEST is a pytest node id such as tests/test_table.py::test_lookup, not {test!r}.")
    drawing = [] if file is None else ["--gpumem-l2-sweep-map", file]
    sys.stdout.flush()
    # The process becomes pytest, so that Ctrl-C and the exit code are pytest's own.
    command = [sys.executable, "-m", "pytest", "--gpumem", "--gpumem-l2-sweep", *drawing, *pytest_arguments, test]
    os.execve(sys.executable, command, without(os.environ, "save"))


main.add_command(accept)
main.add_command(compare)
main.add_command(completion)
main.add_command(duet)
main.add_command(explain)
main.add_command(gate)
main.add_command(profile)
main.add_command(ranges)
main.add_command(read)
main.add_command(report)
