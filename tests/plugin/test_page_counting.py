"""Counting passes as a user asks for them, and limits on what they find."""

from __future__ import annotations

import json

import pytest
from sessions import Run, rows_in

ADD = """
import pytest
from pytest_gpumem import MiB

def add(gpu_benchmark, gpu_kernels, make, **options):
    return gpu_benchmark(gpu_kernels.add, make(4 * MiB), make(4 * MiB), **options)
"""


def said(result: pytest.RunResult) -> str:
    """Everything that was printed, as one line: sentences are wrapped at the terminal's width."""
    return " ".join(result.stdout.str().split())


def counts_of(pytester: pytest.Pytester) -> list[object]:
    rows = rows_in(pytester.path)
    return [row["measurement"]["migrations"] for row in rows]


def test_a_count_is_made_for_a_call(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        ADD
        + """
def test_managed(gpu_benchmark, gpu_kernels, managed_buffer):
    counts = add(gpu_benchmark, gpu_kernels, managed_buffer, label="a", count_pages=True).counts
    assert counts.launch.gpu_faults > 0 and counts.launch.to_device == 8 * MiB
    assert counts.before.to_host == 8 * MiB
    assert add(gpu_benchmark, gpu_kernels, managed_buffer, label="b").counts is None

def test_prefetched(gpu_benchmark, gpu_kernels, prefetched_buffer):
    counts = add(gpu_benchmark, gpu_kernels, prefetched_buffer, count_pages=True).counts
    assert counts.launch.gpu_faults == counts.launch.migrated == 0
"""
    )
    gpumem().assert_outcomes(passed=2)


def test_a_limit_asks_for_the_count_and_is_judged(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        ADD
        + """
@pytest.mark.gpumem(max_gpu_page_faults=0, max_migrated="0 B")
def test_prefetched(gpu_benchmark, gpu_kernels, prefetched_buffer):
    add(gpu_benchmark, gpu_kernels, prefetched_buffer)

@pytest.mark.gpumem(max_gpu_page_faults=0)
def test_faulting(gpu_benchmark, gpu_kernels, managed_buffer):
    add(gpu_benchmark, gpu_kernels, managed_buffer)

def test_moving(gpu_benchmark, gpu_kernels, managed_buffer):
    add(gpu_benchmark, gpu_kernels, managed_buffer, max_migrated="4 MiB")
"""
    )
    result = gpumem()
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "* GPU page faults in a launch, above max_gpu_page_faults 0 (marker) by *",
            "*bandwidth *(8 MiB read, 4 MiB written)*",
            "*pages *a launch, counted by the model: *",
            "8 MiB migrated in a launch (fault 8 MiB), above max_migrated 4 MiB (call) by 4 MiB",
        ]
    )


def test_a_limit_for_the_whole_run_is_judged(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        ADD
        + """
def test_prefetched(gpu_benchmark, gpu_kernels, prefetched_buffer):
    add(gpu_benchmark, gpu_kernels, prefetched_buffer)

def test_faulting(gpu_benchmark, gpu_kernels, managed_buffer):
    add(gpu_benchmark, gpu_kernels, managed_buffer)
"""
    )
    for limit in ("gpumem_max_gpu_page_faults=0", "gpumem_max_migrated=0 B"):
        result = gpumem("-o", limit)
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines([f"*test_faulting*above {limit[7:].partition('=')[0]} 0*"])


def test_counts_are_in_the_json(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        ADD
        + """
def test_add(gpu_benchmark, gpu_kernels, managed_buffer):
    add(gpu_benchmark, gpu_kernels, managed_buffer, count_pages=True)
"""
    )
    result = gpumem("-v", "--benchmark-json", "out.json")
    result.assert_outcomes(passed=1)
    (migrations,) = counts_of(pytester)
    assert migrations["launch"]["to_device"] == 8 << 20  # type: ignore[index]
    assert migrations["launch"]["gpu_groups"]  # type: ignore[index]
    extra = json.loads((pytester.path / "out.json").read_text())["benchmarks"][0]["extra_info"]
    assert "gpu_page_faults" in json.dumps(extra)


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("max_gpu_page_faults=-1", "-1 is not understood; accepted is a whole number from 0 on"),
        (
            "max_gpu_page_faults=True",
            "True is not understood; accepted is a whole number from 0 on",
        ),
        ("max_migrated='many'", "'many'"),
        ("count_pages=3", "count_pages=3; accepted are True, False and None"),
        ("max_page_faults=1", "did you mean max_gpu_page_faults"),
    ],
)
def test_mistakes_are_one_line(
    keyword: str, message: str, pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        ADD
        + f"""
def test_add(gpu_benchmark, gpu_kernels, managed_buffer):
    add(gpu_benchmark, gpu_kernels, managed_buffer, {keyword})
"""
    )
    result = gpumem()
    result.assert_outcomes(failed=1)
    assert message in said(result)


def test_oversubscription_needs_its_marker(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
import pytest
from pytest_gpumem import GiB

def test_refused(device_buffer, managed_buffer, gpu_device):
    device_buffer(72 * GiB)
    managed_buffer(16 * GiB)

@pytest.mark.gpumem(oversubscribe=True)
def test_allowed(device_buffer, managed_buffer, gpu_device):
    device_buffer(72 * GiB)
    assert managed_buffer(16 * GiB).oversubscribed
"""
    )
    result = gpumem("--strict-markers")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*OutOfMemory: 16 GiB of managed memory asked for, * so it needs @pytest.mark.gpumem(oversubscribe=True)*"
        ]
    )
