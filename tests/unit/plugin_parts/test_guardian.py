"""The guardian ends its process when it is to, and only then."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from pytest_gpumem.plugin import guardian

PROGRAM = """
import hashlib, math, multiprocessing, os, signal, sys, time
from pathlib import Path
from pytest_gpumem.plugin.guarding import Guardian, terminate

def hang(): hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

guardian = Guardian(Path())
guardian.tell("start", {"nodeid": "test_it"})
"""


def outcome(*lines: str, program: str = PROGRAM) -> tuple[int, str]:
    """The exit code of a process, and what it and its guardian printed."""
    command = [sys.executable, "-c", program + "\n".join(lines)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.strip()


def test_a_limit_that_is_exceeded() -> None:
    given = (
        "guardian.enter('one.longer')",
        "guardian.enter('two')",
        "guardian.limit(0.1, 'it\\t\\n2')",
        "hang()",
    )
    code, output = outcome(*given)
    assert code == 1
    hung = "gpumem: hung: it 2 did not end within 0.1 s (--gpumem-timeout), and the process was ended; last NVTX range: two"
    assert output.startswith(f"test_it: {hung}\n")
    assert " in hang" in output  # its stack


def test_limits_that_are_kept() -> None:
    limits = "guardian.limit(60, 'a'); guardian.limit(math.inf, 'b'); guardian.limit(0.001, 'c'); guardian.rest()"
    assert outcome(limits, "guardian.close()", "guardian.close()", "print('done')") == (0, "done")


def test_whatever_becomes_of_the_results_the_process_ends(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("def pytest_configure(): raise SystemExit(0)")
    lines = (
        "guardian.close()",
        f"guardian = Guardian(Path({str(tmp_path)!r}), ['--rootdir=.'])",
        "guardian.limit(0.1, '')",
        "hang()",
    )
    assert outcome(*lines)[0] == 1


def test_a_process_that_ends_by_itself() -> None:
    assert outcome("os.kill(os.getpid(), signal.SIGKILL)") == (
        -signal.SIGKILL,
        "",
    )  # another process sees it
    code, output = outcome("os._exit(0)")
    assert code == 1
    assert output.startswith("test_it: gpumem: the process ended in this test, by os._exit(0)\n")
    assert outcome("guardian.outlived()", "os._exit(3)") == (3, "")
    assert outcome("guardian.close()", "os._exit(3)") == (3, "")


def test_a_signal_that_python_handles_changes_nothing() -> None:
    handled = (
        "guardian.limit(math.inf, '')",
        "try:",
        "    os.kill(os.getpid(), signal.SIGINT)",
        "    time.sleep(60)",
    )
    assert outcome(
        *handled,
        "except KeyboardInterrupt: guardian.tell('on'); guardian.close(); print('handled')",
    ) == (0, "handled")


def test_a_process_that_handles_a_signal_may_clean_up() -> None:
    interrupted = (
        "guardian.limit(math.inf, '')",
        "try: os.kill(os.getpid(), signal.SIGINT); hang()",
    )
    assert outcome(
        *interrupted, "except KeyboardInterrupt: time.sleep(1); guardian.close(); print('done')"
    ) == (0, "done")
    # In a wait for the device it may not, nor after a second signal.
    stuck = "except KeyboardInterrupt: guardian.limit(math.inf, 'wait', waits=True); hang()"
    assert outcome(*interrupted, stuck) == (2, "")
    again = "except KeyboardInterrupt: signal.signal(signal.SIGINT, lambda *_: None); os.kill(os.getpid(), signal.SIGINT); hang()"
    assert outcome(*interrupted, again) == (2, "")


def test_signals_of_a_forked_child_are_not_the_process_s() -> None:
    child = (
        "guardian.limit(math.inf, '')",
        "if not os.fork():",
        "    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    )
    rest = (
        "    except KeyboardInterrupt: os._exit(0)",
        "os.wait(); time.sleep(1); guardian.close(); print('done')",
    )
    assert outcome(*child, *rest) == (0, "done")
    handled = "signal.signal(signal.SIGTERM, terminate); guardian.limit(math.inf, '')"
    children = (
        "for _ in range(20):",
        "    child = multiprocessing.get_context('fork').Process(target=time.sleep, args=[60])",
        "    child.start(); child.terminate(); child.join()",
        "    assert child.exitcode == -signal.SIGTERM",
    )
    assert outcome(handled, *children, "time.sleep(1); guardian.close(); print('done')") == (
        0,
        "done",
    )


def test_a_forked_child_has_no_guardian() -> None:
    lines = (
        "if not os.fork():",
        "    guardian.limit(0.001, 'child'); guardian.close(); os._exit(0)",
        "os.wait()",
        "guardian.close()",
    )
    assert outcome(*lines, "print('done')") == (0, "done")


def test_a_session_goes_on_without_its_guardian() -> None:
    lines = (
        "guardian._process.kill(); guardian._process.wait()",
        "guardian.limit(0.1, 'it'); guardian.tell('on'); guardian.close()",
    )
    assert outcome(*lines, "print('done')") == (0, "done")


def test_the_request_for_an_exit_code_stays_for_the_librarys_thread() -> None:
    """Its memory, used again at the end of Python, ended a process in a hundred of a busy machine with 1."""
    lines = (
        "exits = _Exits(); exits.obey(); kept = weakref.ref(exits._request)",
        "del exits; gc.collect(); print(kept() is not None)",
    )
    program = "import gc, weakref\nfrom pytest_gpumem.plugin.guarding import _Exits\n"
    assert outcome(*lines, program=program) == (0, "True")


def test_everything_global_is_restored() -> None:
    before = "before = os._exit, signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)\n"
    program = PROGRAM.replace("guardian = ", before + "guardian = ")
    lines = ("guardian.limit(60, 'it'); guardian.rest(); guardian.close()",)
    after = "print((os._exit, signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)) == before)"
    assert outcome(*lines, after, program=program) == (0, "True")


def test_a_guardian_starts_with_few_modules() -> None:
    """It starts in each session, on the machine that measures."""
    program = f"import sys; exec(open({guardian.__file__!r}).read(), {{'__name__': 'guardian'}}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert imported >= {"select", "signal", "time"}
    assert not imported & {
        "json",
        "pickle",
        "re",
        "subprocess",
        "typing",
        "pathlib",
        "pytest_gpumem",
    }
