"""pytest-benchmark's own storage, JSON and compare, xdist, and NVTX."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
from nvtx_injection import Trace
from sessions import SIMULATED, TRIAD, Run, row_in, rows_in, stored_in

LABELLED = """
import pytest

@pytest.mark.parametrize("nbytes", [1 << 20])
def test_pair(gpu_benchmark, device_buffer, gpu_kernels, nbytes):
    a, b = device_buffer(nbytes), device_buffer(nbytes)
    gpu_benchmark(gpu_kernels.copy, a, b, label="there")
    gpu_benchmark(gpu_kernels.copy, b, a, label="back")
    gpu_benchmark(gpu_kernels.copy, a, b)
"""


def test_json_has_the_exact_samples(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(LABELLED)
    gpumem("--benchmark-json=out.json").assert_outcomes(passed=1)
    document = json.loads((pytester.path / "out.json").read_text())
    stored = {bench["fullname"].split("::")[1]: bench for bench in document["benchmarks"]}
    rows = {row["label"]: row for row in document["gpumem"]["rows"]}
    assert set(rows) == {"there", "back", ""}
    assert set(stored) == {
        "test_pair[1048576][there]",
        "test_pair[1048576][back]",
        "test_pair[1048576]",
    }
    for name, bench in stored.items():
        row = rows[bench["extra_info"]["gpumem"].get("label", "")]
        assert bench["stats"]["data"] == [
            s for placement in row["measurement"]["placements"] for s in placement
        ], name
        assert bench["extra_info"]["gpumem"]["simulated"] is True
        assert bench["params"] == {"nbytes": 1 << 20}


def test_the_same_seed_gives_the_same_document(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(LABELLED)
    documents = []
    for name in ("one.json", "two.json"):
        gpumem(f"--benchmark-json={name}").assert_outcomes(passed=1)
        documents.append(json.loads((pytester.path / name).read_text()))
    one, two = documents
    assert one["gpumem"]["rows"] == two["gpumem"]["rows"]
    assert [(b["stats"]["data"], b["extra_info"]) for b in one["benchmarks"]] == [
        (b["stats"]["data"], b["extra_info"]) for b in two["benchmarks"]
    ]


def test_save_and_compare_work_unchanged(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(LABELLED)
    gpumem("--benchmark-save=first").assert_outcomes(passed=1)
    (saved,) = pytester.path.glob(".benchmarks/*/0001_first.json")
    again = gpumem("--benchmark-compare", "--benchmark-compare-fail=median:5%")
    again.assert_outcomes(passed=1)
    text = again.stdout.str()
    assert "test_pair[1048576][there] (NOW)" in text
    assert "test_pair[1048576][there] (0001_first)" in text
    printed = pytester.run(sys.executable, "-m", "pytest_benchmark", "compare", str(saved))
    printed.stdout.fnmatch_lines(["*test_pair*there*"])


def test_another_devices_run_is_not_compared_with(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(TRIAD)
    gpumem("--benchmark-save=first", "--benchmark-storage=file://./kept").assert_outcomes(passed=1)
    other = gpumem(
        "--gpumem-device", "sim:h200", "--benchmark-compare", "--benchmark-storage=file://./kept"
    )
    assert other.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = (line for line in other.stderr.lines if line.startswith("ERROR"))
    assert "--benchmark-compare" in line
    assert "H200" in line
    assert "H100" in line


HOST = """
now = 0.0

def timer():  # steps of a nanosecond, and what the benchmarked function takes: nothing else of the machine counts
    global now
    now += 1e-9
    return now

def host():
    global now
    now += SECONDS
