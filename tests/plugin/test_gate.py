"""Limits, baselines and what a failure looks like from outside."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from ci_project import make_three
from sessions import Run, rows_in, slower, stored_in

LIMITED = """
import pytest

@pytest.mark.gpumem(max_latency="1 ns")
def test_slow(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(64 << 20), device_buffer(64 << 20))

def test_fine(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(64 << 20), device_buffer(64 << 20), max_latency="1 s")
"""

SIZED = """
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(64 << 20), device_buffer(64 << 20), max_regression="2%")
"""
SLOWER = slower('float(os.environ.get("FACTOR", 1))')


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows of a JSON document by test name and label."""
    rows = rows_in(folder)
    return {
        row["nodeid"].split("::")[1] + (f"[{row['label']}]" if row["label"] else ""): row
        for row in rows
    }


def test_a_broken_limit_fails_the_test(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(LIMITED)
    result = gpumem("--junitxml=junit.xml", "--benchmark-json=out.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=1)
    text = result.stdout.str()
    for figure in (
        "FAIL (simulated), ",
        "max_latency 1.000 ns (marker)",
        "latency ",
        " placements",
        "clean-cold",
        "conditions ",
    ):
        assert figure in text

    suite = ET.parse(pytester.path / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("failures"), suite.get("errors"), suite.get("tests")) == ("1", "0", "2")
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    failure = cases["test_slow"].find("failure")
    assert failure is not None
    assert "max_latency" in (failure.get("message") or "")
    properties = {
        p.get("name"): p.get("value") or ""
        for p in cases["test_fine"].findall("properties/property")
    }
    assert (
        float(properties["gpumem_latency_s"]) == json.loads(properties["gpumem"])["latency_s"] > 0
    )
    assert properties["gpumem_simulated"] == "True"
    assert properties["gpumem_verdict"] == "PASS"

    # pytest-benchmark's own list has the passing row only, ours has both.
    document = json.loads((pytester.path / "out.json").read_text())
    assert [bench["name"] for bench in document["benchmarks"]] == ["test_fine"]
    rows = rows_of(pytester.path)
    assert (rows["test_slow"]["failed"], rows["test_fine"]["failed"]) == (True, False)
    assert rows["test_slow"]["verdict"]["outcome"] == "FAIL"
    assert document["gpumem"]["schema"] == 2
    assert document["gpumem"]["simulated"] is True


def test_json_also_where_every_test_failed(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        def test_early(gpu_benchmark):
            raise ValueError("before anything was measured")

        def test_late(gpu_benchmark, device_buffer, gpu_kernels):
            gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)
            raise ValueError("after it")

        import pytest
        @pytest.fixture
        def broken(): raise ValueError("in setup")

        def test_setup(broken, gpu_benchmark): ...
        """
    )
    gpumem("--benchmark-json=out.json").assert_outcomes(failed=2, errors=1)
    rows = rows_of(pytester.path)
    assert all(row["failed"] for row in rows.values())
    assert rows["test_early"]["measurement"] is None
    assert "before anything was measured" in rows["test_early"]["verdict"]["reason"]
    assert rows["test_late"]["measurement"]["target"] == "write"
    assert rows["test_setup"]["measurement"] is None


def test_json_where_nothing_was_ever_measured(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile("def test_early(gpu_benchmark): raise ValueError")
    gpumem("--benchmark-json=out.json").assert_outcomes(failed=1)
    document = json.loads((pytester.path / "out.json").read_text())
    assert document["benchmarks"] == []
    assert len(document["gpumem"]["rows"]) == 1
    assert not list(pytester.path.glob(".out.json*"))


def test_a_failing_teardown_fails_the_rows(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def messy():
            yield
            raise ValueError("teardown")

        def test_it(messy, gpu_benchmark, device_buffer, gpu_kernels):
            gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)
        """
    )
    gpumem("--benchmark-json=out.json", "--gpumem-save").assert_outcomes(passed=1, errors=1)
    assert rows_of(pytester.path)["test_it"]["failed"]
    assert not stored_in(pytester.path)


def test_a_slower_run_fails_and_so_does_the_next(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(SIZED)
    pytester.makeconftest(SLOWER)
    for runs in (1, 2, 3):
        gpumem("--gpumem-save").assert_outcomes(passed=1)
        assert len(stored_in(pytester.path)) == runs
    monkeypatch.setenv("FACTOR", "1.25")
    for _ in range(2):
        slower = gpumem("--gpumem-save", "--benchmark-autosave")
        slower.assert_outcomes(failed=1)
        slower.stdout.fnmatch_lines(
            ["latency *, was *", "  verdict *FAIL (simulated), *::test_copy"]
        )
    assert len(stored_in(pytester.path)) == 3
    # Nor does pytest-benchmark's own storage take the regressed row.
    for saved in pytester.path.glob(".benchmarks/*/0*.json"):
        assert json.loads(saved.read_text()).get("benchmarks", []) == []


def test_a_session_ends_with_what_fails_why_and_what_to_do(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below pytest's own summary, and not for a test that fails by an assertion."""
    pytester.makepyfile(f"{SIZED}\n\ndef test_wrong(gpu_benchmark):\n    assert False\n")
    pytester.makeconftest(SLOWER)
    gpumem("--gpumem-save", "-k", "not wrong").assert_outcomes(passed=1)
    make_three(stored_in(pytester.path)[0])
    monkeypatch.setenv("FACTOR", "1.5")
    monkeypatch.setenv("COLUMNS", "160")
    result = gpumem(
        "--gpumem-save", "test_a_session_ends_with_what_fails_why_and_what_to_do.py", "--tb=no"
    )
    result.assert_outcomes(failed=2)
    begins = next(
        number
        for number, line in enumerate(result.outlines)
        if line.startswith("FAIL (simulated) ")
    )
    test = "test_a_session_ends_with_what_fails_why_and_what_to_do.py::test_copy"
    text = " ".join(line.strip().removesuffix(" \\") for line in result.outlines[begins:-1])
    assert re.fullmatch(
        rf"FAIL \(simulated\) {test} latency .*, was \S+ us \+\S+ % .* "
        rf"to repeat: pytest .* --gpumem .* {test} "
        r"to accept, commit what this writes: "
        rf"gpumem accept {test} --change time=\S+% --reason '...'",
        text,
    ), text
    assert "--gpumem-save" not in text
    assert any(line.startswith("FAILED ") for line in result.outlines[:begins])


def test_what_repeats_names_each_test_that_fails_once_up_to_five(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("n", range(7))
        @pytest.mark.gpumem(max_latency="1 ns")
        def test_it(gpu_benchmark, device_buffer, gpu_kernels, n):
            for label in "ab":
                gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), label=label)
        """
    )
    result = gpumem("--gpumem-strict")
    (line,) = (line for line in result.outlines if line.startswith("to repeat: "))
    name = "test_what_repeats_names_each_test_that_fails_once_up_to_five.py::test_it"
    tests = " ".join(f"'{name}[{n}]'" for n in range(5))
    assert line.endswith(f" --gpumem-strict {tests}  # and 2 further")


def test_what_repeats_works_in_the_folder_of_the_session(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeini("[pytest]")
    folder = pytester.mkdir("sub")
    (folder / "test_it.py").write_text(LIMITED)
    monkeypatch.chdir(folder)
    result = gpumem()
    (line,) = (line for line in result.outlines if line.startswith("to repeat: "))
    assert line.endswith(" test_it.py::test_slow")


def test_no_baseline_is_a_warning_and_fails_when_strict(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(SIZED)
    relaxed = gpumem()
    relaxed.assert_outcomes(passed=1)
    relaxed.stdout.fnmatch_lines(
        ["NEW *::test_copy: *; pytest --gpumem --gpumem-save *", "1 row (simulated): 1 NEW"]
    )
    strict = gpumem("--gpumem-strict")
    strict.assert_outcomes(failed=1)
    strict.stdout.fnmatch_lines(["  verdict *NEW (simulated), *"])


def test_a_foreign_baseline_is_refused(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(SIZED)
    gpumem("--gpumem-save", "--gpumem-baseline=kept").assert_outcomes(passed=1)
    (h100,) = (pytester.path / "kept").iterdir()
    other = gpumem("--gpumem-device", "sim:h200", "--gpumem-baseline=kept")
    other.assert_outcomes(passed=1)
    other.stdout.fnmatch_lines([f"*{h100.name}*"])  # said: there is one, of another device
    # The same file under this device's key is a lie.
    name = "".join(p.name for p in (pytester.path / "kept").iterdir())
    gpumem("--gpumem-device", "sim:h200", "--gpumem-save", "--gpumem-baseline=kept")
    (h200,) = (p for p in (pytester.path / "kept").iterdir() if p.name != name)
    (saved,) = (h100 / "gpumem").iterdir()
    (h200 / "gpumem" / saved.name).write_text(saved.read_text())
    lie = gpumem("--gpumem-device", "sim:h200", "--gpumem-baseline=kept")
    assert lie.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = (line for line in lie.stderr.lines if line.strip())
    assert saved.name in line


def test_an_expected_failure_stays_one(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        LIMITED.replace("@pytest.mark.gpumem", "@pytest.mark.xfail\n@pytest.mark.gpumem")
    )
    result = gpumem("--gpumem-strict")
    result.assert_outcomes(passed=1, xfailed=1)
    assert result.ret == 0
    result.stdout.no_fnmatch_line("red*")


def test_an_expected_failure_before_a_measurement_is_no_row(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.xfail
        def test_fails(gpu_benchmark):
            assert False
        """
    )
    result = gpumem("--gpumem-max-latency", "1 s")
    result.assert_outcomes(xfailed=1)
    result.stdout.no_fnmatch_line("*1 test failed*")
    result.stdout.no_fnmatch_line("*1 adopted benchmark*")
    result.stdout.fnmatch_lines(["not judged: *test_fails, max_latency: the test xfailed and *"])


# One measurement of a test against another

TWO = """
import os
import pytest

def case(gpu_benchmark, device_buffer, gpu_kernels, nbytes, **keywords):
    return gpu_benchmark(gpu_kernels.copy, device_buffer(nbytes), device_buffer(nbytes), **keywords)

def test_result(gpu_benchmark, device_buffer, gpu_kernels):
    case(gpu_benchmark, device_buffer, gpu_kernels, 64 << 20, label="large")
    small = case(gpu_benchmark, device_buffer, gpu_kernels, 16 << 20, label="small")
    small.faster_than("large", by=float(os.environ.get("BY", 2)))

@pytest.mark.gpumem(faster_than="2 x large")
def test_marker(gpu_benchmark, device_buffer, gpu_kernels):
    case(gpu_benchmark, device_buffer, gpu_kernels, 64 << 20, label="large")
    case(gpu_benchmark, device_buffer, gpu_kernels, 16 << 20, label="small")

def test_call(gpu_benchmark, device_buffer, gpu_kernels):
    case(gpu_benchmark, device_buffer, gpu_kernels, 16 << 20, label="small", faster_than="2 x large")
    case(gpu_benchmark, device_buffer, gpu_kernels, 64 << 20, label="large")
"""


def test_claims_between_two_measurements(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(TWO)
    gpumem("--benchmark-json=out.json").assert_outcomes(passed=3)
    rows = rows_of(pytester.path)
    for test, origin in (
        ("test_result", "result"),
        ("test_marker", "marker"),
        ("test_call", "call"),
    ):
        reason = rows[f"{test}[small]"]["verdict"]["reason"]
        assert "times as fast, between " in reason
        assert f"2 x large ({origin}) holds" in reason
    monkeypatch.setenv("BY", "100")
    result = gpumem("-k", "test_result")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "* of large is *faster_than 100 x large (result) does not hold*",
            "  verdict *FAIL (simulated), *::test_result[[]small]",
        ]
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            'faster_than("lagre")',
            "*BadCall: faster_than('lagre'): no other measurement of this test has that label; others are 'large'*",
        ),
        ('faster_than("small")', "*BadCall: faster_than('small'): no other measurement*"),
        (
            'faster_than("large", by=0.5)',
            "*BadCall: faster_than(..., by=0.5); accepted is a factor of 1 or more*",
        ),
        ('faster_than("large", by="2")', "*BadCall: faster_than(..., by='2'); accepted is*"),
    ],
)
def test_a_claim_that_cannot_be_judged(
    pytester: pytest.Pytester, gpumem: Run, call: str, message: str
) -> None:
    pytester.makepyfile(
        TWO.replace('faster_than("large", by=float(os.environ.get("BY", 2)))', call)
    )
    result = gpumem("-k", "test_result")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])


# Limits by parameter set, looser limits


def test_a_parameter_set_has_limits_of_its_own(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpumem(max_latency="1 s")
        @pytest.mark.parametrize("mib", [16, pytest.param(64, marks=pytest.mark.gpumem(max_latency="1 ns"))])
        def test_copy(gpu_benchmark, device_buffer, gpu_kernels, mib):
            gpu_benchmark(gpu_kernels.copy, device_buffer(mib << 20), device_buffer(mib << 20))
        """
    )
    result = gpumem("--benchmark-json=out.json")
    result.assert_outcomes(passed=1, failed=1)
    rows = rows_of(pytester.path)
    assert rows["test_copy[16]"]["limits"]["max_latency"] == "1 s"
    assert rows["test_copy[64]"]["limits"]["max_latency"] == "1 ns"
    assert rows["test_copy[64]"]["failed"]
