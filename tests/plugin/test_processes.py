"""`--gpumem-processes`: fresh processes behind each row."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from sessions import Run, row_in, stored_in

COPY = """
import os

def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    with open("processes.txt", "a") as seen:
        seen.write(f"{os.getpid()}\\n")
    gpu_benchmark(gpu_kernels.copy, device_buffer(64 << 20), device_buffer(64 << 20), max_regression="2%")

def test_host():
    pass
"""


def test_each_row_is_of_several_fresh_processes(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(COPY)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    options = "--gpumem-processes 3 --benchmark-json=out.json --gpumem-save --junitxml=junit.xml"
    result = gpumem(*options.split())
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "gpumem: 0 of 3 processes measured",
            "gpumem: 1 of 3 processes measured",
            "gpumem: 2 of 3 processes measured",
        ]
    )
    result.stdout.fnmatch_lines(["*3 processes*"])
    pids = (pytester.path / "processes.txt").read_text().split()
    assert len(pids) == len(set(pids)) == 3
    document = json.loads((pytester.path / "out.json").read_text())
    assert document["gpumem"]["settings"]["processes"] == 3
    row = row_in(pytester.path)
    further = row["measurement"]["further"]
    assert [len(repeat["medians"]) for repeat in further] == [
        len(row["measurement"]["placements"])
    ] * 2
    # The run alone saves and reports.
    assert len(stored_in(pytester.path)) == 1
    assert (pytester.path / "junit.xml").exists()
    assert (pytester.path / "summary.md").read_text().count("### gpumem") == 1
    again = gpumem("--gpumem-processes", "2", "--benchmark-json=out.json")
    again.stdout.fnmatch_lines(["*baseline: 3 processes in*, the newest of unknown"])
    row = row_in(pytester.path)
    comparison = row["verdict"]["comparison"]
    assert (comparison["processes"], comparison["days"]) == (3, 1)


def collected_and_measured(pytester: pytest.Pytester, run: Run) -> tuple[str, list[list[str]]]:
    """What three processes print, and of each its id, and that of the process which collected."""
    source = COPY.replace("import os", "import os\nCOLLECTED = os.getpid()")
    pytester.makepyfile(source.replace("{os.getpid()}", "{os.getpid()} {COLLECTED}"))
    result = run("--gpumem-processes", "3")
    result.assert_outcomes(passed=2)
    lines = (pytester.path / "processes.txt").read_text().splitlines()
    return result.stdout.str(), [line.split() for line in lines]


def test_processes_are_forked_from_one_that_has_collected(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    text, [(first, parent), (second, again), (main, collected)] = collected_and_measured(
        pytester, gpumem
    )
    assert (parent, main) == (again, collected)
    assert len({first, second, parent, main}) == 4
    assert "tests use CUDA" not in text


def test_where_tests_use_cuda_while_they_are_collected_processes_start_anew(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    source, library = pytester.path / "driver.c", pytester.path / "driver.so"
    source.write_text("int cuDeviceGetCount(int *count) { *count = 1; return 0; }")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    name = "-Wl,-soname,libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", name, "-o", library, source], check=True)
    pytester.makeconftest(f"import ctypes\n\nctypes.CDLL({str(library)!r})\n")
    text, processes = collected_and_measured(pytester, gpumem)
    assert all(pid == collected for pid, collected in processes)
    said = "process 2 of 3 of --gpumem-processes: tests use CUDA while they are collected, so "
    assert text.count("tests use CUDA") == text.count(said) == 1


def test_a_process_that_cannot_measure_ends_the_run(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(
        "import os\nif 'OUTER' not in os.environ:\n    raise RuntimeError('only once')\nos.environ.pop('OUTER')"
    )
    pytester.makepyfile(COPY)

    monkeypatch.setenv("OUTER", "1")
    result = gpumem("--gpumem-processes", "2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert (
        "process 2 of 2 of --gpumem-processes: pytest ended with 4: RuntimeError: only once"
        in result.stdout.str()
    )


def test_not_under_xdist(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(COPY)
    for other in ("-n2", "--gpumem-isolate"):
        result = gpumem("--gpumem-processes", "2", other)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(
            ["*--gpumem-processes runs its processes in turn; leave out -n and --gpumem-isolate"]
        )


def test_a_test_may_ask_for_the_fixture_while_it_runs(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        def test_copy(request):
            gpu_benchmark, device_buffer, gpu_kernels = map(request.getfixturevalue, ("gpu_benchmark", "device_buffer", "gpu_kernels"))
            gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))
        """
    )
    gpumem("--gpumem-processes", "2", "--benchmark-json=out.json").assert_outcomes(passed=1)
    assert len(row_in(pytester.path)["measurement"]["further"]) == 1


