"""The command `gpumem merge`, and the folder of results that it and `gpumem gate` write."""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.commands import examples, terminal, write
from pytest_gpumem.files import write_whole
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.outcomes import Exit, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.summary import summary
from pytest_gpumem.settings import Role, of_role

if TYPE_CHECKING:
    from pytest_gpumem.reporting.run import Run
    from pytest_gpumem.runs.shards import Merged

RESULTS, JUNIT, DUET = "results.json", "junit.xml", "duet.json"
OUTPUT_FILES = {option.name: str(option.gate_file) for option in of_role(Role.OUTPUT)}  # by the name of an output
FILES = (RESULTS, JUNIT, DUET, *OUTPUT_FILES.values())  # the files of the folder
IGNORED, MARKER = ".gitignore", "# made by gpumem gate, which replaces its own files in this folder\n*\n"
"""File in the folder, and its text: it marks a folder that a gate or a merge made, and hides its files from git."""

output_option = click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("gpumem-results"),
    help="Folder of results, report and summary. Default: gpumem-results.",
)


def prepare(output: Path) -> None:
    """Make the folder, and remove the files of an earlier gate: a run that breaks must not show another's results.
    Raises `click.UsageError`: it holds files, and no marker of a gate; nothing is touched.
    """
    marker = output / IGNORED
    try:
        if (
            output.is_dir()
            and any(output.iterdir())
            and (marker.is_symlink() or not marker.is_file() or marker.read_bytes() != MARKER.encode())
        ):
            raise click.UsageError(
                f"--output: {output} holds files that no gate wrote; accepted is an empty or a new folder, or one that a gate made."
            )
        output.mkdir(parents=True, exist_ok=True)
        write_whole(marker, MARKER)
        for name in FILES:
            (output / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--output: cannot write {output}: {error.strerror or error}") from None


def write_outputs(output: Path, run: Run) -> None:
    """Write the outputs of a run into the folder. Raises `UserError`: a file cannot be written."""
    from pytest_gpumem.reporting.outputs import OUTPUTS

    try:
        for name, file in OUTPUT_FILES.items():
            if (text := OUTPUTS[name](run)) is not None:
                write_whole(output / file, text)
    except OSError as error:
        raise UserError(f"--output: cannot write {error.filename}: {error.strerror or error}") from None


def announce(run: Run) -> None:
    """Under GitHub Actions, add a run to the job's summary, and print its annotations."""
    from pytest_gpumem.reporting.concerns import summarise, workflow_commands
    from pytest_gpumem.reporting.outputs import OUTPUTS

    if (note := summarise(str(OUTPUTS["markdown"](run)), os.environ)) is not None:
        click.echo(printable(note), err=True)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in workflow_commands(run.rows, run.places):
            click.echo(line)


def say_files(output: Path, say: Callable[[str], None]) -> None:
    """Name the files of the folder."""
    if written := [name for name in FILES if (output / name).exists()]:
        say(f"{counted(len(written), 'file')} in {output}: {' '.join(written)}")


def merged_into(output: Path, written: Sequence[str]) -> tuple[Merged, Run]:
    """Merge the results of shards, and write the folder's files of them.
    `output`: the folder; files of an earlier gate are replaced once the shards are read.
    `written`: the files, or patterns of them.
    Raises `UserError`: the shards are not those of one run; nothing is written.
    """
    from pytest_gpumem.reporting.run import Run
    from pytest_gpumem.reporting.terminal import missing_lines
    from pytest_gpumem.runs.shards import junit, merged

    found = merged(_paths(written))
    prepare(output)
    document = found.document
    write("--output", output / RESULTS, json.dumps(found.value, indent=4))
    write("--output", output / JUNIT, junit(found.tests))
    lost = missing_lines(document.missing)
    run = Run(document.rows, document.device, document.settings, found.utc, found.revision, places=found.places, remarks=lost)
    write_outputs(output, run)
    return found, run


def _paths(written: Sequence[str]) -> list[Path]:
    """The files that are named, or that a quoted pattern finds."""

    found: list[Path] = []
    for one in written:
        path = Path(os.path.expanduser(one))
        names = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        if not names:
            raise UserError(f"{one}: no such file or pattern")
        found += (name for name in names if name not in found)
    return found


@click.command(
    short_help="Merge the results of shards into one run.",
    epilog=examples("gpumem merge shard-*.json", "gpumem merge 'results/*/shard.json' --output gpumem-results"),
)
@output_option
@click.argument("results", metavar="RESULTS...", nargs=-1, required=True)
def merge(output: Path, results: tuple[str, ...]) -> int:
    """Merge RESULTS, the --benchmark-json files of all shards of a run (pytest --gpumem-shard I/N), into one.

    The rows are judged as those of one suite. Writes results, JUnit, a report, a Markdown summary and a code-quality report into a folder.
    A missing shard is an error.
    """
    found, run = merged_into(output, results)
    if run.rows:
        width, colour = terminal()
        click.echo(summary(run.rows, run.facts, width=width, colour=colour, in_session=False))
    for line in (*run.remarks, *found.remarks):
        click.echo(printable(line))
    counts = Counter(test.outcome or "not run" for test in found.tests)
    click.echo(f"{counted(len(found.tests), 'test')}: {', '.join(f'{count} {outcome}' for outcome, count in sorted(counts.items()))}")
    announce(run)
    say_files(output, lambda sentence: click.echo(printable(sentence), err=True))
    return Exit(found.code)
