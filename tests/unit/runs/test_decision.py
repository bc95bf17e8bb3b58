"""What a gate makes of a screen and a duet."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from flagged_rows import row
from known_devices import H100
from msgspec.structs import replace

from pytest_gpumem.baselines.accepted import Acceptance, Acceptances, AcceptedChange, Scope
from pytest_gpumem.judging.expectations import LooserLimit
from pytest_gpumem.judging.paired import Paired
from pytest_gpumem.outcomes import Code, Exit, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import ITS_TEST_FAILED, NOT_REACHED, LimitResult, Omission, Row
from pytest_gpumem.records.what_ran import Step, StepKind, what_ran
from pytest_gpumem.runs.decision import (
    EFFECTS,
    Decision,
    OfBase,
    Standing,
    accepted_in_words,
    asks_base,
    by_base,
    decide,
    excused,
    flagged,
    if_meant,
    loosened_lines,
    open_to_a_duet,
    settled,
    standing,
    standing_of_missing,
    unknown_to_base,
    with_accepted,
    with_missing,
)
from pytest_gpumem.runs.reading import DuetVerdict

PASSED = DuetVerdict("", Outcome.PASS, "+0.1 %")
FAILED = DuetVerdict("", Outcome.FAIL, "slower: +3 %")
UNDECIDED = DuetVerdict(
    "", Outcome.UNDECIDED, "noisy", Paired(None, (0.0,) * 5, 0.01, 1.0, 1.0)
)  # the duet has spent its pairs
DISTURBED = DuetVerdict("", Outcome.UNDECIDED, "head in round 2, also when repeated: throttled")
NOT_COMPARED = DuetVerdict("", None, "base: skipped, no torch")


def decided(
    *rows: Row,
    failures: int | None = None,
    strict: bool = False,
    strict_screen: bool = False,
    **duet: DuetVerdict,
) -> Decision:
    failures = sum(one.failed for one in rows) if failures is None else failures
    said = {f"t.py::{name}": judged for name, judged in duet.items()}
    code = 1 if failures else 0
    return decide(code, failures, rows, H100, said, strict=strict, strict_screen=strict_screen)


NEW = DuetVerdict("", None, "base: it measured nothing", new=True)


@pytest.mark.parametrize(
    ("one", "judged", "expected"),
    [
        (row(Code.SLOWER), None, Standing.FAILED),
        (replace(row(), failed=True), None, Standing.ERROR),
        (row(Code.NO_BASELINE, delta=None), None, Standing.OPEN),
        (row(Code.NO_BASELINE, delta=None), NEW, Standing.NEW),
        (row(Outcome.ACCEPTED), None, Standing.ACCEPTED),
        (row(Code.NOISY), UNDECIDED, Standing.UNDECIDED),
        # No duet, and none that came to a verdict by its pairs.
        (row(Code.NOISY), None, Standing.OPEN),
        (row(Code.NOISY), DISTURBED, Standing.OPEN),
        (row(Code.LOOKS_SLOWER), NOT_COMPARED, Standing.OPEN),
        (row(Code.CONDITIONS), None, Standing.OPEN),
        (row(Code.MEASURED_DIFFERENTLY, delta=None), None, Standing.OPEN),
        (row(), None, Standing.PASSED),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_row_has_one_standing_from_which_the_exit_code_follows(
    one: Row, judged: DuetVerdict | None, expected: Standing, strict: bool
) -> None:
    duet = {} if judged is None else {"t.py::a": judged}
    assert standing(one, duet, OfBase(), strict_screen=False) is expected
    effect = EFFECTS[expected]
    failures = int(one.failed)
    decision = decide(failures, failures, (one, row(name="b")), H100, duet, strict=strict)
    assert decision.code == (effect.strict if strict else effect.exit)


@pytest.mark.parametrize(
    ("status", "by_words", "expected"),
    [
        ("lost", False, Standing.LOST),
        ("not run", False, Standing.LOST),
        ("not run", True, Standing.LEFT_OUT),
        ("accepted", False, Standing.LEFT_OUT),
        ("undecided", False, Standing.UNJUDGED),
    ],
)
def test_what_the_screen_lacks_has_a_standing_too(
    status: Any, by_words: bool, expected: Standing
) -> None:
    missing = Omission("t.py::b", "", status, "because", by_words=by_words)
    assert standing_of_missing(missing) is expected
    assert with_missing(decided(row()), [missing]).code == EFFECTS[expected].exit


def test_every_standing_has_an_effect_and_strictness_makes_none_better() -> None:
    order = (Exit.FINE, Exit.NO_VERDICT, Exit.FAILED)
    assert set(EFFECTS) == set(Standing)
    assert all(order.index(one.strict) >= order.index(one.exit) for one in EFFECTS.values())


def test_what_the_screen_flags_is_what_a_duet_can_decide() -> None:
    rows = [row(one, one.name) for one in (*Code, *Outcome)]
    kept = {
        "TOO_MUCH_MEMORY",
        "ACCEPTED",
        "NOT_READ",
        "PASS",
        "MEASURED",
        "FAIL",
    }  # FAIL: of an absolute limit
    assert {one.nodeid.removeprefix("t.py::") for one in flagged(rows)} == {
        one.nodeid.removeprefix("t.py::") for one in rows
    } - kept
    assert flagged([replace(one, limits=Limits()) for one in rows]) == []


@pytest.mark.parametrize("code", [Code.MEASURED_DIFFERENTLY, Code.CONDITIONS, Code.NO_BASELINE])
def test_what_the_screen_compared_with_nothing_is_for_the_duet_to_decide(code: Code) -> None:
    """It may be slower by any factor."""
    alone = row(code, delta=None)
    assert open_to_a_duet([alone], H100, strict=False) == [alone]
    red = decided(alone, row(name="b"), a=FAILED)
    assert (red.code, red.rows[0].verdict.outcome, red.rows[0].verdict.code) == (
        Exit.FAILED,
        Outcome.FAIL,
        Code.SLOWER,
    )
    cleared = decided(alone, strict=True, a=PASSED)
    assert (cleared.code, cleared.rows[0].verdict.outcome, cleared.rows[0].verdict.code) == (
        Exit.FINE,
        Outcome.PASS,
        None,
    )
    undecided = decided(alone, row(name="b"), a=UNDECIDED)
    assert (undecided.code, undecided.rows[0].verdict.outcome, undecided.rows[0].verdict.code) == (
        Exit.FINE,
        alone.verdict.outcome,
        code,
    )
    assert decided(undecided.rows[0], a=UNDECIDED, strict=True).code == Exit.NO_VERDICT
    # The duet could not compare it either.
    assert (
        decided(alone, row(name="b"), a=DuetVerdict("", None, "base: skipped, no torch")).code
        == Exit.NO_VERDICT
    )


@pytest.mark.parametrize("limit", [{"max_copies": "base"}, {"max_kernels": "base"}])
def test_the_duet_leaves_counts_as_the_screen_compared_them(limit: dict[str, Any]) -> None:
    """The duet has no baseline: its rows would be new."""
    noisy = row(Code.NOISY, **limit)
    assert decided(noisy, a=PASSED).rows[0].verdict.outcome is Outcome.PASS
    for outcome, code in ((Outcome.UNDECIDED, Code.CONDITIONS), (Outcome.NEW, Code.NO_BASELINE)):
        beside = and_of(noisy, LimitResult(next(iter(limit)), outcome, code, "so the screen"))
        decision = decided(beside, a=PASSED)
        after = decision.rows[0].verdict
        assert (after.outcome, after.code, decision.code) == (outcome, code, Exit.NO_VERDICT)
        assert "so the screen" in after.reason


def and_of(one: Row, *results: LimitResult) -> Row:
    """The row with further results of its screen."""
    return replace(one, verdict=replace(one.verdict, limits=(*one.verdict.limits, *results)))


def test_what_nobody_compared_is_not_green_unless_it_is_new_or_accepted() -> None:
    """An empty or mistyped baseline folder would let any slow-down pass."""
    without = row(Code.NO_BASELINE, delta=None)
    assert decided(without, row(name="b")).code == Exit.NO_VERDICT
    new = decided(
        without, row(name="b"), a=DuetVerdict("", None, "base: it measured nothing", new=True)
    )
    assert (new.code, new.remarks) == (
        Exit.FINE,
        ("new, base does not have it: t.py::a", "green: 2 rows, 1 of them new"),
    )
    accepted = row(Outcome.ACCEPTED)
    assert decided(accepted).remarks == (
        "a change of it is accepted: t.py::a",
        "green: 1 row, 1 of them accepted",
    )
    # A limit that nobody set is not broken either.
    unlimited = replace(row(), limits=Limits())
    assert "no max_regression for 1 of 2 rows" in decided(unlimited, row(name="b")).remarks[0]
    assert decided(unlimited).code == Exit.NO_VERDICT


def test_conditions_are_not_a_pass_of_a_limit_that_nobody_judged() -> None:
    throttled = row(Code.CONDITIONS, delta=None, max_latency="1 s")
    assert throttled.measurement is not None
    hot = tuple(
        replace(one, throttle_reasons=("sw_power_cap",)) for one in throttled.measurement.conditions
    )
    throttled = replace(throttled, measurement=replace(throttled.measurement, conditions=hot))
    assert decided(throttled, row(name="b"), a=PASSED).rows[0].verdict.code is Code.CONDITIONS


def test_conditions_that_let_nothing_be_judged_are_not_green() -> None:
    rows = (row(Code.CONDITIONS, delta=None), row(Code.CONDITIONS, "b", delta=None))
    decision = decided(*rows, a=UNDECIDED)
    assert (decision.code, decision.remarks) == (
        Exit.NO_VERDICT,
        ("no verdict: the conditions let no row be judged",),
    )
    assert decided(*rows, row(name="c"), a=UNDECIDED, b=UNDECIDED).code == Exit.FINE
    assert decided(*rows, row(name="c"), a=UNDECIDED, b=DISTURBED).code == Exit.NO_VERDICT
    alone = decide(0, 0, [*rows, row(name="c")], H100, None, strict=False)
    assert alone.remarks[0] == "not judged: t.py::a: said by the screen of a"
    assert (
        alone.remarks[-1]
        == "no verdict: 2 of 3 rows not judged, and there was no duet to judge them"
    )


def test_noise_is_green_only_once_the_duet_has_spent_its_pairs() -> None:
    assert decided(row(Code.NOISY), a=UNDECIDED).remarks[-1] == "green: 1 row, 1 of them undecided"
    assert decided(row(Code.NOISY)).code == Exit.NO_VERDICT
    for judged in (DISTURBED, NOT_COMPARED):
        assert decided(row(Code.NOISY), a=judged).code == Exit.NO_VERDICT
    # No duet judges another limit: one that is nearly broken is a doubt by noise.
    near = and_of(
        replace(row(), verdict=replace(row().verdict, outcome=Outcome.UNDECIDED, code=Code.NOISY)),
        NEARLY,
    )
    assert decided(near).remarks[-1] == "green: 1 row, 1 of them undecided"
    not_read = replace(NEARLY, code=Code.CONDITIONS)
    assert decided(and_of(near, not_read)).code == Exit.NO_VERDICT


NEARLY = LimitResult("max_latency", Outcome.UNDECIDED, Code.NOISY, "too close to call")


def test_all_passed() -> None:
    decision = decided(row(), row(name="b"))
    assert (decision.code, decision.remarks) == (Exit.FINE, ("green: 2 rows",))


def test_measured_rows_are_no_doubt_and_no_pass() -> None:
    measured = row(Outcome.MEASURED, "b", max_regression=None)
    for strict in (False, True):
        decision = decided(row(), measured, strict=strict)
        assert (decision.code, decision.remarks[-1]) == (
            Exit.FINE,
            "green: 2 rows, 1 of them measured",
        )
    assert decided(measured).remarks[-1].startswith("no verdict: no row has a limit")


def test_a_flagged_row_stands_unless_the_duet_clears_it() -> None:
    assert decided(row(Code.SLOWER)).code == Exit.FAILED
    cleared = decided(row(Code.SLOWER), a=PASSED)
    assert cleared.code == Exit.FINE
    assert cleared.remarks == ("cleared by the duet: t.py::a", "green: 1 row")
    (after,) = cleared.rows
    assert (after.failed, after.verdict.outcome) == (False, Outcome.PASS)
    assert (
        after.verdict.reason == "the duet: PASS, +0.1 %; the screen: FAIL, said by the screen of a"
    )
    for undecided in (UNDECIDED, DuetVerdict("", None, "head: the test fails")):
        decision = decided(row(Code.CREPT), a=undecided)
        assert (decision.code, decision.rows[0].verdict.code) == (Exit.FAILED, Code.CREPT)
        assert decision.rows[0].verdict.reason.endswith(
            f"; the duet: {undecided.outcome.value if undecided.outcome else 'no verdict'}, {undecided.sentence}"
        )


DOUBTS = (Code.NOISY, Code.LOOKS_SLOWER, Code.TOO_FEW_RUNS)


@pytest.mark.parametrize("code", DOUBTS)
@pytest.mark.parametrize("delta", [0.03, -0.001])
def test_a_duet_decides_what_the_screen_could_not(code: Code, delta: float) -> None:
    doubt = row(code, delta=delta)
    assert (decided(doubt).code, decided(doubt, a=UNDECIDED).code) == (Exit.NO_VERDICT, Exit.FINE)
    assert decided(doubt, a=UNDECIDED, strict=True).code == Exit.NO_VERDICT
    assert decided(doubt, strict=True, a=PASSED).code == Exit.FINE
    red = decided(doubt, a=FAILED)
    assert (red.code, red.rows[0].failed, red.rows[0].verdict.outcome) == (
        Exit.FAILED,
        True,
        Outcome.FAIL,
    )
    assert decided(doubt, a=UNDECIDED).remarks[0] == f"undecided, {code.value}: t.py::a"
    # pytest, itself strict, failed the test: the duet clears it all the same.
    assert (
        decided(replace(doubt, failed=True), failures=1, strict_screen=True, a=PASSED).code
        == Exit.FINE
    )


@pytest.mark.parametrize("code", [*DOUBTS, Code.SLOWER])
def test_an_assertion_that_failed_is_not_cleared_by_a_duet_in_which_it_held(code: Code) -> None:
    """Wrong results now and then are a mistake, and none that a duet looks for."""
    flaky = replace(row(code), failed=True, test_error=True)
    decision = decided(flaky, row(name="b"), failures=1, a=PASSED)
    assert (decision.code, decision.rows[0].failed) == (Exit.FAILED, True)
    assert open_to_a_duet([flaky, row(code, "b")], H100, strict=False) == [row(code, "b")]
    assert decided(row(Code.SLOWER), failures=1, a=PASSED).code == Exit.FINE


def test_the_other_rows_of_a_test_are_cleared_with_the_one_that_failed_it() -> None:
    beside = replace(row(label="y"), failed=True)
    both = (row(Code.SLOWER, label="x"), beside)
    decision = decide(1, 1, both, H100, {"t.py::a[x]": PASSED}, strict=True)
    assert decision.code == Exit.FINE
    assert not any(one.failed for one in decision.rows)
    claim = replace(row(Outcome.FAIL, label="y", delta=None), limits=Limits())
    assert (
        decide(1, 1, (both[0], claim), H100, {"t.py::a[x]": PASSED}, strict=False).code
        == Exit.FAILED
    )


def test_a_duet_clears_a_slow_down_and_nothing_else() -> None:
    """Not a broken limit of another kind, a claim that does not hold, or a test's own failure."""
    broken = decided(row(Code.SLOWER, max_latency="1 us"), a=PASSED)
    assert (broken.code, broken.rows[0].failed) == (Exit.FAILED, True)
    both = (row(Code.SLOWER, label="y", faster_than="2 x x"), row(label="x"))
    assert decide(1, 1, both, H100, {"t.py::a[y]": PASSED}, strict=False).code == Exit.FAILED
    assert decided(replace(row(), failed=True), failures=1, a=PASSED).code == Exit.FAILED