def test_nothing_is_started_where_nothing_measures(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(COPY)
    gpumem("--gpumem-processes", "3", "-k", "host").assert_outcomes(passed=1, deselected=1)
    gpumem("--gpumem-processes", "3", "--collect-only")
    assert not (pytester.path / "processes.txt").exists()


def test_a_total_budget_is_shared_by_the_processes(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(COPY)
    result = gpumem("--gpumem-processes", "2", "--gpumem-budget", "40 ms total")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["budget: * of 20.00 ms spent on measuring"])


def test_a_failure_in_any_process_is_the_tests(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        import os, unittest, pytest
        FURTHER = "_GPUMEM_FURTHER_PROCESS" in os.environ

        @pytest.fixture
        def measure(gpu_benchmark, device_buffer, gpu_kernels):
            return lambda **of: gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20), **of)

        @pytest.fixture
        def messy():
            yield
            assert not FURTHER, "torn down wrongly"

        def test_asserts(measure):
            measure()
            assert not FURTHER, "wrong result"

        def test_teardown(messy, measure):
            measure()

        class TestCase(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def _measure(self, measure):
                self.measure = measure

            def test_case(self):
                self.measure()
                self.assertFalse(FURTHER)

        def test_is_fine(measure):
            measure()

        def test_skips(measure):
            if not FURTHER:
                pytest.skip("only here")
            assert False, "wrong result"

        # Judged over all processes, by the main one: what one of them says alone is no failure.
        def test_limit_of_all_processes(measure):
            measure(max_latency="1 ns" if FURTHER else "1 s")

        def test_without_a_gpu():
            assert not FURTHER, "wrong result"
        """
    )
    result = gpumem("--gpumem-processes", "2", "--gpumem-save", "--benchmark-json=out.json")
    result.assert_outcomes(passed=2, failed=5)
    text = result.stdout.str()
    assert text.count("process 2 of 2 of --gpumem-processes: ") >= 5
    assert "torn down wrongly" in text
    (file,) = stored_in(pytester.path)
    stored = [
        row["nodeid"].rpartition("::")[2] for row in json.loads(file.read_text())["content"]["rows"]
    ]
    assert stored == ["test_is_fine", "test_limit_of_all_processes"]


def test_a_crash_fails_what_the_process_did_not_report(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import ctypes, os, pytest

        def measure(gpu_benchmark, device_buffer, gpu_kernels):
            gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))

        def test_before(gpu_benchmark, device_buffer, gpu_kernels):
            measure(gpu_benchmark, device_buffer, gpu_kernels)

        def test_crashes(gpu_benchmark, device_buffer, gpu_kernels):
            if "_GPUMEM_FURTHER_PROCESS" in os.environ:
                ctypes.CDLL(None)._exit(0)
            measure(gpu_benchmark, device_buffer, gpu_kernels)

        def test_after(gpu_benchmark, device_buffer, gpu_kernels):
            measure(gpu_benchmark, device_buffer, gpu_kernels)
        """
    )
    result = gpumem("--gpumem-processes", "2", "--gpumem-save")
    result.assert_outcomes(passed=1, failed=2)
    assert "process 2 of 2 of --gpumem-processes ended with exit code 0: " in result.stdout.str()
    (file,) = stored_in(pytester.path)
    assert [
        row["nodeid"].rpartition("::")[2] for row in json.loads(file.read_text())["content"]["rows"]
    ] == ["test_before"]


def test_a_failure_of_a_test_that_only_another_process_runs_is_red(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        COPY
        + """
if "_GPUMEM_FURTHER_PROCESS" in os.environ:
    def test_only_there():
        assert False, "wrong result"
"""
    )
    result = gpumem("--gpumem-processes", "2", "-q")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "test_only_there" in result.stdout.str()
    assert "processes measured" not in result.stdout.str()  # -q shows no progress


def test_a_process_that_measures_nothing_is_red(pytester: pytest.Pytester, gpumem: Run) -> None:
    early = '    if "_GPUMEM_FURTHER_PROCESS" in os.environ:\n        return\n    with open'
    pytester.makepyfile(COPY.replace("    with open", early))
    result = gpumem("--gpumem-processes", "2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "process 2 of 2 of --gpumem-processes measured nothing" in result.stdout.str()


def test_what_the_ini_file_switches_on_is_the_runs_alone(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    """Further processes save nothing, write no cache, and stop at no failure; a strict ini accepts them."""
    pytester.makeini("[pytest]\nstrict_config = true\naddopts = --maxfail=1 --benchmark-autosave\n")
    pytester.makepyfile(
        COPY.replace("def test_host", "def test_fails():\n    assert 0\n\ndef test_last")
    )
    result = gpumem("--gpumem-processes", "2", "--benchmark-json=out.json")
    result.assert_outcomes(passed=1, failed=1)
    assert len(row_in(pytester.path)["measurement"]["further"]) == 1
    assert not (pytester.path / ".pytest_cache").exists()
    assert len(list(pytester.path.glob(".benchmarks/*/0*.json"))) == 1
