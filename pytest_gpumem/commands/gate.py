"""The command `gpumem gate`: what a pipeline runs for a pull request. A screen of everything, then a duet of what the screen flags."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from msgspec import structs

from pytest_gpumem.baselines.accepted import FOLDER as ACCEPTED
from pytest_gpumem.baselines.accepted import Acceptance, Acceptances, acceptances
from pytest_gpumem.commands import examples, margin, pytest_arguments, rounds_option, say, terminal
from pytest_gpumem.commands.duet import compare, ended_by_signals
from pytest_gpumem.files import write_whole
from pytest_gpumem.judging.expectations import LooserLimit, Selection, edited, loosened
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.options import OptionRole, of_role
from pytest_gpumem.outcomes import Exit, Outcome, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import SIMULATED, DeviceFacts
from pytest_gpumem.records.difference import Difference
from pytest_gpumem.records.row import DID_NOT_RUN, ENOUGH, Omission, Row
from pytest_gpumem.records.schema import Document, from_plain, to_plain
from pytest_gpumem.result_files import FileError, load, load_results
from pytest_gpumem.revisions import RevisionError, ancestry, files_at
from pytest_gpumem.settings import ACCEPTS, BASE_SELECTION, BASELINE_OF, SELECTION

if TYPE_CHECKING:
    from pytest_gpumem.baselines.history import Baseline
    from pytest_gpumem.baselines.storage import Storage
    from pytest_gpumem.reporting.run import Place
    from pytest_gpumem.runs.base import Base
    from pytest_gpumem.runs.decision import Decision, OfBase
    from pytest_gpumem.runs.processes import ProcessRecord
    from pytest_gpumem.runs.reading import DuetVerdict

FOLDER = Path("gpumem-results")  # default of --output
RESULTS, JUNIT, DUET = "results.json", "junit.xml", "duet.json"
REPORT, SUMMARY = "report.html", "summary.md"
FILES = (RESULTS, JUNIT, DUET, REPORT, SUMMARY)  # the files of the folder
IGNORED, MARKER = (
    ".gitignore",
    "# made by gpumem gate, which replaces its own files in this folder\n*\n",
)
"""File in the folder, and its text: it marks a folder that a gate made, and hides its files from git."""


@click.command(
    short_help="Check a pull request against its base, in a pipeline.",
    epilog=examples(
        "gpumem gate origin/main                       # in a pull request's pipeline",
        "gpumem gate origin/main --strict -- tests/gpu # only PASS of every limit is green",
        "gpumem gate origin/main --screen-only         # without the duet",
    ),
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=FOLDER,
    help=f"Folder of results, report and summary. Default: {FOLDER}.",
)
@click.option(
    "--max-regression",
    metavar="MARGIN",
    callback=margin,
    help='Allowed slow-down of tests without a limit of their own, such as "1%".',
)
@click.option(
    "--screen-only",
    is_flag=True,
    help="Without the duet: a FAIL stands, and a row in doubt is no verdict.",
)
@rounds_option
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 6 unless each row with a limit is a PASS, of a real GPU; duets of all rows in doubt.",
)
@click.option(
    "--accept-from-change",
    is_flag=True,
    help="Count the changes that the change itself accepts, by files that it adds to .gpumem/accepted, up to their sizes.",
)
@click.argument("base", metavar="BASE")
@pytest_arguments
def gate(
    output: Path,
    max_regression: str | None,
    screen_only: bool,
    rounds_max: int,
    strict: bool,
    accept_from_change: bool,
    base: str,
    pytest_arguments: tuple[str, ...],
) -> int:
    """Compare a change with BASE, a git revision: for pipelines of pull requests.

    Collects the tests of the merge base of BASE and HEAD: what these tests measure must be judged, by limits that are not looser. Runs
    pytest with --gpumem against the saved processes of BASE's history. One process of the merge base gives the exact figures of rows
    whose bytes or counts grew or have no baseline; a duet of the merge base and the working tree decides the rows that look
    slower, are undecided or have no baseline. What differs in the worst five failures is known from the baseline or the duet, else
    from further processes in 60 s at most. Writes results, a report and a Markdown summary into a folder, and
    under GitHub Actions the job's summary and annotations.
    """
    from pytest_gpumem.reporting.columns import fitted
    from pytest_gpumem.reporting.concerns import ending
    from pytest_gpumem.reporting.summary import counts_text
    from pytest_gpumem.runs.decision import if_meant, loosened_lines, without_effect
    from pytest_gpumem.runs.report import rounded_duration

    _check_arguments(pytest_arguments, output)
    begun = time.monotonic()
    try:
        merge_base = ancestry(base, (), Path.cwd()).merge_base
    except RevisionError as error:
        raise click.UsageError(f"BASE: {error}.") from None
    accepted = _accepted(merge_base)
    added = Acceptances(accepted if accept_from_change else ())
    # A limit of a test wins over this one, in the screen and in the duet.
    measuring = (
        *pytest_arguments,
        *([f"--gpumem-max-regression={max_regression}"] if max_regression is not None else []),
    )
    _prepare(output)
    with ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        steps = 2 if screen_only else 3
        _say(f"step 1 of {steps}: collect the tests of the merge base with {base}", err=True)
        of_base = _base(base, merge_base, measuring, stack)
        selecting = stack.enter_context(of_base.selecting()) if of_base is not None else _nothing()
        _say(
            f"step 2 of {steps}: measure the tests, and compare them with the history shared with {base}",
            err=True,
        )
        screened = _screen(output, base, measuring, selecting=selecting, accepts=accept_from_change)
        # The change's own mistake comes first.
        selection = Selection({}) if screened.code == Exit.USAGE else selecting.result()
        changes = (
            list(loosened(screened.selection, selection)) if screened.selection is not None else []
        )
        gated = GateRun(
            output,
            base,
            of_base,
            selection,
            measuring,
            rounds_max,
            added,
            changes,
            screen_only=screen_only,
            strict=strict,
        )
        decision = gated.decision(screened)
    of_files = [
        f"{ACCEPTED / one.file_name} does not count: the gate has no --accept-from-change"
        for one in accepted
        if one not in added.files
    ]
    of_files += [
        f"{ACCEPTED / one.file_name} accepts what does not fail here; the next saved run begins a new baseline all the same"
        for one in without_effect(decision, changes, added)
    ]
    lines = (*of_files, *loosened_lines(changes, added), *decision.remarks)
    decision = replace(decision, remarks=lines)
    meant = if_meant(decision)
    if screened.document is not None:
        _tell(
            output,
            base,
            screened.document,
            replace(decision, remarks=(*lines, *meant)),
            screened.places,
        )
    else:
        _write(output / SUMMARY, "".join(f"{line}\n" for line in printable(list(lines))))
    if written := [name for name in FILES if (output / name).exists()]:
        _say(f"{counted(len(written), 'file')} in {output}: {' '.join(written)}", err=True)
    for remark in decision.remarks:
        _say(remark)
    if decision.code == Exit.FAILED and screened.document is not None:
        errors = {one.nodeid: one.message for one in screened.failures if not one.unrun}
        counts = f"{counts_text(decision.rows)}; {rounded_duration(time.monotonic() - begun)} on {screened.document.device.name_and_driver}"
        last = [
            *ending(decision.rows, gated.again, errors),
            *meant,
            counts,
            f"report: {output / REPORT}",
        ]
        for part in (part for line in printable(last) for part in fitted(line, terminal()[0])):
            click.echo(part)
    return decision.code


def _accepted(merge_base: str) -> list[Acceptance]:
    """The accepted changes of the files that the change adds: they are here, and the merge base does not have them.
    Raises `UserError`: a file cannot be used, or two accept the same.
    """
    here = Path.cwd()
    if not (found := acceptances(here)):
        return []
    merged = files_at(merge_base, ACCEPTED, here)
    added, seen = (
        [one for one in found if one.file_name not in merged],
        dict[tuple[object, ...], str](),
    )
    for one in added:
        for change in one.changes:
            same = seen.setdefault((change.row, change.scope, change.limit), one.file_name)
            if same != one.file_name:
                raise UserError(
                    f"{ACCEPTED / one.file_name} and {ACCEPTED / same} both accept the {change.scope.value} of {change.row}; remove one"
                )
    return added


def _base(base: str, commit: str, arguments: Sequence[str], stack: ExitStack) -> Base | None:
    """The commit that BASE and the change have in common, ready to run; None if it has no folder such as this one."""
    from pytest_gpumem.runs.base import Base
    from pytest_gpumem.runs.worktree import NoFolder, commit_side, working_tree

    here = Path.cwd()
    try:
        side = stack.enter_context(commit_side(commit, here, f"merge base with {printable(base)}"))
    except NoFolder:
        return None
    return Base(side, working_tree(here), tuple(arguments), os.environ)


def _nothing() -> Future[Selection]:
    """The selection of a base that has no tests."""
    found = Future[Selection]()
    found.set_result(Selection({}))
    return found


@dataclass(frozen=True)
class GateRun:
    """A gate after its screen."""

    output: Path
    base: str  # as written
    of_base: Base | None
    selection: Selection  # the tests that base selects
    arguments: tuple[str, ...]  # pytest's, as the tests are measured
    rounds_max: int
    added: Acceptances  # what the change accepts, of what counts
    changes: Sequence[LooserLimit]  # the limits that it loosens
    _: KW_ONLY
    screen_only: bool
    strict: bool

    def decision(self, screened: ScreenResult) -> Decision:
        """Its end: by the screen, the exact figures of base, and a duet of what the screen flags."""
        from pytest_gpumem.runs.decision import (
            OfBase,
            accepted_in_words,
            by_base,
            decide,
            flagged,
            open_to_a_duet,
            with_accepted,
            with_missing,
            without_exact,
        )

        document, duet = screened.document, None
        if document is None:
            return decide(screened.code, len(screened.failures), (), None, None, strict=self.strict)
        rows, facts = document.rows, document.device
        missing: Sequence[Omission] = document.missing
        strict_screen = bool(document.settings.get("strict"))
        base, real = OfBase(self.base), self._real(document)
        if screened.code in (Exit.FINE, Exit.FAILED) and not real:
            base, missing = self._of_base(
                rows, facts, missing, screened.selection, strict_screen=strict_screen
            )
            rows = without_exact(
                by_base(rows, facts, base, strict=strict_screen), self.added, strict=strict_screen
            )
            # A row that base does not have, and the baseline neither, is compared with nothing.
            found = [
                row
                for row in flagged(rows)
                if row.key not in base.new or row.verdict.comparison is not None
            ]
            if found and not self.screen_only:
                wanted = [
                    row for row in open_to_a_duet(rows, facts, strict=strict_screen) if row in found
                ]
                _say(f"step 3 of 3: the screen flags {_flags(len(found), len(wanted))}", err=True)
                if wanted:
                    duet = self._duet(wanted)
        decision = decide(
            screened.code,
            len(screened.failures),
            document.rows,
            facts,
            duet,
            self.added,
            strict=self.strict,
            strict_screen=strict_screen,
            base=base,
            real=real,
            unrun=sum(one.unrun for one in screened.failures),
        )
        decision = with_missing(decision, missing)
        decision = with_accepted(
            decision, accepted_in_words(decision, missing, self.changes, duet or {}, self.added)
        )
        if facts.simulated:
            *remarks, result = decision.remarks
            end, _, why_so = result.partition(": ")
            decision = replace(decision, remarks=(*remarks, f"{end} (simulated): {why_so}"))
        return replace(decision, rows=self.with_differences(decision.rows, duet or {}))

    def with_differences(
        self, rows: Sequence[Row], duet: Mapping[str, DuetVerdict]
    ) -> tuple[Row, ...]:
        """The rows; the worst that fail have their differences from base, of the duet or of one more process of each side.
        `duet`: its verdicts, by row key.
        """
        from pytest_gpumem.judging.differences import fails_by_memory
        from pytest_gpumem.reporting.concerns import EXPLAINED, worst_first

        known = []
        for row in rows:
            of_duet = duet[row.key].differences if row.key in duet else ()
            known.append(structs.replace(row, differences=row.differences or of_duet))
        unknown, failing = [], 0
        for row in worst_first(known):
            by_figures = (
                row.verdict.outcome is Outcome.FAIL
                and row.measured_something
                and row.test_error is not True
            )
            if not by_figures or self.selection.lacks(row.nodeid) or failing == EXPLAINED:
                continue
            failing += 1
            lines = [difference for difference in row.differences if difference.site is not None]
            if not (lines if fails_by_memory(row) else row.differences):
                unknown.append(row)
        found = {row.key: row for row in self._looked_at_again(unknown)}
        return tuple(found.get(row.key, row) for row in known)

    def _looked_at_again(self, rows: Sequence[Row]) -> list[Row]:
        """Failing rows with their differences between one more process of base and of the change."""
        from pytest_gpumem.judging.differences import (
            fails_by_memory,
            memory_differences,
            row_differences,
        )
        from pytest_gpumem.reporting.concerns import CAUSE_SECONDS
        from pytest_gpumem.runs import RunError

        if not rows or self.of_base is None:
            return []
        _say(
            f"causes of {counted(len(rows), 'failing row')}: one more pair of processes, {CAUSE_SECONDS:.0f} s at most",
            err=True,
        )
        try:
            base, head = self.of_base.traced(sorted({row.nodeid for row in rows}), CAUSE_SECONDS)
        except RunError as error:
            _say(f"no causes: {error}", err=True)
            return []
        found = []
        for row in rows:
            was, now = base.by_key.get(row.key), head.by_key.get(row.key)
            if was is None or now is None:
                continue
            now = structs.replace(now, verdict=row.verdict)
            lines: tuple[Difference, ...] = ()
            if fails_by_memory(row) and now.footprint is not None:
                lines = memory_differences(was.footprint, now.footprint)
            if was.measurement is not None and now.measurement is not None:
                lines += row_differences(now, was.measurement)
            found.append(structs.replace(row, differences=lines or row.differences))
        return found

    def again(self, row: Row) -> list[str]:
        """The command that measures a failing row again."""
        if any(
            one.limit == "max_regression" and one.outcome is Outcome.FAIL
            for one in row.verdict.limits
        ):
            return ["gpumem", "duet", self.base, "--test", row.nodeid]
        words = [
            word
            for word in self.arguments
            if word.startswith("-") or not Path(word.partition("::")[0]).exists()
        ]
        return ["pytest", "--gpumem", *words, row.nodeid]

    def _real(self, document: Document) -> tuple[str, ...]:
        """The GPUs of the baseline, where the device is simulated and no word of the gate chose that."""
        if not document.device.simulated or _chooses_simulated(self.arguments):
            return ()
        return tuple(key for key in _place(document).devices() if not key.startswith(SIMULATED))

    def _of_base(
        self,
        rows: Sequence[Row],
        facts: DeviceFacts,
        missing: Sequence[Omission],
        own: Selection | None,
        *,
        strict_screen: bool,
    ) -> tuple[OfBase, Sequence[Omission]]:
        """What base says of the rows, and of what was not judged. `own`: what the change selects."""
        from pytest_gpumem.judging.exact import of_memory
        from pytest_gpumem.runs.decision import (
            OfBase,
            asks_base,
            excused,
            held_by_base,
            unknown_to_base,
        )
        from pytest_gpumem.runs.processes import BASE, HEAD

        base = OfBase(
            self.base,
            frozenset(row.key for row in rows if self.selection.lacks(row.nodeid)),
            accepts=self._accepts,
        )
        edits = partial(edited, own=own or Selection({}), base=self.selection)
        tests = sorted(asks_base(rows, missing, base.new, edits, strict=strict_screen))
        if not tests or (process := self._figures(tests, BASE)) is None:
            return base, missing
        skipped = {
            nodeid for nodeid, (outcome, _) in process.outcomes.items() if outcome == "skipped"
        }
        unknown = (
            unknown_to_base(rows, process.rows, process.finished - skipped)
            if process.error is None
            else set()
        )
        base = replace(base, new=base.new | unknown, figures=process.by_key)
        if any(map(of_memory, held_by_base(rows, facts, base, strict=strict_screen))) and (
            own_process := self._figures(tests, HEAD)
        ):
            base = self._confirmed(
                rows, facts, replace(base, alone=own_process.by_key), tests, strict=strict_screen
            )
        return base, excused(missing, skipped, self.base)

    def _confirmed(
        self,
        rows: Sequence[Row],
        facts: DeviceFacts,
        base: OfBase,
        tests: Sequence[str],
        *,
        strict: bool,
    ) -> OfBase:
        """What base says, with further processes of the change while a peak has grown in all of them."""
        from pytest_gpumem.judging.footprint import with_further
        from pytest_gpumem.runs.decision import by_base
        from pytest_gpumem.runs.processes import HEAD

        for _ in range(ENOUGH - 1):
            results = (
                one
                for row in by_base(rows, facts, base, strict=strict)
                for one in row.verdict.limits
            )
            grown = any(
                one.limit == "max_peak_regression" and one.outcome is Outcome.FAIL
                for one in results
            )
            if not grown or (again := self._figures(tests, HEAD, "one more process")) is None:
                break
            alone = {
                key: row
                if row.footprint is None
                else structs.replace(
                    row, footprint=with_further(row.footprint, key, [again.by_key])
                )
                for key, row in base.alone.items()
            }
            base = replace(base, alone=alone)
        return base

    def _figures(
        self, tests: Sequence[str], side: str, which: str = "one process"
    ) -> ProcessRecord | None:
        """A process of a side; None if it could not start. `which`: it is, in words."""
        from pytest_gpumem.runs import RunError
        from pytest_gpumem.runs.processes import BASE

        if self.of_base is None:
            return None
        name, what = (
            (self.base, "exact figures and limits") if side == BASE else ("the change", "memory")
        )
        _say(f"{which} of {name}, for the {what} of {counted(len(tests), 'test')}", err=True)
        try:
            process = self.of_base.figures(tests, side)
        except RunError as error:
            _say(f"no figures of {name}: {error}", err=True)
            return None
        if process.error is not None:
            _say(f"no figures of {name}: {process.name} {process.error}", err=True)
        return process

    def _accepts(self, key: str, limit: str, value: str | None) -> bool:
        """As `OfBase.accepts`."""
        return self.added.loosens(key, limit, value) is not None

    def _duet(self, rows: Sequence[Row]) -> dict[str, DuetVerdict]:
        """The duet's verdicts of these rows, by row key."""
        from pytest_gpumem.runs.reading import DuetVerdict, RowFilter

        if self.of_base is None:
            return {
                row.key: DuetVerdict(row.key, None, "base has no folder such as this one", new=True)
                for row in rows
            }
        _, played = compare(
            self.base,
            RowFilter.of(rows),
            self.arguments,
            base_side=self.of_base.side,
            # Those of the screen, which hold a change to the limits of base.
            max_regression={
                row.key: row.limits.max_regression
                for row in rows
                if row.limits.max_regression is not None
            },
            rounds_max=self.rounds_max,
            file=self.output / DUET,
            evidence=True,
            again="the same command measures its screen again, and goes on from there if that flags the same rows",
        )
        return {one.key: one for one in played.verdicts}


