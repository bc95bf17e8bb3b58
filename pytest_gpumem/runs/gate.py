"""A gate, in the order of its four sentences.

It collects the tests that BASE has, and holds each test to BASE's limits. It runs the tests of the
change. Each row that is not plainly PASS against its reference, in time or bytes, is measured in a
duet, which alone decides: with BASE, and for creep with the oldest revision of the reference.
Red: a FAIL, a LOST test, a row measured differently or a looser limit that the change does not
accept; no verdict: nothing measured, conditions, or a row that the duet leaves open; green: the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path

from msgspec import structs

from pytest_gpumem.baselines.acceptances import Acceptances
from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.store import Store, devices
from pytest_gpumem.judging.expectations import LooserLimit, Selection, edited, loosened, looser
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.outcomes import Exit, Outcome
from pytest_gpumem.records.device import SIMULATED
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Omission, Row, selects
from pytest_gpumem.records.schema import Document
from pytest_gpumem.reporting.conclusion import Conclusion
from pytest_gpumem.revisions import DIRTY, ancestry
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.conclusion import conclude, excused, may_be_excused
from pytest_gpumem.runs.duet import Duet, under_other_name
from pytest_gpumem.runs.open_rows import (
    crept_limits,
    limits_for_duet,
    not_checked,
    with_creep,
    with_duets,
)
from pytest_gpumem.runs.pairs import DuetRow, RowFilter
from pytest_gpumem.runs.session import Files, SessionResult, run_session
from pytest_gpumem.runs.worktree import NoFolder, Side, revision_side

PlayDuet = Callable[[Side, RowFilter, "str | None"], Duet]
"""Plays a duet of a side with the working tree, and prints its verdicts.

