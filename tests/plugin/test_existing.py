"""Suites that exist: benchmarks of pytest-benchmark that are measured on the GPU, and the calls of every test."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from sessions import SIMULATED, Run, row_in, rows_in

ADOPT = "--gpumem-existing=adopt"
QUICK = ("--benchmark-max-time=0.001", "--benchmark-min-rounds=1", "--benchmark-min-time=0.000001")
GPU = '''
import pytest

class Gpu:
    """Work as a suite's own library would queue it: `launch` on the current stream, `elsewhere` on a stream of its own."""

    def __init__(self, test):
        kernels, device = test.kernels, test.device
        self.device, self.stream, self.own = device, test.arena.stream, device.streams.create()
        self.a, self.b, self.c = (test.memory.device(1 << 20, "f4") for _ in range(3))
        bound = kernels.triad
        self.triad = bound.launch(*bound.arguments((self.a, self.b, self.c, 3.0), {}))
        device.streams.synchronize()

    def launch(self):
        self.device.kernels.launch(self.triad, self.stream)
        return "value"

    def elsewhere(self):
        self.device.kernels.launch(self.triad, self.own)

    def waits(self):
        self.launch()
        self.device.streams.synchronize(self.stream)

@pytest.fixture
def gpu(_gpumem_test):
    return Gpu(_gpumem_test)
