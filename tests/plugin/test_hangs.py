"""A test that hangs, crashes or is interrupted costs the session no result of another test, and no process stays behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from filelock import FileLock
from sessions import SIMULATED, TRIAD, rows_in
from test_waiting import GPU_OF_ANOTHER

HANGS = {
    # Both wait in C for themselves and look at no signal; the first one releases the interpreter's lock, as a wait for a GPU does.
    "released": "wait_for_itself(ctypes.CDLL(None))",
    "held": "wait_for_itself(ctypes.PyDLL(None))",
}
MODULE = f"""
import ctypes, os, signal, sys
import pytest
def wait_for_itself(library):
    mutex = ctypes.create_string_buffer(256)
    library.pthread_mutex_init(mutex, None)
    for _ in range(2): library.pthread_mutex_lock(mutex)
{TRIAD}
def test_cpu(): pass
{{culprit}}
def test_later(gpu_device): pass
def test_last(gpu_benchmark, device_buffer, gpu_kernels): test_triad(gpu_benchmark, device_buffer, gpu_kernels)
"""
MEASURES_AND_HANGS = """
@pytest.mark.gpumem(timeout={timeout!r})
def test_culprit(gpu_device, gpu_benchmark, device_buffer, gpu_kernels):
    gpu_device.conditions = lambda: (print("about to hang", file=sys.__stderr__, flush=True), {hang})
    test_triad(gpu_benchmark, device_buffer, gpu_kernels)
