"""What a gate makes of a screen and a duet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flagged_rows import row
from known_devices import H100

from pytest_gpumem.duet.decision import (
    FINE,
    NO_VERDICT,
    RED,
    USAGE,
    Decision,
    Judged,
    decide,
    flagged,
    judged,
    open_to_a_duet,
    settled,
)
from pytest_gpumem.duet.gate import duet_arguments
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Outcome

PASSED, FAILED = Judged("PASS", "+0.1 %"), Judged("FAIL", "slower: +3 %")


def decided(
    *rows: Row,
    failures: int | None = None,
    strict: bool = False,
    in_itself: tuple[str, ...] = (),
    strict_screen: bool = False,
    **duet: Judged,
) -> Decision:
    failures = sum(one.failed for one in rows) if failures is None else failures
    said = {f"t.py::{name}": judged for name, judged in duet.items()}
    code = 1 if failures else 0
    return decide(code, failures, rows, H100, said, strict=strict, in_itself=in_itself, strict_screen=strict_screen)


def test_what_the_screen_flags_is_what_a_duet_can_decide() -> None:
    rows = [row(outcome, outcome.name) for outcome in Outcome] + [row(Outcome.FAIL, "absolute", delta=None)]
    assert {one.nodeid for one in flagged(rows)} == {"t.py::FAIL", "t.py::SUSPECT", "t.py::INCONCLUSIVE", "t.py::UNRELIABLE"}


def test_what_is_measured_in_another_way_than_the_baseline_is_for_the_duet_to_decide() -> None:
    """Another kernel under the same test: there is nothing to compare it with, and it may be slower by any factor."""
    changed = row(Outcome.SUSPECT, delta=None)
    assert flagged([changed]) == [changed]
    assert decided(changed, a=FAILED).code == RED
    cleared = decided(changed, strict=True, a=PASSED)
    assert (cleared.code, cleared.rows[0].verdict.outcome) == (FINE, Outcome.PASS)
    assert decided(changed, a=Judged(None, "the sampler has changed")).rows[0].verdict.outcome is Outcome.SUSPECT


def test_what_another_sort_of_card_kept_the_screen_from_judging_is_for_the_duet_to_decide() -> None:
    """All of a baseline may be of the other sort: without a duet a gate would be green whatever the change does."""
    undecided = row(Outcome.INCONCLUSIVE, delta=None)
    undecided = replace(undecided, verdict=replace(undecided.verdict, another_sort=True))
    assert open_to_a_duet([undecided], H100, strict=False) == [undecided]
    assert decided(undecided, a=FAILED).code == RED
    cleared = decided(undecided, strict=True, a=PASSED)
    assert (cleared.code, cleared.rows[0].verdict.outcome) == (FINE, Outcome.PASS)
    # A claim that cannot be decided is none of the duet's.
    assert flagged([row(Outcome.INCONCLUSIVE, delta=None)]) == []


def test_what_conditions_kept_the_screen_from_judging_is_for_the_duet_to_decide() -> None:
    """A slow-down under throttling would be green."""
    throttled = row(Outcome.UNRELIABLE, delta=None)
    assert decided(throttled, row(name="b"), a=FAILED).code == RED
    cleared = decided(throttled, strict=True, a=PASSED)
    assert (cleared.code, cleared.rows[0].verdict.outcome) == (FINE, Outcome.PASS)
    # Another limit was not judged by anybody.
    assert throttled.measurement is not None
    hot = tuple(replace(one, throttle_reasons=("sw_power_cap",)) for one in throttled.measurement.conditions)
    limited = row(Outcome.UNRELIABLE, delta=None, max_latency="1 s")
    limited = replace(limited, measurement=replace(throttled.measurement, conditions=hot))
    assert decided(limited, row(name="b"), a=PASSED).rows[0].verdict.outcome is Outcome.UNRELIABLE


def test_conditions_that_let_nothing_be_judged_are_not_green() -> None:
    rows = (row(Outcome.UNRELIABLE, delta=None), row(Outcome.UNRELIABLE, "b", delta=None))
    decision = decided(*rows, a=Judged("UNRELIABLE", "throttled"))
    assert (decision.code, decision.remarks) == (NO_VERDICT, ("no verdict: the conditions let no row be judged",))
    assert decided(*rows, row(name="c")).code == FINE


def test_all_passed() -> None:
    decision = decided(row(), row(name="b"))
    assert (decision.code, decision.remarks) == (FINE, ("green: 2 rows",))


def test_a_flagged_row_stands_unless_the_duet_clears_it() -> None:
    assert decided(row(Outcome.FAIL)).code == RED
    cleared = decided(row(Outcome.FAIL), a=PASSED)
    assert cleared.code == FINE
    assert cleared.remarks == ("cleared by the duet: t.py::a", "green: 1 rows")
    (after,) = cleared.rows
    assert (after.failed, after.verdict.outcome) == (False, Outcome.PASS)
    assert after.verdict.reason == "the duet: PASS, +0.1 %; the screen had said FAIL: said by the screen of a"
    for undecided in (Judged("INCONCLUSIVE", "noisy"), Judged("UNRELIABLE", "throttled"), Judged(None, "head: the test fails")):
        decision = decided(row(Outcome.FAIL), a=undecided)
        assert decision.code == RED
        assert decision.rows[0].verdict.reason.endswith(f"; the duet: {undecided.outcome or 'no verdict'}, {undecided.sentence}")


@pytest.mark.parametrize("outcome", [Outcome.SUSPECT, Outcome.INCONCLUSIVE])
def test_a_duet_decides_what_the_screen_could_not(outcome: Outcome) -> None:
    assert decided(row(outcome)).code == FINE
    assert decided(row(outcome), strict=True).code == NO_VERDICT
    assert decided(row(outcome), strict=True, a=PASSED).code == FINE
    red = decided(row(outcome), a=FAILED)
    assert (red.code, red.rows[0].failed, red.rows[0].verdict.outcome) == (RED, True, Outcome.FAIL)
    assert decided(row(outcome), a=Judged("INCONCLUSIVE", "noisy")).code == FINE
    # pytest, itself strict, failed the test: the duet clears it all the same.
    assert decided(replace(row(outcome), failed=True), failures=1, strict_screen=True, a=PASSED).code == FINE


@pytest.mark.parametrize("outcome", [Outcome.SUSPECT, Outcome.INCONCLUSIVE])
def test_an_unchanged_row_is_cleared_though_it_measured_faster(outcome: Outcome) -> None:
    assert decided(row(outcome, delta=-0.001), strict=True, a=PASSED).code == FINE


@pytest.mark.parametrize("outcome", [Outcome.SUSPECT, Outcome.INCONCLUSIVE, Outcome.FAIL])
def test_an_assertion_that_failed_is_not_cleared_by_a_duet_in_which_it_held(outcome: Outcome) -> None:
    """Wrong results now and then are a mistake, and none that a duet looks for."""
    flaky = replace(row(outcome), failed=True)
    decision = decided(flaky, row(name="b"), failures=1, in_itself=("t.py::a",), a=PASSED)
    assert (decision.code, decision.rows[0].failed) == (RED, True)
    assert open_to_a_duet([flaky, row(outcome, "b")], H100, strict=False, in_itself=["t.py::a"]) == [row(outcome, "b")]
    assert decided(row(Outcome.FAIL), failures=1, a=PASSED).code == FINE


def test_the_other_rows_of_a_test_are_cleared_with_the_one_that_failed_it() -> None:
    beside = replace(row(label="y"), failed=True)
    both = (row(Outcome.FAIL, label="x"), beside)
    decision = decide(1, 1, both, H100, {"t.py::a[x]": PASSED}, strict=True)
    assert decision.code == FINE
    assert not any(one.failed for one in decision.rows)
    claim = replace(beside, verdict=replace(beside.verdict, outcome=Outcome.INCONCLUSIVE, fails=True, comparison=None))
    assert decide(1, 1, (both[0], claim), H100, {"t.py::a[x]": PASSED}, strict=False).code == RED


def test_a_duet_clears_a_slow_down_and_nothing_else() -> None:
    """Not a broken limit of another kind, a stale baseline, a claim that does not hold, or a test's own failure."""
    broken = decided(row(Outcome.FAIL, max_latency="1 us"), a=PASSED)
    assert (broken.code, broken.rows[0].failed) == (RED, True)
    assert decided(row(Outcome.FAIL, delta=-0.2, fail_if_faster="5%"), a=PASSED).code == RED
    both = (row(Outcome.FAIL, label="y", faster_than="2 x x"), row(label="x"))
    assert decide(1, 1, both, H100, {"t.py::a[y]": PASSED}, strict=False).code == RED
    assert decided(replace(row(), failed=True), failures=1, a=PASSED).code == RED


