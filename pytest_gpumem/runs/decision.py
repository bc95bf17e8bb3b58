"""The end of a gate: the rows of its screen with the figures of base and the verdicts of its duet, and the exit code."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import NamedTuple

from msgspec import structs

from pytest_gpumem.baselines.accepted import EXACT as OF_COUNTS
from pytest_gpumem.baselines.accepted import (
    OF_FIGURES,
    Acceptance,
    Acceptances,
    Scope,
    changes_of,
    in_words,
    without_accepted,
)
from pytest_gpumem.judging import expectations
from pytest_gpumem.judging.exact import against_base, held_to_base, open_results
from pytest_gpumem.judging.expectations import LooserLimit, looser
from pytest_gpumem.judging.finding import counted, worst
from pytest_gpumem.judging.footprint import RULES, judge_footprint
from pytest_gpumem.judging.judge import SETTLED, failing_in_themselves, is_failure, judge
from pytest_gpumem.judging.limits import relative
from pytest_gpumem.judging.verdict import known, with_verdict
from pytest_gpumem.limits import LIMITS, OF_MEASUREMENT
from pytest_gpumem.outcomes import Code, Exit, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import (
    ACCEPTED,
    NOT_RUN,
    ROW,
    TEST,
    UNJUDGED,
    LimitResult,
    Omission,
    Row,
    Verdict,
    did_not_run,
)
from pytest_gpumem.reporting.row import worst_first
from pytest_gpumem.reporting.terminal import missing_lines
from pytest_gpumem.runs.reading import DuetVerdict

_REGRESSION = (Code.SLOWER, Code.CREPT)  # codes of a FAIL that a duet may clear
_NOISE = (*SETTLED, Code.LOOKS_SLOWER)  # codes of a doubt that more processes may decide
_TIME = (
    "max_regression",
    "",
)  # limits of results that a duet decides: the slow-down, and a doubt about the whole measurement


@dataclass(frozen=True)
class OfBase:
    """What a gate learns from its base."""

    name: str = "base"  # the revision, as it was named
    new: frozenset[str] = frozenset()  # keys of rows that it does not have
    figures: Mapping[str, Row] = field(default_factory=dict)  # rows of one process of it, by key
    alone: Mapping[str, Row] = field(
        default_factory=dict
    )  # rows of the change in a process of the same tests, by key
    accepts: Callable[[str, str, str | None], bool] = lambda key, limit, value: False
    """Whether somebody accepted that the change loosens a limit of a row to a value; None is no limit."""


class Standing(Enum):
    """How something ended that a gate relies on: a row of the screen after the duet, a measurement of the baseline, or a limit."""

    FAILED = "fails by what was measured"
    ERROR = "its test failed by an assertion or an error of its own"
    LOST = "the screen lacks it, and no word of the command line left it out"
    OPEN = (
        "in doubt by more than its noise: compared with nothing, not counted, or by its conditions"
    )
    UNJUDGED = "a limit on a test that ran and measured nothing"
    NEW = "base does not have it"
    ACCEPTED = "a change of it was accepted"
    UNDECIDED = "judged, and left in doubt by its noise"
    PASSED = "within its limits"
    MEASURED = "it has no limit"
    LEFT_OUT = "a word of the command line left it out"


class Effect(NamedTuple):
    """What one standing means for a gate."""

    exit: Exit
    strict: Exit  # under --strict
    remark: str = ""  # a sentence about each, by `key`, `code` and `reason`; empty: none


EFFECTS: Mapping[Standing, Effect] = {
    Standing.FAILED: Effect(Exit.FAILED, Exit.FAILED),
    Standing.ERROR: Effect(Exit.FAILED, Exit.FAILED),
    Standing.LOST: Effect(Exit.FAILED, Exit.FAILED),
    Standing.OPEN: Effect(Exit.NO_VERDICT, Exit.NO_VERDICT, "not judged: {key}: {reason}"),
    Standing.UNJUDGED: Effect(Exit.NO_VERDICT, Exit.NO_VERDICT),
    Standing.NEW: Effect(Exit.FINE, Exit.NO_VERDICT, "new, base does not have it: {key}"),
    Standing.ACCEPTED: Effect(Exit.FINE, Exit.FINE, "a change of it is accepted: {key}"),
    Standing.UNDECIDED: Effect(Exit.FINE, Exit.NO_VERDICT, "undecided{code}: {key}"),
    Standing.PASSED: Effect(Exit.FINE, Exit.FINE),
    Standing.MEASURED: Effect(Exit.FINE, Exit.FINE),
    Standing.LEFT_OUT: Effect(Exit.FINE, Exit.FINE),
}
"""The exit code is the worst of all."""
_SEVERITY = (Exit.FINE, Exit.NO_VERDICT, Exit.FAILED)
ByStanding = dict[Standing, list[Row]]  # the rows of each standing
_NO_PASS = (
    Standing.UNDECIDED,
    Standing.NEW,
    Standing.ACCEPTED,
    Standing.MEASURED,
)  # in the order of the last line


def standing(
    row: Row, duet: Mapping[str, DuetVerdict], base: OfBase, *, strict_screen: bool
) -> Standing:
    """The standing of a row, which has the figures of base and the duet's verdict if they judged it. Arguments as for `decide`."""
    verdict = row.verdict
    if row.failed or is_failure(verdict, strict=False):
        # What was not measured fails with its test.
        return (
            Standing.FAILED
            if row.measured_something and is_failure(verdict, strict_screen)
            else Standing.ERROR
        )
    if verdict.outcome.quiet:
        return Standing.PASSED if verdict.outcome is Outcome.PASS else Standing.MEASURED
    if verdict.outcome is Outcome.ACCEPTED:
        return Standing.ACCEPTED
    judged, doubts = (
        duet.get(row.key),
        verdict.limits or (LimitResult("", verdict.outcome, verdict.code),),
    )
    new = row.key in base.new or (judged is not None and judged.new)
    if any(_open(one, row, judged, new=new) for one in doubts):
        return Standing.OPEN
    return Standing.NEW if new and verdict.outcome is Outcome.NEW else Standing.UNDECIDED


