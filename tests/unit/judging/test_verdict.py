"""The author of verdicts: findings in, a verdict out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_gpumem.judging.finding import known, unjudged, with_verdict
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import LimitResult, Row

ROW = Row("t.py::test_a", Limits(), unjudged(simulated=True))
SLOWER = LimitResult("max_regression", Outcome.FAIL, Code.SLOWER, "slower")
NOISY = LimitResult("max_regression", Outcome.UNDECIDED, Code.NOISY, "noisy")
NEW = LimitResult("max_regression", Outcome.NEW, Code.NO_BASELINE, "new")
PASSED = LimitResult("max_regression", Outcome.PASS, None, "within the limit")
PEAK = LimitResult("max_peak", Outcome.FAIL, Code.TOO_MUCH_MEMORY, "a large peak")
ACCEPTED = LimitResult("max_copies", Outcome.ACCEPTED, None, "accepted (ada)")
EVERY = (
    SLOWER,
    NOISY,
    NEW,
    PASSED,
    PEAK,
    ACCEPTED,
    LimitResult("max_waits", Outcome.PASS, None, "no waits"),
)


def test_no_finding_is_no_limit() -> None:
    assert with_verdict(ROW, []).verdict == unjudged(simulated=True)


def test_the_worst_finding_decides_and_memory_before_time() -> None:
    verdict = with_verdict(ROW, [NEW, PASSED, SLOWER, NOISY, PEAK]).verdict
    assert (verdict.outcome, verdict.code, verdict.simulated) == (
        Outcome.FAIL,
        Code.TOO_MUCH_MEMORY,
        True,
    )
    assert verdict.limits == (PEAK, SLOWER, NOISY, NEW)
    assert verdict.reason == "a large peak; slower; noisy; new"


def test_a_pass_says_what_holds() -> None:
    verdict = with_verdict(ROW, [EVERY[-1], PASSED]).verdict
    assert (verdict.outcome, verdict.code, verdict.reason, verdict.limits) == (
        Outcome.PASS,
        None,
        "no waits; within the limit",
        (),
    )


def test_what_is_accepted_is_no_pass_and_hides_no_doubt() -> None:
    alone = with_verdict(ROW, [PASSED, ACCEPTED]).verdict
    assert (alone.outcome, alone.accepted, alone.limits) == (Outcome.ACCEPTED, ("max_copies",), ())
    beside = with_verdict(ROW, [ACCEPTED, NEW]).verdict
    assert (beside.outcome, beside.code, beside.accepted, beside.limits) == (
        Outcome.NEW,
        Code.NO_BASELINE,
        ("max_copies",),
        (NEW,),
    )
    assert beside.reason == "accepted (ada); new"


def test_what_follows_the_findings_in_a_reason() -> None:
    verdict = with_verdict(ROW, [NOISY], strict=True).verdict
    assert verdict.reason == "noisy (strict: this fails)"
    assert with_verdict(ROW, [PASSED], strict=True).verdict.reason == "within the limit"


@given(st.lists(st.sampled_from(EVERY), unique=True))
def test_a_verdict_made_again_from_what_is_known_of_it_is_the_same(
    findings: list[LimitResult],
) -> None:
    row = with_verdict(ROW, findings)
    again = with_verdict(row, known(row)).verdict
    assert replace(again, reason=row.verdict.reason) == row.verdict
    if not (row.verdict.accepted and row.verdict.limits):
        assert again.reason == row.verdict.reason