def test_what_fails_whatever_a_duet_says_needs_none() -> None:
    """A limit of another kind, a stale baseline, a claim: red at once."""
    lost = [
        row(Outcome.FAIL, max_latency="1 us"),
        row(Outcome.FAIL, "b", delta=-0.2, fail_if_faster="5%"),
        row(Outcome.FAIL, "c", min_bandwidth="1 TB/s"),
    ]
    claim = row(Outcome.INCONCLUSIVE, "d", label="y", faster_than="2 x x")
    lost += [replace(claim, failed=True, verdict=replace(claim.verdict, fails=True)), replace(row(name="d", label="x"), failed=True)]
    for one in lost[:3]:
        assert decided(one, a=PASSED, b=PASSED, c=PASSED).code == RED
    for one in lost[:3] + lost[3:4]:
        assert flagged([one]) == [one]
    open_ = [row(Outcome.FAIL, "e"), row(Outcome.SUSPECT, "f", max_latency="1 s"), row(Outcome.UNRELIABLE, "g", delta=None)]
    assert open_to_a_duet([*lost, *open_, row(name="h")], H100, strict=False) == open_
    assert open_to_a_duet(open_, H100, strict=True) == open_


def test_a_limit_that_is_nearly_broken_stays_a_doubt() -> None:
    near = row(Outcome.FAIL, max_latency="1.004 ms")
    assert near.measurement is not None
    near = replace(near, measurement=replace(near.measurement, placements=((1e-3,), (1.01e-3,)), half_width=0.05e-3))
    after = decided(near, a=PASSED).rows[0]
    assert after.verdict.outcome is Outcome.SUSPECT
    assert "max_latency" in after.verdict.reason


