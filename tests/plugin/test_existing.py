"""Suites that exist: benchmarks that are measured on the GPU too, and waits of every test."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest
from sessions import SIMULATED, Run, results_in, row_in, rows_in, slower

QUICK = ("--benchmark-max-time=0.001", "--benchmark-min-rounds=1", "--benchmark-min-time=0.000001")
JSON = "--benchmark-json=out.json"
GPU = '''
import pytest

class Gpu:
    """Work as a library queues it: `launch` on the current stream, `elsewhere` on another."""

    def __init__(self, test):
        kernels, device = test.session.kernels, test.device
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


def entries(pytester: pytest.Pytester) -> dict[str, dict[str, Any]]:
    """The benchmarks of pytest-benchmark's file, by name."""
    document = json.loads((pytester.path / "out.json").read_text())
    return {entry["name"]: entry for entry in document["benchmarks"]}


def measured(pytester: pytest.Pytester) -> dict[str, dict[str, Any]]:
    """The rows of the plugin, by the name of their test."""
    return {row["nodeid"].rpartition("::")[2]: row for row in rows_in(pytester.path)}


KERNELS = """
def test_launch(BENCHMARK, device_buffer, gpu_kernels):
    BENCHMARK(gpu_kernels.copy, device_buffer("8 MiB"), device_buffer("8 MiB"))

def test_pedantic(BENCHMARK, device_buffer, gpu_kernels):
    arrays = device_buffer("8 MiB"), device_buffer("8 MiB")
    BENCHMARK.pedantic(gpu_kernels.copy, args=arrays, rounds=5)
"""
ALIAS = "from pytest_benchmark.plugin import benchmark\ngpubenchmark = benchmark\n"
SAME_OBJECT = """
import pytest

@pytest.fixture
def benchmark(benchmark, request):
    benchmark.group = "mine"
    benchmark.extra_info["commit"] = "abc"
    return benchmark
"""


@pytest.mark.parametrize(
    ("conftest", "name", "group"),
    [("", "benchmark", None), (ALIAS, "gpubenchmark", None), (SAME_OBJECT, "benchmark", "mine")],
    ids=["stock", "another name", "same object"],
)
def test_a_benchmark_has_a_second_entry_beside_the_untouched_one(
    pytester: pytest.Pytester, gpumem: Run, conftest: str, name: str, group: str | None
) -> None:
    pytester.makeconftest(conftest)
    pytester.makepyfile(KERNELS.replace("BENCHMARK", name))
    result = gpumem(*QUICK, JSON)
    result.assert_outcomes(passed=2)
    stored = entries(pytester)
    assert list(stored) == [
        "test_launch",
        "test_launch[gpu]",
        "test_pedantic",
        "test_pedantic[gpu]",
    ]
    for test, row in measured(pytester).items():
        host, gpu = stored[test], stored[f"{test}[gpu]"]
        assert "gpumem" not in host["extra_info"]
        assert host["group"] == group
        assert host["options"]["timer"] == "perf_counter"
        assert gpu["group"] == f"{group or ''} GPU, simulated".strip()
        assert gpu["options"]["timer"] == "gpumem_device_time"
        assert gpu["extra_info"].get("commit") == host["extra_info"].get("commit")
        assert gpu["stats"]["median"] == pytest.approx(row["measurement"]["latency"], rel=0.01)
        assert gpu["stats"]["rounds"] == sum(map(len, row["measurement"]["placements"]))
        figures = gpu["extra_info"]["gpumem"]
        assert (figures["kernels"], figures["peak_bytes"]) == (1, 16 << 20)
        assert row["extra"]["host s"] == host["stats"]["median"]
    text = result.stdout.str()
    assert f"- benchmark '{group or ''} GPU, simulated'".replace("' ", "'") in text
    assert "2 adopted benchmarks without a limit or a baseline" in text
    assert "verdict" not in text  # no table of the plugin's own