def _open(one: LimitResult, row: Row, judged: DuetVerdict | None, *, new: bool) -> bool:
    """True if a result that is no PASS is more than a doubt by noise, once the duet has spent its pairs.
    `judged`: the duet's verdict on the row.
    `new`: base does not have the row.
    """
    # Without a limit on slow-downs there is no duet.
    of_time = one.limit in _TIME and row.limits.max_regression is not None
    if one.outcome is Outcome.NEW:
        return not (new or (of_time and _by_pairs(judged)))
    if of_time and not new:
        return not _by_pairs(judged) or (one.code is Code.CONDITIONS and _judges_more(row))
    # What a simulated device does not show, nothing else shows either.
    return one.code not in _NOISE and not (one.code is Code.NOT_READ and row.verdict.simulated)


def _by_pairs(judged: DuetVerdict | None) -> bool:
    """True if a duet judged a row by its pairs, and not by their conditions."""
    return judged is not None and judged.paired is not None


def _judges_more(row: Row) -> bool:
    """True if a row has a limit on its time that no duet judges."""
    return any(
        getattr(row.limits, name) is not None for name in OF_MEASUREMENT if name != "max_regression"
    )


def standing_of_missing(missing: Omission) -> Standing:
    """The standing of what the screen did not judge."""
    if missing.status == UNJUDGED:
        return Standing.UNJUDGED
    return Standing.LOST if expectations.lost([missing]) else Standing.LEFT_OUT


@dataclass(frozen=True)
class Decision:
    """How a gate ends."""

    code: int
    rows: tuple[Row, ...]  # the run's rows, with the duet's verdict where it gave one
    remarks: tuple[str, ...]  # the reasons, a sentence each; the last one is the result
    missing: tuple[Omission, ...] = ()  # what was not judged
    loosened: tuple[LooserLimit, ...] = ()  # the limits of calls that the change loosens