def test_failures_that_no_row_accounts_for_are_red() -> None:
    """An ordinary test, a teardown: pytest counted more failures than the duet cleared tests."""
    decision = decided(row(Outcome.FAIL), failures=2, a=PASSED)
    assert decision.code == RED
    assert decision.remarks[-1] == "red: 1 failure that no row accounts for"
    assert decided(row(), failures=1).code == RED
    two = (row(Outcome.FAIL, label="x"), row(Outcome.FAIL, label="y"))
    assert decide(1, 1, two, H100, {"t.py::a[x]": PASSED, "t.py::a[y]": PASSED}, strict=False).code == FINE
    assert decide(1, 1, two, H100, {"t.py::a[x]": PASSED}, strict=False).code == RED


def test_rows_that_fail_with_their_test_are_counted_as_tests() -> None:
    beside = (replace(row(label="x"), failed=True), replace(row(label="y"), failed=True))
    own = "1 test failed by an assertion or an error of its own"
    assert decide(1, 1, beside, H100, None, strict=False).remarks == (f"red: {own}",)
    early = replace(row(Outcome.FAIL, "b"), measurement=None)
    assert decide(1, 1, [early, row()], H100, None, strict=False).remarks == (f"red: {own}",)
    slow = (row(Outcome.FAIL, "c", label="x"), replace(row(name="c", label="y"), failed=True))
    every = decide(1, 4, [*slow, *beside, row()], H100, None, strict=False)
    assert every.remarks == (f"red: 1 of 5 rows fail; {own}; 2 failures that no row accounts for",)
    # A strict pytest fails by it.
    doubtful = replace(row(Outcome.INCONCLUSIVE), failed=True)
    assert decided(doubtful, strict_screen=True).remarks == ("red: 1 of 1 rows fail",)


def test_a_session_that_failed_as_a_whole_is_red() -> None:
    assert decide(1, 0, [row()], H100, None, strict=False).code == RED


@pytest.mark.parametrize(
    ("code", "expected"), [(0, NO_VERDICT), (1, RED), (2, RED), (3, RED), (4, USAGE), (5, NO_VERDICT), (6, RED), (-11, RED), (137, RED)]
)
def test_no_results_are_never_green(code: int, expected: int) -> None:
    assert decide(code, 0, (), None, None, strict=False).code == expected
    assert decide(code, 0, (), H100, None, strict=False).code == expected


@pytest.mark.parametrize("code", [2, 3, 4, 5, -9])
def test_a_run_that_broke_off_is_never_green_whatever_it_measured(code: int) -> None:
    assert decide(code, 0, [row()], H100, None, strict=False).code != FINE


def test_strict_takes_a_real_gpu_and_a_baseline() -> None:
    simulated = replace(H100, simulated=True)
    assert decide(0, 0, [row()], simulated, None, strict=True).code == NO_VERDICT
    assert decide(0, 0, [row()], simulated, None, strict=False).code == FINE
    new = decided(row(Outcome.NO_BASELINE, delta=None))
    assert (new.code, new.remarks[-1]) == (FINE, "green: 1 rows, 1 of them undecided or without a baseline")
    assert decided(row(Outcome.NO_BASELINE, delta=None), strict=True).code == NO_VERDICT


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
    assert duet_arguments(given) == left


def test_a_shift_of_all_together_is_that_of_what_was_not_decided() -> None:
    verdicts = [
        {"key": name, "outcome": outcome, "sentence": "own"} for name, outcome in (("a", "PASS"), ("b", "INCONCLUSIVE"), ("c", None))
    ]
    common = {"key": "all", "outcome": "FAIL", "sentence": "all slower"}
    assert judged({"verdicts": verdicts, "common": common}) == {
        "a": Judged("PASS", "own"),
        "b": Judged("FAIL", "all slower"),
        "c": Judged("FAIL", "all slower"),
    }
    for none in (None, {**common, "outcome": "PASS"}):
        assert judged({"verdicts": verdicts, "common": none})["b"] == Judged("INCONCLUSIVE", "own")
