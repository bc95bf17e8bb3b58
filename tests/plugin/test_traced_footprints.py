"""`--gpumem-footprint=trace` on the simulated device: the lines behind a test's memory, and those that grew since the baseline."""

from __future__ import annotations

import pytest
from sessions import Run, row_in

from pytest_gpumem import MiB

MODEL = """
def layer(device_buffer):
    return device_buffer("2 MiB")
"""
GROWS = """
import pytest
from model import layer

@pytest.mark.gpumem(max_peak_regression="0 B")
def test_grows(device_buffer):
    first = device_buffer("1 MiB")
    others = [layer(device_buffer) for _ in range(3)]
"""


@pytest.fixture
def traced(pytester: pytest.Pytester, gpumem: Run) -> Run:
    pytester.makepyfile(model=MODEL, test_it=GROWS)
    gpumem("--gpumem-footprint=trace", "--gpumem-save").assert_outcomes(passed=1)
    (pytester.path / "model.py").write_text("import sys\n" + MODEL.replace("2 MiB", "3 MiB"))
    return gpumem


def test_the_report_of_a_failed_test_names_the_line_that_grew(traced: Run) -> None:
    result = traced(
        "--gpumem-footprint=trace", "--gpumem-report=report.html", "--benchmark-json=results.json"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "why: test_it.py::test_grows: +3 MiB at model.py:4 in layer: "
            'return device_buffer("3 MiB") (6 MiB before, by return device_buffer("2 MiB"))',
        ]
    )


def test_results_have_the_lines_and_the_way_to_them(pytester: pytest.Pytester, traced: Run) -> None:
    traced(
        "--gpumem-footprint=trace", "--gpumem-report=report.html", "--benchmark-json=results.json"
    )
    row = row_in(pytester.path, "results.json")
    sites = row["footprint"]["sites"]
    assert [(site["file"], site["line"], site["at_peak"]) for site in sites] == [
        ("model.py", 4, 9 * MiB),
        ("test_it.py", 6, MiB),
    ]
    assert "model.py:4 in layer" in (pytester.path / "report.html").read_text()


def test_without_the_option_it_is_named(traced: Run) -> None:
    result = traced()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*--gpumem-footprint=trace names the lines that allocated"])


def test_a_labelled_part_has_its_own_lines(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile("""
        def test_it(device_buffer, gpu_memory):
            before = device_buffer("8 MiB")
            with gpu_memory.watch("decode", max_peak="1 MiB"):
                inside = device_buffer("2 MiB")
    """)
    result = gpumem("--gpumem-footprint=trace")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "why: *: 2 MiB at test_*.py:4 in test_it: inside = device_buffer*",
        ]
    )