def with_missing(decision: Decision, missing: Sequence[Omission]) -> Decision:
    """The end of a gate whose screen did not judge all that was expected: what the project itself leaves out is red, as is a lost
    measurement; a limit that nothing was measured for is no verdict."""
    if decision.code == Exit.USAGE or not missing:
        return decision
    *remarks, result = decision.remarks
    found, code = Counter(standing_of_missing(one) for one in missing), decision.code
    worst_exit = _worst(EFFECTS[one].exit for one in found)
    if worst_exit == Exit.FAILED:
        also = f"; {result.removeprefix('red: ')}" if code == Exit.FAILED else ""
        lost = [one for one in missing if standing_of_missing(one) is Standing.LOST]
        code, result = worst_exit, f"red: {_counted(lost)} lost{also}"
    elif worst_exit == Exit.NO_VERDICT and code == Exit.FINE:
        unjudged = counted(found[Standing.UNJUDGED], "limit")
        code, result = worst_exit, f"no verdict: {unjudged} judged by nothing"
    remarks = [*remarks, *missing_lines(missing), result]
    return Decision(code, decision.rows, tuple(remarks), tuple(missing), decision.loosened)


def loosened_lines(changes: Sequence[LooserLimit], added: Acceptances) -> list[str]:
    """Lines about the limits that a change loosens: to those of base it is held all the same, unless it accepts the new ones."""
    tests: dict[tuple[str, str, str | None, str], list[str]] = {}
    for one in changes:
        by = added.loosens(one.key, one.limit, one.now)
        holds = f"{one.was} holds" if by is None else f"accepted, {by.who}: {by.reason}"
        tests.setdefault((one.limit, one.was, one.now, holds), []).append(one.key)
    return [
        f"limit of {keys[0] if len(keys) == 1 else counted(len(keys), 'test')}: {limit} {was} -> {now or 'none'} in this change ({holds})"
        for (limit, was, now, holds), keys in tests.items()
    ]


def accepted_in_words(
    decision: Decision,
    missing: Sequence[Omission],
    changes: Sequence[LooserLimit],
    duet: Mapping[str, DuetVerdict],
    added: Acceptances,
) -> dict[str, list[str]]:
    """By node id, what a gate accepts of a test: such as "+8.41 %", "a peak of 96 MiB", "removed"."""
    found: dict[str, list[str]] = {}
    for row in decision.rows:
        if row.verdict.accepted:
            paired = duet[row.key].paired if row.key in duet else None
            found.setdefault(row.nodeid, []).extend(
                in_words(row, paired.change if paired is not None else None)
            )
    for one in missing:
        if one.status == ACCEPTED:
            found.setdefault(one.nodeid, []).append("removed")
    tests = {row.key: row.nodeid for row in decision.rows}
    for change in (*changes, *decision.loosened):
        if added.loosens(change.key, change.limit, change.now) is not None:
            found.setdefault(tests.get(change.key, change.key), []).append(
                f"{change.limit} {change.was} -> {change.now or 'none'}"
            )
    return found


def without_effect(
    decision: Decision, changes: Sequence[LooserLimit], added: Acceptances
) -> list[Acceptance]:
    """The files of the change that accept nothing which this gate found. Arguments as of `accepted_in_words`."""
    used = [one for row in decision.rows if row.verdict.accepted for one in added.of(row.key)]
    used += [one for missing in decision.missing if (one := added.removed(missing.key)) is not None]
    loosened = ((change.key, change.limit, change.now) for change in (*changes, *decision.loosened))
    used += [one for change in loosened if (one := added.loosens(*change)) is not None]
    return [one for one in added.files if one not in used]


SHOWN = 3  # tests that one line names


