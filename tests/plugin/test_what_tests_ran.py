"""What a row runs: in the results and the baseline, as limits, as evidence, and first in a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sessions import SIMULATED, Run, rows_in, slower, stored_in

TESTS = """
import os
import pytest

N = "4 MiB"

@pytest.mark.gpumem(max_regression="5%")
def test_copy(gpu_benchmark, gpu_kernels, device_buffer):
    kernel = gpu_kernels.copy.with_grid(int(os.environ.get("GRID", "64")))
    gpu_benchmark(kernel, device_buffer(N, dtype="f4"), device_buffer(N, dtype="f4"))

def test_up(gpu_benchmark, gpu_kernels, device_buffer, pinned_buffer):
    gpu_benchmark(gpu_kernels.memcpy, device_buffer(N), pinned_buffer(N), max_copied_bytes=os.environ.get("MOST", "4 MiB"), max_kernels=0)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, session: Run) -> Run:
    pytester.makepyfile(test_a=TESTS)
    return lambda *arguments: session(
        *SIMULATED, "--benchmark-json=out.json", "--gpumem-processes=1", *arguments
    )


def set_limit(pytester: pytest.Pytester, limit: str) -> None:
    pytester.makepyfile(test_a=TESTS.replace('max_regression="5%"', f'max_regression="{limit}"'))


def rows(folder: Path) -> dict[str, Any]:
    found = rows_in(folder)
    return {row["nodeid"].partition("::")[2]: row for row in found}


def test_the_results_and_the_baseline_hold_what_ran(pytester: pytest.Pytester, run: Run) -> None:
    assert run("--gpumem-save").ret == 0
    ran = rows(pytester.path)["test_copy"]["measurement"]["what_ran"]
    assert [step["name"] for step in ran["steps"]] == ["copy"]
    (stored,) = stored_in(pytester.path)
    kept = {
        row["nodeid"]: row["measurement"]["what_ran"]
        for row in json.loads(stored.read_text())["content"]["rows"]
    }
    assert kept["test_a.py::test_copy"]["steps"][0]["code"] == ran["steps"][0]["code"]


def test_the_same_code_needs_less(pytester: pytest.Pytester, run: Run) -> None:
    set_limit(pytester, "2%")
    assert run("--gpumem-save", "--gpumem-processes=3").ret == 0
    assert run("--gpumem-strict").ret == 0
    verdict = rows(pytester.path)["test_copy"]["verdict"]
    assert (verdict["outcome"], verdict["comparison"]["same_code"]) == ("PASS", True)


def test_other_work_is_not_the_same_code(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--gpumem-save").ret == 0
    monkeypatch.setenv("GRID", "65")
    run()
    assert rows(pytester.path)["test_copy"]["verdict"]["comparison"]["same_code"] is False


def test_another_scalar_argument_is_not_the_same_code(
    pytester: pytest.Pytester, session: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        test_a="""
        import os
        import pytest

        @pytest.mark.gpumem(max_regression="5%")
        def test_triad(gpu_benchmark, gpu_kernels, device_buffer):
            buffers = [device_buffer(1 << 20, "f4") for _ in range(3)]
            gpu_benchmark(gpu_kernels.triad, *buffers, float(os.environ.get("SCALAR", "3")))
        """
    )
    here = (*SIMULATED, "--benchmark-json=out.json", "--gpumem-processes=1")

    def same_code() -> Any:
        assert session(*here).ret == 0
        return rows(pytester.path)["test_triad"]["verdict"]["comparison"]["same_code"]

    assert session(*here, "--gpumem-save").ret == 0
    assert same_code() is True
    monkeypatch.setenv("SCALAR", "4")
    assert same_code() is False


def test_advice_on_a_buffer_of_a_case_is_part_of_what_ran(
    pytester: pytest.Pytester, session: Run
) -> None:
    pytester.makepyfile(
        test_a="""
        import pytest
        from pytest_gpumem import Case

        @pytest.mark.gpumem(max_regression="5%")
        def test_sum(gpu_benchmark):
            def case(memory):
                x = memory.prefetched("4 MiB", "f4", read_mostly=True)
                work = lambda: x.view().sum()
                return Case(work, reference=work, reads=[x])

            gpu_benchmark.case(case)
        """
    )
    assert session(*SIMULATED, "--benchmark-json=out.json").ret == 0
    state = rows(pytester.path)["test_sum"]["measurement"]["what_ran"]["state"]
    assert state["managed buffer 1"] == "4 MiB, prefetched, read_mostly"


def test_a_failure_begins_with_what_ran_differently(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(slower("2.0 if 'GRID' in os.environ else 1.0"))
    for _ in range(3):
        assert run("--gpumem-save").ret == 0
    monkeypatch.setenv("GRID", "8")
    result = run()
    assert rows(pytester.path)["test_copy"]["verdict"]["code"] == "slower"
    why = result.stdout.str().partition("why: test_a.py::test_copy: ")[2].splitlines()
    assert why[0] == "kernel copy: grid 64 → 8"


def test_limits_on_counts_are_judged(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run().ret == 0
    monkeypatch.setenv("MOST", "4095 KiB")
    result = run()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    verdict = rows(pytester.path)["test_up"]["verdict"]
    assert (verdict["outcome"], verdict["code"]) == ("FAIL", None)
    assert "4 MiB copied in a launch, above max_copied_bytes" in verdict["reason"]


def test_limits_on_counts_are_options_too(pytester: pytest.Pytester, run: Run) -> None:
    assert run("-o", "gpumem_max_kernels=0").ret == pytest.ExitCode.TESTS_FAILED
    assert rows(pytester.path)["test_copy"]["verdict"]["outcome"] == "FAIL"
    result = run("-o", "gpumem_max_waits=few")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*-o gpumem_max_waits: 'few' is not understood; accepted is a whole number from 0 on, or*"]
    )
