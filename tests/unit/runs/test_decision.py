"""What a gate makes of a screen and a duet."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from flagged_rows import row
from known_devices import H100
from msgspec.structs import replace

from pytest_gpumem.judging.paired import Paired
from pytest_gpumem.outcomes import Code, Exit, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Missing, Row
from pytest_gpumem.records.what_ran import Step, StepKind, what_ran
from pytest_gpumem.runs.decision import (
    Decision,
    decide,
    flagged,
    open_to_a_duet,
    settled,
    with_missing,
)
from pytest_gpumem.runs.reading import DuetVerdict
from pytest_gpumem.runs.workers import accepted

PASSED = DuetVerdict("", Outcome.PASS, "+0.1 %")
FAILED = DuetVerdict("", Outcome.FAIL, "slower: +3 %")
UNDECIDED = DuetVerdict("", Outcome.UNDECIDED, "noisy")


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


def test_what_the_screen_flags_is_what_a_duet_can_decide() -> None:
    rows = [row(one, one.name) for one in (*Code, *Outcome)]
    kept = {"FASTER", "TOO_MUCH_MEMORY", "ACCEPTED", "PASS", "FAIL"}  # a FAIL without a code is of an absolute limit
    assert {one.nodeid.removeprefix("t.py::") for one in flagged(rows)} == {one.nodeid.removeprefix("t.py::") for one in rows} - kept
    assert flagged([replace(one, limits=Limits()) for one in rows]) == []


@pytest.mark.parametrize("code", [Code.MEASURED_DIFFERENTLY, Code.OTHER_CARD_VARIANT, Code.CONDITIONS, Code.NO_BASELINE])
def test_what_the_screen_compared_with_nothing_is_for_the_duet_to_decide(code: Code) -> None:
    """It may be slower by any factor."""
    alone = row(code, delta=None)
    assert open_to_a_duet([alone], H100, strict=False) == [alone]
    red = decided(alone, row(name="b"), a=FAILED)
    assert (red.code, red.rows[0].verdict.outcome, red.rows[0].verdict.code) == (Exit.FAILED, Outcome.FAIL, Code.SLOWER)
    cleared = decided(alone, strict=True, a=PASSED)
    assert (cleared.code, cleared.rows[0].verdict.outcome, cleared.rows[0].verdict.code) == (Exit.FINE, Outcome.PASS, None)
    undecided = decided(alone, row(name="b"), a=UNDECIDED)
    assert (undecided.code, undecided.rows[0].verdict.outcome, undecided.rows[0].verdict.code) == (Exit.FINE, alone.verdict.outcome, code)
    assert decided(undecided.rows[0], a=UNDECIDED, strict=True).code == Exit.NO_VERDICT
    # The duet could not compare it either.
    assert decided(alone, row(name="b"), a=DuetVerdict("", None, "base: skipped, no torch")).code == Exit.NO_VERDICT


@pytest.mark.parametrize("limit", [{"same_kernels": "true"}, {"max_kernels": "baseline"}])
def test_the_duet_leaves_counts_as_the_screen_compared_them(limit: dict[str, Any]) -> None:
    """The duet has no baseline: its rows would be new."""
    noisy = row(Code.NOISY, **limit)
    assert noisy.measurement is not None
    watched = replace(noisy, measurement=replace(noisy.measurement, what_ran=what_ran([Step(StepKind.KERNEL, "triad", code="a")], {})))
    assert decided(watched, a=PASSED).rows[0].verdict.outcome is Outcome.PASS
    assert decided(noisy, a=PASSED).rows[0].verdict.outcome is Outcome.UNDECIDED
    new = replace(watched, verdict=replace(watched.verdict, outcome=Outcome.NEW, code=Code.NO_BASELINE))
    assert decided(new, a=PASSED).rows[0].verdict.outcome is Outcome.NEW


def test_what_nobody_compared_is_not_green_unless_it_is_new_or_accepted() -> None:
    """An empty or mistyped baseline folder would let any slow-down pass."""
    without = row(Code.NO_BASELINE, delta=None)
    assert decided(without, row(name="b")).code == Exit.NO_VERDICT
    new = decided(without, row(name="b"), a=DuetVerdict("", None, "base: it measured nothing", new=True))
    assert (new.code, new.remarks) == (Exit.FINE, ("new, base does not have it: t.py::a", "green: 2 rows, 1 of them new"))
    accepted = row(Code.ACCEPTED, delta=None)
    assert decided(accepted).remarks == ("a change of it was accepted: t.py::a", "green: 1 row, 1 of them accepted")
    # A limit that nobody set is not broken either.
    unlimited = replace(row(), limits=Limits())
    assert "1 of 2 rows have no max_regression" in decided(unlimited, row(name="b")).remarks[0]
    assert decided(unlimited).code == Exit.NO_VERDICT


def test_conditions_are_not_a_pass_of_a_limit_that_nobody_judged() -> None:
    throttled = row(Code.CONDITIONS, delta=None, max_latency="1 s")
    assert throttled.measurement is not None
    hot = tuple(replace(one, throttle_reasons=("sw_power_cap",)) for one in throttled.measurement.conditions)
    throttled = replace(throttled, measurement=replace(throttled.measurement, conditions=hot))
    assert decided(throttled, row(name="b"), a=PASSED).rows[0].verdict.code is Code.CONDITIONS


def test_conditions_that_let_nothing_be_judged_are_not_green() -> None:
    rows = (row(Code.CONDITIONS, delta=None), row(Code.CONDITIONS, "b", delta=None))
    decision = decided(*rows, a=UNDECIDED)
    assert (decision.code, decision.remarks) == (Exit.NO_VERDICT, ("no verdict: the conditions let no row be judged",))
    assert decided(*rows, row(name="c"), a=UNDECIDED, b=UNDECIDED).code == Exit.FINE
    # Without a duet too the conditions alone are a warning.
    assert decide(0, 0, [*rows, row(name="c")], H100, None, strict=False).remarks[0] == "undecided, conditions: t.py::a"


def test_all_passed() -> None:
    decision = decided(row(), row(name="b"))
    assert (decision.code, decision.remarks) == (Exit.FINE, ("green: 2 rows",))


def test_a_flagged_row_stands_unless_the_duet_clears_it() -> None:
    assert decided(row(Code.SLOWER)).code == Exit.FAILED
    cleared = decided(row(Code.SLOWER), a=PASSED)
    assert cleared.code == Exit.FINE
    assert cleared.remarks == ("cleared by the duet: t.py::a", "green: 1 row")
    (after,) = cleared.rows
    assert (after.failed, after.verdict.outcome) == (False, Outcome.PASS)
    assert after.verdict.reason == "the duet: PASS, +0.1 %; the screen: FAIL, said by the screen of a"
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
    assert (decided(doubt).code, decided(doubt, strict=True).code) == (Exit.FINE, Exit.NO_VERDICT)
    assert decided(doubt, strict=True, a=PASSED).code == Exit.FINE
    red = decided(doubt, a=FAILED)
    assert (red.code, red.rows[0].failed, red.rows[0].verdict.outcome) == (Exit.FAILED, True, Outcome.FAIL)
    assert decided(doubt, a=UNDECIDED).remarks[0] == f"undecided, {code.value}: t.py::a"
    # pytest, itself strict, failed the test: the duet clears it all the same.
    assert decided(replace(doubt, failed=True), failures=1, strict_screen=True, a=PASSED).code == Exit.FINE


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
    assert decide(1, 1, (both[0], claim), H100, {"t.py::a[x]": PASSED}, strict=False).code == Exit.FAILED


def test_a_duet_clears_a_slow_down_and_nothing_else() -> None:
    """Not a broken limit of another kind, a stale baseline, a claim that does not hold, or a test's own failure."""
    broken = decided(row(Code.SLOWER, max_latency="1 us"), a=PASSED)
    assert (broken.code, broken.rows[0].failed) == (Exit.FAILED, True)
    assert decided(row(Code.FASTER, delta=-0.2, fail_if_faster="5%"), a=PASSED).code == Exit.FAILED
    both = (row(Code.SLOWER, label="y", faster_than="2 x x"), row(label="x"))
    assert decide(1, 1, both, H100, {"t.py::a[y]": PASSED}, strict=False).code == Exit.FAILED
    assert decided(replace(row(), failed=True), failures=1, a=PASSED).code == Exit.FAILED