"""


@pytest.mark.parametrize(
    ("where", "saved_with"), [((), "sim:h200"), (("--benchmark-storage=kept",), "")]
)
def test_benchmarks_of_the_host_compare_as_without_the_plugin(
    pytester: pytest.Pytester, session: Run, gpumem: Run, where: tuple[str, ...], saved_with: str
) -> None:
    """Saved without the plugin or on another GPU, beside rows of that GPU: a slower function fails, an equal one does not."""
    pytester.syspathinsert()
    pytester.makepyfile(
        kern=HOST.replace("SECONDS", "0.0001"),
        test_host="import kern\ndef test_host(benchmark): benchmark(kern.host)\n",
    )
    pytester.makepyfile(test_gpu=TRIAD)
    options = (
        *where,
        "--benchmark-timer=kern.timer",
        "--benchmark-max-time=0.01",
        "--benchmark-min-rounds=3",
    )
    save = functools.partial(gpumem, "--gpumem-device", saved_with) if saved_with else session
    assert save("--benchmark-save=first", *options).ret == 0
    compare = (
        "--benchmark-compare",
        "--benchmark-compare-fail=median:5%",
        *options,
        "test_host.py",
    )
    assert gpumem(*compare).ret == 0
    (pytester.path / "kern.py").write_text(HOST.replace("SECONDS", "0.00012"))
    with_plugin, without = gpumem(*compare), session("-p", "no:gpumem", *compare)
    assert with_plugin.ret == without.ret != 0
    assert "Performance has regressed" in with_plugin.stderr.str()
    assert not any("machine_info is different" in line for line in gpumem(*compare).stderr.lines)


def test_only_skip_and_disable(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(TRIAD + "\ndef test_other(): pass\n")
    gpumem("--benchmark-only").assert_outcomes(passed=1, skipped=1)
    gpumem("--benchmark-skip").assert_outcomes(passed=1, skipped=1)
    disabled = gpumem("--benchmark-disable", "--benchmark-json=out.json")
    disabled.assert_outcomes(passed=2)
    document = json.loads((pytester.path / "out.json").read_text())
    assert document["benchmarks"] == []
    assert len(document["gpumem"]["rows"]) == 1


def test_users_benchmark_marker_is_kept(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.benchmark(group='mine')" + TRIAD)
    gpumem("--benchmark-json=out.json").assert_outcomes(passed=1)
    (bench,) = json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    assert bench["group"] == "mine, simulated"


def test_host_benchmarks_keep_their_clock(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(TRIAD + "\ndef test_host(benchmark): benchmark(sum, range(1000))\n")
    gpumem("--benchmark-json=out.json", "--benchmark-max-time=0.01").assert_outcomes(passed=2)
    stored = {
        b["name"]: b for b in json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    }
    assert stored["test_host"]["options"]["timer"] == "perf_counter"
    assert stored["test_triad"]["options"]["timer"] == "gpumem_device_time"


CODSPEED = """
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

class Other:
    "As the fixture of pytest-codspeed 5, which claims to be pytest-benchmark's."
    @property
    def __class__(self): return BenchmarkFixture
    def __call__(self, function): return function()

def pytest_addoption(parser): parser.addoption("--codspeed", action="store_true")

@pytest.fixture
def benchmark(): return Other()
"""


def test_beside_codspeed(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makeconftest(CODSPEED)
    pytester.makepyfile(TRIAD + "\ndef test_host(benchmark): assert benchmark(lambda: 3) == 3\n")
    result = gpumem("-p", "no:codspeed", "--codspeed", "--benchmark-json=out.json")
    result.assert_outcomes(passed=2)
    row = row_in(pytester.path)
    assert row["nodeid"].endswith("::test_triad")
    pytester.makepyfile(TRIAD.replace("assert result.latency > 0", "assert result.latency < 0"))
    gpumem("-p", "no:codspeed", "--codspeed").assert_outcomes(failed=1)


def test_a_failed_subtest_fails_the_rows_of_its_test(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    if not hasattr(pytest, "Subtests"):
        pytest.skip("subtests are of pytest 9")
    measured = TRIAD.replace("(gpu_benchmark", "(subtests, gpu_benchmark")
    failing = "    with subtests.test('one'):\n        assert 0\n"
    head, _, body = measured.partition(":\n")
    pytester.makepyfile(test_after=measured + failing, test_before=f"{head}:\n{failing}{body}")
    gpumem("--benchmark-json=out.json", "--gpumem-save").assert_outcomes(failed=4)
    rows = rows_in(pytester.path)
    assert [(row["failed"], row["measurement"]["latency"] > 0) for row in rows] == [
        (True, True)
    ] * 2
    assert not list(pytester.path.rglob(".benchmarks/*/gpumem/*.json"))


def test_xdist(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(
        LABELLED
        + TRIAD
        + """