def _chooses_simulated(arguments: Sequence[str]) -> bool:
    """True if words of a command line choose the simulated device, by the last one that names a device."""
    chosen = ""
    for word, after in zip(arguments, (*arguments[1:], ""), strict=False):
        name, _, value = word.partition("=")
        if name == "--gpumem-device":
            chosen = value or after
    return chosen.startswith("sim")


def _place(document: Document) -> Storage:
    """The place of the baseline. The screen has brought the copy of a URL up to date."""
    from pytest_gpumem.baselines.storage import storage

    return storage(str(document.settings.get("baseline") or ".benchmarks"), offline=True)


def _saved(base: str, document: Document) -> Baseline:
    """The saved runs of the history that the change shares with BASE."""
    from pytest_gpumem.baselines.store import Store

    return Store(_place(document), document.device).load(partial(ancestry, base, folder=Path.cwd()))


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
    refused = dict.fromkeys(
        ("--benchmark-json", "--junitxml", "--junit-xml", "--gpumem-report"), why
    )
    refused |= {
        option.flag: "a gate saves nothing into a baseline" for option in of_role(OptionRole.SAVING)
    }
    for argument in arguments:
        if (name := argument.partition("=")[0]) in refused:
            raise click.UsageError(f"{name} among pytest's arguments: {refused[name]}.")


