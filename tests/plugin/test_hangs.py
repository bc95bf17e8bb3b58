"""Whatever ends a test or its session costs no result of another test, and no process stays behind.

HANGS=all python -m pytest tests/plugin/test_hangs.py -n auto         # the whole table; one row of each kind by default
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any
from xml.etree import ElementTree

import pytest
from filelock import FileLock
from sessions import SIMULATED, TRIAD, rows_in
from test_waiting import GPU_OF_ANOTHER

MODULE = f"""
import asyncio, ctypes, os, signal, sys, time
import pytest
# Both wait in C for themselves and look at no signal; the first one releases the interpreter's lock, as a wait for a GPU does.
def released(): wait_for_itself(ctypes.CDLL(None))
def held(): wait_for_itself(ctypes.PyDLL(None))
def wait_for_itself(library):
    mutex = ctypes.create_string_buffer(256)
    library.pthread_mutex_init(mutex, None)
    print("about to hang", file=sys.__stderr__, flush=True)
    for _ in range(2): library.pthread_mutex_lock(mutex)
def sleep():
    print("about to hang", file=sys.__stderr__, flush=True)
    time.sleep(600)
{TRIAD}
def test_cpu(): pass
{{culprit}}
def test_later(gpu_device): pass
def test_last(gpu_benchmark, device_buffer, gpu_kernels): test_triad(gpu_benchmark, device_buffer, gpu_kernels)
"""
MEASURED = """
@pytest.mark.gpumem(timeout={timeout!r})
def test_culprit(gpu_device, gpu_benchmark, device_buffer, gpu_kernels):
    gpu_device.conditions = {hang}
    test_triad(gpu_benchmark, device_buffer, gpu_kernels)
"""
IN_BODY = "@pytest.mark.gpumem(timeout={timeout!r})\ndef test_culprit(gpu_device): {hang}()"
IN_FIXTURE = "@pytest.fixture\ndef own(gpu_device):\n    {code}\n@pytest.mark.gpumem(timeout='1 s')\ndef test_culprit(own): pass"
ALONE = "def test_culprit(): {}"
ASYNC = """
def test_loop():
    async def stolen():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, int)  # it takes Python's way for signals
    asyncio.run(stolen())
