"""What a launch runs in fresh processes: they agree, each change shows, and nothing calls cuInit early."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "ci" / "bench"
pytestmark = [
    pytest.mark.usefixtures("free_gpu"),
    pytest.mark.skipif(find_spec("cupti") is None, reason="needs CUPTI"),
]


def test_following_modules_calls_no_cu_init() -> None:
    """Children by fork of a process that called cuInit cannot use CUDA."""
    program = (
        "import os; from pytest_gpumem.devices.opening import choose; choose('cuda').follow(); pid = os.fork();\n"
        "if not pid:\n"
        "    from cuda.bindings import driver\n"
        "    os._exit(int(driver.cuInit(0)[0]))\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@cache
def first_session() -> tuple[Any, Any]:
    """A fresh process that runs the rows of `ci/bench/evidence.py`."""
    sys.path.insert(0, str(BENCH))
    import evidence

    return evidence, evidence.session()


def test_each_change_has_another_digest_and_a_rebuild_the_same() -> None:
    evidence, first = first_session()
    assert first["exit"] == 0, first["output"]
    wrong = {
        key: one["differences"]
        for key, one in evidence.changes(first["rows"]).items()
        if one["same"] is not one["wanted_same"]
    }
    assert wrong == {}


def test_two_runs_of_three_processes_agree() -> None:
    """Single processes differ in padding of arguments, and runs of three in few rows, never in more."""
    evidence, first = first_session()
    with ThreadPoolExecutor(
        2 * evidence.GROUP - 1
    ) as pool:  # what runs does not depend on other processes
        others = list(
            pool.map(lambda _: evidence.session(alone=False), range(2 * evidence.GROUP - 1))
        )
    padded = evidence.disagreeing([first, *others])
    assert all(padded.values()), padded
    assert len(padded) <= evidence.PADDED * len(first["rows"]), padded