def if_meant(decision: Decision) -> str:
    """The command that accepts what makes a gate red; empty if nothing can be accepted."""
    if decision.code != Exit.FAILED:
        return ""
    acceptable = []
    for row in decision.rows:
        if row.test_error is not True and any(changes_of(row)):
            acceptable.append(row)
    tests = [row.nodeid for row in worst_first(acceptable)]
    tests += [missing.nodeid for missing in decision.missing if missing.may_be_meant]
    named = list(dict.fromkeys(tests))
    return f"gpumem accept {shlex.join(named[:SHOWN])} --reason '...'" if named else ""


def with_accepted(decision: Decision, tests: Mapping[str, Sequence[str]]) -> Decision:
    """The end of a green gate that accepts something of its change: it is never the bare green. `tests`: as of `accepted_in_words`."""
    if decision.code != Exit.FINE or not tests:
        return decision
    *remarks, result = decision.remarks
    words = ", ".join(dict.fromkeys(word for of_test in tests.values() for word in of_test))
    last = f"ACCEPTED: {counted(len(tests), 'test')} {words} by this change"
    return replace(decision, remarks=(*remarks, result.removeprefix("green: "), last))


def _worst(exits: Iterable[Exit]) -> Exit:
    return max(exits, key=_SEVERITY.index, default=Exit.FINE)


def _counted(lost: Sequence[Omission]) -> str:
    """ "1 measurement of the baseline, 2 tests and 1 limit"."""
    rows, tests = (sum(one.what == what for one in lost) for what in (ROW, TEST))
    of = (
        (rows, "measurement", " of the baseline"),
        (tests, "test", ""),
        (len(lost) - rows - tests, "limit", ""),
    )
    *first, last = [f"{counted(count, thing)}{more}" for count, thing, more in of if count]
    return f"{', '.join(first)} and {last}" if first else last


def flagged(rows: Sequence[Row]) -> list[Row]:
    """Rows that a duet is to judge: those that the screen finds slower, or cannot compare."""
    return [row for row in rows if row.limits.max_regression is not None and _flagged(row.verdict)]


def _flagged(verdict: Verdict) -> bool:
    if verdict.outcome is Outcome.FAIL:
        return verdict.code in _REGRESSION
    return (
        not verdict.outcome.quiet
        and verdict.outcome is not Outcome.ACCEPTED
        and verdict.code is not Code.NOT_READ
    )


def without_regression(
    row: Row, rows: Sequence[Row], facts: DeviceFacts
) -> list[LimitResult] | None:
    """The findings about a row without its limit on slow-downs, if no other limit fails by its figures; else None. A failed assertion of
    the test is no figure: a test that fails in itself has no verdict in a duet, which clears nothing."""
    measurement = row.measurement
    if measurement is None or not flagged([row]):
        return None
    siblings = {
        one.label: one.measurement
        for one in rows
        if one.nodeid == row.nodeid and one.measurement is not None
    }
    # The screen, or base, has compared the exact figures.
    compared = relative(row.limits)
    others = structs.replace(row.limits, max_regression=None, **dict.fromkeys(compared))
    left = [one for one in row.verdict.limits if one.limit in compared]
    if (
        row.verdict.code is Code.CONDITIONS
        and not left
        and all(getattr(others, name) is None for name in LIMITS)
    ):
        # The conditions of the screen are none of the duet's, and nothing else was to be judged by them.
        return []
    findings = judge(measurement, others, facts, (), siblings=siblings).findings
    if row.footprint is not None:
        findings += judge_footprint(
            row.footprint,
            others,
            (),
            tuple(RULES),
            fixtures_alone=facts.simulated and not row.label,
        )
    results = [*(finding.result for finding in findings), *left]
    return None if worst(results) is Outcome.FAIL else results


def open_to_a_duet(rows: Sequence[Row], facts: DeviceFacts, *, strict: bool) -> list[Row]:
    """Flagged rows whose test fails or passes by the duet; the others fail whatever its verdict. Arguments as for `settled`."""
    failing = failing_in_themselves(rows, strict)
    found = []
    for row in flagged(rows):
        rest = without_regression(row, rows, facts)
        lost = is_failure(row.verdict, strict) and (
            rest is None or any(is_failure(one, strict) for one in rest)
        )
        if row.nodeid not in failing and not lost:
            found.append(row)
    return found


