"""What a duet judges of a gate's rows, what its verdicts change, and how the gate ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_pairs
from datetime import datetime, timezone
from typing import Any

import pytest
from flagged_rows import row
from known_devices import H100
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.baselines.acceptances import Acceptance, Acceptances, AcceptedChange
from pytest_gpumem.baselines.references import Baseline, PastRow, SavedRun
from pytest_gpumem.judging.duet import DuetRow, Pairs
from pytest_gpumem.judging.expectations import LooserLimit, Selection, excused, lost
from pytest_gpumem.limits import PEAK, TIME
from pytest_gpumem.outcomes import Code, Exit, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.records.row import LimitResult, Omission, Row
from pytest_gpumem.reporting.conclusion import Conclusion, conclusion_lines
from pytest_gpumem.runs.decisions import (
    NOTHING,
    State,
    conclude,
    crept_limits,
    limits_for_duet,
    state_of,
    with_creep,
    with_duets,
)

BASE = Selection({}, (), tuple(f"t.py::{name}" for name in "abcdef"))
NONE = Acceptances()


def accepted(figure: Any, up_to: str | None = None, key: str = "t.py::a") -> Acceptances:
    change = AcceptedChange(key, figure, up_to)
    return Acceptances({"a.json": Acceptance(key, "because", "ada", (change,))})


def wanted(*rows: Row, acceptances: Acceptances = NONE) -> dict[str, Any]:
    found = limits_for_duet(rows, BASE, acceptances)
    names = ("max_regression", "max_peak_regression", "max_copies", "max_latency")
    return {
        key: {name: getattr(limits, name) for name in names if getattr(limits, name) is not None}
        for key, limits in found.items()
    }


def judged(verdict: Outcome, limit: str = TIME, code: Code | None = None) -> DuetRow:
    result = LimitResult(limit, verdict, code, f"the duet of {limit}")
    return DuetRow("t.py::a", decided={limit: result})


def after(one: Row, verdict: DuetRow, acceptances: Acceptances = NONE) -> Row:
    (found,) = with_duets([one], {"t.py::a": verdict}, acceptances)
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
    # A strict session fails by a doubt.
    assert wanted(replace(row(code), failed=True)) == {"t.py::a": {"max_regression": "1%"}}
    (open_row,) = with_duets([replace(row(Code.NOISY), failed=True)], {}, NONE)
    assert not open_row.failed


def test_conditions_leave_every_compared_limit_open() -> None:
    throttled = row(Code.CONDITIONS, max_copies="base", max_latency="1 s")
    assert wanted(throttled) == {"t.py::a": {"max_regression": "1%", "max_copies": "base"}}


def test_a_count_limited_by_base_is_for_the_duet_whatever_the_reference_has() -> None:
    assert wanted(row(max_copies="base", max_kernels="3")) == {"t.py::a": {"max_copies": "base"}}


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


def measured(*latencies: float) -> list[Row]:
    taken = [measurement(placements=((latency,),)) for latency in latencies]
    return [replace(row(), measurement=one) for one in taken]


def test_a_verdict_has_the_medians_of_the_duet_that_its_change_is_of() -> None:
    pairs = Pairs((0.02, 0.02, 0.02), 0.01, Outcome.PASS)
    with_base = replace_pairs(
        judged(Outcome.PASS),
        pairs=pairs,
        base=measured(1.1e-3, 1.2e-3, 1.6e-3),
        head=measured(1.3e-3, 1.4e-3, 1.3e-3),
    )
    with_oldest = replace_pairs(
        judged(Outcome.FAIL, code=Code.SLOWER),
        pairs=pairs,
        base=measured(1e-3),
        head=measured(1.5e-3),
    )
    crept = with_creep(with_base, Limits(), with_oldest)
    by_peak = with_creep(with_base, Limits(), judged(Outcome.FAIL, PEAK))
    for duet_row, medians in (
        (with_base, (1.2e-3, 1.3e-3)),
        (crept, (1e-3, 1.5e-3)),
        (by_peak, (1.2e-3, 1.3e-3)),
    ):
        paired = after(row(Code.SLOWER), duet_row).verdict.paired
        assert paired is not None
        assert (paired.base, paired.head) == pytest.approx(medians)


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
        found = with_duets(rows, {"t.py::a[x]": judged(outcome)}, NONE)
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


def test_memory_that_was_not_read_is_not_accepted() -> None:
    result = LimitResult(PEAK, Outcome.UNDECIDED, Code.NOT_READ, "not watched")
    verdict = DuetRow("t.py::a", decided={PEAK: result}, head=[with_peak(0)])
    found = after(with_peak(0), verdict, accepted("memory", "96 B"))
    assert found.verdict.outcome is Outcome.UNDECIDED


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
        file=run,
    )
    for rows, expected in (({base.key: (saved,)}, crept), ({}, {})):
        limits = crept_limits(head, verdict, NONE, Baseline(H100, rows=rows))
        names = {
            revision: [name for name in (TIME, PEAK) if getattr(of_row, name) is not None]
            for revision, of_row in limits.items()
        }
        assert names == expected


def test_a_creep_is_decided_by_the_duet_with_the_oldest_revision() -> None:
    passed = judged(Outcome.PASS)
    sides = [replace(row(), measurement=measurement(moved_bytes=MovedBytes(n, 0))) for n in (1, 2)]
    oldest = judged(Outcome.FAIL, code=Code.SLOWER)
    oldest.base, oldest.head = [sides[0]], [sides[1]]
    crept = with_creep(passed, Limits(), oldest)
    assert (crept.outcome, crept.results[0].code) == (Outcome.FAIL, Code.CREPT)
    assert "oldest revision" in crept.results[0].reason
    assert [difference.kind for difference in crept.differences] == ["declared bytes"]
    assert with_creep(passed, Limits(), passed).outcome is Outcome.PASS
    for limits in (Limits(max_regression="1%"), Limits(max_peak_regression="0 B")):
        unknown = with_creep(passed, limits, DuetRow("t.py::a", ended=(None, "no commit")))
        assert unknown.outcome is Outcome.UNDECIDED
        assert getattr(limits, unknown.results[0].limit) is not None
        assert "whose oldest revision: no commit" in unknown.results[0].reason


# The end of a gate

ROW_A = "t.py::a"


def concluded(
    *rows: Row,
    missing: Sequence[Omission] = (),
    looser: Sequence[LooserLimit] = (),
    new: Sequence[str] = (),
    failures: dict[str, str] | None = None,
    unrun: tuple[str, ...] = (),
    code: int | None = None,
    **options: Any,
) -> Conclusion:
    if failures is None:
        failures = {one.nodeid: "an error" for one in rows if one.failed}
    if code is None:
        code = 1 if failures else 0
    head = Selection({}, (), failures=failures, unrun=unrun)
    return conclude(code, head, rows, missing, looser, new, **options)


def not_shown() -> Row:
    unread = row(Code.NOT_READ, max_kept="0 B", max_regression=None)
    return replace(unread, verdict=replace(unread.verdict, simulated=True))


STATES = [
    (row(Code.SLOWER), State.FAILED),
    (replace(row(), failed=True), State.ERROR),
    (replace(row(Code.SLOWER), test_error=True), State.ERROR),
    (row(Code.NO_BASELINE, delta=None), State.OPEN),
    (row(Code.NO_BASELINE, "new", delta=None), State.NEW),
    (row(Code.NOISY), State.OPEN),
    (row(Code.CONDITIONS), State.OPEN),
    (row(Code.NOT_READ), State.OPEN),
    (not_shown(), State.NOT_SHOWN),
    (row(Outcome.ACCEPTED), State.ACCEPTED),
    (row(), State.PASSED),
    (row(Outcome.MEASURED, max_regression=None), State.MEASURED),
]


CODES = {
    State.FAILED: (Exit.FAILED, Exit.FAILED),
    State.ERROR: (Exit.FAILED, Exit.FAILED),
    State.OPEN: (Exit.NO_VERDICT, Exit.NO_VERDICT),
    State.NEW: (Exit.FINE, Exit.NO_VERDICT),
    State.NOT_SHOWN: (Exit.FINE, Exit.NO_VERDICT),
    State.ACCEPTED: (Exit.FINE, Exit.FINE),
    State.MEASURED: (Exit.FINE, Exit.FINE),
    State.PASSED: (Exit.FINE, Exit.FINE),
}
"""The exit code of a gate by the state of a row, and under --strict."""


def test_a_row_has_one_state_from_which_the_exit_code_follows() -> None:
    for one, expected in STATES:
        assert state_of(one, ["t.py::new"]) is expected
        for strict in (False, True):
            end = concluded(one, row(name="b"), new=["t.py::new"], strict=strict)
            assert end.code == CODES[expected][strict], expected


def test_every_row_that_passes_is_green() -> None:
    end = concluded(row(), row(name="b"))
    assert (end.colour, conclusion_lines(end, 500)[0]) == ("green", "green: 2 rows")
    measured = row(Outcome.MEASURED, "b", max_regression=None)
    end = concluded(row(), measured)
    assert conclusion_lines(end, 500)[0] == "green: 2 rows, 1 of them measured"
    assert "no max_regression for 1 of 2 rows" in end.remarks[-1]
    assert concluded(measured).code == Exit.NO_VERDICT


def test_what_was_not_judged() -> None:
    rows: list[tuple[Any, bool, Exit]] = [
        ("lost", False, Exit.FAILED),
        ("not run", False, Exit.FAILED),
        ("not run", True, Exit.FINE),
        ("accepted", False, Exit.FINE),
        ("undecided", False, Exit.NO_VERDICT),
    ]
    for status, by_words, code in rows:
        missing = Omission("t.py::b", "", status, "because", by_words=by_words)
        end = concluded(row(), missing=[missing])
        assert end.code == code
        if code == Exit.FAILED:
            assert end.causes == ("1 measurement lost",)
        if status == "accepted":
            assert conclusion_lines(end, 500)[0] == "green: 1 row; 1 lost row accepted"


def test_all_causes_of_a_failure_are_named() -> None:
    lost = [Omission("t.py::x", "", "lost", "gone", "test") for _ in range(2)]
    error = {"failed": True, "test_error": True}
    rows = [row(Code.SLOWER), replace(row(name="b"), **error)]
    rows.append(replace(row(name="early"), measurement=None, **error))
    failures = {
        "t.py::a": "slow",
        "t.py::b": "assert 0",
        "t.py::cpu": "assert 1",
        "t.py::early": "RuntimeError",
        "t.py::c": "did not run: t.py::b lost the context",
    }
    looser = [LooserLimit("t.py::d", "max_latency", "1 us", "1 s")]
    end = concluded(*rows, missing=lost, looser=looser, failures=failures, unrun=("t.py::c",))
    assert conclusion_lines(end, 500)[0] == (
        "red: 2 tests lost; 1 of 2 rows fails; looser limits of 1 test; "
        "1 test failed by an assertion or an error; "
        "2 tests failed without a measurement; 1 test did not run"
    )


def test_a_session_that_came_to_no_rows() -> None:
    for code, exit_code, cause in [
        (0, Exit.NO_VERDICT, NOTHING),
        (1, Exit.FAILED, "tests failed, and nothing was measured"),
        (2, Exit.FAILED, "pytest ended with 2 before its tests did"),
        (5, Exit.NO_VERDICT, "no tests were collected"),
        (-9, Exit.FAILED, "pytest ended with -9 before its tests did"),
    ]:
        end = concluded(code=code, failures={})
        assert (end.code, end.causes) == (exit_code, (cause,))


def test_a_session_that_fails_as_a_whole_is_red() -> None:
    assert concluded(row(), code=1, failures={}).causes == (
        "pytest failed the session as a whole; its output says why",
    )


def test_a_simulated_device_in_place_of_a_gpu_is_no_verdict() -> None:
    end = concluded(row(), real_devices=["NVIDIA-H100"])
    assert end.code == Exit.NO_VERDICT
    assert "the baseline is of NVIDIA-H100" in end.causes[0]
    # No duet was played, so rows may be open.
    causes = concluded(row(Code.NOISY), real_devices=["NVIDIA-H100"]).causes
    assert causes == ("1 of 1 row open", *end.causes)
    failed = concluded(row(Code.NOISY), code=1, failures={}, real_devices=["NVIDIA-H100"])
    assert len(failed.causes) == 1


def test_strict_takes_a_pass_of_every_row_on_a_real_gpu() -> None:
    assert concluded(row(), strict=True).code == Exit.FINE
    simulated = concluded(row(), strict=True, simulated=True)
    assert simulated.causes == ("under --strict, the device is simulated",)
    new = row(Code.NO_BASELINE, delta=None)
    assert concluded(new, row(name="b"), new=[ROW_A], strict=True).causes == (
        "under --strict, 1 of 2 rows without a PASS",
    )


def test_what_is_open_and_what_is_new_has_a_line() -> None:
    new = [row(Code.NO_BASELINE, name, delta=None) for name in "nm"]
    end = concluded(row(Code.NOISY), *new, new=["t.py::n", "t.py::m"])
    assert end.remarks == (
        "NEW 2 rows, such as t.py::n: base does not have it",
        "UNDECIDED t.py::a: said by the screen of a",
    )
    assert end.causes == ("1 of 3 rows open",)


def test_what_is_accepted_is_never_the_bare_green() -> None:
    slower = replace(row(), verdict=replace(row().verdict, outcome=Outcome.ACCEPTED))
    slower = replace(slower, verdict=replace(slower.verdict, accepted=("max_copies",)))
    end = concluded(slower, row(name="b"))
    assert conclusion_lines(end, 500)[0] == "green: 2 rows, 1 of them accepted"
    assert end.remarks == ("ACCEPTED t.py::a: said by the screen of a",)


def test_tests_with_the_same_looser_limit_share_a_line() -> None:
    changes = [
        LooserLimit("t.py::a", "max_latency", "1 us", None),
        LooserLimit("t.py::b", "max_latency", "1 us", None),
        LooserLimit("t.py::b", "max_peak", "1 MiB", "2 MiB"),
    ]
    assert concluded(row(), looser=changes).remarks == (
        "limit of 2 tests, such as t.py::a: max_latency 1 us → none in this change (1 us holds)",
        "limit of t.py::b: max_peak 1 MiB → 2 MiB in this change (1 MiB holds)",
    )


def test_a_test_that_skips_in_base_too_is_no_loss() -> None:
    skipped = Omission("t.py::a", "", "lost", "its test skipped", "max_latency", how="skipped")
    row_of_baseline = replace(skipped, what="row")
    (after,) = excused([skipped], ["t.py::a"], "main")
    assert (after.status, lost([after]), lost([skipped])) == ("not run", [], [skipped])
    assert after.reason == "skipped in main too"
    assert excused([skipped, row_of_baseline], ["t.py::b"], "main") == [skipped, row_of_baseline]
    assert excused([row_of_baseline], ["t.py::a"], "main") == [row_of_baseline]
