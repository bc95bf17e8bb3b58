"""Limits on the calls of a test."""

from __future__ import annotations

import pytest
from known_devices import H100

from pytest_gpumem.judging.calls import FIGURES, PastCalls, judge_calls
from pytest_gpumem.judging.exact import against_base
from pytest_gpumem.judging.footprint import judge_footprint
from pytest_gpumem.limits import OF_CALLS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.calls import Calls, WaitLine
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import LimitResult, Row, Verdict
from pytest_gpumem.records.uses import CopyUse


def waiting(count: int, *, line: int = 12, sure: bool = True, allowed: bool = False) -> WaitLine:
    return WaitLine(
        "test_a.py",
        line,
        "test_a",
        "",
        "cuStreamSynchronize",
        "stream",
        count,
        sure=sure,
        allowed=allowed,
    )


def judged(
    calls: Calls, written: str, *past: PastCalls, name: str = "max_waits"
) -> tuple[Outcome, str]:
    found = judge_calls(name, calls, f"{name} {written}", written, past, None, "the baseline")
    return found.outcome, found.sentence


def saved(count: int, revision: str | None = None) -> PastCalls:
    return PastCalls(Calls(waiting=(waiting(count),)), revision)


def test_a_count_holds_or_does_not() -> None:
    calls = Calls(waiting=(waiting(2), waiting(1, line=14)))
    assert judged(calls, "3") == (Outcome.PASS, "the host waits 3 times: test_a.py:12 2 x cuStreamSynchronize, test_a.py:14 1 x "
                                  "cuStreamSynchronize, not above max_waits 3")  # fmt: skip
    assert judged(calls, "2")[0] is Outcome.FAIL


def test_what_may_wait_and_what_is_allowed_counts_where_it_is_to() -> None:
    calls = Calls(waiting=(waiting(2, sure=False), waiting(4, allowed=True), waiting(1)))
    assert calls.waits == 1
    assert Calls(waiting=calls.waiting, strict=True).waits == 3


@pytest.mark.parametrize("name", OF_CALLS)
def test_each_limit_has_its_figure(name: str) -> None:
    copies = (
        CopyUse("H2D", "pageable", "device", 3, 400, 0),
        CopyUse("D2D", "device", "device", 2, 100, 0),
    )
    calls = Calls(kernels=7, copies=copies, waiting=(waiting(6),))
    assert (
        FIGURES[name][0](calls)
        == {"max_kernels": 7, "max_copies": 5, "max_copied_bytes": 500, "max_waits": 6}[name]
    )


def test_a_growth_is_against_the_newest_run() -> None:
    calls = Calls(waiting=(waiting(4),))
    assert judged(calls, "baseline", saved(9), saved(4))[0] is Outcome.PASS
    assert judged(calls, "baseline", saved(9), saved(3))[0] is Outcome.FAIL
    assert judged(calls, "baseline + 1", saved(3))[0] is Outcome.PASS
    assert judged(calls, "baseline")[0] is Outcome.NEW


def test_a_count_that_varies_is_not_judged_exactly() -> None:
    past = (saved(3, "a1"), saved(5, "a1"), saved(3, "b2"))
    outcome, sentence = judged(Calls(waiting=(waiting(6),)), "baseline", *past)
    assert outcome is Outcome.UNDECIDED
    assert (
        "it varies with unchanged code, the host waits 3 times to the host waits 5 times"
        in sentence
    )
    assert judged(Calls(waiting=(waiting(5),)), "baseline", *past)[0] is Outcome.PASS
    # Another revision, and changes that were not committed, may have other counts.
    assert (
        judged(Calls(waiting=(waiting(6),)), "baseline", saved(5, "a1"), saved(3, "b2"))[0]
        is Outcome.FAIL
    )
    assert (
        judged(Calls(waiting=(waiting(6),)), "baseline", saved(5, "a-dirty"), saved(3, "a-dirty"))[
            0
        ]
        is Outcome.FAIL
    )


def test_what_was_not_counted_passes_nothing() -> None:
    calls = Calls(waiting=(waiting(1),), not_counted="CUPTI is held")
    assert judged(calls, "1")[0] is Outcome.UNDECIDED
    assert judged(calls, "0")[0] is Outcome.FAIL  # there are at least as many
    assert judged(Calls(), "baseline", PastCalls(calls, None))[0] is Outcome.NEW


def test_a_footprint_without_counts_says_nothing_of_calls() -> None:
    limits = Limits(max_waits="0", origin={"max_waits": "marker"})
    assert not list(judge_footprint(Footprint(0), limits, (), ["max_waits"]))
    (found,) = judge_footprint(
        Footprint(0, calls=Calls()), limits, (), ["max_waits"]
    )  # no memory is watched, and calls are counted
    assert (found.outcome, found.limit) == (Outcome.PASS, "max_waits")


def test_a_gate_judges_the_calls_of_a_test_against_base() -> None:
    limits = Limits(max_waits="baseline", origin={"max_waits": "marker"})

    def row(count: int) -> Row:
        new = Verdict(
            Outcome.NEW, "", limits=(LimitResult("max_waits", Outcome.NEW, Code.NO_BASELINE),)
        )
        return Row(
            "test_a.py::test_a",
            limits,
            new,
            footprint=Footprint(0, calls=Calls(waiting=(waiting(count),))),
        )

    def outcome(head: int, base: int) -> Outcome:
        return against_base(row(head), row(base), row(head), H100, "main").verdict.outcome

    assert (outcome(3, 3), outcome(4, 3)) == (Outcome.PASS, Outcome.FAIL)