def asks_base(
    rows: Sequence[Row],
    missing: Sequence[Omission],
    new: Collection[str],
    edited: Callable[[str], bool],
    *,
    strict: bool,
) -> set[str]:
    """Node ids of the tests that one process of base is to run: for exact figures that grew or were compared with nothing, for the limits
    of calls in files that the change edits, and for tests that skip while they run.
    `new`: keys of rows that base does not have.
    `edited`: whether the change edits the file of a test.
    `strict`: as for `settled`.
    """
    failing = failing_in_themselves(rows, strict)
    asked = (
        row
        for row in rows
        if row.key not in new and row.nodeid not in failing and row.measured_something
    )
    of_rows = {row.nodeid for row in asked if open_results(row) or edited(row.nodeid)}
    return of_rows | {one.nodeid for one in missing if _may_be_excused(one)}


def _may_be_excused(one: Omission) -> bool:
    # What the baseline holds was measured on this GPU: a library that this machine lacks is no excuse.
    return one.skipped and one.what != ROW


def excused(missing: Sequence[Omission], skipped: Collection[str], name: str) -> list[Omission]:
    """What the screen did not judge; tests that skip in base too are no loss. `skipped`: their node ids. `name`: of base."""
    return [
        structs.replace(one, status=NOT_RUN, reason=f"{name} skips it too", base_too=True)
        if _may_be_excused(one) and one.nodeid in skipped
        else one
        for one in missing
    ]


def unknown_to_base(
    rows: Sequence[Row], of_base: Sequence[Row], finished: Collection[str]
) -> set[str]:
    """Keys of rows that a process of base does not have, of tests that it has. A row may be one of base's under another label.
    `of_base`: its rows.
    `finished`: node ids of the tests that passed or failed in it.
    """
    own, has = {row.key for row in rows}, {row.key for row in of_base}
    renamed = {row.nodeid for row in of_base if row.key not in own}
    return {
        row.key
        for row in rows
        if row.nodeid in finished and row.key not in has and row.nodeid not in renamed
    }


def held_by_base(
    rows: Sequence[Row], facts: DeviceFacts, base: OfBase, *, strict: bool
) -> list[Row]:
    """The rows, held to the limits of base's rows. `strict`: as for `settled`."""
    failing = failing_in_themselves(rows, strict)

    def held(row: Row) -> Row:
        siblings = {
            one.label: one.measurement
            for one in rows
            if one.nodeid == row.nodeid and one.measurement is not None
        }
        return held_to_base(
            row, base.figures[row.key], facts, siblings, base.name, partial(base.accepts, row.key)
        )

    return [
        held(row) if row.key in base.figures and row.nodeid not in failing else row for row in rows
    ]


def by_base(
    rows: Sequence[Row], facts: DeviceFacts, base: OfBase, *, strict: bool
) -> tuple[Row, ...]:
    """The rows, held to the limits of base's rows; those whose exact figures grew, or were compared with nothing, are judged by its.
    `strict`: as for `settled`.
    """
    failing = failing_in_themselves(rows, strict)

    def judged(row: Row) -> Row:
        if row.key not in base.figures or row.nodeid in failing:
            return row
        if open_results(row):
            row = against_base(
                row, base.figures[row.key], base.alone.get(row.key), facts, base.name
            )
        return structs.replace(row, failed=row.failed or is_failure(row.verdict, strict))

    return _with_failures(
        [judged(row) for row in held_by_base(rows, facts, base, strict=strict)], failing, strict
    )


def without_exact(rows: Sequence[Row], added: Acceptances, *, strict: bool) -> tuple[Row, ...]:
    """The rows without what the change accepts of their exact figures. Arguments as for `settled`."""
    failing = failing_in_themselves(rows, strict)
    left = [
        row if row.nodeid in failing else _accept(row, added.of(row.key, OF_COUNTS), OF_COUNTS)
        for row in rows
    ]
    return _with_failures(left, failing, strict)