"""
SEGFAULT, KILL = (f"os.kill(os.getpid(), signal.{name})" for name in ("SIGSEGV", "SIGKILL"))
C_EXIT = "ctypes.CDLL(None)._exit(0)"
INT, TERM = signal.SIGINT, signal.SIGTERM
WORKERS, ISOLATED = ("-n", "2"), ("--gpumem-isolate",)


@dataclass(frozen=True)
class Hang:
    """What happens in a session, and what a user gets."""

    culprit: str
    code: int
    text: str
    signals: Sequence[int] = ()  # are sent to the process once the test is about to hang
    arguments: Sequence[str] = ()
    failed: bool = True  # the culprit has an entry in the results, as a failure
    late: bool = False  # the process is dead before anything can be written: the results come while its output is open
    stacks: bool = False  # the output names where it hung


def timed_out(culprit: str, what: str, *arguments: str) -> Hang:
    """A limit of time is exceeded."""
    return Hang(culprit, 1, f"{what} did not end within 1", arguments=arguments, stacks=True)


def signalled(
    culprit: str, *signals: int, arguments: Sequence[str] = (), text: str = "KeyboardInterrupt"
) -> Hang:
    """Signals end the session."""
    code, text = (143, "Exit: gpumem: ") if TERM in signals else (2, text)
    return Hang(culprit, code, text, signals, arguments, failed=False)


def hang(template: str, lock: str, timeout: str = "1 s") -> str:
    """A test that hangs."""
    return template.format(hang=lock, timeout=timeout)


TABLE = {
    # Time-outs: exit code 1, and the test fails with its stacks.
    "measurement, released": timed_out(
        hang(MEASURED, "released"), "the measurement of triad", "--dist=load"
    ),  # without -n it is nothing
    "measurement, held": timed_out(hang(MEASURED, "held"), "the measurement of triad"),
    "body, released": timed_out(hang(IN_BODY, "released"), "the test's body"),
    "body, held": timed_out(hang(IN_BODY, "held"), "the test's body"),
    "setup": timed_out(IN_FIXTURE.format(code="released()"), "the test's setup"),
    "teardown": timed_out(IN_FIXTURE.format(code="yield; held()"), "the test's teardown"),
    "wait for its work": timed_out(
        "@pytest.mark.gpumem(timeout='1 s')\ndef test_culprit(gpu_device): gpu_device.streams.synchronize = lambda *_: released()",
        "waiting for the test's work",
    ),
    "measurement, in a worker": timed_out(
        hang(MEASURED, "held"), "", *WORKERS
    ),  # or the controls ahead of it
    "measurement, isolated": timed_out(
        hang(MEASURED, "released"), "the measurement of triad", *ISOLATED
    ),
    "measurement, one worker by files": timed_out(
        hang(MEASURED, "released"), "the measurement of triad", "-n", "1", "--dist=loadfile"
    ),
    # Ctrl-C and SIGTERM: exit codes 2 and 143, also where Python does not react.
    "Ctrl-C, measurement, released": signalled(hang(MEASURED, "released", "none"), INT),
    "Ctrl-C, measurement, held": signalled(hang(MEASURED, "held", "none"), INT),
    "Ctrl-C, body, sleeps": signalled(hang(IN_BODY, "sleep", "none"), INT),
    "Ctrl-C twice, no fixture, held": signalled(ALONE.format("held()"), INT, INT),
    "Ctrl-C, isolated": signalled(hang(MEASURED, "held", "none"), INT, arguments=ISOLATED),
    "SIGTERM, measurement, held": signalled(hang(MEASURED, "held", "none"), TERM),
    "SIGTERM, no fixture, released": signalled(ALONE.format("released()"), TERM),
    "SIGTERM, body, sleeps": signalled(hang(IN_BODY, "sleep", "none"), TERM),
    "SIGTERM, isolated": signalled(hang(MEASURED, "held", "none"), TERM, arguments=ISOLATED),
    # Ends by the test itself.
    "os._exit(0)": Hang(ALONE.format("os._exit(0)"), 1, "by os._exit(0)", stacks=True),
    "os._exit(0) of a thread": Hang(
        ALONE.format(
            "import threading; threading.Thread(target=os._exit, args=[0]).start(); held()"
        ),
        1,
        "by os._exit(0)",
        stacks=True,
    ),
    "os._exit(0), isolated": Hang(
        ALONE.format("os._exit(0)"), 1, "by os._exit(0)", arguments=ISOLATED
    ),
    "pytest.exit with code 0": Hang(
        ALONE.format("pytest.exit('enough', returncode=0)"), 2, "Exit: enough", failed=False
    ),
    "crash": Hang(ALONE.format(SEGFAULT), -signal.SIGSEGV, "by a crash", late=True),
    "SIGKILL": Hang(ALONE.format(KILL), -signal.SIGKILL, "by a crash, a signal", late=True),
    "_exit(0) of C": Hang(ALONE.format(C_EXIT), 0, "or _exit of C", late=True),
    "crash in a worker": Hang(ALONE.format(SEGFAULT), 1, "crashed", arguments=WORKERS),
    "_exit(0) of C, isolated": Hang(ALONE.format(C_EXIT), 1, "crashed", arguments=ISOLATED),
    # Beside others that look after hangs, or take Python's way for signals.
    "pytest-timeout, by a thread": Hang(
        "@pytest.mark.timeout(1)\n" + hang(IN_BODY, "released", "none"),
        1,
        "Timeout",
        arguments=("-o", "timeout_method=thread"),
        stacks=True,
    ),
    "pytest-timeout, by a signal": timed_out(
        "@pytest.mark.timeout(0.5)\n" + hang(IN_BODY, "held"),
        "the test's body",
        "-o",
        "timeout_method=signal",
    ),
    # Python reads the stacks of a thread that runs at its own risk: not before this one hangs.
    "faulthandler_timeout": timed_out(
        hang(MEASURED, "released", "1.9 s"),
        "the measurement of triad",
        "-o",
        "faulthandler_timeout=1.5",
    ),
    "asyncio before, time-out": timed_out(
        ASYNC + hang(MEASURED, "held"), "the measurement of triad"
    ),
    "asyncio before, Ctrl-C": signalled(ASYNC + hang(MEASURED, "held", "none"), INT),
}
USUAL = (
    "measurement, held",
    "body, released",
    "teardown",
    "measurement, in a worker",
    "measurement, isolated",
    "Ctrl-C, measurement, held",
    "SIGTERM, measurement, held",
    "SIGTERM, no fixture, released",
    "os._exit(0)",
    "pytest.exit with code 0",
    "crash",
    "crash in a worker",
    "_exit(0) of C, isolated",
    "pytest-timeout, by a signal",
    "asyncio before, time-out",
)
CHOSEN = TABLE if os.environ.get("HANGS") == "all" else {name: TABLE[name] for name in USUAL}
OUTPUTS = {
    "--benchmark-json": "out.json",
    "--junitxml": "out.xml",
    "--gpumem-markdown": "out.md",
    "--gpumem-report": "out.html",
}


class Session:
    """A session that runs in a process, all that is written to its output, and its results."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._lines: list[bytes] = []
        self._hangs = Event()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if b"about to hang" in line:
                self._hangs.set()

    def send(self, signals: Sequence[int]) -> None:
        """Send signals once the test is about to hang."""
        assert self._hangs.wait(60)
        while (
            self._status().get("State", "S (sleeping)")[0] == "R"
        ):  # not yet in what it hangs in, where Python would take the signals
            os.sched_yield()
        for number in signals:
            self._process.send_signal(number)
            while (
                self._pending() >> (number - 1) & 1
            ):  # a second signal of a number would be none while the first one waits
                os.sched_yield()

    def _pending(self) -> int:
        """The signals that wait for the process, as a mask."""
        return int(self._status().get("ShdPnd", "0"), 16)

    def _status(self) -> dict[str, str]:
        """What Linux tells of the process and its main thread; nothing once it has ended."""
        try:
            lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        except OSError:
            return {}
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def wait(self) -> int:
        """The exit code."""
        return self._process.wait(60)

    def output(self) -> str:
        """All output, once nobody has it open."""
        self._reader.join(60)
        assert not self._reader.is_alive()
        return b"".join(self._lines).decode()

    def end(self) -> None:
        """A session that hung in spite of all would go on for ever."""
        self._process.kill()
        self._process.wait()
        self._reader.join(60)

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["nodeid"].partition("::")[2]: row for row in rows_in(Path())}

    @property
    def failed(self) -> dict[str, bool]:
        """Each test in the JUnit file, and whether it failed; pytest gives one that was interrupted no name."""
        cases = (
            case
            for case in ElementTree.parse("out.xml").getroot().iter("testcase")
            if case.get("name")
        )
        return {
            case.get("name", ""): any(case.find(tag) is not None for tag in ("failure", "error"))
            for case in cases
        }


