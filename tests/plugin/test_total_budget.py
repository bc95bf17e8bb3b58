"""A total budget over a run on the simulated device, whose clock is virtual: what it says, and what it spends."""

from __future__ import annotations

from typing import Any

import pytest
from sessions import TRIAD, Run

from pytest_gpumem.measuring.measure import Plan, measure
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.plugin import gpu_benchmark
from pytest_gpumem.records.measurement import Measurement

CHEAP_AND_DEAR = """
def test_cheap(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)

def test_dear(gpu_benchmark, device_buffer, managed_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.add, managed_buffer(1 << 24), managed_buffer(1 << 24), label="faulting")
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0, label="device")
"""


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of the plans so far, by "target label"."""
    budgets: dict[str, float] = {}

    def noted(
        harness: Any, target: Target, plan: Plan, *, label: str, **options: Any
    ) -> Measurement:
        budgets[f"{target.name} {label}".strip()] = plan.budget
        return measure(harness, target, plan, label=label, **options)

    monkeypatch.setattr(gpu_benchmark, "measure", noted)
    return budgets


def spent(result: pytest.RunResult) -> float:
    """Seconds that the run says it spent."""
    (line,) = (line for line in result.stdout.lines if line.startswith("budget: "))
    value, unit = line.split()[1:3]
    return float(value) * {"ms": 1e-3, "s": 1.0}[unit]


def test_a_run_spends_its_total_and_says_so(pytester: pytest.Pytester, gpumem: Run) -> None:
    """Page faults take milliseconds, of which no share holds as many as are wanted."""
    dear = (
        "def test_dear"
        + CHEAP_AND_DEAR.partition("def test_dear")[2].partition(
            "    gpu_benchmark(gpu_kernels.write"
        )[0]
    )
    pytester.makepyfile("\n".join(dear.replace("test_dear", f"test_{i}") for i in range(4)))
    result = gpumem("--gpumem-budget=2 s total")
    result.assert_outcomes(passed=4)
    assert 1.8 < spent(result) < 2.1
    result.stdout.fnmatch_lines(["budget: * of 2.000 s spent on measuring"])


def test_tests_that_do_not_run_leave_their_share(
    pytester: pytest.Pytester, gpumem: Run, plans: dict[str, float]
) -> None:
    skipped = "@pytest.mark.skip" + TRIAD.replace("test_triad", "test_skipped")
    pytester.makepyfile(
        "import pytest\n" + skipped + skipped.replace("_skipped", "_skipped_too") + TRIAD
    )
    result = gpumem("--gpumem-budget=3 s total")
    result.assert_outcomes(passed=1, skipped=2)
    assert plans == {"triad": 3}


def test_a_markers_budget_lies_within_the_total(
    pytester: pytest.Pytester, gpumem: Run, plans: dict[str, float]
) -> None:
    write = TRIAD.replace("triad, a, b, c", "write, a").replace("test_triad", "test_write")
    marks = [f"@pytest.mark.gpumem(budget='{budget}')" for budget in ("0.5 s", "5 s")]
    pytester.makepyfile("\n".join(["import pytest", marks[0] + TRIAD, marks[1] + write]))
    gpumem("--gpumem-budget=2 s total").assert_outcomes(passed=2)
    assert plans["triad"] == 0.5
    assert 1 < plans["write"] < 2


def test_what_no_budget_can_prevent_is_said(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(CHEAP_AND_DEAR)
    result = gpumem("--gpumem-budget=1 ms total")
    result.assert_outcomes(passed=2)
    assert spent(result) > 1e-3
    result.stdout.fnmatch_lines(["budget: * of 1.000 ms spent on measuring"])