def settled(
    rows: Sequence[Row],
    facts: DeviceFacts,
    duet: Mapping[str, DuetVerdict],
    added: Acceptances | None = None,
    *,
    strict: bool,
) -> tuple[Row, ...]:
    """The rows; flagged ones have the duet's verdict, if it judged them, and what the change accepts of them is ACCEPTED.
    `duet`: its verdicts, by `Row.key`.
    `added`: what the change accepts, of what counts.
    `strict`: the screen failed every row that is no PASS.
    """
    failing, changes = (
        failing_in_themselves(rows, strict),
        added if added is not None else Acceptances(),
    )
    after = [
        row
        if row.nodeid in failing
        else _without_accepted(
            _settled(row, rows, facts, duet.get(row.key)), duet.get(row.key), changes
        )
        for row in rows
    ]
    return _with_failures(after, failing, strict)


def _with_failures(rows: Sequence[Row], failing: set[str], strict: bool) -> tuple[Row, ...]:
    """The rows: all rows of a test fail with one of them, and no longer once none does. `failing`: tests that fail in themselves."""
    failing = failing | {row.nodeid for row in rows if is_failure(row.verdict, strict)}
    return tuple(
        structs.replace(row, failed=False) if row.failed and row.nodeid not in failing else row
        for row in rows
    )


def _without_accepted(row: Row, judged: DuetVerdict | None, added: Acceptances) -> Row:
    """The row without what the change accepts of its verdict. `judged`: the duet's verdict on it; None without one."""
    low = None
    if judged is not None and judged.outcome is Outcome.FAIL:
        # Of a test that fails in head, or measures in another way, no slow-down is known.
        low = judged.paired.least if judged.paired is not None else math.inf
    return _accept(row, added.of(row.key), OF_FIGURES, low)


def _accept(
    row: Row, accepted: Sequence[Acceptance], scopes: Collection[Scope], low: float | None = None
) -> Row:
    """The row without what is accepted of its verdict. Arguments as of `without_accepted`."""
    before = list(known(row))
    left = without_accepted(
        row, before, accepted, comparison=row.verdict.comparison, scopes=scopes, low=low
    )
    return row if left == before else with_verdict(row, left)


def _settled(row: Row, rows: Sequence[Row], facts: DeviceFacts, judged: DuetVerdict | None) -> Row:
    if judged is None or row not in flagged(rows):
        return row
    before = known(row)
    screen = f"the screen: {row.verdict.outcome.value}, {row.verdict.reason}"
    verdict = f"the duet: {judged.outcome.value if judged.outcome is not None else 'no verdict'}, {judged.sentence}"
    if judged.outcome is Outcome.FAIL:
        others = (
            structs.replace(one, reason="") for one in before if one.limit not in _TIME
        )  # the screen's reason has theirs
        slower = LimitResult("max_regression", Outcome.FAIL, Code.SLOWER, verdict)
        return structs.replace(with_verdict(row, [slower, *others], remarks=[screen]), failed=True)
    rest = without_regression(row, rows, facts) if judged.outcome is Outcome.PASS else None
    if rest is None:
        return with_verdict(row, before, remarks=[verdict])
    same_code = judged.paired is not None and judged.paired.same_code
    passed = LimitResult(
        "max_regression", Outcome.PASS, Code.SAME_CODE if same_code else None, verdict
    )
    accepted = (one for one in before if one.outcome is Outcome.ACCEPTED)
    return structs.replace(
        with_verdict(row, [passed, *rest, *accepted], remarks=[screen]), failed=False
    )


