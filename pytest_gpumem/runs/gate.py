"""A gate, in the order of its four sentences (docs/gate.md)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec import structs

from pytest_gpumem.baselines.acceptances import Acceptances, under_other_name
from pytest_gpumem.baselines.references import Baseline
from pytest_gpumem.baselines.store import Store, devices
from pytest_gpumem.files import ResultFile, load_results, write_whole
from pytest_gpumem.judging.duet import DuetRow
from pytest_gpumem.judging.expectations import (
    LooserLimit,
    Selection,
    excused,
    loosened,
    looser,
    may_be_excused,
)
from pytest_gpumem.limits import LIMITS, OF_FOOTPRINT
from pytest_gpumem.outcomes import Exit, NoAnswer, Outcome, UserError
from pytest_gpumem.records import selects
from pytest_gpumem.records.device import SIMULATED
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import ACCEPTED, UNDECIDED, Omission, Row, Status
from pytest_gpumem.records.schema import from_plain, to_plain
from pytest_gpumem.reporting.conclusion import Conclusion
from pytest_gpumem.revisions import ancestry, git
from pytest_gpumem.runs.decisions import (
    conclude,
    crept_limits,
    limits_for_duet,
    with_creep,
    with_duets,
)
from pytest_gpumem.runs.duet import Duet, RowFilter
from pytest_gpumem.runs.processes import BASE, HEAD, Processes, pytest_command, running, switch_off
from pytest_gpumem.runs.worktree import Side, revision_side, working_tree
from pytest_gpumem.settings import ACCEPTS, ANNOUNCE, BASE_SELECTION, BASELINE_OF, SELECTION
from pytest_gpumem.units import counted


@dataclass
class Gate:
    base: str  # as written
    merge_base: str  # commit that BASE and HEAD have in common
    arguments: tuple[str, ...]  # pytest's
    options: tuple[str, ...]  # further words of the session alone
    accepted: Acceptances  # of those that the change adds, the ones that count
    all_accepted: Acceptances  # those of the project that count, of BASE too
    play: Callable[[Side, RowFilter, str], Duet]
    """Plays a duet of a side with the working tree into a file so named, and prints it."""
    say: Callable[[str], object]  # prints a sentence about the progress
    base_python: str | None = None
    screen_only: bool = False
    strict: bool = False
    base_side: Side = field(init=False)
    of_base: Selection = field(default_factory=Selection)  # the tests of BASE
    of_head: Selection = field(default_factory=Selection)
    """The tests of the change; none if its session did not come to its end."""
    old_names: dict[str, str] = field(default_factory=dict)
    """Names of renamed tests in BASE, by their new ones."""
    code: int = 0  # pytest's, of the session
    mistake: str = ""  # pytest's words on what it refuses
    results: ResultFile | None = None  # of the session; None if it measured nothing
    baseline: Baseline = field(init=False)  # once its session has results
    looser: list[LooserLimit] = field(default_factory=list)
    """Limits that the change loosens and does not accept."""
    accepted_limits: list[tuple[LooserLimit, str]] = field(default_factory=list)
    crept: dict[str, str] = field(default_factory=dict)  # by test: the oldest revision of a creep

    def run(self) -> Conclusion:
        """Run it to its end.

        Raises `UserError`: BASE cannot be prepared, or results or the baseline cannot be read.
        Raises `NoAnswer`: its tests cannot be collected.
        """
        self.say(f"collect the tests of the merge base with {self.base}, and measure the change")
        title = f"merge base {self.merge_base[:10]}"
        with revision_side(self.merge_base, Path.cwd(), title, python=self.base_python) as side:
            self.base_side = side
            self._run_session()
            self._add_looser(loosened(self.of_head, self.of_base), self.accepted)
            if self.code == Exit.USAGE:
                return Conclusion(Exit.USAGE, [self.mistake])
            if self.results is None:
                return conclude(self.code, self.of_head, looser=self.looser)
            return self._decide(self.results)

    # Sentences 1 and 2

    def _run_session(self) -> None:
        """Collect the tests of BASE, which the session waits for with its first test."""
        # Tests after the first failure are judged too: the duet may clear that failure.
        words = [*self.arguments, *self.options, "--maxfail=0"]
        of_base, not_collected = Selection(), None
        with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
            base, head = Path(folder, "base.json"), Path(folder, "head.json")
            file = Path(folder, "results.json")
            command = pytest_command(words, options=["--no-header"], results=file)
            variables = {BASELINE_OF: self.base, BASE_SELECTION: str(base), SELECTION: str(head)}
            if self.accepted.files:
                variables[ACCEPTS] = "1"
            errors = Path(folder, "errors.txt")
            environment = switch_off(os.environ, ["save", ANNOUNCE]) | variables
            with running(command, environment, errors) as process:
                try:
                    of_base = self._collect(Path(folder, "collected.json"))
                    write_whole(base, json.dumps(to_plain(of_base)))
                except NoAnswer as error:
                    not_collected = error
                    write_whole(base, "null")
                self.code = process.wait()
            if self.code == Exit.USAGE:
                self.mistake = " ".join(errors.read_text(errors="replace").split())
            elif not_collected is not None:
                raise not_collected  # the change's mistake comes first
            if head.exists():
                self.of_head = _selection(head)
            # pytest-benchmark leaves an empty file where nothing was measured.
            if file.exists() and file.stat().st_size:
                self.results = load_results(file)
        self._take_base(of_base)

    def _collect(self, file: Path) -> Selection:
        """Collect the tests that BASE selects, without a GPU."""
        words = [*self.arguments, "--collect-only", "--gpumem-device=sim"]
        variables = {**os.environ, SELECTION: str(file)}
        sides = {BASE: self.base_side, HEAD: working_tree(Path.cwd())}
        try:
            with closing(Processes(sides, words, variables)) as processes:
                process = processes.run(BASE)
            if process.error is not None:
                raise UserError(f"{process.name} {process.error}")
            return _selection(file)
        except UserError as error:
            raise NoAnswer(f"BASE: its tests cannot be collected: {error}") from None
        except (OSError, ValueError):
            raise NoAnswer(
                f"BASE: {self.base_side.title} has another version of pytest-gpumem, which does "
                "not say what it selects"
            ) from None

    def _take_base(self, base: Selection) -> None:
        """Take what BASE selects, its renamed tests by the names that they have in the change."""
        for new, old in self.accepted.old_names().items():
            if any(selects(old, nodeid) for nodeid in (*base.tests, *base.others)):
                self.old_names[new] = old
        new_names = {old: new for new, old in self.old_names.items()}

        def renamed(nodeids: Iterable[str]) -> tuple[str, ...]:
            return tuple(under_other_name(nodeid, new_names) for nodeid in nodeids)

        tests = dict(zip(renamed(base.tests), base.tests.values(), strict=True))
        others, idle = renamed(base.others), renamed(base.idle)
        self.of_base = structs.replace(base, tests=tests, others=others, idle=idle)

    def _add_looser(self, changes: Iterable[LooserLimit], accepted: Acceptances) -> None:
        for change in changes:
            newest = self.accepted.of(change.key, "limit", change.limit)
            if not accepted.allows(change.key, change.limit, change.now):
                self.looser.append(change)
            elif newest is not None:  # else BASE accepts it
                self.accepted_limits.append((change, newest[0].why))

    # Sentence 3

    def _decide(self, results: ResultFile) -> Conclusion:
        document = results.document
        rows = document.rows
        missing = list(document.missing)
        folder = Path(str(document.settings["baseline"]))
        history = partial(ancestry, self.base, folder=Path.cwd())
        self.baseline = Store(folder, document.device).load(history, self.all_accepted)
        real_devices: list[str] = []
        # "=" for the space: the option may be one word or two.
        if document.device.simulated and "--gpumem-device=sim" not in "=".join(self.arguments):
            real_devices = [key for key in devices(folder) if not key.startswith(SIMULATED)]
        judged: dict[str, DuetRow] = {}
        if self.code in (Exit.FINE, Exit.FAILED) and not real_devices:
            self._compare_limits_of_calls(rows)
            duet = self._duet(rows, missing)
            if duet is not None:
                judged = {row.key: row for row in duet.rows}
                missing = excused(missing, duet.skipped_in_base, self.base)
                missing += self._only_in_base(duet, rows, missing)
                if not any(row.outcome is Outcome.FAIL for row in duet.rows):
                    self._check_creep(rows, judged)
        new = {row.key for row in rows if self.of_base.lacks(row.nodeid)}
        new |= {key for key, row in judged.items() if row.outcome is Outcome.NEW}
        return conclude(
            self.code,
            self.of_head,
            with_duets(rows, judged, self.accepted),
            missing,
            self.looser,
            new,
            accepted=self.accepted_limits,
            strict=self.strict,
            real_devices=real_devices,
            simulated=document.device.simulated,
        )

    def _duet(self, rows: Sequence[Row], missing: Sequence[Omission]) -> Duet | None:
        """Play the duet with BASE; None where there is nothing to decide."""
        limits = {} if self.screen_only else limits_for_duet(rows, self.of_base, self.accepted)
        skipped = {omission.nodeid for omission in missing if may_be_excused(omission)}
        if limits:
            self.say(f"a duet decides {counted(len(limits), 'row')}")
        elif skipped:
            self.say("one pair of processes, for the skips of BASE")
        else:
            return None
        tests = {row.nodeid for row in rows if row.key in limits} | skipped
        differing = [key for key in limits if self.accepted.of(key, "measured")]
        wanted = RowFilter(frozenset(tests), limits, self.old_names, differing)
        return self.play(self.base_side, wanted, "duet")

    def _only_in_base(
        self, duet: Duet, rows: Sequence[Row], missing: Sequence[Omission]
    ) -> Iterator[Omission]:
        """Yield what BASE measures in the first pair, and the change does not."""
        of_change = [*rows, *duet.first[HEAD].rows.values()]
        seen = {row.key for row in of_change if row.label or row.measurement}
        seen.update(omission.key for omission in missing)
        for key, row in duet.first[BASE].rows.items():
            if key not in seen and (row.label or row.measurement):
                gone = self.accepted.why_gone(key, renamed=False)
                status: Status = ACCEPTED if gone else UNDECIDED
                why = f"only {self.base} measures it; if meant, gpumem accept --change removed"
                yield Omission(row.nodeid, row.label, status, gone or why, how="passed")

    def _check_creep(self, rows: Sequence[Row], judged: dict[str, DuetRow]) -> None:
        crept: dict[str, dict[str, Limits]] = {}  # by revision and row key, the limits to judge
        for row in rows:
            if row.key in judged:
                limits = crept_limits(row, judged[row.key], self.accepted, self.baseline)
                for revision, of_row in limits.items():
                    crept.setdefault(revision, {})[row.key] = of_row
        for revision, of_rows in crept.items():
            words = f"{counted(len(of_rows), 'row')} beyond the limit over the reference"
            self.say(f"{words}: a duet with its oldest revision {revision[:10]} decides")
            tests = frozenset(row.nodeid for row in rows if row.key in of_rows)
            self.crept |= dict.fromkeys(tests, revision)
            title = f"oldest revision of the reference {revision[:10]}"
            try:
                with revision_side(revision, Path.cwd(), title) as side:
                    wanted = RowFilter(tests, of_rows, self.old_names)
                    of_oldest = self.play(side, wanted, f"creep-{revision}").rows
            except UserError as error:
                ended = None, f"it cannot be measured: {error}"
                of_oldest = [DuetRow(key, ended=ended) for key in of_rows]
            for oldest in of_oldest:
                judged[oldest.key] = with_creep(judged[oldest.key], of_rows[oldest.key], oldest)

    def _compare_limits_of_calls(self, rows: Sequence[Row]) -> None:
        """Compare limits of calls, in test files that the change edits, with those of BASE: of its
        saved calls, else of its tests."""
        words = ["diff", "--name-only", "--no-renames", "--relative", "-z", self.merge_base]
        edited = git(Path(self.of_head.root), words).split("\0")
        for row in rows:
            old = under_other_name(row.nodeid, self.old_names)
            saved = self.baseline.saved(structs.replace(row, nodeid=old))
            if self.of_base.lacks(row.nodeid) or not saved or old.partition("::")[0] not in edited:
                continue
            base, calls = self.of_base.tests.get(row.nodeid, Limits()), []
            for name in LIMITS:
                if saved[-1].limits.origin.get(name) == "call":
                    base = structs.replace(base, **{name: getattr(saved[-1].limits, name)})
                elif name in OF_FOOTPRINT or row.limits.origin.get(name) != "call":
                    continue
                calls.append(name)
            self._add_looser(looser(row.key, row.limits, base, calls), self.all_accepted)


def _selection(file: Path) -> Selection:
    return from_plain(json.loads(file.read_bytes()), Selection)