class Failure(NamedTuple):
    """A test, or what was to collect it, that failed or broke off in the screen."""

    nodeid: str
    message: str  # the first line

    @property
    def unrun(self) -> bool:
        """True if another test kept it from running."""
        return DID_NOT_RUN in self.message


@dataclass(frozen=True)
class ScreenResult:
    """The results of the screen."""

    code: int  # pytest's exit code
    failures: Sequence[Failure]  # failures and errors that it counted
    document: Document | None  # its results; None if it wrote none
    selection: Selection | None = None
    """The tests that it selects; None if it did not come to its end."""
    places: Mapping[str, Place] = field(
        default_factory=dict
    )  # where its tests are defined, by node id


def _screen(
    output: Path,
    base: str,
    arguments: Sequence[str],
    *,
    selecting: Future[Selection],
    accepts: bool,
) -> ScreenResult:
    """`selecting`: finds the tests that base selects; no test runs before. `accepts`: what the change accepts counts."""
    from pytest_gpumem.runs.child import for_a_run, pytest_command, run_here

    # One word each: pytest looks for its root folder among all words that are paths. The user's own words come after the defaults
    # that they may change, and before what the gate relies on.
    # In this family JUnit's file says where each test is defined.
    own = [
        f"--junitxml={output / JUNIT}",
        "--override-ini=junit_family=xunit1",
        f"--gpumem-report={output / REPORT}",
    ]
    # Tests after the first failure are judged too: the duet may clear that failure.
    own += ["--maxfail=0"]
    command = pytest_command([*arguments, *own], options=["--no-header"], results=output / RESULTS)
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        of_base, of_head = Path(folder, "base.json"), Path(folder, "head.json")
        selecting.add_done_callback(partial(_write_selection, of_base))
        variables = {BASELINE_OF: base, BASE_SELECTION: str(of_base), SELECTION: str(of_head)}
        if accepts:
            variables[ACCEPTS] = "1"
        code = run_here(command, for_a_run(os.environ) | variables)
        selected = (
            from_plain(json.loads(of_head.read_text(encoding="utf-8")), Selection)
            if of_head.exists()
            else None
        )
    try:
        if not (output / RESULTS).exists() or not (output / JUNIT).exists():
            return ScreenResult(code, (), None, selected)
        document = load(output / RESULTS)
        failures, places = _read_junit(output / JUNIT, selected)
    except (FileError, OSError, ValueError, ElementTree.ParseError) as error:
        raise UserError(f"the screen's results in {output} cannot be read: {error}") from None
    return ScreenResult(code, failures, document, selected, places)


