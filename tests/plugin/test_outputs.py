"""What a session writes for machines."""

from __future__ import annotations

import csv
import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from pytest_benchmark.utils import get_machine_id
from sessions import TRIAD, Run, results_in, stored_in

from pytest_gpumem.cli import main

SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "results.schema.json"
TESTS = """
import pytest

def measure(gpu_benchmark, device_buffer, gpu_kernels, **limits):
    return gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20), **limits)

@pytest.mark.parametrize("name", ["::error::x|`@y`"])
def test_slow(gpu_benchmark, device_buffer, gpu_kernels, name):
    measure(gpu_benchmark, device_buffer, gpu_kernels, max_latency="1 ns")

def test_fine(gpu_benchmark, device_buffer, gpu_kernels):
    measure(gpu_benchmark, device_buffer, gpu_kernels)
"""
FILES = ("--gpumem-report=report.html", "--benchmark-json=out.json", "--junitxml=junit.xml")


def test_a_run_in_github_actions(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Annotations on the test's line in the repository, the job's summary, and every file; the results are of the schema."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", os.fspath(pytester.path.parent))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "steps.md")
    (pytester.path / "steps.md").write_text("before\n")
    pytester.makepyfile(test_it=TESTS)
    result = gpumem(*FILES)
    result.assert_outcomes(passed=1, failed=1)
    commands = [line for line in result.outlines if line.startswith("::")]
    nodeid = "test_it.py::test_slow[::error::x|`@y`]"
    assert len(commands) == 1
    assert commands[0].startswith(
        f"::error file={pytester.path.name}/test_it.py,line=6,title=gpumem%3A FAIL (simulated)::FAIL (simulated) {nodeid}: "
    )
    summary = (pytester.path / "steps.md").read_text()
    assert summary.startswith("before\n")
    assert "**2 rows (simulated): 1 FAIL, 1 measured**" in summary
    document = results_in(pytester.path)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    cases = {
        case.get("name"): case
        for case in ET.parse(pytester.path / "junit.xml").getroot().iter("testcase")
    }
    properties = {p.get("name"): p.get("value") for p in cases["test_fine"].iter("property")}
    named = "verdict reason latency_s half_width_s bandwidth_bytes_per_s mode sampler gpu simulated"
    assert {f"gpumem_{name}" for name in named.split()} <= set(properties)
    result.stdout.fnmatch_lines(["--gpumem-report: wrote *report.html"])


def test_a_row_without_a_limit_is_measured_and_passes_nothing_in_every_output(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails no strict session, enters the baseline as a PASS does, and later shows its change against it."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "steps.md")
    pytester.makepyfile(
        test_it="""
        import pytest

        def measure(gpu_benchmark, device_buffer, gpu_kernels):
            gpu_benchmark(gpu_kernels.triad, *(device_buffer(1 << 20) for _ in range(3)), 3.0)

        @pytest.mark.gpumem(max_latency="1 s")
        def test_held(gpu_benchmark, device_buffer, gpu_kernels):
            measure(gpu_benchmark, device_buffer, gpu_kernels)

        def test_free(gpu_benchmark, device_buffer, gpu_kernels):
            measure(gpu_benchmark, device_buffer, gpu_kernels)

        @pytest.mark.gpumem(max_peak="1 GiB")
        def test_memory(device_buffer, gpu_memory):
            with gpu_memory.watch("part"):
                device_buffer(1 << 20)
        """
    )
    gpumem("--gpumem-save")
    result = gpumem(*FILES, "--gpumem-strict", "-v")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        ["test_free * %* measured (sim)", "4 rows (simulated): 2 PASS, 2 measured"]
    )
    assert not [line for line in result.outlines if line.startswith("::")]
    rows = {row["key"]: row["verdict"] for row in results_in(pytester.path)["rows"]}
    assert {key.partition("::")[2]: verdict["outcome"] for key, verdict in rows.items()} == {
        "test_held": "PASS",
        "test_free": "MEASURED",
        "test_memory": "PASS",
        "test_memory[part]": "MEASURED",
    }
    assert rows["test_it.py::test_free"]["comparison"]["processes"] == 1
    markdown, html = ((pytester.path / name).read_text() for name in ("steps.md", "report.html"))
    assert "**4 rows (simulated): 2 PASS, 2 measured**" in markdown
    assert "| measured (simulated) |" in markdown
    assert '<span class="chip measured">2 measured</span>' in html
    cases = {
        case.get("name"): case
        for case in ET.parse(pytester.path / "junit.xml").getroot().iter("testcase")
    }
    assert ("gpumem_verdict", "MEASURED") in [
        (p.get("name"), p.get("value")) for p in cases["test_free"].iter("property")
    ]
    report = CliRunner().invoke(main, ["report", "out.json", "--csv", "rows.csv"])
    assert report.exit_code == 0, report.output
    assert [
        line["verdict"]
        for line in csv.DictReader((pytester.path / "rows.csv").read_text().splitlines())
    ] == [verdict["outcome"] for verdict in rows.values()]


def test_every_output_counts_the_rows_of_adopted_benchmarks(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "steps.md")
    pytester.makepyfile(
        """
        def test_adopted(benchmark, device_buffer, gpu_kernels):
            benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))

        def test_slow(gpu_benchmark, device_buffer, gpu_kernels):
            arrays = device_buffer(1 << 20), device_buffer(1 << 20)
            gpu_benchmark(gpu_kernels.copy, *arrays, max_latency="1 ns")
        """
    )
    result = gpumem("--benchmark-max-time=0.01", "--gpumem-report=report.html")
    for name in ("steps.md", "report.html", None):
        text = (pytester.path / name).read_text() if name else result.stdout.str()
        assert "red (simulated): 1 of 2 rows fails" in text, name
        assert "2 rows (simulated): 1 FAIL, 1 measured" in text, name