Start = Callable[..., Session]


@pytest.fixture
def start(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> Start:
    def run(culprit: str, *arguments: str) -> Session:
        pytester.makepyfile(test_it=MODULE.format(culprit=culprit))
        own = (
            *(f"{option}={name}" for option, name in OUTPUTS.items()),
            "--gpumem-save",
            "--gpumem-baseline=baseline",
        )
        command = [sys.executable, "-m", "pytest", *SIMULATED, *own, *arguments]
        session = Session(
            pytester.popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        request.addfinalizer(session.end)
        return session

    return run


@pytest.mark.parametrize("expected", CHOSEN.values(), ids=CHOSEN)
def test_whatever_ends_a_session(start: Start, expected: Hang) -> None:
    session = start(expected.culprit, *expected.arguments, *(["-s"] if expected.signals else []))
    if expected.signals:
        session.send(expected.signals)
    assert session.wait() == expected.code
    if expected.late:
        session.output()
    failed, rows = session.failed, session.rows  # before anyone waits for the output
    assert all(Path(name).stat().st_size for name in OUTPUTS.values())
    output = session.output()
    assert expected.text in output
    assert not expected.stacks or f'File "{Path("test_it.py").absolute()}"' in output
    ended = {"test_triad": False, "test_cpu": False} | (
        {"test_culprit": True} if expected.failed else {}
    )
    if "test_loop" in expected.culprit:
        ended["test_loop"] = False
    if expected.arguments[:1] in (WORKERS[:1], ISOLATED) and not expected.signals:
        assert failed == ended | {"test_later": False, "test_last": False}
        assert {name for name, row in rows.items() if not row["failed"]} == {
            "test_triad",
            "test_last",
        }
        return
    assert not Path("baseline").exists()
    assert failed == ended
    assert {name for name, row in rows.items() if not row["failed"]} == {"test_triad"}
    if expected.failed:
        assert "test_it.py::test_culprit; 2 tests not run" in output
        assert {name for name, row in rows.items() if row["failed"]} == (
            {"test_culprit"} if "of triad" in expected.text else set()
        )


def test_a_hung_measurement_names_its_range_and_has_a_row(start: Start) -> None:
    session = start(hang(MEASURED, "released"))
    session.wait()
    text = "did not end within 1.005 s (--gpumem-timeout), and the process was ended; last NVTX range: test_culprit.check"
    assert text in session.output()
    assert {name: row["verdict"]["outcome"] for name, row in session.rows.items()} == {
        "test_triad": "MEASURED",
        "test_culprit": "FAIL",
    }


def test_a_crash_keeps_what_was_told_of_the_others(start: Start, pytester: pytest.Pytester) -> None:
    skipped = "def test_skipped(): pytest.skip('not here')\n"
    pytester.makepyfile(test_a="import pytest\npytest.importorskip('no_such_library')")
    session = start(skipped + ALONE.format(SEGFAULT), "-k", "not last", "test_a.py", "test_it.py")
    assert session.wait() == -signal.SIGSEGV
    assert "1 failed, 2 passed, 2 skipped, 1 deselected" in session.output()
    assert session.rows["test_triad"]["footprint"][
        "ended"
    ]  # the footprint has what the test keeps, which its teardown tells


def test_no_exit_code_0_after_a_failure(start: Start) -> None:
    session = start("def test_culprit(): assert 0\ndef test_leaves(): os._exit(0)")
    assert session.wait() == pytest.ExitCode.TESTS_FAILED
    assert session.failed == {
        "test_triad": False,
        "test_cpu": False,
        "test_culprit": True,
        "test_leaves": True,
    }
    assert "assert 0" in session.output()


def test_an_exit_fails_its_test_and_keeps_its_rows(start: Start) -> None:
    measured = "test_triad(gpu_benchmark, device_buffer, gpu_kernels)"
    session = start(
        f"def test_culprit(gpu_benchmark, device_buffer, gpu_kernels):\n    {measured}\n    sys.exit(0)"
    )
    session.wait()
    assert session.failed == {
        "test_triad": False,
        "test_cpu": False,
        "test_culprit": True,
        "test_later": False,
        "test_last": False,
    }
    assert session.rows["test_culprit"]["measurement"] is not None
    assert session.rows["test_culprit"]["failed"]


@pytest.mark.usefixtures("new_interpreters")
@pytest.mark.parametrize("workers", [(), ISOLATED], ids=["alone", "worker"])
def test_an_interrupt_frees_the_gpu(
    pytester: pytest.Pytester, start: Start, workers: Sequence[str]
) -> None:
    pytester.makeconftest(GPU_OF_ANOTHER.format(limit=600.0))
    Path("runtime", "gpumem").mkdir(parents=True, mode=0o700)
    session = start(hang(MEASURED, "held", "none"), "-s", *workers)
    session.send([signal.SIGINT])  # to this process alone; Ctrl-C sends it to the workers as well
    assert session.wait() == pytest.ExitCode.INTERRUPTED
    with FileLock(Path("runtime", "gpumem", "GPU-1.lock")).acquire(
        timeout=5
    ):  # the process that held it is gone
        pass


@pytest.mark.parametrize(
    ("culprit", "option"), [("assert 0", "--pdb"), ("breakpoint()", "--color=no")]
)
def test_the_session_goes_on_after_a_debugger(start: Start, culprit: str, option: str) -> None:
    Path(".pdbrc").write_text("continue\n")
    session = start(f"def test_culprit(gpu_device):\n    {culprit}", option)
    assert session.wait() == (
        pytest.ExitCode.TESTS_FAILED if option == "--pdb" else pytest.ExitCode.OK
    )
    failed = {"test_culprit": option == "--pdb"}
    assert (
        session.failed
        == {"test_triad": False, "test_cpu": False, "test_later": False, "test_last": False}
        | failed
    )
    assert set(session.rows) == {"test_triad", "test_last"}


@pytest.mark.usefixtures("new_interpreters")
def test_a_session_inside_a_test_leaves_the_other_its_guardian(start: Start) -> None:
    inside = "from pathlib import Path; from pytest_gpumem.plugin.guarding import Guardian; Guardian(Path()).close()"
    session = start(
        f"@pytest.mark.gpumem(timeout='1 s')\ndef test_culprit(gpu_device):\n    {inside}\n    released()"
    )
    assert session.wait() == pytest.ExitCode.TESTS_FAILED
    assert f'File "{Path("test_it.py").absolute()}"' in session.output()


@pytest.mark.usefixtures("new_interpreters")
def test_a_test_may_interrupt_itself_and_end_its_children(start: Start) -> None:
    session = start("""
import multiprocessing
def test_culprit(gpu_device):
    with pytest.raises(KeyboardInterrupt): os.kill(os.getpid(), signal.SIGINT)
    child = multiprocessing.get_context('fork').Process(target=time.sleep, args=[600])
    child.start()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM
""")
    assert session.wait() == pytest.ExitCode.OK
    assert len(session.failed) == 5


def test_isolation_needs_xdist(
    pytester: pytest.Pytester, gpumem: Callable[..., pytest.RunResult]
) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = gpumem("--gpumem-isolate", "-p", "no:xdist")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: gpumem: --gpumem-isolate needs pytest-xdist*"])
