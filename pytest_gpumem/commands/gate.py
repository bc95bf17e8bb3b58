"""The command `gpumem gate`: what a pipeline runs for a pull request. A screen of everything, then a duet of what the screen flags."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.commands import examples, margin, pytest_arguments, rounds_option, say
from pytest_gpumem.commands.baseline import FOLDER
from pytest_gpumem.commands.duet import compare
from pytest_gpumem.commands.merge import (
    DUET,
    JUNIT,
    OUTPUT_FILES,
    RESULTS,
    announce,
    merged_into,
    output_option,
    prepare,
    say_files,
    write_outputs,
)
from pytest_gpumem.commands.report import earlier
from pytest_gpumem.outcomes import Exit, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import Document
from pytest_gpumem.result_files import FileError, load, load_results
from pytest_gpumem.revisions import DIRTY, RevisionError, ancestry, head
from pytest_gpumem.settings import DUET_FOLLOWS, Role, of_role

if TYPE_CHECKING:
    from pytest_gpumem.reporting.concerns import Place
    from pytest_gpumem.runs.decision import Decision
    from pytest_gpumem.runs.reading import DuetVerdict


@click.command(
    short_help="Check a pull request against its base, in a pipeline.",
    epilog=examples(
        "gpumem gate origin/main                       # in a pull request's pipeline",
        "gpumem gate origin/main --strict -- tests/gpu # only PASS of every row is green",
        "gpumem gate origin/main --screen-only         # without the duet",
        "gpumem gate origin/main --shards 'shards/*'   # what several runners measured",
    ),
)
@output_option
@click.option(
    "--shards",
    metavar="RESULTS",
    multiple=True,
    help="Results of all shards of the screen, as gpumem merge takes them, in place of measuring here; may be repeated.",
)
@click.option(
    "--max-regression", metavar="MARGIN", callback=margin, help='Allowed slow-down, such as "1%". Default: the limit of each test.'
)
@click.option("--screen-only", is_flag=True, help="Without the duet: a FAIL stands, and an UNDECIDED row is a warning.")
@rounds_option
@click.option("--strict", is_flag=True, help="Exit with 6 unless every row is a PASS, and of a real GPU; duets of all rows in doubt.")
@click.option(
    "--allow-lost", metavar="TEST", multiple=True, help="Measurements that this run may lose, as TEST or TEST[label]; may be repeated."
)
@click.argument("base", metavar="BASE")
@pytest_arguments
def gate(
    output: Path,
    shards: tuple[str, ...],
    max_regression: str | None,
    screen_only: bool,
    rounds_max: int,
    strict: bool,
    allow_lost: tuple[str, ...],
    base: str,
    pytest_arguments: tuple[str, ...],
) -> int:
    """Compare a change with BASE, a git revision: for pipelines of pull requests.

    Runs pytest with --gpumem against the accepted processes of BASE's history. A duet of BASE and the working tree then decides the rows
    that look slower, are undecided or have no baseline; rows that run the same machine code and may be only noisy need none. Writes
    results, a report, a Markdown summary and a code-quality report into a folder, and under GitHub Actions the job's summary and
    annotations.
    """
    from pytest_gpumem.runs.decision import decide, flagged, open_to_a_duet, unaltered, with_missing
    from pytest_gpumem.runs.workers import accepted

    _check_arguments(pytest_arguments, output)
    try:
        ancestry(base, (), Path.cwd())
    except RevisionError as error:
        raise click.UsageError(f"BASE: {error}.") from None
    steps = 1 if screen_only else 2
    if shards:
        for flag, value in (("--max-regression", max_regression), ("--allow-lost", allow_lost)):
            if value:
                raise click.UsageError(f"{flag}: the shards are judged already; give --gpumem-{flag.removeprefix('--')} to each of them.")
        screened = _of_shards(output, base, shards)
        max_regression = screened.document.settings.get("max_regression") if screened.document is not None else None
    # A limit of a test wins over this one, in the screen and in the duet.
    measuring = (*pytest_arguments, *([f"--gpumem-max-regression={max_regression}"] if max_regression is not None else []))
    if not shards:
        prepare(output)
        first = f"gpumem gate: step 1 of {steps}: measure the tests, and compare them with the history shared with {printable(base)}"
        click.echo(first, err=True)
        arguments = (*measuring, *(f"--gpumem-allow-lost={name}" for name in allow_lost))
        screened = _screen(output, base, arguments, duet_follows=not screen_only)
    document, duet = screened.document, None
    rows = document.rows if document is not None else ()
    facts, settings = (document.device, document.settings) if document is not None else (None, {})
    strict_screen = bool(settings.get("strict"))
    found = flagged(rows) if screened.code in (Exit.FINE, Exit.FAILED) and not screen_only else []
    if not strict and not strict_screen:
        found = [row for row in found if not unaltered(row)]
    if found and facts is not None:
        wanted = [row for row in open_to_a_duet(rows, facts, strict=strict_screen) if row in found]
        click.echo(f"gpumem gate: step 2 of 2: the screen flags {_flags(len(found), len(wanted))}", err=True)
        if wanted:
            duet = _duet(output, base, wanted, rounds_max, accepted(measuring))
    decision = decide(screened.code, screened.failures, rows, facts, duet, strict=strict, strict_screen=strict_screen)
    decision = with_missing(decision, document.missing if document is not None else ())
    if document is not None:
        _tell(output, document, decision)
    say_files(output, partial(_say, err=True))
    for remark in decision.remarks:
        _say(remark)
    return decision.code


def _say(sentence: str, *, err: bool = False) -> None:
    say(f"gpumem gate: {sentence}", err=err)


def _flags(found: int, wanted: int) -> str:
    """How many rows are flagged, and how many of them the duet decides."""
    rows, them = ("1 row", "it") if found == 1 else (f"{found} rows", "them")
    if not wanted:
        return f"{rows}; a duet would change nothing for {them}"
    return (
        f"{rows}; the duet decides {them}"
        if wanted == found
        else f"{rows}; the duet decides {wanted} of them, the others fail whatever its verdict"
    )


def _check_arguments(arguments: Sequence[str], output: Path) -> None:
    """Refuse options that a gate sets itself. Raises `click.UsageError`: names the option and why."""
    why = f"the gate writes into {output}; see --output"
    refused = dict.fromkeys(("--benchmark-json", "--junitxml", "--junit-xml", *(option.flag for option in of_role(Role.OUTPUT))), why)
    refused |= {option.flag: "a gate saves nothing into a baseline" for option in of_role(Role.SAVING)}
    for argument in arguments:
        if (name := argument.partition("=")[0]) in refused:
            raise click.UsageError(f"{name} among pytest's arguments: {refused[name]}.")


@dataclass(frozen=True)
class Screened:
    """The results of the screen."""

    code: int  # pytest's exit code
    failures: int  # failures and errors that it counted
    document: Document | None  # its results; None if it wrote none


def _screen(output: Path, base: str, arguments: Sequence[str], *, duet_follows: bool) -> Screened:
    from pytest_gpumem.runs.child import for_a_run, pytest_command, run_here

    # One word each: pytest looks for its root folder among all words that are paths. The user's own words come after the defaults
    # that they may change, and before what the gate relies on.
    own = [f"--junitxml={output / JUNIT}", *(f"{option.flag}={output / OUTPUT_FILES[option.name]}" for option in of_role(Role.OUTPUT))]
    # Tests after the first failure are judged too: the duet may clear that failure.
    own += ["--maxfail=0"]
    command = pytest_command([*arguments, *own], options=["--no-header", f"--gpumem-baseline-of={base}"], results=output / RESULTS)
    code = run_here(command, for_a_run(os.environ, announces=False) | ({DUET_FOLLOWS: "1"} if duet_follows else {}))
    try:
        if not (output / RESULTS).exists() or not (output / JUNIT).exists():
            return Screened(code, 0, None)
        document = load(output / RESULTS)
        suites = ElementTree.parse(output / JUNIT).getroot().iter("testsuite")
        failures = sum(int(suite.get(kind, "0")) for suite in suites for kind in ("failures", "errors"))
    except (FileError, OSError, ValueError, ElementTree.ParseError) as error:
        raise UserError(f"the screen's results in {output} cannot be read: {error}") from None
    return Screened(code, failures, document)


def _of_shards(output: Path, base: str, shards: Sequence[str]) -> Screened:
    """The results of shards as those of a screen.
    Raises `UserError`: they are not all shards of one run, of other code than is checked out, or were compared with all runs.
    """
    found, _ = merged_into(output, shards)
    compared, revision = found.document.settings.get("baseline_of"), head(Path.cwd())
    if compared != base:
        what = "all runs" if compared is None else f"the history of {compared}"
        raise UserError(f"--shards: compared with {what}; measure them with --gpumem-baseline-of={base}")
    if revision is not None and (found.revision or "").removesuffix(DIRTY) != revision.removesuffix(DIRTY):
        raise UserError(f"--shards: of the code of {found.revision or 'no revision'}, and {revision} is checked out")
    for remark in found.remarks:
        _say(remark)
    return Screened(found.code, found.failures, found.document)


def _duet(output: Path, base: str, rows: Sequence[Row], rounds_max: int, arguments: Sequence[str]) -> dict[str, DuetVerdict]:
    """The duet's verdicts of these rows; empty if it judged none."""
    from pytest_gpumem.runs.reading import Wanted

    _, played = compare(
        base,
        Wanted.of(rows),
        arguments,
        rounds_max=rounds_max,
        file=output / DUET,
        evidence=True,
        again="the same command measures its screen again, and goes on from there if that flags the same rows",
    )
    return {one.key: one for one in played.verdicts}


