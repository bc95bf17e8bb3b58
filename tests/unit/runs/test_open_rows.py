"""What a duet judges of the rows that a session leaves open, and what its verdicts change."""

from __future__ import annotations

from dataclasses import replace as replace_pairs
from datetime import datetime, timezone
from typing import Any

import pytest
from flagged_rows import row
from known_devices import H100
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.baselines.acceptances import Acceptance, Acceptances, AcceptedChange
from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.saved import PastRow, SavedRun
from pytest_gpumem.judging.duet import Pairs
from pytest_gpumem.judging.expectations import Selection
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import LimitResult, Row
from pytest_gpumem.runs.decisions import (
    crept_limits,
    limits_for_duet,
    with_creep,
    with_duets,
)
from pytest_gpumem.runs.pairs import PEAK, TIME, DuetRow

BASE = Selection({}, tuple(f"t.py::{name}" for name in "abcdef"))
NOTHING = Acceptances()


def accepted(figure: Any, up_to: str | None = None, key: str = "t.py::a") -> Acceptances:
    change = AcceptedChange(key, figure, up_to)
    return Acceptances({"a.json": Acceptance(key, "because", "ada", (change,))})


def wanted(*rows: Row, acceptances: Acceptances = NOTHING, strict: bool = False) -> dict[str, Any]:
    found = limits_for_duet(rows, BASE, acceptances, strict=strict)
    names = ("max_regression", "max_peak_regression", "max_copies", "max_latency")
    return {
        key: {name: getattr(limits, name) for name in names if getattr(limits, name) is not None}
        for key, limits in found.items()
    }


def judged(verdict: Outcome, limit: str = TIME, code: Code | None = None) -> DuetRow:
    result = LimitResult(limit, verdict, code, f"the duet of {limit}")
    return DuetRow("t.py::a", decided={limit: result})


def after(one: Row, verdict: DuetRow, acceptances: Acceptances = NOTHING) -> Row:
    (found,) = with_duets([one], {"t.py::a": verdict}, acceptances, strict=False)
    return found


@pytest.mark.parametrize(
    "code",
    [
        Code.NOISY,
        Code.SLOWER,
    ],
)
def test_a_row_that_is_not_plainly_pass_is_for_the_duet(code: Code) -> None:
    assert wanted(row(code), row(name="b")) == {"t.py::a": {"max_regression": "1%"}}


def test_conditions_leave_every_compared_limit_open() -> None:
    throttled = row(Code.CONDITIONS, max_copies="base", max_latency="1 s")
    assert wanted(throttled) == {"t.py::a": {"max_regression": "1%", "max_copies": "base"}}


def test_other_rows_are_not() -> None:
    for one in [
        row(Outcome.FAIL, max_latency="1 us"),  # whatever a duet says
        replace(row(Code.NOISY), failed=True, test_error=True),
        replace(row(Code.NOISY), nodeid="t.py::new"),
        row(Code.NOT_READ, max_regression=None, max_kept="0 B"),
        row(Outcome.MEASURED, max_regression=None),
        row(),
    ]:
        assert wanted(one) == {}


def test_what_the_change_accepts_is_judged_up_to_its_size() -> None:
    assert wanted(row(), acceptances=accepted("time", "8%")) == {
        "t.py::a": {"max_regression": "8%"}
    }
    copies = row(max_copies="base")
    assert wanted(copies, acceptances=accepted("limit", "max_copies=3")) == {
        "t.py::a": {"max_copies": "3"}
    }


def test_the_verdict_of_the_duet_takes_the_place_of_the_sessions() -> None:
    slower = row(Code.SLOWER)
    cleared = after(slower, judged(Outcome.PASS))
    assert (cleared.failed, cleared.verdict.outcome) == (False, Outcome.PASS)
    assert cleared.verdict.reason == "the duet of max_regression"
    red = after(row(Code.NOISY), judged(Outcome.FAIL, code=Code.SLOWER))
    assert (red.failed, red.verdict.outcome, red.verdict.code) == (True, Outcome.FAIL, Code.SLOWER)
    pairs = Pairs((0.02, 0.02, 0.02, 0.02, 0.021), 0.01, Outcome.FAIL)
    paired = after(slower, replace_pairs(judged(Outcome.FAIL, code=Code.SLOWER), pairs=pairs))
    assert paired.verdict.paired is not None
    assert (paired.verdict.paired.pairs, paired.verdict.paired.change > 0.02) == (5, True)


def test_a_duet_leaves_other_doubts_and_failures() -> None:
    unread = LimitResult("max_kept", Outcome.UNDECIDED, Code.NOT_READ, "not read")
    noisy = row(Code.NOISY)
    both = replace(noisy, verdict=replace(noisy.verdict, limits=(*noisy.verdict.limits, unread)))
    cleared = after(both, judged(Outcome.PASS))
    assert [result.limit for result in cleared.verdict.limits] == ["max_kept"]
    wrong = replace(row(Code.SLOWER), test_error=True)
    assert after(wrong, judged(Outcome.PASS)) == wrong
    # The conditions of the session are not those of the duet, and it judges no limit of a number.
    throttled = row(Code.CONDITIONS)
    assert after(throttled, judged(Outcome.PASS)).verdict.outcome is Outcome.PASS
    limited = row(Code.CONDITIONS, max_latency="1 s")
    assert after(limited, judged(Outcome.PASS)).verdict.code is Code.CONDITIONS