"""
WORKERS = [("-n", "2"), ("--gpumem-isolate",), ("-n", "1", "--dist", "loadfile")]


class Ended:
    """A session that ended, and everything that wrote to its output with it."""

    def __init__(self, code: int, output: str) -> None:
        self.code = code
        self.output = output
        self.rows = {row["nodeid"].partition("::")[2]: row for row in rows_in(Path())}
        cases = ElementTree.parse("out.xml").getroot().iter("testcase")
        self.failed = {case.get("name"): any(case.find(tag) is not None for tag in ("failure", "error")) for case in cases}


def end(session: subprocess.Popen[bytes]) -> None:
    """A session that hung in spite of all would go on for ever."""
    session.kill()
    session.communicate()


@pytest.fixture
def start(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> Callable[..., Any]:
    def run(culprit: str, *arguments: str) -> Any:
        pytester.makepyfile(test_it=MODULE.format(culprit=culprit))
        own = ("--benchmark-json=out.json", "--junitxml=out.xml", "--gpumem-save", "--gpumem-baseline=baseline")
        command = [sys.executable, "-m", "pytest", *SIMULATED, *own, *arguments]
        session = pytester.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        request.addfinalizer(partial(end, session))
        return session

    return run


@pytest.fixture
def ended(start: Callable[..., subprocess.Popen[bytes]]) -> Callable[..., Ended]:
    def run(culprit: str, *arguments: str) -> Ended:
        session = start(culprit, *arguments)
        output, _ = session.communicate(timeout=60)
        return Ended(session.returncode, output.decode())

    return run


@pytest.mark.parametrize("lock", HANGS)
def test_a_hang_ends_the_session_and_keeps_its_results(ended: Callable[..., Ended], lock: str) -> None:
    session = ended(MEASURES_AND_HANGS.format(hang=HANGS[lock], timeout="1 s"), "--dist=load")  # which without -n is nothing
    assert session.code == (pytest.ExitCode.TESTS_FAILED if lock == "released" else -signal.SIGKILL)
    assert session.failed == {"test_triad": False, "test_cpu": False, "test_culprit": True}
    assert {name: row["verdict"]["outcome"] for name, row in session.rows.items()} == {"test_triad": "PASS", "test_culprit": "FAIL"}
    assert not Path("baseline").exists()
    assert "the measurement of triad did not end within 1.005 s (--gpumem-timeout)" in session.output
    assert "last NVTX range: test_culprit.check" in session.output
    assert f'File "{Path("test_it.py").absolute()}"' in session.output  # where it hung
    assert "test_it.py::test_culprit; 2 tests not run" in session.output


@pytest.mark.parametrize("workers", WORKERS, ids=" ".join)
def test_a_worker_that_hangs_is_replaced(ended: Callable[..., Ended], workers: tuple[str, ...]) -> None:
    session = ended(MEASURES_AND_HANGS.format(hang=HANGS["released"], timeout="1 s"), *workers)
    assert session.code == pytest.ExitCode.TESTS_FAILED
    assert session.failed == {"test_triad": False, "test_cpu": False, "test_culprit": True, "test_later": False, "test_last": False}
    assert {name for name, row in session.rows.items() if not row["failed"]} == {"test_triad", "test_last"}
    assert "did not end within 1" in session.output
    assert "1 failed, 4 passed" in session.output


@pytest.mark.parametrize(
    "culprit",
    [
        f"@pytest.mark.gpumem(timeout='1 s')\ndef test_culprit(gpu_device): {HANGS['released']}",
        f"@pytest.fixture\ndef own(gpu_device):\n    {HANGS['released']}\n@pytest.mark.gpumem(timeout='1 s')\ndef test_culprit(own): pass",
        f"@pytest.fixture\ndef own(gpu_device):\n    yield\n    {HANGS['released']}\n"
        "@pytest.mark.gpumem(timeout='1 s')\ndef test_culprit(own): pass",
        "@pytest.mark.gpumem(timeout='1 s')\ndef test_culprit(gpu_device):\n"
        f"    gpu_device.streams.synchronize = lambda *_: {HANGS['released']}",
    ],
    ids=["body", "setup", "teardown", "wait"],
)
def test_every_part_of_a_test_of_the_device_has_a_limit(ended: Callable[..., Ended], culprit: str) -> None:
    session = ended(culprit)
    assert session.failed == {"test_triad": False, "test_cpu": False, "test_culprit": True}
    assert "did not end within 1 s" in session.output


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), signal.SIGSEGV)", "os._exit(0)"])
def test_a_crash_keeps_the_results(ended: Callable[..., Ended], death: str) -> None:
    session = ended(f"def test_culprit(): {death}")
    assert session.failed == {"test_triad": False, "test_cpu": False, "test_culprit": True}
    assert set(session.rows) == {"test_triad"}
    assert session.rows["test_triad"]["footprint"]["ended"]  # the footprint has what the test keeps, which its teardown tells
    assert not Path("baseline").exists()
    assert "test_it.py::test_culprit; 2 tests not run" in session.output


def test_a_worker_that_crashes_costs_its_test_alone(ended: Callable[..., Ended]) -> None:
    session = ended("def test_culprit(): os.kill(os.getpid(), signal.SIGSEGV)", "--gpumem-isolate")
    assert session.code == pytest.ExitCode.TESTS_FAILED
    assert session.failed == {"test_triad": False, "test_cpu": False, "test_culprit": True, "test_later": False, "test_last": False}
    assert set(session.rows) == {"test_triad", "test_last"}


def test_an_exit_fails_its_test_and_keeps_its_rows(ended: Callable[..., Ended]) -> None:
    measured = "test_triad(gpu_benchmark, device_buffer, gpu_kernels)"
    session = ended(f"def test_culprit(gpu_benchmark, device_buffer, gpu_kernels):\n    {measured}\n    sys.exit(0)")
    assert session.failed == {"test_triad": False, "test_cpu": False, "test_culprit": True, "test_later": False, "test_last": False}
    assert session.rows["test_culprit"]["measurement"] is not None
    assert session.rows["test_culprit"]["failed"]


@pytest.mark.usefixtures("new_interpreters")
@pytest.mark.parametrize("workers", [(), ("--gpumem-isolate",)], ids=["alone", "worker"])
@pytest.mark.parametrize("lock", HANGS)
def test_an_interrupt_ends_a_process_that_hangs(
    pytester: pytest.Pytester, start: Callable[..., subprocess.Popen[bytes]], lock: str, workers: tuple[str, ...]
) -> None:
    pytester.makeconftest(GPU_OF_ANOTHER.format(limit=600.0))
    Path("runtime", "gpumem").mkdir(parents=True, mode=0o700)
    session = start(MEASURES_AND_HANGS.format(hang=HANGS[lock], timeout="none"), "-s", *workers)
    assert session.stdout is not None
    before = next(line for line in session.stdout if b"about to hang" in line)
    session.send_signal(signal.SIGINT)  # to this process alone; Ctrl-C sends it to the workers as well
    after, _ = session.communicate(timeout=60)
    done = Ended(session.returncode, (before + after).decode())
    # A process that keeps the interpreter's lock cannot exit by itself, unless the signal came just before it hung.
    assert done.code in (pytest.ExitCode.INTERRUPTED, *([-signal.SIGKILL] if lock == "held" and not workers else []))
    assert "KeyboardInterrupt" in done.output
    assert not done.failed["test_triad"]
    assert set(done.rows) == {"test_triad"}
    with FileLock(Path("runtime", "gpumem", "GPU-1.lock")).acquire(timeout=5):  # the process that held it is gone
        pass


@pytest.mark.parametrize(("culprit", "option"), [("assert 0", "--pdb"), ("breakpoint()", "--color=no")])
def test_the_session_goes_on_after_a_debugger(ended: Callable[..., Ended], culprit: str, option: str) -> None:
    Path(".pdbrc").write_text("continue\n")
    session = ended(f"def test_culprit(gpu_device):\n    {culprit}", option)
    assert session.failed == {
        "test_triad": False,
        "test_cpu": False,
        "test_culprit": option == "--pdb",
        "test_later": False,
        "test_last": False,
    }
    assert session.code == (pytest.ExitCode.TESTS_FAILED if option == "--pdb" else pytest.ExitCode.OK)
    assert set(session.rows) == {"test_triad", "test_last"}


@pytest.mark.usefixtures("new_interpreters")
def test_a_session_inside_a_test_leaves_the_other_its_stacks(ended: Callable[..., Ended]) -> None:
    inside = "from pytest_gpumem.plugin.watchdog import Watchdog\n    Watchdog(lambda end, told: 0).close()"
    culprit = f"@pytest.mark.gpumem(timeout='1 s')\ndef test_culprit(gpu_device):\n    {inside}\n    {HANGS['released']}"
    session = ended(culprit)
    assert session.code == pytest.ExitCode.TESTS_FAILED
    assert f'File "{Path("test_it.py").absolute()}"' in session.output


@pytest.mark.usefixtures("new_interpreters")
def test_a_test_may_interrupt_itself(ended: Callable[..., Ended]) -> None:
    culprit = "def test_culprit(gpu_device):\n    with pytest.raises(KeyboardInterrupt): os.kill(os.getpid(), signal.SIGINT)"
    session = ended(culprit)
    assert session.code == pytest.ExitCode.OK
    assert len(session.failed) == 5


def test_isolation_needs_xdist(pytester: pytest.Pytester, gpumem: Callable[..., pytest.RunResult]) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = gpumem("--gpumem-isolate", "-p", "no:xdist")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: gpumem: --gpumem-isolate needs pytest-xdist*"])