def decide(
    code: int,
    failures: int,
    rows: Sequence[Row],
    facts: DeviceFacts | None,
    duet: Mapping[str, DuetVerdict] | None,
    added: Acceptances | None = None,
    *,
    strict: bool,
    strict_screen: bool = False,
    base: OfBase = OfBase(),
    real: Sequence[str] = (),
    unrun: int = 0,
) -> Decision:
    """The gate's end.
    `code`: pytest's exit code of the screen.
    `failures`: failures and errors that pytest counted.
    `unrun`: how many of these are of tests that did not run, because another one lost the context.
    `facts`: of the device; None if pytest wrote no results.
    `duet`: its verdicts, by `Row.key`; None without a duet.
    `added`: as of `settled`.
    `strict`: green takes a PASS, or ACCEPTED, of every row with a limit, on a real GPU.
    `strict_screen`: the screen failed every row in doubt.
    `base`: what it says of the rows.
    `real`: the GPUs of the baseline, where the device is simulated and no word of the gate chose that.
    """
    if (broken := _broken_off(code, facts is not None and bool(rows))) is not None:
        return Decision(broken[0], tuple(rows), (broken[1],))
    assert facts is not None
    changes = added if added is not None else Acceptances()
    grown = by_base(rows, facts, base, strict=strict_screen)
    compared = without_exact(grown, changes, strict=strict_screen)
    after = settled(compared, facts, duet or {}, changes, strict=strict_screen)
    found: ByStanding = {one: [] for one in Standing}
    for row in after:
        found[standing(row, duet or {}, base, strict_screen=strict_screen)].append(row)
    of_calls = tuple(
        one
        for row in rows
        if row.key in base.figures
        for one in looser(row.key, row.limits, base.figures[row.key].limits)
    )
    shared = [
        line for before, row in zip(rows, grown, strict=True) for line in _shared(before, row, base)
    ]
    cleared = [
        f"cleared by the duet: {row.key}"
        for row, old in zip(after, compared, strict=True)
        if _cleared(old, row)
    ]
    if code == Exit.FAILED and failures == 0:
        end, remarks = (
            Exit.FAILED,
            ["red: pytest failed the session as a whole; its output says why"],
        )
    elif causes := _causes(found, rows, after, failures, unrun):
        end, remarks = Exit.FAILED, [f"red: {'; '.join(causes)}"]
    elif (why := _nothing_judged(after, real)) is not None:
        end, remarks = Exit.NO_VERDICT, [f"no verdict: {why}"]
    else:
        end, remarks = _judged(found, after, facts, duet, strict=strict)
    return Decision(
        end,
        after,
        (*loosened_lines(of_calls, changes), *shared, *cleared, *remarks),
        loosened=of_calls,
    )


def _cleared(before: Row, after: Row) -> bool:
    return before.failed and not after.failed and after.verdict.outcome is not Outcome.ACCEPTED


def _shared(before: Row, after: Row, base: OfBase) -> Iterator[str]:
    """A line about the figures of a row that grew against the baseline, and did not against base."""
    left = {one.limit for one in after.verdict.limits}
    grown = [
        one for one in open_results(before) if one.outcome is Outcome.FAIL and one.limit not in left
    ]
    if grown:
        yield f"{base.name} has it too: {before.key}: {'; '.join(one.reason for one in grown)}"


_ENDED: Mapping[int, tuple[Exit, str]] = {
    Exit.USAGE: (
        Exit.USAGE,
        "no verdict: pytest did not accept its arguments, its settings or the device",
    ),
    Exit.NO_TESTS: (Exit.NO_VERDICT, "no verdict: no tests were collected"),
}
_WITHOUT_ROWS: Mapping[int, tuple[Exit, str]] = {
    Exit.FAILED: (Exit.FAILED, "red: tests failed, and nothing was measured"),
    Exit.FINE: (Exit.NO_VERDICT, "no verdict: nothing was measured"),
}


def _broken_off(code: int, measured: bool) -> tuple[Exit, str] | None:
    """The exit code and the result of a screen that came to no rows or not to its end; None of any other."""
    if code in _WITHOUT_ROWS:
        return None if measured else _WITHOUT_ROWS[code]
    return _ENDED.get(code, (Exit.FAILED, f"red: pytest ended with {code} before its tests did"))


