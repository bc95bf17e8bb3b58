"""The calls of all tests in a sentence."""

from __future__ import annotations

from pytest_gpumem.records.calls import Calls, WaitLine
from pytest_gpumem.reporting.calls import call_totals


def waiting(line: int, *, sure: bool = True) -> WaitLine:
    return WaitLine("test_a.py", line, "test_a", "", "cuMemAlloc", "allocation", 2, sure=sure)


def test_the_lines_are_those_whose_waits_count() -> None:
    lines = (waiting(3), waiting(4, sure=False))
    (plain,) = call_totals([Calls(kernels=1, waiting=lines)])
    (strict,) = call_totals([Calls(kernels=1, waiting=lines, strict=True)])
    assert (
        plain
        == "calls of 1 test: 1 kernel, 0 copies of 0 B, the host waits 2 times at 1 line: test_a.py:3 2 x"
    )
    assert strict.endswith("the host waits 4 times at 2 lines: test_a.py:3 2 x, test_a.py:4 2 x")


def test_tests_that_could_not_be_counted_are_named() -> None:
    (text,) = call_totals([Calls(kernels=1), Calls(kernels=2, not_counted="a profiler had CUPTI")])
    assert (
        text
        == "calls of 2 tests: 3 kernels, 0 copies of 0 B, the host waits 0 times; 1 test not counted, or not completely"
    )