def test_a_duet_clears_no_memory() -> None:
    """It compares times; a row that is slower too has the code of the memory."""
    too_much = row(Code.TOO_MUCH_MEMORY)
    assert decided(too_much, a=PASSED).code == Exit.FAILED
    # Beside a doubt about the time, a limit on memory that could not be judged stays a doubt.
    unseen = replace(row(Code.NOISY, max_kept="0 B"), footprint=Footprint(0, not_watched=("no GPU",)))
    (settled_row,) = decided(unseen, a=PASSED).rows
    assert (settled_row.verdict.outcome, settled_row.verdict.code) == (Outcome.UNDECIDED, Code.CONDITIONS)
    memory_alone = replace(too_much, measurement=None, footprint=Footprint(1))
    assert "1 of 1 row fails" in decided(memory_alone).remarks[-1]


def test_what_fails_whatever_a_duet_says_needs_none() -> None:
    """A limit of another kind, a stale baseline, a claim: red at once."""
    limits: dict[str, dict[str, Any]] = {"b": {"max_latency": "1 us"}, "c": {"min_bandwidth": "1 TB/s"}}
    lost = [
        *(row(Code.SLOWER, name, **given) for name, given in limits.items()),
        row(Code.FASTER, "d", delta=-0.2, fail_if_faster="5%"),
        row(Outcome.FAIL, "e", max_latency="1 us"),
        replace(row(name="f", label="x"), failed=True),
        row(Outcome.FAIL, "f", label="y", faster_than="2 x x"),
    ]
    for one in lost:
        assert decided(one, b=PASSED, c=PASSED, d=PASSED, e=PASSED).code == Exit.FAILED
    open_ = [row(Code.SLOWER, "g"), row(Code.LOOKS_SLOWER, "h", max_latency="1 s"), row(Code.CONDITIONS, "i", delta=None)]
    assert open_to_a_duet([*lost, *open_, row(name="j")], H100, strict=False) == open_
    assert open_to_a_duet(open_, H100, strict=True) == open_