def test_a_duet_clears_no_memory() -> None:
    """It compares times; a row that is slower too has the code of the memory."""
    too_much = row(Code.TOO_MUCH_MEMORY)
    assert decided(too_much, a=PASSED).code == Exit.FAILED
    # Beside a doubt about the time, a limit on memory that could not be judged stays a doubt.
    unseen = replace(
        row(Code.NOISY, max_kept="0 B"), footprint=Footprint(0, not_watched=("no GPU",))
    )
    (settled_row,) = decided(unseen, a=PASSED).rows
    assert (settled_row.verdict.outcome, settled_row.verdict.code) == (
        Outcome.UNDECIDED,
        Code.NOT_READ,
    )
    memory_alone = replace(too_much, measurement=None, footprint=Footprint(1))
    assert "1 of 1 row fails" in decided(memory_alone).remarks[-1]


def test_memory_that_was_not_read_is_no_verdict_unless_a_simulated_device_does_not_show_it() -> (
    None
):
    unread = row(Code.NOT_READ, max_kept="0 B", max_regression=None)
    assert decided(row(name="b"), unread).code == Exit.NO_VERDICT
    simulated = replace(unread, verdict=replace(unread.verdict, simulated=True))
    decision = decided(row(name="b"), simulated)
    assert (decision.code, decision.remarks[-1]) == (
        Exit.FINE,
        "green: 2 rows, 1 of them undecided",
    )