def test_the_other_rows_of_a_test_fail_and_are_cleared_with_it() -> None:
    rows = [row(Code.SLOWER, label="x"), replace(row(label="y"), failed=True)]
    for outcome, failed in ((Outcome.PASS, False), (Outcome.FAIL, True)):
        found = with_duets(rows, {"t.py::a[x]": judged(outcome)}, NOTHING, strict=False)
        assert [one.failed for one in found] == [failed, failed]


def test_what_base_does_not_have_stays_new_and_what_cannot_be_compared_is_open() -> None:
    new = row(Code.NO_BASELINE, delta=None)
    assert after(new, DuetRow("t.py::a", ended=(Outcome.NEW, "base: nothing"))) == new
    skipped = after(new, DuetRow("t.py::a", ended=(None, "base: skipped, no torch")))
    assert skipped.verdict.outcome is Outcome.UNDECIDED
    assert "base: skipped, no torch" in skipped.verdict.reason


def test_an_accepted_slow_down_is_accepted_up_to_its_size_alone() -> None:
    acceptances = accepted("time", "8%")
    found = after(row(Code.SLOWER), judged(Outcome.PASS), acceptances)
    assert (found.verdict.outcome, found.verdict.accepted) == (Outcome.ACCEPTED, (TIME,))
    assert after(row(Code.SLOWER), judged(Outcome.FAIL), acceptances).failed


def test_a_count_without_a_limit_is_accepted_whatever_it_is() -> None:
    copies = row(max_copies="base")
    acceptances = accepted("limit", "max_copies=none")
    assert wanted(copies, acceptances=acceptances) == {"t.py::a": {"max_copies": "base"}}
    found = after(copies, judged(Outcome.FAIL, "max_copies"), acceptances)
    assert found.verdict.outcome is Outcome.ACCEPTED


def with_peak(nbytes: int) -> Row:
    return replace(row(max_peak_regression="0 B"), footprint=Footprint(peak=nbytes))


@pytest.mark.parametrize(("up_to", "outcome"), [("96 B", Outcome.ACCEPTED), ("95 B", Outcome.FAIL)])
def test_accepted_memory_is_the_middle_peak_of_the_duet(up_to: str, outcome: Outcome) -> None:
    heads = [with_peak(nbytes) for nbytes in (64, 96, 128)]
    result = LimitResult(PEAK, Outcome.FAIL, Code.TOO_MUCH_MEMORY, "more")
    verdict = DuetRow("t.py::a", decided={PEAK: result}, head=heads)
    found = after(with_peak(96), verdict, accepted("memory", up_to))
    assert found.verdict.outcome is outcome


def test_another_way_of_measuring_is_red_unless_it_is_accepted() -> None:
    verdict = judged(Outcome.FAIL, "", Code.MEASURED_DIFFERENTLY)
    assert after(row(Code.NO_BASELINE, delta=None), verdict).failed
    found = after(row(Code.NO_BASELINE, delta=None), verdict, accepted("measured"))
    assert found.verdict.outcome is Outcome.ACCEPTED


@pytest.mark.parametrize(
    ("outcome", "latency", "peak", "crept"),
    [
        (Outcome.PASS, 1.02e-3, 64, {"b": [TIME]}),
        (Outcome.UNDECIDED, 1.02e-3, 65, {"b": [TIME, PEAK]}),
        (Outcome.FAIL, 1.02e-3, 65, {"b": [PEAK]}),
        (None, 1.02e-3, 64, {}),
        (Outcome.PASS, 1.005e-3, 64, {}),
    ],
)
def test_a_row_that_did_not_fail_is_held_against_its_reference(
    outcome: Outcome | None, latency: float, peak: int, crept: dict[str, list[str]]
) -> None:
    base = with_peak(64)
    head = replace(with_peak(peak), measurement=measurement(placements=((latency,),)))
    verdict = replace_pairs(
        judged(Outcome.PASS, PEAK), pairs=Pairs((0.001, 0.002), 0.01, outcome), head=[head]
    )
    utc = datetime(2026, 11, 1, tzinfo=timezone.utc)
    run = SavedRun(id="a", utc=utc, device=H100, revision="b")
    saved = PastRow(
        base.key,
        measurement=measurement(),
        footprint=base.footprint,
        limits=base.limits,
        process=run,
    )
    for rows, expected in (({base.key: (saved,)}, crept), ({}, {})):
        limits = crept_limits(head, verdict, NOTHING, Baseline(H100, rows=rows))
        names = {
            revision: [name for name in (TIME, PEAK) if getattr(of_row, name) is not None]
            for revision, of_row in limits.items()
        }
        assert names == expected


def test_a_creep_is_decided_by_the_duet_with_the_oldest_revision() -> None:
    passed = judged(Outcome.PASS)
    crept = with_creep(passed, Limits(), judged(Outcome.FAIL, code=Code.SLOWER))
    assert (crept.outcome, crept.results[0].code) == (Outcome.FAIL, Code.CREPT)
    assert "oldest revision" in crept.results[0].reason
    assert with_creep(passed, Limits(), passed).outcome is Outcome.PASS
    for limits in (Limits(max_regression="1%"), Limits(max_peak_regression="0 B")):
        unknown = with_creep(passed, limits, "no folder")
        assert unknown.outcome is Outcome.UNDECIDED
        assert getattr(limits, unknown.results[0].limit) is not None
        assert "cannot be measured: no folder" in unknown.results[0].reason