def test_shapes_of_a_suite_are_measured_and_keep_what_they_return(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        def test_current_stream(benchmark, gpu):
            assert benchmark(gpu.launch) == "value"
            assert benchmark.stats.stats.rounds >= 1

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
            assert benchmark.pedantic(work, setup=setup, teardown=teardown) == 2
            assert calls.count("setup") == calls.count("teardown") >= calls.count("work") > 10
            assert all(before == "setup" for before, after in zip(calls, calls[1:]) if after == "work")
        """
    )
    result = gpumem(*QUICK, JSON, "--benchmark-columns=median")
    result.assert_outcomes(passed=4)
    rows = measured(pytester)
    assert len(rows) == 4
    assert {row["measurement"]["mode"] for row in rows.values()} == {"hot"}
    assert rows["test_current_stream"]["measurement"]["sampler"] in ("batched", "blocked")
    assert rows["test_own_stream"]["measurement"]["sampler"] == "host"
    notes = rows["test_waits"]["measurement"]["notes"]
    assert any("wall time of a call until the GPU is done" in note for note in notes)
    twice = rows["test_setup_and_teardown"]["measurement"]["latency"]
    assert twice > 1.5 * rows["test_current_stream"]["measurement"]["latency"]


def test_what_cannot_be_measured_is_named_and_changes_no_test(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import pytest

        def late(benchmark, gpu, error):
            calls = []
            def work():
                gpu.launch()
                calls.append(1)
                if len(calls) > 3:
                    raise error
                return "value"
            assert benchmark.pedantic(work, rounds=2) == "value"

        def test_exception(benchmark, gpu):
            late(benchmark, gpu, ValueError("too often"))

        def test_assertion(benchmark, gpu):
            late(benchmark, gpu, AssertionError())

        def test_skip(benchmark, gpu):
            late(benchmark, gpu, pytest.skip.Exception("not again"))

        def test_failure(benchmark, gpu):
            late(benchmark, gpu, pytest.fail.Exception("not again"))

        def test_teardown(benchmark, gpu):
            calls = []
            def teardown():
                calls.append(1)
                if len(calls) > 2:
                    raise RuntimeError("no more")
            benchmark.pedantic(gpu.launch, teardown=teardown, rounds=2)

        def test_once(benchmark, gpu):
            benchmark.pedantic(gpu.launch)

        @pytest.mark.gpumem(adopt=True)
        def test_once_on_purpose(benchmark, gpu):
            benchmark.pedantic(gpu.launch)

        @pytest.mark.gpumem(adopt=False)
        def test_left_alone(benchmark, gpu):
            benchmark(gpu.launch)

        @pytest.mark.parametrize("changes", [5, 100])
        def test_compiled(benchmark, gpu, changes):
            calls = []
            def work():
                calls.append(1)
                for _ in range(max(1, changes - len(calls))):
                    gpu.launch()
            benchmark.pedantic(work, rounds=2)

        def test_host(benchmark):
            assert benchmark(sorted, [2, 1]) == [1, 2]
        """
    )
    result = gpumem(*QUICK, JSON, "--assert=plain")
    result.assert_outcomes(passed=11)
    assert set(measured(pytester)) == {"test_once_on_purpose", "test_compiled[5]"}
    stored = entries(pytester)
    assert len(stored) == 13
    assert all(entry["options"]["timer"] == "perf_counter" for entry in list(stored.values())[:6])
    for line in (
        "1 benchmark not measured on the GPU: ValueError: too often: *::test_exception",
        "1 benchmark not measured on the GPU: AssertionError: *::test_assertion",
        "1 benchmark not measured on the GPU: Skipped: not again: *::test_skip",
        "1 benchmark not measured on the GPU: Failed: not again: *::test_failure",
        "1 benchmark not measured on the GPU: RuntimeError: no more: *::test_teardown",
        "1 benchmark not measured on the GPU: pedantic(rounds=1) runs it once; *::test_once",
        "1 benchmark not measured on the GPU: * run other work: *::test_compiled?100?",
        "1 benchmark did no work on the GPU: *",
    ):
        result.stdout.fnmatch_lines_random([line])