def test_what_fails_whatever_a_duet_says_needs_none() -> None:
    """A limit of another kind, a claim: red at once."""
    limits: dict[str, dict[str, Any]] = {
        "b": {"max_latency": "1 us"},
        "c": {"min_bandwidth": "1 TB/s"},
    }
    lost = [
        *(row(Code.SLOWER, name, **given) for name, given in limits.items()),
        row(Outcome.FAIL, "e", max_latency="1 us"),
        replace(row(name="f", label="x"), failed=True),
        row(Outcome.FAIL, "f", label="y", faster_than="2 x x"),
    ]
    for one in lost:
        assert decided(one, b=PASSED, c=PASSED, d=PASSED, e=PASSED).code == Exit.FAILED
    open_ = [
        row(Code.SLOWER, "g"),
        row(Code.LOOKS_SLOWER, "h", max_latency="1 s"),
        row(Code.CONDITIONS, "i", delta=None),
    ]
    assert open_to_a_duet([*lost, *open_, row(name="j")], H100, strict=False) == open_
    assert open_to_a_duet(open_, H100, strict=True) == open_


def test_a_limit_that_is_nearly_broken_stays_a_doubt() -> None:
    near = row(Code.SLOWER, max_latency="1.004 ms")
    assert near.measurement is not None
    near = replace(
        near,
        measurement=replace(near.measurement, placements=((1e-3,), (1.01e-3,)), half_width=0.05e-3),
    )
    after = decided(near, a=PASSED).rows[0]
    assert (after.verdict.outcome, after.failed) == (Outcome.UNDECIDED, False)
    assert "max_latency" in after.verdict.reason


