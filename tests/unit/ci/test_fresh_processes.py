"""Workers in fresh processes: the three lines that they speak, one at a time, and what becomes of those that fail."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import fresh_processes
import pytest
from fresh_processes import Outcome, one_after_another

WORKER = """
import json, os, sys
sys.path.insert(0, {bench!r})
from fresh_processes import serve

job = json.loads(sys.argv[1])
folder = job["folder"]

def named(what, name=None):
    return os.path.join(folder, f"{{what}}-{{job['name'] if name is None else name}}")

def prepare():
    if job.get("how") == "dies early":
        raise RuntimeError("no such library")
    if job.get("how") == "never ready":
        sys.stdin.read()
    open(named("pid"), "w").write(str(os.getpid()))
    os.rename(named("pid"), named("ready"))
    return 2

def work(given):
    lock = os.open(os.path.join(folder, "gpu"), os.O_CREAT | os.O_EXCL)  # fails if another worker has the GPU
    try:
        print("a library's chatter")
        os.system("echo chatter of a child")
        if job.get("how") == "fails":
            raise ValueError("out of memory, it says")
        if job.get("how") == "hangs":
            sys.stdin.read()
        if "until_ready" in job:
            while not os.path.exists(named("ready", job["until_ready"])):
                pass
        return {{"answer": given * job["number"]}}
    finally:
        os.close(lock)
        os.unlink(os.path.join(folder, "gpu"))

serve(prepare, work)
"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(bench=str(Path(fresh_processes.__file__).parent)))

    def start(*jobs: dict[str, Any], ahead: int = 2, timeout: float = 60.0) -> Any:
        named = [
            {"folder": str(tmp_path), "name": i, "number": i, **job} for i, job in enumerate(jobs)
        ]
        return one_after_another(
            named,
            lambda job: [sys.executable, "-S", str(script), json.dumps(job)],
            ahead=ahead,
            timeout=timeout,
        )

    return start


def test_each_job_is_answered_in_order_by_a_process_of_its_own(run: Any, tmp_path: Path) -> None:
    outcomes: list[Outcome] = list(run({}, {}, {}, {}))
    assert [outcome.answer for outcome in outcomes] == [{"answer": 2 * i} for i in range(4)]
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert len({(tmp_path / f"ready-{i}").read_text() for i in range(4)}) == 4


def test_the_next_ones_get_ready_while_one_works(run: Any) -> None:
    # The first would never end if the third were not started before it has answered.
    outcomes = list(run({"until_ready": 2}, {}, {}, ahead=2))
    assert [outcome.error for outcome in outcomes] == [None] * 3


@pytest.mark.parametrize(
    ("how", "what", "words"),
    [
        ("dies early", "did not get ready (exit status 1)", "no such library"),
        ("fails", "gave no answer (exit status 1)", "out of memory, it says"),
    ],
)
def test_a_worker_that_fails_is_told_with_its_words_and_the_others_go_on(
    run: Any, how: str, what: str, words: str
) -> None:
    first, broken, last = run({}, {"how": how}, {})
    assert (first.error, last.error) == (None, None)
    assert last.answer == {"answer": 4}
    assert broken.answer is None
    assert what in broken.error
    assert words in broken.error


@pytest.mark.parametrize(
    ("how", "what"),
    [("never ready", "did not get ready in time"), ("hangs", "gave no answer in time")],
)
def test_a_worker_that_takes_too_long_is_ended(run: Any, how: str, what: str) -> None:
    (outcome,) = run({"how": how}, timeout=1.0)
    assert what in outcome.error


def test_closing_ends_the_workers_that_wait(run: Any, tmp_path: Path) -> None:
    workers = run({"until_ready": 2}, {}, {}, ahead=2)
    assert next(workers).error is None
    pid = int((tmp_path / "ready-2").read_text())
    workers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