def test_a_suite_without_a_gpu_is_called_as_often_as_without_the_plugin(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        calls = []

        def test_host(benchmark):
            benchmark.pedantic(calls.append, (1,), rounds=3)
            assert len(calls) == 3
        """
    )
    result = gpumem()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["1 benchmark did no work on the GPU: *"])


def test_adoption_is_turned_off(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(KERNELS.replace("BENCHMARK", "benchmark"))
    pytester.makeini("[pytest]\ngpumem_adopt = false\n")
    result = gpumem(*QUICK, JSON, "--gpumem-max-latency=1 ns", "--gpumem-strict")
    result.assert_outcomes(passed=2)
    assert list(entries(pytester)) == ["test_launch", "test_pedantic"]


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
    result = gpumem()
    assert result.ret == 7
    result.assert_outcomes()


# Limits and comparisons


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("ini", ("-n1",)),
        ("ini", ("--gpumem-isolate",)),
        ("command line", ()),
        ("marker", ()),
    ],
)
def test_a_limit_holds_for_an_adopted_benchmark_wherever_it_is_written(
    pytester: pytest.Pytester,
    gpumem: Run,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    how: tuple[str, ...],
) -> None:
    pytester.makeconftest(ALIAS)
    tests = KERNELS.replace("BENCHMARK", "gpubenchmark")
    more: tuple[str, ...] = ()
    if where == "ini":
        pytester.makeini("[pytest]\ngpumem_max_latency = 1 ns\n")
    elif where == "command line":
        more = ("--gpumem-max-latency=1 ns",)
    elif where == "environment":
        monkeypatch.setenv("GPUMEM_MAX_LATENCY", "1 ns")
    else:
        tests = f"import pytest\npytestmark = pytest.mark.gpumem(max_latency='1 ns', budget='5 ms')\n{tests}"
    pytester.makepyfile(tests)
    result = gpumem(*QUICK, *how, *more, JSON)
    result.assert_outcomes(failed=2)
    rows = measured(pytester)
    assert [row["verdict"]["outcome"] for row in rows.values()] == ["FAIL", "FAIL"]
    if how:  # pytest-benchmark is off
        assert not any(row["extra"] for row in rows.values())
        assert entries(pytester) == {}
    disabled = gpumem(*more, "--benchmark-disable", "--gpumem-strict")
    disabled.assert_outcomes(passed=2)
    assert disabled.ret == pytest.ExitCode.TESTS_FAILED
    disabled.stdout.fnmatch_lines(["not judged: *::test_launch, max_latency: *measured nothing"])
    assert gpumem(*more, "--benchmark-skip", "--gpumem-strict").ret == pytest.ExitCode.TESTS_FAILED


def test_a_limit_of_the_session_is_not_about_benchmarks_of_the_host(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_host(benchmark):
            benchmark(sorted, [2, 1])

        @pytest.mark.gpumem(max_latency="1 s")
        def test_limited(benchmark):
            benchmark(sorted, [2, 1])
        """
    )
    strict = (*QUICK, "--gpumem-max-latency=1 s", "--gpumem-strict")
    for how in ((), ("-n1",)):
        assert gpumem(*strict, *how, "-k", "test_host").ret == pytest.ExitCode.OK
        result = gpumem(*strict, *how)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        said = [line for line in result.outlines if line.startswith("not judged")]
        assert len(said) == 1
        assert "::test_limited" in said[0]


LAUNCH = """
def test_launch(benchmark, gpu):
    benchmark(gpu.launch)
"""


