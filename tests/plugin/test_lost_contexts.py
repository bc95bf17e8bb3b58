"""Work that fails on the device after its test's last wait fails that test; later tests name it, each in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from sessions import SIMULATED, TRIAD, Run, rows_in

LOSING = """
    import pytest
    from pytest_gpumem.devices.protocol import ContextLost

    def lose(device):
        "From now on every call for the device fails, but freeing one's own memory, as on a GPU."
        def lost(*arguments, **options):
            raise ContextLost("waiting for the device: cudaErrorIllegalAddress. The CUDA context is lost.")
        for facet in (device.streams, device.l2, device.content, device.kernels):
            for name in dir(facet):
                if not name.startswith("_") and name not in ("close", "clear") and callable(getattr(facet, name)):
                    setattr(facet, name, lost)  # a model loses none
        device.memory.allocate = device.memory.scatter = device.memory.make_room = device.conditions = device.close = lost
"""
"""A conftest: how a test loses the context of the simulated device."""

INNOCENT = """
def test_cpu(): pass
def test_next(gpu_device): raise AssertionError("run with a lost context")
def test_last(gpu_benchmark, device_buffer): raise AssertionError("run with a lost context")
"""


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's own summary then has no room for the reasons, which are counted."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def losing(pytester: pytest.Pytester, gpumem: Run) -> Callable[[str], pytest.RunResult]:
    def run(culprit: str) -> pytest.RunResult:
        pytester.makeconftest(LOSING)
        pytester.makepyfile(
            test_it=f"import pytest\nfrom conftest import lose\n{TRIAD}\n{culprit}\n{INNOCENT}"
        )
        result = gpumem("-rA", "--gpumem-save")
        text = result.stdout.str() + result.stderr.str()
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert "Traceback" not in text
        assert "INTERNALERROR" not in text
        assert "LeftoverWarning" not in text
        result.stdout.fnmatch_lines(["*: 1 of 1 row stored in *"])  # that of before
        (line,) = {
            line for line in result.outlines if line.startswith("ContextLost: did not run: ")
        }
        assert re.fullmatch(
            r"ContextLost: did not run: test_it\.py::test_culprit lost the context \(cudaErrorIllegalAddress, test_it\.py:\d+\)",
            line,
        )
        assert result.outlines.count(line) == 2
        return result

    return run


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))",
    ],
    ids=[
        "passes",
        "measures",
    ],
)
def test_what_a_test_left_fails_it(losing: Callable[[str], pytest.RunResult], body: str) -> None:
    result = losing(
        f"def test_culprit(gpu_benchmark, gpu_kernels, gpu_device, device_buffer):\n    lose(gpu_device)\n    {body}\n"
    )
    result.assert_outcomes(passed=2, failed=1, errors=2)
    result.stdout.fnmatch_lines(["*_ test_culprit _*", "*ContextLost: *cudaErrorIllegalAddress*"])


def test_a_failure_of_the_test_s_own_stays(losing: Callable[[str], pytest.RunResult]) -> None:
    result = losing("def test_culprit(gpu_device):\n    lose(gpu_device)\n    assert 1 == 2\n")
    result.assert_outcomes(passed=2, failed=1, errors=2)
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_culprit - assert 1 == 2"])


def test_a_context_lost_in_a_teardown_is_that_tests_error(
    losing: Callable[[str], pytest.RunResult],
) -> None:
    result = losing(
        "@pytest.fixture\ndef own(gpu_device, device_buffer):\n    yield device_buffer('1 MiB')\n    lose(gpu_device)\n"
        "def test_culprit(own): pass\n"
    )
    result.assert_outcomes(passed=3, errors=3)
    result.stdout.fnmatch_lines(
        [
            "*_ ERROR at teardown of test_culprit _*",
            "ContextLost: at the test's end: *cudaErrorIllegalAddress*",
        ]
    )


UNSEEN = """
@pytest.fixture(scope="module")
def found(request):
    return request.config.pluginmanager.getplugin("gpumem-session")
