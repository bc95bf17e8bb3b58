"""Which lines take more memory than in the baseline."""

from __future__ import annotations

from msgspec.structs import replace

from pytest_gpumem import MiB
from pytest_gpumem.judging.differences import grown_lines
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.difference import PEAK, Difference
from pytest_gpumem.records.footprint import Footprint, Site
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.records.waits import WaitLine, Waits
from pytest_gpumem.reporting.footprints import site_lines, wait_totals

LAYER = Site(
    "model.py", 12, "forward", "y = a * b", "PyTorch", "device", at_peak=64 * MiB, at_peak_count=1
)
OUT = Site(
    "model.py",
    14,
    "forward",
    "np.multiply(a, b, out=c)",
    "PyTorch",
    "device",
    at_peak=32 * MiB,
    at_peak_count=1,
)


def test_a_line_that_only_moved_is_the_same() -> None:
    assert grown_lines([LAYER, OUT], [replace(OUT, line=40), replace(LAYER, line=38)], PEAK) == []


def test_growth_of_a_line() -> None:
    (change,) = grown_lines([LAYER, OUT], [replace(LAYER, line=13, at_peak=128 * MiB), OUT], PEAK)
    assert change == Difference(
        PEAK, 64 * MiB, 128 * MiB, site=replace(LAYER, line=13, at_peak=128 * MiB)
    )


def test_a_line_that_was_changed_is_compared_with_what_it_was() -> None:
    """A dtype is widened."""
    base = replace(LAYER, code="state = torch.zeros(n, dtype=torch.float32)")
    head = replace(LAYER, code="state = torch.zeros(n, dtype=torch.float64)", at_peak=128 * MiB)
    (change,) = grown_lines([base, OUT], [head, OUT], PEAK)
    assert (change.was, change.now, change.name) == (64 * MiB, 128 * MiB, base.code)


def test_a_new_line_in_place_of_one_that_took_nothing() -> None:
    """A refactoring made a temporary: what was done in place took nothing, so that the baseline has no site of it."""
    temporary = replace(LAYER, code="c = a * b + c", at_peak=16 * MiB)
    (change,) = grown_lines([OUT], [OUT, temporary], PEAK)
    assert change == Difference(PEAK, 0, 16 * MiB, site=temporary)


def test_the_largest_growth_comes_first() -> None:
    more = replace(LAYER, function="backward", code="grad = w.T @ y")
    found = grown_lines([LAYER, OUT], [more, replace(OUT, at_peak=33 * MiB)], PEAK)
    assert [(change.was, change.now) for change in found] == [
        (0, 64 * MiB),
        (32 * MiB, 33 * MiB),
    ]
    assert [change.site.function for change in found if change.site is not None] == [
        "backward",
        "forward",
    ]


def test_the_same_line_of_two_libraries_is_two() -> None:
    (change,) = grown_lines([LAYER], [LAYER, replace(LAYER, library="CUDA", at_peak=MiB)], PEAK)
    assert change == Difference(PEAK, 0, MiB, site=replace(LAYER, library="CUDA", at_peak=MiB))


def test_three_of_each_are_shown_with_what_changed() -> None:
    from pytest_gpumem.records.footprint import Footprint

    lines = [
        replace(LAYER, line=line, code=f"x{line} = make({line})", at_peak=line * MiB)
        for line in (10, 20, 30, 40)
    ]
    leak = replace(OUT, at_peak=0, kept=4096, kept_count=2)
    base = Footprint(100 * MiB, sites=(*lines[1:], replace(lines[0], at_peak=MiB)))
    found = site_lines(Footprint(100 * MiB, sites=(*lines, leak)), base)
    assert found == [
        "in use at the peak, 100 MiB in 4 allocations:",
        "  40 MiB  model.py:40 in forward: x40 = make(40)  (PyTorch, 1 allocation)",
        "  30 MiB  model.py:30 in forward: x30 = make(30)  (PyTorch, 1 allocation)",
        "  20 MiB  model.py:20 in forward: x20 = make(20)  (PyTorch, 1 allocation)",
        "since the baseline:",
        "  +9 MiB  model.py:10 in forward: x10 = make(10)  (1 MiB before)",
        "kept, 4 KiB in 2 allocations:",
        "  4 KiB  model.py:14 in forward: np.multiply(a, b, out=c)  (PyTorch, 2 allocations)",
        "since the baseline:",
        "  +4 KiB  model.py:14 in forward: np.multiply(a, b, out=c)  (new)",
    ]
    assert site_lines(Footprint(1)) == []
    assert (
        "without --gpumem-footprint=trace"
        in site_lines(Footprint(2, sites=(LAYER,)), Footprint(1))[-1]
    )
    assert "baseline" not in "\n".join(site_lines(Footprint(1, sites=(LAYER,)), Footprint(1)))


def test_the_lines_that_wait_most_are_summed_over_tests() -> None:
    def row(*counts: int) -> Row:
        lines = tuple(
            WaitLine("conftest.py", 20 + at, "wait", "cuStreamSynchronize", count)
            for at, count in enumerate(counts)
        )
        return Row(
            "a.py::test",
            Limits(),
            Verdict(Outcome.MEASURED, ""),
            footprint=Footprint(0, waits=Waits(lines)),
        )

    assert wait_totals([row(), Row("a.py::test", Limits(), Verdict(Outcome.MEASURED, ""))]) == []
    (text,) = wait_totals([row(1), row(2, 1), row()])
    assert (
        text
        == "the host waits 4 times in 2 tests, at 2 lines: conftest.py:20 3 x, conftest.py:21 1 x"
    )