def _causes(
    found: ByStanding, before: Sequence[Row], after: Sequence[Row], failures: int, unrun: int
) -> list[str]:
    """What makes a gate red: rows, tests, and failures that neither accounts for. Arguments as of `decide`."""
    failed = found[Standing.FAILED]
    bad = {row.nodeid for row in (*failed, *found[Standing.ERROR]) if not did_not_run(row)}
    tests = bad - {row.nodeid for row in failed}
    # A test is cleared once all its rows are: others of it may fail.
    cleared = {row.nodeid for row in before if row.failed} - {
        row.nodeid for row in after if row.failed
    }
    others = failures - unrun - len(cleared) - len(bad)
    causes = (
        [f"{len(failed)} of {counted(len(after), 'row')} {'fails' if len(failed) == 1 else 'fail'}"]
        if failed
        else []
    )
    causes += (
        [f"{counted(len(tests), 'test')} failed by an assertion or an error of its own"]
        if tests
        else []
    )
    causes += [f"{counted(others, 'test')} failed without a measurement"] if others > 0 else []
    return causes + ([f"{counted(unrun, 'test')} did not run"] if unrun else [])


def _judged(
    found: ByStanding,
    rows: Sequence[Row],
    facts: DeviceFacts,
    duet: Mapping[str, DuetVerdict] | None,
    *,
    strict: bool,
) -> tuple[Exit, list[str]]:
    """The exit code of rows of which none fails, and the remarks, the result last."""
    end = _worst(EFFECTS[one].exit for one, those in found.items() if those)
    remarks = [
        _remark(one, row)
        for one, those in found.items()
        if EFFECTS[one].exit == end
        for row in those
        if EFFECTS[one].remark
    ]
    if end == Exit.NO_VERDICT:
        why = "" if duet is not None else ", and there was no duet to judge them"
        return end, [
            *remarks,
            f"no verdict: {len(found[Standing.OPEN])} of {counted(len(rows), 'row')} not judged{why}",
        ]
    remarks += _advice(rows)
    if strict and (why_not := _not_strict(found, len(rows), facts)) is not None:
        return Exit.NO_VERDICT, [*remarks, f"no verdict under --strict: {why_not}"]
    left = "".join(
        f", {len(found[one])} of them {one.name.lower()}" for one in _NO_PASS if found[one]
    )
    return end, [*remarks, f"green: {counted(len(rows), 'row')}{left}"]


def _nothing_judged(rows: Sequence[Row], real: Sequence[str]) -> str | None:
    """Why no row at all was judged; None if one was. `real`: as for `decide`."""
    if real:
        return f"the device is simulated, and the baseline is of {', '.join(real)}; -- --gpumem-device sim chooses the simulated device"
    if all(getattr(row.limits, name) is None for row in rows for name in LIMITS):
        return "no row has a limit; --max-regression sets one for all"
    return (
        "the conditions let no row be judged"
        if all(row.verdict.code is Code.CONDITIONS for row in rows)
        else None
    )


def _remark(one: Standing, row: Row) -> str:
    code = "" if row.verdict.code is None else f", {row.verdict.code.value}"
    return EFFECTS[one].remark.format(key=row.key, code=code, reason=row.verdict.reason)


def _advice(rows: Sequence[Row]) -> Iterator[str]:
    """What a reader of a green gate should know."""
    if free := sum(
        row.measurement is not None and row.limits.max_regression is None for row in rows
    ):
        yield f"no max_regression for {free} of {counted(len(rows), 'row')}, so no slow-down there is detected; see --max-regression"


def _not_strict(found: ByStanding, count: int, facts: DeviceFacts) -> str | None:
    """Why a green gate is none under --strict; None if it is."""
    doubtful = sum(len(those) for one, those in found.items() if EFFECTS[one].strict != Exit.FINE)
    if doubtful:
        return f"{doubtful} of {counted(count, 'row')} {'is' if doubtful == 1 else 'are'} no PASS"
    return "the device is simulated" if facts.simulated else None