'''


@pytest.fixture(autouse=True)
def _suite(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(GPU)


# Without the option


def test_a_benchmark_that_returns_early_is_named_once_at_the_end(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_early(benchmark, gpu):
            assert benchmark(gpu.launch) == "value"

        def test_pedantic(benchmark, gpu):
            assert benchmark.pedantic(gpu.launch, rounds=3) == "value"

        def test_waits(benchmark, gpu):
            benchmark(gpu.waits)

        def test_host(benchmark):
            assert benchmark(sorted, [2, 1]) == [1, 2]

        @pytest.mark.gpumem(adopt=False)
        def test_on_purpose(benchmark, gpu):
            benchmark(gpu.launch)
        """
    )
    result = gpumem(*QUICK)
    result.assert_outcomes(passed=5)
    said = [line for line in result.outlines if "return before the GPU is done" in line]
    assert len(said) == 1
    assert (
        "2 benchmarks return before the GPU is done; if GPU time is meant: --gpumem-existing=adopt: "
        in said[0]
    )
    assert "::test_early" in said[0]
    assert "::test_pedantic" in said[0]


# adopt


def test_shapes_of_a_suite_are_measured_and_keep_what_they_return(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        def test_current_stream(benchmark, gpu):
            benchmark.group, benchmark.name = "mine", "renamed"
            benchmark.extra_info["size"] = 7
            assert benchmark(gpu.launch) == "value"
            assert benchmark.stats.stats.rounds > 3
            assert benchmark.stats.stats.mean < 1e-4
            assert benchmark.extra_info["size"] == 7

        def test_own_stream(benchmark, gpu):
            benchmark(gpu.elsewhere)

        def test_waits(benchmark, gpu):
            benchmark(gpu.waits)

        def test_setup_and_teardown(benchmark, gpu):
            calls = []
            def setup():
                calls.append("setup")
                return (gpu,), {"times": 2}
            def work(gpu, times):
                calls.append("work")
                for _ in range(times):
                    gpu.launch()
                return times
            def teardown(gpu, times):
                calls.append("teardown")
            assert benchmark.pedantic(work, setup=setup, teardown=teardown, rounds=2) == 2
            assert calls.count("setup") == calls.count("teardown") >= calls.count("work") > 10
            assert all(before == "setup" for before, after in zip(calls, calls[1:]) if after == "work")

        def test_host(benchmark):
            assert benchmark(sorted, [2, 1]) == [1, 2]
        """
    )
    result = gpumem(ADOPT, *QUICK, "--benchmark-json=out.json")
    result.assert_outcomes(passed=5)
    rows = {row["nodeid"].partition("::")[2]: row for row in rows_in(pytester.path)}
    assert set(rows) == {
        "test_current_stream",
        "test_own_stream",
        "test_waits",
        "test_setup_and_teardown",
    }
    for row in rows.values():
        assert row["measurement"]["mode"] == "hot"
        assert row["extra"]["host s"] > 0
    assert rows["test_current_stream"]["measurement"]["sampler"] in ("batched", "blocked")
    assert rows["test_own_stream"]["measurement"]["sampler"] == "host"
    assert any(
        "wall time" in note and "GPU time" in note
        for note in rows["test_waits"]["measurement"]["notes"]
    )
    assert (
        rows["test_setup_and_teardown"]["measurement"]["latency"]
        > 1.5 * rows["test_current_stream"]["measurement"]["latency"]
    )
    stored = {
        one["name"]: one
        for one in json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    }
    assert len(stored) == 5
    adopted = stored["renamed"]
    assert adopted["group"] == "mine, simulated"
    assert adopted["options"]["timer"] == "gpumem_device_time"
    assert adopted["stats"]["median"] == pytest.approx(
        rows["test_current_stream"]["measurement"]["latency"], rel=0.01
    )
    assert stored["test_host"]["options"]["timer"] == "perf_counter"
    assert stored["test_host"]["extra_info"] == {}


def test_what_cannot_be_measured_is_left_as_it_is_with_a_reason(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        def test_grows(benchmark, gpu):
            calls = []
            def grows():
                calls.append(1)
                for _ in calls:
                    gpu.launch()
            benchmark.pedantic(grows, rounds=2)
            assert len(benchmark.stats.stats.data) == 2

        def test_late_exception(benchmark, gpu):
            calls = []
            def raises():
                gpu.launch()
                calls.append(1)
                if len(calls) > 3:
                    raise ValueError("too often")
            benchmark.pedantic(raises, rounds=2)

        def test_late_exception_without_text(benchmark, gpu):
            calls = []
            def raises():
                gpu.launch()
                calls.append(1)
                assert len(calls) < 4, ""
            benchmark.pedantic(raises, rounds=2)

        def test_late_teardown(benchmark, gpu):
            calls = []
            def teardown():
                calls.append(1)
                if len(calls) > 2:
                    raise RuntimeError("no more")
            benchmark.pedantic(gpu.launch, teardown=teardown, rounds=2)
        """
    )
    result = gpumem(ADOPT, "--benchmark-json=out.json", "--assert=plain")
    result.assert_outcomes(passed=4)
    assert not rows_in(pytester.path)
    text = result.stdout.str()
    assert (
        "left to the host's clock: not repeatable: calls that follow each other run other work: "
        in text
    )
    assert "left to the host's clock: ValueError: too often: " in text
    assert "left to the host's clock: AssertionError: : " in text
    assert "left to the host's clock: RuntimeError: no more: " in text
    clocks = {
        one["name"]: one["options"]["timer"]
        for one in json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    }
    assert set(clocks.values()) == {"perf_counter"}


def test_an_exit_while_the_gpu_is_measured_ends_the_session(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_exits(benchmark, gpu):
            calls = []
            def work():
                gpu.launch()
                calls.append(1)
                if len(calls) > 3:
                    pytest.exit("enough", returncode=7)
            benchmark.pedantic(work, rounds=2)

        def test_next():
            pass
        """
    )
    result = gpumem(ADOPT)
    assert result.ret == 7
    result.assert_outcomes()


def test_a_function_is_called_until_two_calls_run_the_same(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    """As a function of torch.compile, whose first calls try other kernels."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("changes", [0, 5, 100])
        def test_compiled(benchmark, gpu, changes):
            calls = []
            def work():
                calls.append(1)
                for _ in range(max(1, changes - len(calls))):
                    gpu.launch()
            benchmark.pedantic(work, rounds=2)
        """
    )
    result = gpumem(ADOPT, "--benchmark-json=out.json")
    result.assert_outcomes(passed=3)
    assert {row["nodeid"].partition("::")[2] for row in rows_in(pytester.path)} == {
        "test_compiled[0]",
        "test_compiled[5]",
    }
    result.stdout.fnmatch_lines(
        [
            "1 benchmark is left to the host's clock: not repeatable: calls that follow each other*test_compiled?100?"
        ]
    )


def test_a_call_that_changes_its_arguments_says_so(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        import itertools
        import numpy

        numbers = itertools.count()

        def add(gpu, a):
            a.write(numpy.full(a.size, next(numbers), "f4"))
            gpu.launch()

        def test_drifts(benchmark, gpu):
            benchmark.pedantic(add, (gpu, gpu.b), rounds=2)
        """
    )
    result = gpumem(ADOPT, "--benchmark-json=out.json")
    result.assert_outcomes(passed=1)
    assert any("not repeatable" in note for note in row_in(pytester.path)["measurement"]["notes"])
    result.stdout.fnmatch_lines(
        ["1 benchmark changes its own arguments*not repeatable*test_drifts*"]
    )


def test_arrays_that_a_call_changes_are_found_wherever_they_are_held(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import itertools
        import numpy
        import pytest

        numbers = itertools.count()
        held = []

        def change(a):
            a.write(numpy.full(a.size, next(numbers), "f4"))

        class Model:
            def __init__(self, gpu):
                self.gpu, self.weights = gpu, gpu.b

            def step(self):
                change(self.weights)
                self.gpu.launch()

        def test_object(benchmark, gpu):
            benchmark.pedantic(Model(gpu).step, rounds=2)

        def test_module(benchmark, gpu):
            held[:] = [gpu.b]
            def work():
                change(held[0])
                gpu.launch()
            benchmark.pedantic(work, rounds=2)

        def test_closure(benchmark, gpu):
            a = gpu.b
            def work():
                change(a)
                gpu.launch()
            benchmark.pedantic(work, rounds=2)

        def test_setup(benchmark, gpu):
            def work():
                change(gpu.b)
                gpu.launch()
            benchmark.pedantic(work, setup=lambda: None, rounds=2)

        def test_unchanged(benchmark, gpu):
            benchmark.pedantic(gpu.launch, rounds=2)
        """
    )
    gpumem(ADOPT, "--benchmark-json=out.json").assert_outcomes(passed=5)
    drifts = {
        row["nodeid"].partition("::")[2]: any(
            "not repeatable" in note for note in row["measurement"]["notes"]
        )
        for row in rows_in(pytester.path)
    }
    assert drifts == {
        "test_object": True,
        "test_module": True,
        "test_closure": True,
        "test_setup": False,
        "test_unchanged": False,
    }


def test_host_times_and_gpu_times_never_compare(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile("def test_early(benchmark, gpu):\n    benchmark(gpu.launch)\n")
    gpumem(*QUICK, "--benchmark-save=host").assert_outcomes(passed=1)
    result = gpumem(ADOPT, *QUICK, "--benchmark-compare", "--benchmark-compare-fail=mean:5%")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*has times of the host for this benchmark (timer perf_counter), this run has times of the GPU: they do*"
        ]
    )
    gpumem(ADOPT, *QUICK, "--benchmark-save=gpu").assert_outcomes(passed=1)
    gpumem(ADOPT, *QUICK, "--benchmark-compare").assert_outcomes(passed=1)
    back = gpumem(*QUICK, "--benchmark-compare")
    back.assert_outcomes(failed=1)
    back.stdout.fnmatch_lines(
        ["*has times of the GPU for this benchmark (timer gpumem_device_time)*"]
    )


def test_gpu_times_do_not_compare_with_a_benchmark_that_left_the_gpu(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import os

        def test_launch(benchmark, gpu):
            benchmark(gpu.launch if "ON_GPU" in os.environ else sorted, *([] if "ON_GPU" in os.environ else [[2, 1]]))
        """
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ON_GPU", "1")
        gpumem(ADOPT, *QUICK, "--benchmark-save=gpu").assert_outcomes(passed=1)
    result = gpumem(ADOPT, *QUICK, "--benchmark-compare")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*has times of the GPU for this benchmark (timer gpumem_device_time), this run has times of the host*"
        ]
    )


def test_an_adopted_benchmark_is_gated_by_the_baseline(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import os

        def test_launch(benchmark, gpu):
            def work():
                for _ in range(int(os.environ.get("TIMES", "1"))):
                    gpu.launch()
            benchmark(work)
        """
    )
    limited = (ADOPT, *QUICK, "--gpumem-max-regression=5%")
    gpumem(*limited, "--gpumem-save").assert_outcomes(passed=1)
    gpumem(*limited).assert_outcomes(passed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIMES", "4")
        gpumem(*limited).assert_outcomes(failed=1)
    lost = gpumem(*QUICK)  # without the option nothing measures the row of the baseline
    lost.stdout.fnmatch_lines(["lost: *::test_launch: its test passed without it"])


# Neighbours

NEIGHBOURS = """
import unittest
import pytest

def test_plain(benchmark, gpu):
    assert benchmark(gpu.launch) == "value"

class TestClass(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _fixtures(self, benchmark, gpu):
        self.benchmark, self.gpu = benchmark, gpu

    def test_method(self):
        assert self.benchmark(self.gpu.launch) == "value"

def test_no_benchmark(gpu):
    gpu.launch()
"""


@pytest.mark.parametrize(
    ("options", "passed", "skipped", "rows", "said"),
    [
        pytest.param((), 3, 0, 2, "", id="unittest"),
        pytest.param(
            ("-n2",), 3, 0, 0, "2 benchmarks NOT RUN: pytest-benchmark is disabled", id="xdist"
        ),
        pytest.param(
            ("--benchmark-disable",),
            3,
            0,
            0,
            "2 benchmarks NOT RUN: pytest-benchmark is disabled",
            id="disable",
        ),
        pytest.param(("--benchmark-only",), 2, 1, 2, "", id="only"),
        pytest.param(("--benchmark-skip",), 1, 2, 0, "", id="skip"),
        pytest.param(("--timeout=60",), 3, 0, 2, "", id="timeout"),
        pytest.param(("--benchmark-cprofile=tottime",), 3, 0, 2, "", id="cprofile"),
        pytest.param(
            *(("--randomly-seed=7",), 3, 0, 2, "Using --randomly-seed=7"),
            id="randomly",
            marks=pytest.mark.skipif(
                find_spec("pytest_randomly") is None, reason="pytest-randomly is not installed"
            ),
        ),
    ],
)
def test_neighbours(
    pytester: pytest.Pytester,
    gpumem: Run,
    options: tuple[str, ...],
    passed: int,
    skipped: int,
    rows: int,
    said: str,
) -> None:
    pytester.makepyfile(NEIGHBOURS)
    result = gpumem(ADOPT, *QUICK, "--benchmark-json=out.json", *options)
    result.assert_outcomes(passed=passed, skipped=skipped)
    document = (
        json.loads((pytester.path / "out.json").read_text())
        if (pytester.path / "out.json").exists()
        else {}
    )
    assert len(document.get("gpumem", {}).get("rows", [])) == rows
    assert said in result.stdout.str()


def test_a_timeout_ends_a_benchmark_while_it_is_measured_on_the_gpu(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import threading

        import pytest

        @pytest.mark.timeout(2, method="signal")
        def test_hangs(benchmark, gpu):
            calls = []
            def work():
                gpu.launch()
                calls.append(1)
                if len(calls) > 3:  # those of pytest-benchmark
                    print("measured")
                    threading.Event().wait()
            benchmark.pedantic(work, rounds=2)

        def test_next(benchmark, gpu):
            benchmark(gpu.launch)
        """
    )
    result = pytester.runpytest_subprocess(
        ADOPT, *QUICK, *SIMULATED, "-p", "no:randomly", "--benchmark-json=out.json", timeout=60
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Timeout*", "measured"], consecutive=False)
    assert row_in(pytester.path)["nodeid"].endswith("::test_next")


def test_a_benchmark_runs_again_and_in_a_subtest(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        tries = []

        def test_flaky(benchmark, gpu):
            benchmark(gpu.launch)
            tries.append(1)
            assert len(tries) > 1

        def test_sub(benchmark, gpu, subtests):
            with subtests.test("one"):
                assert benchmark(gpu.launch) == "value"
        """
    )
    result = gpumem(ADOPT, *QUICK, "--reruns=1", "--benchmark-json=out.json")
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] >= 2
    assert outcomes.get("failed") is None
    stored = json.loads((pytester.path / "out.json").read_text())
    assert sorted(row["nodeid"].partition("::")[2] for row in stored["gpumem"]["rows"]) == [
        "test_flaky",
        "test_sub",
    ]
    assert {one["options"]["timer"] for one in stored["benchmarks"]} == {"gpumem_device_time"}


# Waits

WAITS = "--gpumem-waits"
NO_CALLS = "not read: the simulated device has no calls"


def test_a_simulated_device_has_no_waits_and_says_so_once(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        def test_waits(gpu):
            gpu.waits()

        def test_host():
            assert sorted([2, 1]) == [1, 2]

        def test_measured(gpu_benchmark, gpu_kernels, device_buffer):
            gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))
        """
    )
    result = gpumem(WAITS, "--benchmark-json=out.json")
    result.assert_outcomes(passed=3)
    rows = {row["nodeid"].partition("::")[2]: row for row in rows_in(pytester.path)}
    assert set(rows) == {"test_waits", "test_measured"}
    assert rows["test_waits"]["footprint"]["waits"] == {"lines": [], "not_read": NO_CALLS}
    assert rows["test_measured"]["footprint"]["waits"] is None
    assert result.outlines.count(f"waits: {NO_CALLS}") == 1


@pytest.mark.parametrize("option", [(), (WAITS,), ("--gpumem-footprint=off",)], ids=" ".join)
def test_a_limit_on_waits_that_are_not_read_is_undecided(
    pytester: pytest.Pytester, gpumem: Run, option: tuple[str, ...]
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpumem(max_waits=0)
        def test_waits():
            pass

        def test_other():
            pass
        """
    )
    gpumem(*option, "--benchmark-json=out.json").assert_outcomes(passed=2)
    verdict = row_in(pytester.path)["verdict"]
    assert verdict["outcome"] == "UNDECIDED"
    assert f"max_waits 0 (marker) cannot be judged: {NO_CALLS}" in verdict["reason"]
    gpumem(*option, "--gpumem-strict").assert_outcomes(failed=1, passed=1)


def test_a_measurement_has_the_waits_of_one_launch(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.gpumem(max_waits=0, max_kernels=1)
        def test_asks_later(request, device_buffer):
            a, b = device_buffer(1 << 20), device_buffer(1 << 20)
            request.getfixturevalue("gpu_benchmark")(request.getfixturevalue("gpu_kernels").copy, a, b)
        """
    )
    gpumem("--benchmark-json=out.json").assert_outcomes(passed=1)
    row = row_in(pytester.path)
    assert row["verdict"]["outcome"] == "PASS"
    assert row["footprint"]["waits"] is None


@pytest.mark.parametrize(
    "limit",
    [
        "max_kernels=1",
        "max_copies=1",
        "max_copied_bytes='1 MiB'",
        "max_spill=0",
        "max_migrated=0",
        "max_gpu_page_faults=0",
    ],
)
def test_a_limit_on_one_launch_needs_a_measurement(
    pytester: pytest.Pytester, gpumem: Run, limit: str
) -> None:
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.gpumem({limit})
        def test_quiet(device_buffer):
            pass
        """
    )
    result = gpumem()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            f"*test_quiet: marker: {limit.partition('=')[0]} * limits one launch of a measurement, and the test*"
        ]
    )