def test_failures_that_no_row_accounts_for_are_red() -> None:
    """An ordinary test, a teardown: pytest counted more failures than the duet cleared tests."""
    decision = decided(row(Code.SLOWER), failures=2, a=PASSED)
    assert decision.code == Exit.FAILED
    assert decision.remarks[-1] == "red: 1 test failed without a measurement"
    assert decided(row(), failures=1).code == Exit.FAILED
    two = (row(Code.SLOWER, label="x"), row(Code.SLOWER, label="y"))
    assert (
        decide(1, 1, two, H100, {"t.py::a[x]": PASSED, "t.py::a[y]": PASSED}, strict=False).code
        == Exit.FINE
    )
    assert decide(1, 1, two, H100, {"t.py::a[x]": PASSED}, strict=False).code == Exit.FAILED


def test_rows_that_fail_with_their_test_are_counted_as_tests() -> None:
    beside = (replace(row(label="x"), failed=True), replace(row(label="y"), failed=True))
    own = "1 test failed by an assertion or an error of its own"
    assert decide(1, 1, beside, H100, None, strict=False).remarks == (f"red: {own}",)
    early = replace(row(Code.SLOWER, "b"), measurement=None)
    assert decide(1, 1, [early, row()], H100, None, strict=False).remarks == (f"red: {own}",)
    slow = (row(Code.SLOWER, "c", label="x"), replace(row(name="c", label="y"), failed=True))
    every = decide(1, 4, [*slow, *beside, row()], H100, None, strict=False)
    assert every.remarks == (
        f"red: 1 of 5 rows fails; {own}; 2 tests failed without a measurement",
    )
    # A strict pytest fails by it.
    doubtful = replace(row(Code.NOISY), failed=True)
    assert decided(doubtful, strict_screen=True).remarks == ("red: 1 of 1 row fails",)