def test_slow(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0, max_latency="1 ns")

def test_early(gpu_benchmark):
    raise ValueError
"""
    )
    result = gpumem("-n2", "--benchmark-json=out.json", "--gpumem-save", "--junitxml=junit.xml")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines_random(
        ["test_pair* measured*", "FAILED *::test_slow - * us is above max_latency*"]
    )
    document = json.loads((pytester.path / "out.json").read_text())
    assert len(document["gpumem"]["rows"]) == 6
    assert document["benchmarks"] == []
    assert "FAIL (simulated)" in (pytester.path / "junit.xml").read_text()
    (saved,) = stored_in(pytester.path)
    assert "test_slow" not in saved.read_text()
    # The workers read what the controller stored.
    gpumem(
        "-n1", "--gpumem-max-regression=5%", "-k", "triad", "--benchmark-json=out.json"
    ).assert_outcomes(passed=1)
    row = row_in(pytester.path)
    assert row["verdict"]["comparison"]["processes"] == 1


def test_xdist_mistake_in_a_marker(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytest.importorskip("xdist")
    mistaken = "import pytest\n@pytest.mark.gpumem(max_latncy='1 ms')\ndef test_it(): pass\n@pytest.mark.gpumem(budget='soon')"
    pytester.makepyfile(mistaken + TRIAD + TRIAD.replace("test_triad", "test_sound"))
    result = gpumem("-n1", "--gpumem-budget=2 s total")
    result.assert_outcomes(passed=1, errors=2)
    assert "did you mean max_latency" in result.stdout.str()


def test_ranges(pytester: pytest.Pytester, nvtx_trace: Trace) -> None:
    pytester.makepyfile(TRIAD + "\ndef test_other(): pass\n")
    environment = {**os.environ, **nvtx_trace.environment}
    program = [sys.executable, "-m", "pytest", *SIMULATED]
    done = subprocess.run(
        program, cwd=pytester.path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    ranges = set(nvtx_trace.ranges())  # fails if one is not closed
    for part in ("setup", "check", "warm-up", "measure", "teardown"):
        assert f"test_triad/test_triad.{part}" in ranges
    assert "test_other" in ranges
    marks = [event.message for event in nvtx_trace.events() if event.kind == "mark"]
    assert marks == ["test_ranges.py::test_triad", "test_ranges.py::test_other"]
    # A tool was attached: these times are not for a baseline.
    assert "profiled: 1 test; times under a profiler are not judged" in done.stdout
    assert "UNDECIDED" not in done.stdout
    assert "- benchmark 'simulated'" not in done.stdout  # nor pytest-benchmark's table


def test_html_report(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(TRIAD)
    result = gpumem("--gpumem-report=out.html", "--gpumem-save")
    result.stdout.fnmatch_lines(["--gpumem-report: wrote *out.html"])
    text = (pytester.path / "out.html").read_text()
    assert "test_triad" in text
    assert "saved run and" not in text
    # The baseline of before is the history of now.
    gpumem("--gpumem-report=out.html")
    assert "1 saved run and this run" in (pytester.path / "out.html").read_text()
    (pytester.path / "out.html").unlink()
    result = gpumem("--gpumem-report=out.html", "-k", "nothing")
    result.stdout.fnmatch_lines(["nothing was measured: *out.html is not written"])
    assert not (pytester.path / "out.html").exists()


def test_a_report_that_cannot_be_written_is_noticed_before_anything_is_measured(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(TRIAD)
    result = gpumem("--gpumem-report=no/such/folder/out.html")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: gpumem: --gpumem-report: cannot write *out.html: there is no folder *"]
    )
    assert "test_triad" not in result.stdout.str()