"""
"""How a test reaches the device without our fixtures, as a library does."""


def test_a_test_without_our_fixtures_fails_and_is_named(
    losing: Callable[[str], pytest.RunResult],
) -> None:
    result = losing(f"{UNSEEN}def test_culprit(found): lose(found.device)\n")
    result.assert_outcomes(passed=2, failed=1, errors=2)
    result.stdout.fnmatch_lines(["*_ test_culprit _*", "*ContextLost: *cudaErrorIllegalAddress*"])


@pytest.mark.parametrize("arguments", [(), ("--gpumem-isolate",)])
@pytest.mark.parametrize("when", ["lose(found.device); yield", "yield; lose(found.device)"])
def test_the_last_test_that_loses_the_context_unseen_fails(
    pytester: pytest.Pytester, arguments: tuple[str, ...], when: str
) -> None:
    """Nobody comes after it who could notice, and the worker that it ran in is replaced."""
    pytester.makeconftest(LOSING)
    fixture = f"@pytest.fixture\ndef own(found): {when}\n"
    pytester.makepyfile(
        test_it=f"import pytest\nfrom conftest import lose\n{TRIAD}\n{UNSEEN}{fixture}def test_culprit(own): pass\n"
    )
    result = pytester.runpytest_subprocess(*SIMULATED, *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*_ * of test_culprit _*" if when.startswith("yield") else "*_ test_culprit _*",
            "*ContextLost: *",
        ]
    )


@pytest.mark.parametrize(
    ("when", "arguments"),
    [
        ("body", ("-n", "2")),
        ("body", ("-n", "1", "--dist", "loadscope")),
        ("teardown", ("--gpumem-isolate",)),
    ],
)
def test_a_worker_that_lost_the_context_is_replaced(
    pytester: pytest.Pytester, when: str, arguments: tuple[str, ...]
) -> None:
    loses = {"body": "lose(gpu_device); yield", "teardown": "yield; lose(gpu_device)"}[when]
    pytester.makeconftest(LOSING)
    fixtures = f"""
import pytest
from conftest import lose
{TRIAD}
@pytest.fixture(scope="module")
def cleaned():
    yield
    open("cleaned", "a").write("x")
@pytest.fixture
def own(gpu_device, cleaned): {loses}
"""
    tests = """
def test_culprit(own): pass
def test_next(gpu_device): pass
def test_last(gpu_benchmark, device_buffer, gpu_kernels): test_triad(gpu_benchmark, device_buffer, gpu_kernels)
"""
    pytester.makepyfile(test_it=fixtures + tests)
    result = pytester.runpytest_subprocess(
        *SIMULATED, *arguments, "--benchmark-json=out.json", "--junitxml=out.xml"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(
        **{"passed": 3, "failed": 1} if when == "body" else {"passed": 4, "errors": 1}
    )
    rows = rows_in(pytester.path)
    assert {row["nodeid"] for row in rows} == {"test_it.py::test_triad", "test_it.py::test_last"}
    cases = [
        case.get("name")
        for case in ElementTree.parse(pytester.path / "out.xml").getroot().iter("testcase")
    ]
    assert sorted(map(str, cases)) == ["test_culprit", "test_last", "test_next", "test_triad"]
    assert (pytester.path / "cleaned").read_text() == "x"
    assert "not run" not in result.stdout.str()


def test_a_capture_that_a_test_leaves_open_is_ended_and_fails_no_other(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makeconftest(
        """
        from pytest_gpumem.devices.protocol import DeviceError

        def leave_open(device):
            "As a GPU does: nothing can be waited for until the capture ends."
            streams = device.streams
            synchronize = streams.synchronize

            def refused(stream=None):
                raise DeviceError("cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing")

            def end():
                streams.synchronize, streams.end_captures = synchronize, lambda: 0
                return 1

            streams.synchronize, streams.end_captures = refused, end
        """
    )
    pytester.makepyfile(
        """
        from conftest import leave_open

        def test_ours(gpu_device):
            leave_open(gpu_device)

        def test_after(gpu_benchmark, device_buffer, gpu_kernels):
            gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))

        DEVICE = []

        def test_opens(gpu_device):
            DEVICE.append(gpu_device)

        def test_foreign():
            leave_open(DEVICE[0])

        def test_last(gpu_benchmark, device_buffer, gpu_kernels):
            gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))
        """
    )
    result = gpumem("-rA")
    left = "the test left the capture of a stream open; it was ended, and its graph dropped"
    result.stdout.fnmatch_lines([f"*DeviceError: {left}"])
    assert len([line for line in result.outlines if line.startswith("FAILED ")]) == 1
    for name in ("test_ours", "test_foreign"):
        result.stdout.fnmatch_lines(
            [f"*::{name} left the capture of a stream open, which was ended*"]
        )