def test_a_session_that_failed_as_a_whole_is_red() -> None:
    assert decide(1, 0, [row()], H100, None, strict=False).code == Exit.FAILED


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, Exit.NO_VERDICT),
        (1, Exit.FAILED),
        (2, Exit.FAILED),
        (3, Exit.FAILED),
        (4, Exit.USAGE),
        (5, Exit.NO_VERDICT),
        (6, Exit.FAILED),
        (-11, Exit.FAILED),
        (137, Exit.FAILED),
    ],
)
def test_no_results_are_never_green(code: int, expected: int) -> None:
    assert decide(code, 0, (), None, None, strict=False).code == expected
    assert decide(code, 0, (), H100, None, strict=False).code == expected


@pytest.mark.parametrize("code", [2, 3, 4, 5, -9])
def test_a_run_that_broke_off_is_never_green_whatever_it_measured(code: int) -> None:
    assert decide(code, 0, [row()], H100, None, strict=False).code != Exit.FINE


def test_strict_takes_a_real_gpu_and_a_baseline() -> None:
    simulated = replace(H100, simulated=True)
    assert decide(0, 0, [row()], simulated, None, strict=True).code == Exit.NO_VERDICT
    assert decide(0, 0, [row()], simulated, None, strict=False).code == Exit.FINE
    new = DuetVerdict("", None, "base: it measured nothing", new=True)
    assert decided(row(Code.NO_BASELINE, delta=None), strict=True, a=new).code == Exit.NO_VERDICT


def test_rows_that_were_not_flagged_are_left_alone() -> None:
    fine = row()
    assert settled([fine], H100, {"t.py::a": FAILED}, strict=False) == (fine,)


def test_a_pass_of_the_duet_by_the_same_code_says_so() -> None:
    (after,) = decided(
        row(Code.NOISY),
        a=dataclasses.replace(
            PASSED, paired=Paired(Outcome.PASS, (0.0,) * 5, 0.01, 1.0, 0.04, same_code=True)
        ),
    ).rows
    assert (after.verdict.outcome, after.verdict.code) == (Outcome.PASS, Code.SAME_CODE)


# What the change accepts


def accepting(*changes: AcceptedChange) -> Acceptances:
    return Acceptances([Acceptance("t.py::a", "checks bounds", "ada", changes)])


def time(size: str) -> Acceptances:
    return accepting(AcceptedChange("t.py::a", Scope.TIME, size))


def slower(*more: LimitResult, **changes: Any) -> Row:
    """A row that the screen finds 3 % slower."""
    found = row(Code.SLOWER, **changes)
    return replace(
        found,
        verdict=replace(
            found.verdict, limits=(LimitResult("max_regression", Outcome.FAIL, Code.SLOWER), *more)
        ),
    )


def by_duet(*changes: float) -> DuetVerdict:
    pairs = tuple(math.log1p(change) for change in changes)
    return DuetVerdict(
        "", Outcome.FAIL, "slower", paired=Paired(Outcome.FAIL, pairs, 0.01, 1e-6, 1.0)
    )