def _write_selection(file: Path, selecting: Future[Selection]) -> None:
    """Give the screen what base selects: null if that is not known."""
    known = not selecting.cancelled() and selecting.exception() is None
    with suppress(OSError):  # the screen has ended
        write_whole(file, json.dumps(to_plain(selecting.result()) if known else None))


def _in_junit(nodeid: str) -> tuple[str, str]:
    """The class and the name by which pytest's JUnit file knows a test."""
    path, bracket, parameters = nodeid.partition("[")
    file, *names = path.split("::")
    words = [file.replace("/", ".").removesuffix(".py"), *names]
    return ".".join(words[:-1]), f"{words[-1]}{bracket}{parameters}"


_OF_PYTEST = re.compile(
    r'^(?:failed on (?:setup|teardown) with ")?(?:Failed: )?(.*?)"?$'
)  # what it adds to a message


def _read_junit(junit: Path, selected: Selection | None) -> tuple[list[Failure], dict[str, Place]]:
    """The failures of a JUnit file, in its order, and where its tests are defined, by node id.
    `selected`: tests whose node ids are known; of others the names in the file stand.
    """
    from pytest_gpumem.reporting.concerns import place_of

    ids = () if selected is None else (*selected.tests, *selected.others)
    named = {_in_junit(nodeid): nodeid for nodeid in ids}
    found: list[Failure] = []
    places: dict[str, Place] = {}
    here = Path.cwd()
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        name = case.get("classname", ""), case.get("name", "")
        file, line = case.get("file"), case.get("line")
        if name in named and file is not None and line is not None:
            # pytest's root folder, which paths are relative to, is this one or above.
            root = next(
                (folder for folder in (here, *here.parents) if (folder / file).exists()), here
            )
            places[named[name]] = place_of(root, file, int(line) + 1)
        for failed in (*case.findall("failure"), *case.findall("error")):
            lines = (failed.get("message") or failed.text or "").strip().splitlines()
            message = _OF_PYTEST.sub(r"\1", lines[0]) if lines else "failed"
            found.append(Failure(named.get(name, "::".join(filter(None, name))), message))
    return found, places


