"""A row is stored once pytest's reports say that its test passed, whatever kind of test it is."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sessions import Run, results_in

MEASURE = "gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))"

TEST_CASE = """
import unittest, pytest

class TestCase(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _gpu(self, gpu_benchmark, device_buffer, gpu_kernels):
        self.measure = lambda **of: gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20), **of)

    def test_passes(self):
        self.measure()

    def test_asserts(self):
        self.measure()
        self.assertTrue(False, "wrong result")

    def test_fails_in_a_subtest(self):
        self.measure(label="before")
        with self.subTest("a"):
            self.fail("wrong result")
        self.measure(label="after")

    @unittest.expectedFailure
    def test_fails_as_expected(self):
        self.measure()
        self.fail("wrong result")

    def test_skips(self):
        self.measure()
        self.skipTest("no torch")
"""

FUNCTIONS = f"""
import pytest

def test_passes(gpu_benchmark, device_buffer, gpu_kernels):
    {MEASURE}

def test_fails_in_a_subtest(subtests, gpu_benchmark, device_buffer, gpu_kernels):
    with subtests.test("a"):
        {MEASURE}
        assert False, "wrong result"

def test_fails_in_a_subtest_first(subtests, gpu_benchmark, device_buffer, gpu_kernels):
    with subtests.test("a"):
        assert False, "wrong result"
    {MEASURE}

@pytest.mark.xfail(reason="known")
def test_xfails(gpu_benchmark, device_buffer, gpu_kernels):
    {MEASURE}
    assert False, "wrong result"

@pytest.mark.xfail(strict=False, reason="known")
def test_xpasses(gpu_benchmark, device_buffer, gpu_kernels):
    {MEASURE}

def test_skips(gpu_benchmark, device_buffer, gpu_kernels):
    {MEASURE}
    pytest.skip("no torch")
"""

# As pytest-forked does: each test in a child of its own, whose reports alone reach the parent.
FORKED = """
import os, pickle, tempfile
import pytest
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    path = tempfile.mktemp()
    child = os.fork()
    if not child:
        reports = runtestprotocol(item, log=False)
        with open(path, "wb") as file:
            pickle.dump([report._to_json() for report in reports], file)
        os._exit(0)
    os.waitpid(child, 0)
    with open(path, "rb") as file:
        for report in pickle.load(file):
            item.ihook.pytest_runtest_logreport(report=pytest.TestReport._from_json(report))
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""


def stored(folder: Path) -> set[str]:
    """Names of the tests in the one file of the baseline."""
    (file,) = folder.glob(".benchmarks/*/gpumem/*.json")
    return {
        row["nodeid"].rpartition("::")[2] for row in json.loads(file.read_text())["content"]["rows"]
    }


def results(path: Path) -> dict[str, tuple[str, bool]]:
    """Verdict and failure of each row, by test and label."""
    rows = json.loads(path.read_text())["gpumem"]["rows"]
    return {
        row["key"].rpartition("::")[2]: (row["verdict"]["outcome"], row["failed"]) for row in rows
    }


@pytest.mark.parametrize("how", [(), ("-n", "1")], ids=["here", "xdist"])
@pytest.mark.parametrize("code", [TEST_CASE, FUNCTIONS], ids=["unittest", "pytest"])
def test_only_a_test_that_passed_is_stored(
    pytester: pytest.Pytester, gpumem: Run, code: str, how: tuple[str, ...]
) -> None:
    pytester.makepyfile(code)
    result = gpumem("--gpumem-save", "--benchmark-json=out.json", *how)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert stored(pytester.path) == {"test_passes"}
    failures = {
        name.partition("[")[0]: failed
        for name, (_, failed) in results(pytester.path / "out.json").items()
    }
    assert failures == {
        name: name.startswith(("test_asserts", "test_fails_in_a_subtest")) for name in failures
    }
    # pytest-benchmark's own list of what passed.
    benchmarks = json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    assert how or {one["name"] for one in benchmarks} == {"test_passes"}


@pytest.mark.parametrize("how", [(), ("-n", "1")], ids=["here", "xdist"])
def test_junit_says_of_a_row_what_the_results_say(
    pytester: pytest.Pytester, gpumem: Run, how: tuple[str, ...]
) -> None:
    pytester.makepyfile(
        FUNCTIONS
        + """
@pytest.fixture
def torn():
    yield
    assert False, "not freed"

def test_fails_afterwards(torn, gpu_benchmark, device_buffer, gpu_kernels):
    test_passes(gpu_benchmark, device_buffer, gpu_kernels)
"""
    )
    gpumem("--benchmark-json=out.json", "--junitxml=out.xml", *how)
    told = {}
    for case in ElementTree.parse("out.xml").getroot().iter("testcase"):
        properties = {one.get("name"): one.get("value", "") for one in case.iter("property")}
        told[case.get("name")] = (
            properties["gpumem_verdict"],
            json.loads(properties["gpumem"])["failed"],
        )
    assert told == results(pytester.path / "out.json")
    assert told["test_xfails"] == ("UNDECIDED", False)
    assert told["test_fails_afterwards"] == ("MEASURED", True)


