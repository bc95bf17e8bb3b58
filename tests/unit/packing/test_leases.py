"""The memory of one GPU, shared out among processes by a file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpumem.packing.leases import ALONE, IDLE, RUNS, WAITS, Lease, LeaseError, Leases, Process, running, take

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

ONE, OTHER, THIRD = (Process(number, 1) for number in (1, 2, 3))


def of(path: Path, *alive: Process) -> Leases:
    return Leases(path / "gpu.leases", set(alive or (ONE, OTHER, THIRD)).__contains__)


def test_a_lease_is_granted_while_all_fit(tmp_path: Path) -> None:
    leases = of(tmp_path)
    leases.put(ONE, held=10)
    assert take([(leases, 100)], ONE, 50, alone=False)
    assert not take([(leases, 100)], OTHER, 41, alone=False)
    assert take([(leases, 100)], OTHER, 40, alone=False)
    assert sorted(leases.all()) == [Lease(ONE, 10, 50, RUNS), Lease(OTHER, 0, 40, RUNS)]
    leases.put(ONE, held=5, share=0, state=IDLE)
    assert take([(leases, 100)], THIRD, 55, alone=False)


@pytest.mark.parametrize(
    ("state", "beside", "granted"),
    [(ALONE, IDLE, True), (ALONE, RUNS, False), (ALONE, ALONE, False), (ALONE, WAITS, False), (RUNS, ALONE, False), (RUNS, WAITS, False)],
)
def test_a_test_alone_on_the_gpu_waits_for_the_others_and_they_for_it(tmp_path: Path, state: str, beside: str, granted: bool) -> None:
    leases = of(tmp_path)
    leases.put(OTHER, held=10, state=beside, ticket=5)
    assert take([(leases, 100)], ONE, 10, alone=state == ALONE) is granted


def test_of_two_that_wait_the_first_has_its_turn(tmp_path: Path) -> None:
    leases = of(tmp_path)
    leases.put(ONE, state=WAITS, ticket=7)
    leases.put(OTHER, state=WAITS, ticket=8)
    assert not take([(leases, 100)], OTHER, 10, alone=True)
    assert take([(leases, 100)], ONE, 10, alone=True)


def test_two_gpus_are_taken_at_once_or_not_at_all(tmp_path: Path) -> None:
    first, second = (Leases(tmp_path / name, lambda process: True) for name in ("a", "b"))
    second.put(OTHER, share=90, state=RUNS)
    assert not take([(first, 100), (second, 100)], ONE, 20, alone=False)
    assert first.all() == []
    second.put(OTHER, share=0, state=IDLE)
    assert take([(first, 100), (second, 100)], ONE, 20, alone=False)
    assert first.all() == second.all() == [Lease(ONE, 0, 20, RUNS)]


def test_what_a_dead_process_held_is_free(tmp_path: Path) -> None:
    of(tmp_path, ONE).put(ONE, held=100, state=ALONE)
    leases = of(tmp_path, OTHER)
    assert leases.all() == []
    assert take([(leases, 100)], OTHER, 100, alone=False)


def test_a_process_is_told_from_a_later_one_with_its_number(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, own = running(child.pid), running(os.getpid())
    leases = Leases(tmp_path / "gpu.leases")
    leases.put(process, held=1)
    leases.put(Process(os.getpid(), own.start + 1), held=1)
    assert [lease.process for lease in leases.all()] == [process]
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie holds no memory
    assert leases.all() == []
    child.communicate()


def test_a_full_disk_stops_no_later_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = Leases(tmp_path / "gpu.leases", lambda process: True)
    assert leases.all() == []
    size = leases.path.stat().st_size
    for number in range(100):
        leases.put(Process(2**22 + number, 2**40), held=2**40, share=2**40, state=WAITS, ticket=2**63)
    assert leases.path.stat().st_size == size
    monkeypatch.setattr(os, "pwrite", lambda *_: 10)
    with pytest.raises(LeaseError, match=rf"new, cannot be used: {os.strerror(errno.ENOSPC)}"):
        Leases(tmp_path / "new").all()


def test_what_is_held_between_tests_takes_no_lease_of_a_test_away(tmp_path: Path) -> None:
    leases = of(tmp_path)
    leases.put(ONE, held=5)
    assert leases.all() == [Lease(ONE, 5)]
    assert take([(leases, 100)], ONE, 50, alone=False)
    leases.put(ONE, held=7)
    assert leases.all() == [Lease(ONE, 7, 50, RUNS)]


def test_a_line_that_is_none_is_no_lease(tmp_path: Path) -> None:
    leases = of(tmp_path)
    leases.put(ONE, held=7)
    text = leases.path.read_text().rstrip()
    leases.path.write_text(f"{text}\n2 1 é 0 idle 0\n2 1 5\n3 1 1 0 sleeps 0", encoding="utf-8")
    assert leases.all() == [Lease(ONE, 7)]


def test_too_many_processes_and_a_missing_folder_are_one_line(tmp_path: Path) -> None:
    leases = Leases(tmp_path / "gpu.leases", lambda process: True)
    with leases.locked() as found:
        found |= {Process(number, 2**40): Lease(Process(number, 2**40), 2**40) for number in range(100)}
    with pytest.raises(LeaseError, match="too many processes hold leases"), leases.locked() as found:
        found |= {Process(number, 1): Lease(Process(number, 1), 1) for number in range(2000)}
    assert len(leases.all()) == 100
    with pytest.raises(LeaseError, match="No such file or directory"):
        Leases(tmp_path / "none" / "gpu.leases").all()
