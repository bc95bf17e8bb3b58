"""The end of a gate: rows, what was not judged and looser limits in; exit code and causes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flagged_rows import row
from msgspec.structs import replace

from pytest_gpumem.judging.expectations import LooserLimit, excused, looser_lines, lost
from pytest_gpumem.outcomes import Code, Exit, Outcome
from pytest_gpumem.records.row import Omission, Row
from pytest_gpumem.reporting.conclusion import Conclusion, conclusion_lines
from pytest_gpumem.runs.decisions import (
    NOTHING,
    State,
    conclude,
    state_of,
)

ROW_A = "t.py::a"


def concluded(
    *rows: Row,
    missing: Sequence[Omission] = (),
    looser: Sequence[LooserLimit] = (),
    new: Sequence[str] = (),
    failures: dict[str, str] | None = None,
    code: int | None = None,
    **options: Any,
) -> Conclusion:
    if failures is None:
        failures = {one.nodeid: "an error" for one in rows if one.failed}
    if code is None:
        code = 1 if failures else 0
    return conclude(code, failures, rows, missing, looser, new, **options)


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
        assert state_of(one, ["t.py::new"], strict=False) is expected
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
            assert end.causes == ("1 measurement of the baseline lost",)
        if status == "accepted":
            assert conclusion_lines(end, 500)[0] == "green: 1 row; accepted: 1 gone"


def test_all_causes_of_a_failure_are_named() -> None:
    lost = [Omission("t.py::x", "", "lost", "gone", "test") for _ in range(2)]
    rows = [row(Code.SLOWER), replace(row(name="b"), failed=True, test_error=True)]
    failures = {
        "t.py::a": "slow",
        "t.py::b": "assert 0",
        "t.py::cpu": "assert 1",
        "t.py::c": "did not run: t.py::b lost the context",
    }
    looser = [LooserLimit("t.py::d", "max_latency", "1 us", "1 s")]
    end = concluded(*rows, missing=lost, looser=looser, failures=failures, unrun=["t.py::c"])
    assert conclusion_lines(end, 500)[0] == (
        "red: 2 tests lost; 1 of 2 rows fails; looser limits of 1 test; "
        "1 test failed by an assertion or an error of its own; "
        "1 test failed without a measurement; 1 test did not run"
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


def test_strict_takes_a_pass_of_every_row_on_a_real_gpu() -> None:
    assert concluded(row(), strict=True).code == Exit.FINE
    simulated = replace(row(), verdict=replace(row().verdict, simulated=True))
    assert concluded(simulated, strict=True).causes == ("under --strict, the device is simulated",)
    new = row(Code.NO_BASELINE, delta=None)
    assert concluded(new, row(name="b"), new=[ROW_A], strict=True).causes == (
        "under --strict, 1 of 2 rows is no PASS",
    )


def test_what_is_open_and_what_is_new_has_a_line() -> None:
    end = concluded(row(Code.NOISY), row(Code.NO_BASELINE, "n", delta=None), new=["t.py::n"])
    assert end.remarks == (
        "new, base does not have it: t.py::n",
        "UNDECIDED t.py::a: said by the screen of a",
    )
    assert end.causes == ("1 of 2 rows open",)


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
    assert looser_lines(changes) == [
        "limit of 2 tests: max_latency 1 us -> none in this change (1 us holds)",
        "limit of t.py::b: max_peak 1 MiB -> 2 MiB in this change (1 MiB holds)",
    ]


def test_a_test_that_skips_in_base_too_is_no_loss() -> None:
    skipped = Omission("t.py::a", "", "lost", "its test skipped", "max_latency", skipped=True)
    row_of_baseline = replace(skipped, what="row")
    (after,) = excused([skipped], ["t.py::a"], "main")
    assert (after.status, lost([after]), lost([skipped])) == ("not run", [], [skipped])
    assert after.reason == "main skips it too"
    assert excused([skipped, row_of_baseline], ["t.py::b"], "main") == [skipped, row_of_baseline]
    assert excused([row_of_baseline], ["t.py::a"], "main") == [row_of_baseline]