def _tell(output: Path, document: Document, decision: Decision) -> None:
    """Write the outputs anew, with the duet's verdicts; under GitHub Actions the job's summary and annotations too."""
    from pytest_gpumem.baselines.storage import storage
    from pytest_gpumem.reporting.run import Run

    shown = load_results(output / RESULTS)
    run = Run(decision.rows, document.device, document.settings, shown.utc, shown.revision, sweeps=shown.sweeps, remarks=decision.remarks)
    run = replace(run, places=_places(output, document))
    # The screen has brought the copy of a URL up to date.
    history = storage(str(document.settings.get("baseline") or FOLDER), offline=True)
    with suppress(UserError):  # there is no history yet
        before = earlier(history.folder, document.device.key, document.rows, output / RESULTS)
        run = replace(run, past=before.past, footprints=before.footprints)
    write_outputs(output, run)
    announce(run)


def _places(output: Path, document: Document) -> dict[str, Place]:
    """The places of tests in the screen's own code-quality report."""
    from pytest_gpumem.reporting.concerns import Place, fingerprint

    try:
        findings: list[dict[str, Any]] = json.loads((output / OUTPUT_FILES["code_quality"]).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    by_fingerprint = {one["fingerprint"]: one["location"] for one in findings}
    found = {}
    for row in document.rows:
        if (location := by_fingerprint.get(fingerprint(row))) is not None:
            found[row.nodeid] = Place(location["path"], location["lines"]["begin"])
    return found
