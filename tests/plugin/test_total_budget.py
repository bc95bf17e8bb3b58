"""A total budget over a run on the simulated device, whose clock is virtual: what it says, and what it spends."""

from __future__ import annotations

import pytest
from sessions import Run

DEAR = """
def test_dear(gpu_benchmark, managed_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.add, managed_buffer(1 << 24), managed_buffer(1 << 24))
"""
"""Page faults take milliseconds, of which no share holds as many as are wanted: it spends all that it gets."""


def spent(result: pytest.RunResult) -> float:
    """Seconds that the run says it spent."""
    (line,) = (line for line in result.stdout.lines if line.startswith("budget: "))
    value, unit = line.split()[1:3]
    return float(value) * {"ms": 1e-3, "s": 1.0}[unit]


def test_a_run_spends_its_total_and_says_so(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile("".join(DEAR.replace("test_dear", f"test_{i}") for i in range(4)))
    result = gpumem("--gpumem-budget=2 s total")
    result.assert_outcomes(passed=4)
    assert 1.8 < spent(result) < 2.1
    result.stdout.fnmatch_lines(["budget: * of 2.000 s spent on measuring"])


def test_tests_that_do_not_run_leave_their_share(pytester: pytest.Pytester, gpumem: Run) -> None:
    skipped = "@pytest.mark.skip" + DEAR.replace("test_dear", "test_skipped")
    pytester.makepyfile(f"import pytest\n{skipped}{skipped.replace('_skipped', '_too')}{DEAR}")
    result = gpumem("--gpumem-budget=1 s total")
    result.assert_outcomes(passed=1, skipped=2)
    assert 0.9 < spent(result) < 1.1


@pytest.mark.parametrize(("marked", "least", "most"), [("0.1 s", 0.09, 0.3), ("5 s", 0.4, 0.7)])
def test_a_markers_budget_lies_within_the_total(
    pytester: pytest.Pytester, gpumem: Run, marked: str, least: float, most: float
) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.gpumem(budget='{marked}'){DEAR}")
    result = gpumem("--gpumem-budget=0.5 s total")
    result.assert_outcomes(passed=1)
    assert least < spent(result) < most


def test_what_no_budget_can_prevent_is_said(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(DEAR)
    result = gpumem("--gpumem-budget=1 ms total")
    result.assert_outcomes(passed=1)
    assert spent(result) > 1e-3
    result.stdout.fnmatch_lines(["budget: * of 1.000 ms spent on measuring"])
