"""A measurement that hangs, and a test that crashes: what is written, and what becomes of the other tests."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from sessions import SIMULATED, TRIAD, Run, rows_in

MODULE = f"""
import ctypes, functools, os, signal, sys, time
import pytest
from pytest_gpumem import Case

# Both wait in C and look at no signal; the first one releases the interpreter's lock, as a wait for a GPU does.
def released(): wait_for_itself(ctypes.CDLL(None))
def held(): wait_for_itself(ctypes.PyDLL(None))
def wait_for_itself(library):
    mutex = ctypes.create_string_buffer(256)
    library.pthread_mutex_init(mutex, None)
    for _ in range(2): library.pthread_mutex_lock(mutex)

{TRIAD}

{{culprits}}

def test_last(gpu_benchmark, device_buffer, gpu_kernels): test_triad(gpu_benchmark, device_buffer, gpu_kernels)
"""
CULPRIT = """
@pytest.mark.gpumem(timeout="{timeout}")
def test_{name}(gpu_benchmark):
    @functools.cache
    def during():
        {during}
    gpu_benchmark.case(lambda memory: Case(during, reference=during))
"""
HINT = "*gpumem: test_it.py::test_culprit: a measurement did not end within 0.501 s (--gpumem-timeout)*--gpumem-isolate*"
STACK = [
    '  File "*/test_it.py", line * in wait_for_itself',
    '  File "*/test_it.py", line * in test_culprit*',
]


def culprit(during: str, name: str = "culprit", timeout: str = "0.5 s") -> str:
    """A test whose measurement calls something, once."""
    return CULPRIT.format(during=during, name=name, timeout=timeout)


@pytest.fixture
def start(pytester: pytest.Pytester) -> Run:
    """Runs a session in a process of its own, which may end."""

    def run(culprits: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=MODULE.format(culprits=culprits))
        outputs = ("--benchmark-json=out.json", "--junitxml=out.xml")
        return pytester.runpytest_subprocess(*SIMULATED, *outputs, *arguments, timeout=120)

    return run


def failures() -> list[str]:
    """What the JUnit file says of the tests that failed."""
    root = ElementTree.parse("out.xml").getroot()
    return [problem.text or "" for problem in [*root.iter("failure"), *root.iter("error")]]


def measured() -> list[str]:
    """The tests with a row."""
    return [row["nodeid"].partition("::")[2] for row in rows_in(Path())]


@pytest.mark.parametrize("how", ["released", "held"])
def test_a_hang_ends_the_process_with_its_stack(start: Run, how: str) -> None:
    result = start(culprit(f"{how}()"))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    if how == "released":
        result.stderr.fnmatch_lines([HINT])
        assert "Timeout (" not in result.stderr.str()  # the hint has the limit that was passed
    result.stderr.fnmatch_lines(STACK)
    assert not Path("out.json").exists()


def test_six_hangs_cost_their_tests_alone(start: Run) -> None:
    result = start(
        "".join(culprit("released()", f"culprit_{number}") for number in range(6)),
        "--gpumem-isolate",
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=2, failed=6)
    result.stdout.fnmatch_lines(
        [
            "*_ test_culprit_* _*",
            "gpumem: a measurement did not end in time (--gpumem-timeout), and its process was ended",
            *STACK,
        ]
    )
    texts = "\n".join(failures())
    assert [texts.count(f"in test_culprit_{number}") for number in range(6)] == [1] * 6
    assert "_pytest" not in texts
    assert measured() == ["test_triad", "test_last"]


@pytest.mark.parametrize(
    "during", ["held()", "os.kill(os.getpid(), signal.SIGSEGV)", "ctypes.CDLL(None)._exit(0)"]
)
def test_no_scheduler_repeats_a_test_that_ended_its_worker(start: Run, during: str) -> None:
    result = start(culprit(during), "-n1", "--dist=loadfile")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=2, failed=1)
    (text,) = failures()
    crashed = "worker 'gw0' crashed while running 'test_it.py::test_culprit'"
    assert ("in test_culprit" if during == "held()" else crashed) in text
    assert measured() == ["test_triad", "test_last"]


def test_a_limit_of_pytest_timeout_holds_alone(start: Run) -> None:
    result = start("@pytest.mark.timeout(2, method='signal')" + culprit("time.sleep(60)"))
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*Timeout (>2.0s) from pytest-timeout*"])
    assert "--gpumem-timeout" not in result.stderr.str()


def test_a_debugger_has_no_deadline(start: Run) -> None:
    Path(".pdbrc").write_text("import time; time.sleep(2)\ncontinue\n")
    result = start(culprit("breakpoint()"))
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=3)


def test_an_exit_fails_its_test_and_keeps_its_rows(start: Run) -> None:
    result = start(culprit("pass", timeout="1 min") + "\n    sys.exit(0)")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=2, failed=1)
    assert [row["failed"] for row in rows_in(Path())] == [False, True, False]


def test_an_interrupt_keeps_the_rows_before_it(start: Run) -> None:
    result = start(culprit("os.kill(os.getpid(), signal.SIGINT)", timeout="1 min"))
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert measured() == ["test_triad"]


def test_an_interrupt_leaves_limits_that_were_not_reached(start: Run) -> None:
    interrupt = "os.kill(os.getpid(), signal.SIGINT)"
    result = start(culprit(interrupt, timeout="1 min"), "--gpumem-max-latency=1 s")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["not run: 2 limits, such as *::test_*, max_latency: not reached"])


def test_isolation_needs_xdist(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = gpumem("--gpumem-isolate", "-p", "no:xdist")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: gpumem: --gpumem-isolate needs pytest-xdist*"])