def test_an_adopted_benchmark_is_held_to_the_baseline(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(LAUNCH)
    limited = (*QUICK, "--gpumem-max-regression=5%")
    gpumem(*limited, "--gpumem-save").assert_outcomes(passed=1)
    gpumem(*limited).assert_outcomes(passed=1)
    shown = gpumem(*QUICK)  # a reference alone gives it a line in the table
    shown.stdout.fnmatch_lines(["test_launch * measured*"])
    pytester.makeconftest(GPU + slower("4"))
    gpumem(*limited).assert_outcomes(failed=1)
    lost = gpumem(*QUICK, "-o", "gpumem_adopt=false")
    lost.stdout.fnmatch_lines(["lost: *::test_launch: its test passed unmeasured"])


def test_pytest_benchmarks_comparison_fails_by_the_entry_of_the_gpu(
    pytester: pytest.Pytester, gpumem: Run, session: Run
) -> None:
    pytester.syspathinsert()
    pytester.makepyfile(
        kern="""
        now = 0.0

        def timer():  # steps of a nanosecond, and what the function takes
            global now
            now += 1e-9
            return now

        def host():
            global now
            now += 1e-4
        """,
        test_it="""
        import kern

        def test_launch(benchmark, gpu):
            benchmark(lambda: [kern.host(), gpu.launch()])

        def test_host(benchmark):
            benchmark(kern.host)
        """,
    )
    stock = (
        "--benchmark-timer=kern.timer",
        "--benchmark-max-time=0.01",
        "--benchmark-min-rounds=3",
    )
    compare = (*stock, "--benchmark-compare", "--benchmark-compare-fail=median:5%")
    # A run of plain pytest-benchmark compares as before.
    assert session("-p", "no:gpumem", *stock, "--benchmark-save=plain", "-k", "test_host").ret == 0
    assert gpumem(*compare).ret == 0
    assert gpumem(*stock, "--benchmark-save=gpu").ret == 0
    assert gpumem(*compare).ret == 0
    pytester.makeconftest(GPU + slower("2"))
    result = gpumem(*compare)
    assert result.ret != 0
    regressed = [line for line in result.errlines if "Field 'median' has failed" in line]
    assert len(regressed) == 1
    assert "test_launch[gpu]" in regressed[0]


def test_entries_of_another_gpu_do_not_compare(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(LAUNCH)
    assert gpumem(*QUICK, "--benchmark-save=a").ret == 0
    result = gpumem(*QUICK, "--gpumem-device=sim:h200", "--benchmark-compare")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*give each GPU a storage of its own*"])


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
    ("options", "passed", "skipped", "rows"),
    [
        pytest.param(("-n2",), 3, 0, 2, id="xdist"),
        pytest.param(("--benchmark-disable",), 3, 0, 0, id="disable"),
        pytest.param(("--benchmark-only",), 2, 1, 2, id="only"),
        pytest.param(("--gpumem-processes=2",), 3, 0, 2, id="processes"),
        pytest.param(
            *(("--randomly-seed=7",), 3, 0, 2),
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
) -> None:
    pytester.makepyfile(NEIGHBOURS)
    result = gpumem(*QUICK, JSON, *options)
    result.assert_outcomes(passed=passed, skipped=skipped)
    written = (pytester.path / "out.json").exists()
    assert (len(results_in(pytester.path)["rows"]) if written else 0) == rows


def test_a_timeout_ends_the_pass_alone(pytester: pytest.Pytester) -> None:
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
                    threading.Event().wait()
            benchmark.pedantic(work, rounds=2)

        def test_next(benchmark, gpu):
            benchmark(gpu.launch)
        """
    )
    result = pytester.runpytest_subprocess(
        *QUICK, *SIMULATED, "-p", "no:randomly", JSON, timeout=60
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["1 benchmark not measured on the GPU: Failed: Timeout*test_hangs"])
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
    result = gpumem(*QUICK, "-p", "rerunfailures", "--reruns=1", JSON)
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] >= 2
    assert outcomes.get("failed") is None
    assert sorted(measured(pytester)) == ["test_flaky", "test_sub"]
    assert sorted(entries(pytester)) == [
        "test_flaky",
        "test_flaky[gpu]",
        "test_sub",
        "test_sub[gpu]",
    ]


# Waits

WAITS = "--gpumem-waits"
NO_CALLS = "not read: a simulated device calls no driver"


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
        "max_migrated=0",
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


def test_cupti_stays_for_tests_that_the_host_does_not_time(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    """Else rows of `gpu_benchmark` and their floors would differ by what came before."""
    pytester.makepyfile(
        """
        detached = []

        def test_first(gpu_benchmark, gpu_kernels, gpu_device, device_buffer):
            gpu_device.counters.detach = lambda: detached.append("out")
            gpu_benchmark(gpu_kernels.copy, device_buffer(4096), device_buffer(4096))

        def test_second(gpu_benchmark, gpu_kernels, device_buffer):
            assert not detached
            gpu_benchmark(gpu_kernels.copy, device_buffer(4096), device_buffer(4096))

        def test_host(benchmark):
            assert detached == ["out"]
            benchmark(sum, [])
        """
    )
    gpumem(*QUICK).assert_outcomes(passed=3)