def test_rows_of_a_forked_child_reach_its_parent(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makeconftest(FORKED)
    pytester.makepyfile(FUNCTIONS)
    gpumem("--gpumem-save", "--benchmark-json=out.json", "-k", "passes or skips")
    assert stored(pytester.path) == {"test_passes"}
    assert results(pytester.path / "out.json")["test_skips"] == ("UNDECIDED", False)


FAILS_AT_FIRST = """
import pytest

attempts = []

@pytest.mark.gpumem(max_latency="1 ms")
def test_time(gpu_benchmark, device_buffer, gpu_kernels):
    attempts.append(1)
    size = (1 << 32) if len(attempts) == 1 else (1 << 20)
    gpu_benchmark(gpu_kernels.copy, device_buffer(size), device_buffer(size), label="x")

@pytest.mark.gpumem(max_peak="2 MiB")
def test_memory(device_buffer):
    attempts.append(2)
    device_buffer("4 MiB" if attempts.count(2) == 1 else "1 MiB")

@pytest.mark.gpumem(max_latency="1 ms")
def test_that_skips_then(gpu_benchmark, device_buffer, gpu_kernels):
    attempts.append(3)
    if attempts.count(3) > 1:
        pytest.skip("flaky")
    gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 32), device_buffer(1 << 32))

@pytest.mark.gpumem(max_latency="1 ms")
def test_assertion(gpu_benchmark, device_buffer, gpu_kernels):
    attempts.append(4)
    gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))
    assert attempts.count(4) > 1
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_rerun_clears_an_assertion_and_no_verdict(
    pytester: pytest.Pytester, gpumem: Run, workers: tuple[str, ...]
) -> None:
    pytest.importorskip("pytest_rerunfailures", reason="pytest-rerunfailures is of the extra test")
    pytester.makepyfile(FAILS_AT_FIRST)
    result = gpumem("-p", "rerunfailures", "--reruns=2", "--benchmark-json=out.json", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    found = results_in(pytester.path)["rows"]
    said = {
        row["key"].partition("::")[2]: (row["verdict"]["outcome"], row["failed"]) for row in found
    }
    assert said == {
        "test_time[x]": ("FAIL", True),
        "test_memory": ("FAIL", True),
        "test_that_skips_then": ("FAIL", True),
        "test_assertion": ("PASS", False),
    }
    of_time = next(row for row in found if row["label"])
    assert of_time["verdict"]["reason"].startswith("FAIL in attempt 1: ")
    assert of_time["measurement"]["latency"] < 1e-3  # of the last attempt
    result.stdout.fnmatch_lines(["*3 failed, 1 passed*"])


def test_a_rerun_takes_the_place_of_all_earlier_rows(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makeconftest(
        """
        from _pytest.runner import runtestprotocol

        def pytest_runtest_protocol(item, nextitem):
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for attempt in range(2):
                for report in runtestprotocol(item, nextitem=nextitem, log=False):
                    if attempt == 0 and report.failed:
                        report.outcome = "rerun"
                    item.ihook.pytest_runtest_logreport(report=report)
                item._initrequest()
            return True
        """
    )
    pytester.makepyfile(
        """
        attempts = []

        def test_it(gpu_benchmark, device_buffer, gpu_kernels):
            attempts.append(1)
            for label in ("x", "y") if len(attempts) == 1 else ("x",):
                gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20), label=label)
            assert len(attempts) == 2
        """
    )
    gpumem("--benchmark-json=out.json")
    assert results(pytester.path / "out.json") == {"test_it[x]": ("MEASURED", False)}


ON_THE_REPORT = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.item, report.extras, report.call = item, [item], lambda: 0
    return report
"""
BY_HAND = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    report = pytest.TestReport(item.nodeid, item.location, keywords=item.keywords, outcome="passed", longrepr=None, when="call")
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""


@pytest.mark.parametrize("conftest", [ON_THE_REPORT, BY_HAND], ids=["attributes", "made by hand"])
def test_a_report_may_hold_what_cannot_be_sent(
    pytester: pytest.Pytester, gpumem: Run, conftest: str
) -> None:
    pytester.makeconftest(conftest)
    pytester.makepyfile("def test_a(): pass")
    result = gpumem()
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1)