@pytest.mark.parametrize(
    ("judged", "size", "code"),
    [
        (None, "3%", 0),
        (None, "2.9%", 1),
        (by_duet(*[0.08] * 11), "8%", 0),
        (by_duet(*[0.08] * 11), "7.9%", 1),
        (by_duet(0.5, 0.52, 0.51), "50%", 0),  # too few for an interval: the smallest pair
        (by_duet(0.5, 0.52, 0.51), "49%", 1),
        (DuetVerdict("", Outcome.FAIL, "head: the test fails"), "900%", 1),
        (UNDECIDED, "3%", 0),
    ],
)
def test_a_slow_down_is_accepted_up_to_its_size(
    judged: DuetVerdict | None, size: str, code: int
) -> None:
    duet = {} if judged is None else {"t.py::a": judged}
    for strict in (False, True):
        decision = decide(1, 1, [slower()], H100, duet, time(size), strict=strict)
        assert decision.code == code
        (after,) = decision.rows
        outcome = Outcome.FAIL if code else Outcome.ACCEPTED
        assert (after.verdict.outcome, after.failed) == (outcome, bool(code))
    assert decide(1, 1, [slower()], H100, duet, None, strict=False).code == Exit.FAILED


def test_what_a_test_fails_by_itself_is_never_accepted() -> None:
    for one in (replace(slower(), test_error=True), replace(row(Outcome.FAIL), measurement=None)):
        assert decide(1, 1, [one], H100, {}, time("900%"), strict=False).code == Exit.FAILED
    beside = slower(LimitResult("max_latency", Outcome.FAIL))
    assert decide(1, 1, [beside], H100, {}, time("900%"), strict=False).code == Exit.FAILED


def test_a_red_gate_names_the_command_that_accepts_it() -> None:
    red = decide(1, 1, [slower(), row(Outcome.FAIL, "b")], H100, {}, None, strict=False)
    assert if_meant(red) == "gpumem accept t.py::a --reason '...'"
    lost = with_missing(
        red, [Omission(f"t.py::{name}", "", "lost", "gone") for name in ("a", "b [c]", "d", "e")]
    )
    assert if_meant(lost) == "gpumem accept t.py::a 't.py::b [c]' t.py::d --reason '...'"
    crashed = with_missing(
        red, [Omission("t.py::d", "", "lost", why) for why in (NOT_REACHED, ITS_TEST_FAILED)]
    )
    assert if_meant(crashed) == if_meant(red)
    assert not any("gpumem accept" in line for line in crashed.remarks)
    for one in (replace(slower(), test_error=True), row(Outcome.FAIL)):
        assert if_meant(decide(1, 1, [one], H100, {}, None, strict=False)) == ""
    assert if_meant(decided(row())) == ""


def test_a_row_that_a_duet_passes_is_accepted_by_its_kernels() -> None:
    """The screen took them out of its verdict."""
    noisy = row(Code.NOISY)
    noisy = replace(noisy, verdict=replace(noisy.verdict, accepted=("max_kernels",)))
    assert decided(noisy, a=PASSED).rows[0].verdict.outcome is Outcome.ACCEPTED
    assert decided(noisy, a=UNDECIDED).rows[0].verdict.outcome is Outcome.UNDECIDED
    assert decided(noisy, a=FAILED).code == Exit.FAILED


def test_a_green_gate_that_accepts_something_never_ends_with_green() -> None:
    changes = accepting(
        AcceptedChange("t.py::a", Scope.TIME, "3%"),
        AcceptedChange("t.py::a", Scope.LIMIT, "9%", "max_latency"),
    )
    decision = decide(1, 1, [slower(), row(name="b")], H100, {}, changes, strict=False)
    looser = [
        LooserLimit("t.py::a", "max_latency", "1 s", "2 s"),
        LooserLimit("t.py::b", "max_latency", "1 s", None),
    ]
    changes = accepting(AcceptedChange("t.py::a", Scope.LIMIT, "2 s", "max_latency"))
    assert loosened_lines(looser, changes) == [
        "limit of t.py::a: max_latency 1 s -> 2 s in this change (accepted, ada: checks bounds)",
        "limit of t.py::b: max_latency 1 s -> none in this change (1 s holds)",
    ]
    gone = Omission("t.py::c", "", "accepted", "its removal was accepted (ada: gone)")
    words = accepted_in_words(decision, [gone], looser, {}, changes)
    assert words == {"t.py::a": ["+3.00 %", "max_latency 1 s -> 2 s"], "t.py::c": ["removed"]}
    ended = with_accepted(with_missing(decision, [gone]), words)
    assert ended.remarks[-2:] == (
        "2 rows, 1 of them accepted",
        "ACCEPTED: 2 tests +3.00 %, max_latency 1 s -> 2 s, removed by this change",
    )
    assert with_accepted(decision, {}) == decision
    red = decide(1, 1, [slower()], H100, {}, None, strict=False)
    assert with_accepted(red, words) == red