def test_a_limit_that_is_nearly_broken_stays_a_doubt() -> None:
    near = row(Code.SLOWER, max_latency="1.004 ms")
    assert near.measurement is not None
    near = replace(near, measurement=replace(near.measurement, placements=((1e-3,), (1.01e-3,)), half_width=0.05e-3))
    after = decided(near, a=PASSED).rows[0]
    assert (after.verdict.outcome, after.failed) == (Outcome.UNDECIDED, False)
    assert "max_latency" in after.verdict.reason


def test_failures_that_no_row_accounts_for_are_red() -> None:
    """An ordinary test, a teardown: pytest counted more failures than the duet cleared tests."""
    decision = decided(row(Code.SLOWER), failures=2, a=PASSED)
    assert decision.code == Exit.FAILED
    assert decision.remarks[-1] == "red: 1 failure that no row accounts for"
    assert decided(row(), failures=1).code == Exit.FAILED
    two = (row(Code.SLOWER, label="x"), row(Code.SLOWER, label="y"))
    assert decide(1, 1, two, H100, {"t.py::a[x]": PASSED, "t.py::a[y]": PASSED}, strict=False).code == Exit.FINE
    assert decide(1, 1, two, H100, {"t.py::a[x]": PASSED}, strict=False).code == Exit.FAILED


def test_rows_that_fail_with_their_test_are_counted_as_tests() -> None:
    beside = (replace(row(label="x"), failed=True), replace(row(label="y"), failed=True))
    own = "1 test failed by an assertion or an error of its own"
    assert decide(1, 1, beside, H100, None, strict=False).remarks == (f"red: {own}",)
    early = replace(row(Code.SLOWER, "b"), measurement=None)
    assert decide(1, 1, [early, row()], H100, None, strict=False).remarks == (f"red: {own}",)
    slow = (row(Code.SLOWER, "c", label="x"), replace(row(name="c", label="y"), failed=True))
    every = decide(1, 4, [*slow, *beside, row()], H100, None, strict=False)
    assert every.remarks == (f"red: 1 of 5 rows fails; {own}; 2 failures that no row accounts for",)
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


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["tests", "-k", "a"], ["tests", "-k", "a"]),
        (["--gpumem-processes=3", "-n0", "tests"], ["tests"]),
        (["--gpumem-processes", "3", "-n", "2", "--gpumem-baseline", "x", "--gpumem-mode", "hot"], ["--gpumem-mode", "hot"]),
        (["--gpumem-l2-sweep", "tests"], ["tests"]),
    ],
)
def test_what_of_the_screens_arguments_goes_to_the_duet(given: list[str], left: list[str]) -> None:
    assert accepted(given) == left


def test_a_pass_of_the_duet_by_the_same_code_says_so() -> None:
    (after,) = decided(
        row(Code.NOISY), a=dataclasses.replace(PASSED, paired=Paired(Outcome.PASS, (0.0,) * 5, 0.01, 1.0, 0.04, same_code=True))
    ).rows
    assert (after.verdict.outcome, after.verdict.code) == (Outcome.PASS, Code.SAME_CODE)


def test_a_lost_measurement_is_red_whatever_the_rows_say() -> None:
    lost = Missing("t.py::b", "y", "lost", "its test passed without it")
    allowed, not_run = replace(lost, status="allowed"), replace(lost, status="not run", reason="deselected")
    green = decide(0, 0, [row()], H100, None, strict=False)
    nothing = decide(5, 0, (), None, None, strict=False)
    for decision in (green, nothing):
        assert with_missing(decision, [lost]).code == Exit.FAILED
        assert with_missing(decision, [allowed, not_run]).code == decision.code
    assert "t.py::b[y]" in with_missing(green, [lost]).remarks[0]
    red = with_missing(decide(1, 1, [row()], H100, None, strict=False), [lost])
    assert red.remarks[-1] == "red: 1 measurement of the baseline lost; 1 failure that no row accounts for"
    assert with_missing(decide(4, 0, (), None, None, strict=False), [lost]).code == Exit.USAGE