def _tell(
    output: Path, base: str, document: Document, decision: Decision, places: Mapping[str, Place]
) -> None:
    """Write results, report and summary, with the gate's verdicts; under GitHub Actions the job's summary and annotations too."""
    from pytest_gpumem.reporting import html, markdown
    from pytest_gpumem.reporting.run import Run

    _write_results(output / RESULTS, document, decision)
    shown = load_results(output / RESULTS)
    run = Run(
        decision.rows,
        document.device,
        document.settings,
        shown.utc,
        shown.revision,
        remarks=decision.remarks,
    )
    saved = _saved(base, document)
    past = {row.key: saved.past(row) for row in run.rows}
    run = replace(run, past=past, footprints=saved.newest_footprints)
    summary = markdown.page(run)
    _write(output / SUMMARY, summary)
    if run.rows:
        _write(output / REPORT, html.page(run))
    _announce(run.rows, summary, places)


# The folder of results


def _prepare(output: Path) -> None:
    """Make the folder, and remove the files of an earlier gate: a run that breaks must not show another's results.
    Raises `click.UsageError`: it holds files, and no marker of a gate; nothing is touched.
    """
    marker = output / IGNORED
    try:
        if (
            output.is_dir()
            and any(output.iterdir())
            and (
                marker.is_symlink()
                or not marker.is_file()
                or marker.read_bytes() != MARKER.encode()
            )
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


def _write_results(path: Path, screen: Document, decision: Decision) -> None:
    """Write the verdicts of the gate into the results of its screen. Raises `UserError`: the file cannot be written."""
    from pytest_gpumem.records.schema import document
    from pytest_gpumem.reporting.exports import figures

    try:
        value = json.loads(path.read_bytes())
        value["gpumem"] |= document(screen.device, decision.rows, screen.settings, decision.missing)
        found = {(row.range_name, row.label): figures(row, screen.device) for row in decision.rows}
        for one in value.get("benchmarks", ()):
            if (fed := one.get("extra_info", {}).get("gpumem")) is not None:
                one["extra_info"]["gpumem"] = found.get((fed["range"], fed.get("label", "")), fed)
    except OSError as error:
        raise UserError(f"--output: cannot read {path}: {error.strerror or error}") from None
    _write(path, json.dumps(value, allow_nan=False, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    """Write a file of the folder. Raises `UserError`: it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"--output: cannot write {path}: {error.strerror or error}") from None


def _announce(rows: Sequence[Row], summary: str, places: Mapping[str, Place]) -> None:
    """Under GitHub Actions, add a run to the job's summary, and print its annotations."""
    from pytest_gpumem.reporting.concerns import summarise, workflow_commands

    if (note := summarise(summary, os.environ)) is not None:
        click.echo(printable(note), err=True)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in workflow_commands(rows, places):
            click.echo(line)