def test_a_lost_measurement_is_red_whatever_the_rows_say() -> None:
    lost = Omission("t.py::b", "y", "lost", "its test passed without it")
    accepted, not_run = (
        replace(lost, status="accepted"),
        replace(lost, status="not run", reason="deselected by -k", by_words=True),
    )
    left_out = replace(not_run, reason="deselected by conftest.py", by_words=False)
    unjudged = replace(
        lost, status="undecided", what="max_latency", reason="the test passed and measured nothing"
    )
    green = decide(0, 0, [row()], H100, None, strict=False)
    nothing = decide(5, 0, (), None, None, strict=False)
    for decision in (green, nothing):
        assert with_missing(decision, [lost]).code == Exit.FAILED
        assert with_missing(decision, [accepted, not_run]).code == decision.code
        assert with_missing(decision, [left_out]).code == Exit.FAILED
        assert with_missing(decision, [unjudged]).code == Exit.NO_VERDICT
    assert "t.py::b[y]" in with_missing(green, [lost]).remarks[0]
    red = with_missing(decide(1, 1, [row()], H100, None, strict=False), [lost])
    assert (
        red.remarks[-1]
        == "red: 1 measurement of the baseline lost; 1 test failed without a measurement"
    )
    assert with_missing(decide(4, 0, (), None, None, strict=False), [lost]).code == Exit.USAGE


# The exact figures of base


def watched(one: Row, kernels: int = 1, peak: int | None = None) -> Row:
    """The row with so many kernels in a launch, and such a peak."""
    assert one.measurement is not None
    ran = what_ran([Step(StepKind.KERNEL, "triad", code="a")] * kernels, {})
    footprint = None if peak is None else Footprint(peak, watched=("CUPTI",), driver_peak=peak)
    return replace(one, measurement=replace(one.measurement, what_ran=ran), footprint=footprint)


def grown(outcome: Outcome, limit: str = "max_kernels", **more: Any) -> Row:
    """A row whose screen compared an exact figure with a baseline, or with nothing."""
    code = {
        Outcome.FAIL: Code.TOO_MUCH_MEMORY if limit == "max_peak_regression" else None,
        Outcome.NEW: Code.NO_BASELINE,
    }[outcome]
    value = {"max_kernels": "base", "max_peak_regression": "0 B"}[limit]
    limits: dict[str, Any] = {"max_regression": None, limit: value}
    one = row(**limits, **more)
    result = LimitResult(limit, outcome, code, f"{limit} so the screen")
    verdict = replace(
        one.verdict, outcome=outcome, code=code, reason=result.reason, limits=(result,)
    )
    return watched(replace(one, verdict=verdict, failed=outcome is Outcome.FAIL), 2, 96 << 20)


def of_base(*rows: Row, new: tuple[str, ...] = ()) -> OfBase:
    alone = {one.key: one for one in (watched(row(), 2, 96 << 20),)}
    return OfBase("main", frozenset(new), {one.key: one for one in rows}, alone)


@pytest.mark.parametrize("limit", ["max_kernels", "max_peak_regression"])
@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.NEW])
def test_base_judges_exact_figures(limit: str, outcome: Outcome) -> None:
    one = grown(outcome, limit)
    failures = int(one.failed)

    def with_base(base: OfBase) -> Decision:
        return decide(failures, failures, [one, row(name="b")], H100, None, strict=False, base=base)

    # Without its figures a growth stands, and what was compared with nothing is no verdict.
    assert with_base(of_base()).code == (
        Exit.FAILED if outcome is Outcome.FAIL else Exit.NO_VERDICT
    )
    alike = replace(row(), limits=one.limits)
    too = with_base(of_base(watched(alike, 2, 96 << 20)))
    assert (too.code, too.rows[0].failed, too.rows[0].verdict.outcome) == (
        Exit.FINE,
        False,
        Outcome.PASS,
    )
    assert too.remarks[:-1] == (
        (f"main has it too: t.py::a: {limit} so the screen",) if outcome is Outcome.FAIL else ()
    ) + (
        "no max_regression for 1 of 2 rows, so no slow-down there is detected; see --max-regression",
    )
    own = with_base(of_base(watched(alike, 1, 64 << 20)))
    assert (own.code, own.rows[0].failed, own.rows[0].verdict.outcome) == (
        Exit.FAILED,
        True,
        Outcome.FAIL,
    )
    assert " main" in own.rows[0].verdict.reason
    assert own.remarks[-1] == "red: 1 of 2 rows fails"
    if outcome is Outcome.NEW:
        new = with_base(of_base(new=("t.py::a",)))
        assert (new.code, new.remarks[0]) == (Exit.FINE, "new, base does not have it: t.py::a")


def test_memory_is_compared_in_processes_of_the_same_tests() -> None:
    """A test takes more memory if no other called a library before it."""
    one = grown(Outcome.FAIL, "max_peak_regression")
    base = of_base(watched(replace(row(), limits=one.limits), 2, 100 << 20))

    def code(base: OfBase) -> int:
        return decide(1, 1, [one, row(name="b")], H100, None, strict=False, base=base).code

    assert code(base) == Exit.FINE
    first = dataclasses.replace(base, alone={one.key: watched(one, 2, 116 << 20)})
    assert code(first) == Exit.FAILED
    assert code(dataclasses.replace(base, alone={})) == Exit.FAILED  # its own process crashed