The third argument is what the duet is about, for the name of its file; None: BASE.
"""


@dataclass
class Gate:
    """A gate: what the user requests of it, and what it comes to."""

    base: str  # as written
    merge_base: str  # commit that BASE and HEAD have in common
    arguments: tuple[str, ...]  # pytest's
    files: Files  # that the session writes
    accepted: Acceptances  # of those that the change adds, the ones that count
    all_accepted: Acceptances  # those of the project that count, of BASE too
    play: PlayDuet
    say: Callable[[str], object]  # prints a sentence about the progress
    base_python: str | None = None
    screen_only: bool = False
    strict: bool = False
    _: KW_ONLY
    base_side: Side | None = None  # None: BASE has no folder such as this one
    selection: Selection = field(default_factory=lambda: Selection({}))
    """The tests that BASE selects."""
    old_names: dict[str, str] = field(default_factory=dict)
    """Names of renamed tests in BASE, by their new ones."""
    session: SessionResult = field(default_factory=lambda: SessionResult(0))
    baseline: Baseline = field(init=False)  # once its session has results
    looser: list[LooserLimit] = field(default_factory=list)
    """Limits that the change loosens and does not accept."""

    def run(self) -> Conclusion:
        """Run it to its end.

        Raises `RunError`: BASE cannot be prepared. Raises `NoAnswer`: its tests cannot be
        collected. Raises `UserError`: results or the baseline cannot be read.
        """
        with ExitStack() as stack:
            self._measure(stack)
            document = self.session.document
            if document is None:
                return conclude(self.session, (), (), self.looser, (), strict=False)
            self.baseline = self._load_baseline(document)
            return self._conclude(document)

    # Sentences 1 and 2

    def _measure(self, stack: ExitStack) -> None:
        """Collect the tests of BASE while the session collects and measures those of the change."""
        title = f"merge base with {self.base} {self.merge_base[:10]}"
        self.say(f"collect the tests of the merge base with {self.base}, and measure the change")
        with suppress(NoFolder):
            self.base_side = stack.enter_context(
                revision_side(self.merge_base, Path.cwd(), title, python=self.base_python)
            )
        accepts = bool(self.accepted.files)
        self.session = session = run_session(
            self.files, self.base, self.arguments, self.base_side, accepts=accepts
        )
        self.selection = self._under_new_names(session.base)
        if session.selection is not None:
            self._add_looser(loosened(session.selection, self.selection), self.accepted)

    def _under_new_names(self, base: Selection) -> Selection:
        """What BASE selects, its renamed tests by the names that they have in the change."""
        for new, old in self.accepted.old_names().items():
            if any(selects(old, nodeid) for nodeid in (*base.tests, *base.others)):
                self.old_names[new] = old
        new_names = {old: new for new, old in self.old_names.items()}
        tests = {}
        for nodeid, test in base.tests.items():
            tests[under_other_name(nodeid, new_names)] = test
        others = [under_other_name(nodeid, new_names) for nodeid in base.others]
        return structs.replace(base, tests=tests, others=tuple(others))

    def _add_looser(self, changes: Iterable[LooserLimit], accepted: Acceptances) -> None:
        for change in changes:
            if not accepted.allows(change.key, change.limit, change.now):
                self.looser.append(change)

    # Sentence 3

    def _conclude(self, document: Document) -> Conclusion:
        session = self.session
        rows: Sequence[Row] = document.rows
        missing: Sequence[Omission] = document.missing
        strict_session = bool(document.settings.get("strict"))
        real_devices = self._real_devices(document)
        new = {row.key for row in rows if self.selection.lacks(row.nodeid)}
        limits, unknown, skipped = dict[str, Limits](), dict[str, Limits](), set[str]()
        if session.code in (Exit.FINE, Exit.FAILED) and not real_devices:
            unknown = self._compare_limits_of_calls(rows, session.selection)
            skipped = {omission.nodeid for omission in missing if may_be_excused(omission)}
            if not self.screen_only:
                limits = limits_for_duet(rows, self.selection, self.accepted, strict=strict_session)
        if limits or unknown or skipped:
            result = self._duet(rows, {**unknown, **limits}, skipped)
            verdicts = {verdict.key: verdict for verdict in result.rows}
            new |= {key for key, verdict in verdicts.items() if verdict.outcome is Outcome.NEW}
            for row in rows:
                if row.key in unknown and row.key in result.base_limits:
                    self._compare_limits(row, result.base_limits[row.key])
            missing = excused(missing, result.skipped_in_base, self.base)
            self._check_creep(rows, verdicts)
            rows = with_duets(rows, verdicts, self.accepted, strict=strict_session)
        return conclude(
            session,
            rows,
            missing,
            self.looser,
            new,
            strict=self.strict,
            strict_session=strict_session,
            real_devices=real_devices,
        )

    def _duet(self, rows: Sequence[Row], limits: dict[str, Limits], skipped: set[str]) -> Duet:
        """The duet with BASE.

        `limits`: by row key, those to judge. `skipped`: tests that skip, and may skip in BASE too.
        """
        assert self.base_side is not None  # else every row is new
        tests = {row.nodeid for row in rows if row.key in limits} | skipped
        open_rows = sum(of_row != Limits() for of_row in limits.values())
        if open_rows:
            self.say(f"a duet decides {counted(open_rows, 'row')}")
        else:
            self.say("one pair of processes, for the limits and the skips of BASE")
        wanted = RowFilter(frozenset(tests), limits, self.old_names)
        return self.play(self.base_side, wanted, None)

    def _check_creep(self, rows: Sequence[Row], verdicts: dict[str, DuetRow]) -> None:
        """Compare rows that are above the limit over their reference with its oldest revision."""
        if any(verdict.outcome is Outcome.FAIL for verdict in verdicts.values()):
            return
        crept: dict[str, dict[str, Limits]] = {}  # by revision and row key, the limits to judge
        for row in rows:
            if row.key in verdicts:
                limits = crept_limits(row, verdicts[row.key], self.accepted, self.baseline)
                for revision, of_row in limits.items():
                    crept.setdefault(revision, {})[row.key] = of_row
        for revision, of_rows in crept.items():
            words = f"{counted(len(of_rows), 'row')} beyond the limit over the reference"
            self.say(f"{words}: a duet with its oldest revision {revision[:10]} decides")
            tests = frozenset(row.nodeid for row in rows if row.key in of_rows)
            wanted = RowFilter(tests, of_rows, self.old_names)
            try:
                oldest = self._duet_with_oldest(revision, wanted)
            except RunError as error:
                for key, of_row in of_rows.items():
                    verdicts[key] = not_checked(verdicts[key], of_row, str(error))
            else:
                for verdict in oldest.rows:
                    verdicts[verdict.key] = with_creep(verdicts[verdict.key], verdict)

    def _duet_with_oldest(self, revision: str, wanted: RowFilter) -> Duet:
        """Raises `RunError`: the revision cannot be measured."""
        if revision == "None" or revision.endswith(DIRTY):
            raise RunError("no commit holds the code of its oldest run")
        title = f"oldest revision of the reference {revision[:10]}"
        with revision_side(revision, Path.cwd(), title, name=title) as side:
            return self.play(side, wanted, revision)

    # The limits of calls

    def _compare_limits_of_calls(
        self, rows: Sequence[Row], selection: Selection | None
    ) -> dict[str, Limits]:
        """Compare the limits of calls, in test files that the change edits, with saved rows.

        Returns the rows without saved limits, of which a duet reads those of BASE.
        """
        unknown = {}
        for row in rows:
            if self.selection.lacks(row.nodeid):
                continue
            if not edited(row.nodeid, selection or Selection({}), self.selection):
                continue
            saved = self.baseline.saved(row)
            if saved:
                self._compare_limits(row, saved[-1].limits)
            elif row.measured_something:
                unknown[row.key] = Limits()
        return unknown

    def _compare_limits(self, row: Row, base: Limits) -> None:
        """Take the limits of calls that demand less than those of BASE."""
        calls = {name: getattr(base, name) for name in base.origin if base.origin[name] == "call"}
        of_base = Limits(**calls)
        self._add_looser(looser(row.key, row.limits, of_base), self.all_accepted)

    # The baseline

    def _load_baseline(self, document: Document) -> Baseline:
        """The saved runs of the history that the change shares with BASE."""
        history = partial(ancestry, self.base, folder=Path.cwd())
        store = Store(_baseline_folder(document), document.device)
        return store.load(history, self.all_accepted)

    def _real_devices(self, document: Document) -> list[str]:
        """GPUs of the baseline, where the device is simulated and the user did not choose that."""
        chosen = "--gpumem-device=sim" in "=".join(self.arguments)
        if chosen or not document.device.simulated:
            return []
        return [key for key in devices(_baseline_folder(document)) if not key.startswith(SIMULATED)]


def _baseline_folder(document: Document) -> Path:
    return Path(str(document.settings.get("baseline") or ".benchmarks")).expanduser()