def test_a_result_that_nothing_checked_is_said(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `Case` without a check is not taken for a kernel whose result was compared."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "steps.md")
    pytester.makepyfile(
        test_it="""
        import pytest
        from pytest_gpumem import Case

        @pytest.mark.parametrize("check", [None, lambda: None])
        @pytest.mark.parametrize("size", [1, 2])
        def test_case(gpu_benchmark, size, check):
            def case(memory):
                return Case(lambda: None, reference=lambda: None, check=check, reads=[memory.device(size << 20)])

            gpu_benchmark.case(case)

        def test_kernel(gpu_benchmark, device_buffer, gpu_kernels):
            gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))
        """
    )
    result = gpumem("-v", "--benchmark-json=out.json", "--gpumem-report=report.html")
    result.assert_outcomes(passed=5)
    assert [row["measurement"]["checked"] for row in results_in(pytester.path)["rows"]] == [
        False,
        True,
        False,
        True,
        True,
    ]
    result.stdout.fnmatch_lines(
        ["2 rows measured without a check of the result", "5 rows (simulated): 5 measured"]
    )
    assert (pytester.path / "report.html").read_text().count("<small>unchecked</small>") == 2


def test_elsewhere_nothing_is_annotated_and_nothing_measured_is_said(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = gpumem(*FILES[:1])
    assert "::" not in "".join(line for line in result.outlines if line.startswith("::"))
    result.stdout.fnmatch_lines(["nothing was measured: *report.html is not written"])
    assert not (pytester.path / "report.html").exists()


@pytest.mark.parametrize("option", ["--gpumem-report", "--benchmark-json"])
def test_a_file_that_cannot_be_written_is_noticed_before_anything_is_measured(
    pytester: pytest.Pytester, gpumem: Run, option: str
) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = gpumem(f"{option}=nowhere/out")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"ERROR: gpumem: {option}: *nowhere/out: there is no folder *nowhere"]
    )


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_full_disk_costs_only_the_file_that_is_on_it(
    pytester: pytest.Pytester, gpumem: Run, workers: tuple[str, ...]
) -> None:
    pytester.makepyfile(TRIAD)
    result = gpumem(
        "--benchmark-json=/dev/full",
        "--gpumem-save",
        "--gpumem-report=out.html",
        "--gpumem-max-regression=5%",
        *workers,
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines_random(
        [
            "1 row (simulated): 1 NEW",
            "pytest-benchmark cannot save its results: *No space left on device*",
            "--gpumem-save: 1 of 1 row stored in *",
            "--gpumem-report: wrote *out.html",
            "*= 1 passed*",
        ]
    )
    assert len(stored_in(pytester.path)) == 1
    result.stdout.no_fnmatch_line("NEW: *--gpumem-save stores*")  # this session does


def test_a_save_of_pytest_benchmark_that_fails_names_its_file(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(TRIAD)
    pytester.mkdir(".benchmarks")
    (pytester.path / ".benchmarks" / get_machine_id()).touch()
    result = gpumem("--benchmark-autosave")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["pytest-benchmark cannot save its results: *.benchmarks*.json*"])


def test_verdicts_stand_below_the_table_of_pytest_benchmark_also_where_its_own_comparison_fails(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(test_it=TESTS)
    gpumem("--benchmark-save=before", "-k", "fine")
    (pytester.path / "test_it.py").write_text(TESTS.replace("1 << 20", "1 << 24"))
    result = gpumem(
        "--benchmark-compare=0001", "--benchmark-compare-fail=min:5%", "--gpumem-report=out.html"
    )
    assert result.ret != pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "*- benchmark 'simulated'*",
            "Legend:*",
            "*= gpumem: *",
            "2 rows (simulated): 1 FAIL, 1 measured",
            "--gpumem-report: wrote *",
        ]
    )


def test_pytest_benchmarks_table_leaves_out_gpu_tests_unless_it_is_asked_for(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(test_it=TESTS, test_host="def test_host(benchmark): benchmark(sum, [1, 2])")
    with_others = gpumem("--benchmark-json=out.json", "--benchmark-max-time=0.01").stdout.str()
    assert "- benchmark 'simulated'" not in with_others
    assert "- benchmark: 1 tests -" in with_others  # that of a test on the host
    assert len(json.loads((pytester.path / "out.json").read_text())["benchmarks"]) == 2
    assert "- benchmark" not in gpumem("test_it.py").stdout.str()
    for asked in ("--benchmark-columns=min,max", "--benchmark-sort=name", "--benchmark-verbose"):
        assert "- benchmark 'simulated'" in gpumem("test_it.py", asked).stdout.str()
    pytester.makeini("[pytest]\naddopts = --benchmark-sort=name")
    assert "- benchmark 'simulated'" in gpumem("test_it.py").stdout.str()


def test_a_failure_is_as_wide_as_the_terminal_and_its_summary_is_whole(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")  # pytest does not cut its short summary
    monkeypatch.setenv("COLUMNS", "80")
    pytester.makepyfile(test_it=TRIAD)
    result = gpumem("--gpumem-max-latency", "1 ns", "--junitxml=junit.xml")
    lines = [
        line
        for line in result.outlines
        if "/" not in line and not line.startswith(("FAILED", "plugins:", "to "))
    ]  # a path and a command are not broken
    assert [line for line in lines if len(line) > 80] == []
    (failed,) = (line for line in result.outlines if line.startswith("FAILED"))
    assert len(failed) > 80
    message = failed.partition(" - ")[2]
    assert message.endswith("placements")
    assert ET.parse(pytester.path / "junit.xml").find(".//failure").get("message") == message  # type: ignore[union-attr]