def test_base_leaves_the_rest_of_a_row_to_the_duet() -> None:
    one = grown(Outcome.FAIL)
    slow = LimitResult("max_regression", Outcome.FAIL, Code.SLOWER, "slower")
    both = and_of(replace(one, limits=replace(one.limits, max_regression="1%")), slow)
    base = of_base(watched(row(), 2))
    (compared,) = by_base([both], H100, base, strict=False)
    assert (compared.verdict.outcome, compared.verdict.code, compared.failed) == (
        Outcome.FAIL,
        Code.SLOWER,
        True,
    )
    assert flagged([compared]) == [compared]
    judged = {"t.py::a": PASSED}
    assert decide(1, 1, [both], H100, judged, strict=False, base=base).code == Exit.FINE
    assert decide(1, 1, [both], H100, None, strict=False, base=base).code == Exit.FAILED


def test_a_row_is_held_to_the_limits_that_base_has_for_it() -> None:
    """Those of its calls: of markers and of the session the screen knows."""
    fine = replace(row(), limits=Limits(max_regression="900%", origin={"max_regression": "call"}))
    strict_base = of_base(
        replace(row(), limits=Limits(max_regression="1%", max_latency="1 us", origin={}))
    )
    (after,) = by_base([fine], H100, strict_base, strict=False)
    assert (after.limits.max_regression, after.limits.max_latency, after.failed) == (
        "1%",
        "1 us",
        True,
    )
    assert after.limits.origin["max_regression"] == "limit of main"
    decision = decide(0, 0, [fine], H100, {"t.py::a": PASSED}, strict=False, base=strict_base)
    assert decision.code == Exit.FAILED
    assert decision.remarks[:2] == (
        "limit of t.py::a: max_latency 1 us -> none in this change (1 us holds)",
        "limit of t.py::a: max_regression 1% -> 900% in this change (1% holds)",
    )
    slower_only = of_base(row())
    assert flagged(by_base([fine], H100, slower_only, strict=False)) != []
    assert decide(0, 0, [fine], H100, None, strict=False, base=slower_only).code == Exit.NO_VERDICT
    assert (
        decide(0, 0, [fine], H100, {"t.py::a": PASSED}, strict=False, base=slower_only).code
        == Exit.FINE
    )
    accepted = dataclasses.replace(
        slower_only,
        accepts=lambda key, limit, value: (
            (key, limit, value) == ("t.py::a", "max_regression", "900%")
        ),
    )
    assert decide(0, 0, [fine], H100, None, strict=False, base=accepted).code == Exit.FINE


def test_base_clears_no_failure_of_the_test_itself() -> None:
    flaky = replace(grown(Outcome.FAIL), test_error=True)
    assert asks_base([flaky], (), (), lambda nodeid: True, strict=False) == set()
    assert (
        decide(1, 1, [flaky], H100, None, strict=False, base=of_base(watched(row(), 2))).code
        == Exit.FAILED
    )


def test_base_runs_what_it_is_to_judge_and_no_more() -> None:
    skipped = Omission("t.py::s", "", "lost", "its test skipped", "test", skipped=True)
    of_baseline = replace(skipped, nodeid="t.py::r", what="row")
    rows = [grown(Outcome.NEW), row(name="b"), row(Code.SLOWER, "c"), grown(Outcome.NEW, name="d")]
    assert asks_base(
        rows, (skipped, of_baseline), ("t.py::d",), lambda nodeid: False, strict=False
    ) == {"t.py::a", "t.py::s"}
    assert asks_base(rows, (), ("t.py::d",), "t.py::b".__eq__, strict=False) == {
        "t.py::a",
        "t.py::b",
    }
    excused_one, lost = excused((skipped, of_baseline), {"t.py::s", "t.py::r"}, "main")
    assert (excused_one.status, excused_one.reason, excused_one.accounted) == (
        "not run",
        "main skips it too",
        True,
    )
    assert lost == of_baseline


def test_a_row_of_a_test_that_base_has_is_new_unless_it_has_another_name_there() -> None:
    rows = [row(label="x"), row(name="b", label="y"), row(name="c"), row(name="d")]
    of_base_rows = [row(label="x"), row(name="b", label="old"), row(name="d")]
    finished = {"t.py::a", "t.py::b", "t.py::c", "t.py::d"}
    assert unknown_to_base(rows, of_base_rows, finished) == {"t.py::c"}
    assert unknown_to_base(rows, of_base_rows, finished - {"t.py::c"}) == set()


def test_a_simulated_device_in_place_of_the_baselines_is_no_verdict() -> None:
    decision = decide(
        0, 0, [row()], replace(H100, simulated=True), None, strict=False, real=("NVIDIA-H100",)
    )
    assert decision.code == Exit.NO_VERDICT
    assert decision.remarks[-1].startswith(
        "no verdict: the device is simulated, and the baseline is of NVIDIA-H100; "
    )
