"""Beside the real pytest-codspeed, whose fixture `benchmark` claims to be pytest-benchmark's. Skips where it is not installed."""

from __future__ import annotations

import json

import pytest
from sessions import SIMULATED, TRIAD, row_in

pytest.importorskip("pytest_codspeed", reason="pytest-codspeed is not installed")

pytestmark = pytest.mark.usefixtures("new_interpreters")

TESTS = TRIAD + "\ndef test_host(benchmark):\n    assert benchmark(lambda: 3) == 3\n"


def test_a_session_with_both_measures_each_test_once(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODSPEED_PROFILE_FOLDER", str(pytester.path / "codspeed"))
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess(
        "--codspeed", "--codspeed-max-time=0.1", *SIMULATED, "--benchmark-json=out.json"
    )
    result.assert_outcomes(passed=2)
    row = row_in(pytester.path)
    assert row["nodeid"].endswith("::test_triad")
    assert row["measurement"]["latency"] > 1e-6
    # CodSpeed must not store the GPU test: it would have timed an empty function.
    (stored,) = (pytester.path / "codspeed").rglob("*.json")
    assert [one["name"] for one in json.loads(stored.read_text())["benchmarks"]] == ["test_host"]


@pytest.mark.parametrize("options", [(), ("--codspeed",)])
def test_a_failing_assertion_on_a_gpu_result_fails(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    pytester.makepyfile(TRIAD.replace("assert result.latency > 0", "assert result.latency < 0"))
    pytester.runpytest_subprocess(*options, *SIMULATED).assert_outcomes(failed=1)


def test_without_gpumem_only_the_gpu_test_skips(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    pytester.runpytest_subprocess("--codspeed", "--codspeed-max-time=0.1").assert_outcomes(
        passed=1, skipped=1
    )


def test_a_benchmark_of_codspeed_is_not_adopted(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODSPEED_PROFILE_FOLDER", str(pytester.path / "codspeed"))
    pytester.makepyfile(
        "def test_sort(benchmark):\n    assert benchmark(sorted, [2, 1]) == [1, 2]\n"
    )
    options = (*SIMULATED, "--benchmark-json=out.json")
    result = pytester.runpytest_subprocess("--codspeed", "--codspeed-max-time=0.1", *options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["1 benchmark not measured on the GPU: another plugin, such as CodSpeed, *::test_sort"]
    )
