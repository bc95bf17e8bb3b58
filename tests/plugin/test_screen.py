"""A row against its saved processes: at its test's end, and at the end of its session."""

from __future__ import annotations

import pytest
from sessions import Run, rows_in, slower

TESTS = """
import os
import pytest

@pytest.mark.parametrize("size", [64, 80, 96, 128], ids=["small", "next", "middle", "large"])
def test_copy(gpu_benchmark, device_buffer, gpu_kernels, size):
    buffers = [device_buffer(size << 20) for _ in range(2)]
    limit = os.environ.get("LIMIT", "1%")
    gpu_benchmark(gpu_kernels.copy, *buffers, max_regression=limit)
"""
BY_TEST = slower("float(os.environ.get('SLOWER_' + request.node.callspec.id.upper(), 1))")
SAVE_THREE = ("--gpumem-save", "--gpumem-processes=3")


@pytest.fixture
def four_sizes(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(TESTS)
    pytester.makeconftest(BY_TEST)
    return pytester


def verdicts(pytester: pytest.Pytester) -> dict[str, tuple[str, str | None]]:
    found = {}
    for row in rows_in(pytester.path):
        verdict = row["verdict"]
        found[row["nodeid"].partition("[")[2].rstrip("]")] = verdict["outcome"], verdict["code"]
    return found


def test_a_single_saved_process_passes_nothing(four_sizes: pytest.Pytester, gpumem: Run) -> None:
    gpumem("--gpumem-save")
    result = gpumem("--benchmark-json=out.json")
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.OK
    assert set(verdicts(four_sizes).values()) == {("UNDECIDED", "too few runs")}
    strict = gpumem("--gpumem-strict")
    strict.assert_outcomes(passed=4)
    assert strict.ret == pytest.ExitCode.TESTS_FAILED
    assert "--gpumem-strict: 4 rows undecided: this fails" in strict.stdout.str()


def test_three_saved_processes_of_a_day_pass_the_same_code(
    four_sizes: pytest.Pytester, gpumem: Run
) -> None:
    gpumem(*SAVE_THREE)
    result = gpumem("--gpumem-strict", "--benchmark-json=out.json")
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.OK
    assert set(verdicts(four_sizes).values()) == {("PASS", None)}
    reason = rows_in(four_sizes.path)[0]["verdict"]["reason"]
    assert "against 3 saved processes of 1 day" in reason
    assert "we are 90 % sure that it is not slower than the limit allows" in reason


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_gross_slow_down_fails_and_a_smaller_needs_a_duet(
    four_sizes: pytest.Pytester,
    gpumem: Run,
    monkeypatch: pytest.MonkeyPatch,
    workers: tuple[str, ...],
) -> None:
    gpumem(*SAVE_THREE)
    monkeypatch.setenv("SLOWER_SMALL", "1.15")
    result = gpumem("--benchmark-json=out.json", *workers)
    result.assert_outcomes(passed=3, failed=1)
    passed = ("PASS", None)
    expected = {"small": ("FAIL", "slower"), "next": passed, "middle": passed, "large": passed}
    assert verdicts(four_sizes) == expected
    monkeypatch.setenv("SLOWER_SMALL", "1.05")
    result = gpumem("--benchmark-json=out.json", *workers)
    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.OK
    assert verdicts(four_sizes) == {**expected, "small": ("UNDECIDED", "looks slower")}
    duet = "gpumem duet BASE --test 'test_a_gross"
    reasons = [row["verdict"]["reason"] for row in rows_in(four_sizes.path)]
    assert any(duet in reason and "[small]' decides" in reason for reason in reasons)


def test_where_the_other_rows_changed_too_nothing_passes(
    four_sizes: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session on another card: rows alone would pass or fail by the card."""
    budget = "--gpumem-budget=5 ms"
    gpumem(*SAVE_THREE, budget)
    for size in ("SMALL", "NEXT", "MIDDLE", "LARGE"):
        monkeypatch.setenv(f"SLOWER_{size}", "0.993")
    gpumem("--benchmark-json=out.json", budget).assert_outcomes(passed=4)
    assert set(verdicts(four_sizes).values()) == {("UNDECIDED", "noisy")}
    reason = rows_in(four_sizes.path)[0]["verdict"]["reason"]
    assert "the other rows changed by -0.6" in reason


def test_a_row_is_none_of_its_other_rows(
    four_sizes: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpumem(*SAVE_THREE)
    monkeypatch.setenv("LIMIT", "5%")
    monkeypatch.setenv("SLOWER_SMALL", "1.02")
    gpumem("--benchmark-json=out.json", "-k", "small").assert_outcomes(passed=1)
    assert verdicts(four_sizes) == {"small": ("PASS", None)}
    gpumem("--benchmark-json=out.json", "-k", "small or large").assert_outcomes(passed=2)
    assert verdicts(four_sizes) == {"small": ("PASS", None), "large": ("UNDECIDED", "noisy")}
