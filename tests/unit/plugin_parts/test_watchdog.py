"""The watchdog ends its process when it is to, and only then."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import hashlib, math, os, signal, sys, time
from pytest_gpumem.plugin.watchdog import Watchdog

def hang(): hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

def finish(end, told):
    print(end.cause.name, end.what, end.entered, told, "hang" in end.stacks, flush=True)
    return 7

watchdog = Watchdog(finish)
"""


def outcome(*lines: str) -> tuple[int, str]:
    """The exit code of a process, and what it and its watchdog printed."""
    done = subprocess.run([sys.executable, "-c", PROGRAM + "\n".join(lines)], stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    return done.returncode, done.stdout.strip()


def test_a_limit_that_is_exceeded() -> None:
    given = ("watchdog.tell(1)", "watchdog.enter('one.longer')", "watchdog.enter('two')", "watchdog.limit(0.1, 'it')", "hang()")
    assert outcome(*given) == (7, "TIMEOUT it two [1] True")


def test_limits_that_are_kept() -> None:
    limits = "watchdog.limit(60, 'a'); watchdog.limit(math.inf, 'b'); watchdog.limit(0.001, 'c'); watchdog.rest()"
    assert outcome(limits, "watchdog.close()", "watchdog.close()", "print('done')") == (0, "done")


@pytest.mark.parametrize("finish", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGSEGV)", "raise OSError"])
def test_whatever_becomes_of_the_last_words_the_process_ends(finish: str) -> None:
    lines = (
        "def finish(end, told):",
        f"    {finish}",
        "watchdog.close()",
        "watchdog = Watchdog(finish)",
        "watchdog.limit(0.1, '')",
        "hang()",
    )
    code, _ = outcome(*lines)
    assert code == (0 if "_exit" in finish else 1)


def test_a_death_is_told_unless_nobody_needs_it() -> None:
    assert outcome("watchdog.tell('x')", "os.kill(os.getpid(), signal.SIGKILL)") == (-9, "DEATH   ['x'] False")
    assert outcome("watchdog.outlived()", "os._exit(3)") == (3, "")


def test_an_interrupt_that_python_handles_changes_nothing() -> None:
    handled = ("watchdog.limit(math.inf, '')", "try:", "    os.kill(os.getpid(), signal.SIGINT)", "    time.sleep(9)")
    assert outcome(*handled, "except KeyboardInterrupt: watchdog.tell(1); watchdog.close(); print('handled')") == (0, "handled")


def test_a_process_that_reacts_to_an_interrupt_may_clean_up() -> None:
    lines = ("import pytest_gpumem.plugin.watchdog as module", "watchdog.close(); module.PATIENCE = 0.2; watchdog = Watchdog(finish)")
    interrupted = ("watchdog.limit(math.inf, '')", "try: os.kill(os.getpid(), signal.SIGINT); hang()")
    assert outcome(*lines, *interrupted, "except KeyboardInterrupt: time.sleep(0.5); watchdog.close(); print('done')") == (0, "done")
    # In a wait for the device it may not, nor after a second interrupt.
    stuck = "except KeyboardInterrupt: watchdog.limit(math.inf, 'wait', waits=True); hang()"
    assert outcome(*lines, *interrupted, stuck) == (7, "INTERRUPT wait  [] False")
    again = "except KeyboardInterrupt: signal.signal(signal.SIGINT, lambda *_: None); os.kill(os.getpid(), signal.SIGINT); hang()"
    assert outcome(*lines, *interrupted, again)[0] == 7


def test_an_interrupt_of_a_forked_child_is_not_the_process_s() -> None:
    lines = ("import pytest_gpumem.plugin.watchdog as module", "watchdog.close(); module.PATIENCE = 0.01; watchdog = Watchdog(finish)")
    child = ("watchdog.limit(math.inf, '')", "if not os.fork():", "    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(9)")
    rest = ("    except KeyboardInterrupt: os._exit(0)", "os.wait(); time.sleep(0.2); watchdog.close(); print('done')")
    assert outcome(*lines, *child, *rest) == (0, "done")


def test_a_forked_child_has_no_watchdog() -> None:
    lines = ("if not os.fork():", "    watchdog.limit(0.001, 'child'); watchdog.close(); os._exit(0)", "os.wait()", "watchdog.close()")
    assert outcome(*lines, "print('done')") == (0, "done")
