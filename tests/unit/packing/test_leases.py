"""The memory of one GPU, shared out among processes by a file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpumem.packing import leases as leases_module
from pytest_gpumem.packing.leases import ALONE, IDLE, LINES, RUNS, WAITS, Lease, LeaseError, Leases, Process, take, this_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

ONE, OTHER, THIRD = (Process(number, 1) for number in (1, 2, 3))


def of(path: Path, *alive: Process) -> Leases:
    return Leases(path / "gpu.leases", set(alive or (ONE, OTHER, THIRD)).__contains__)


def test_a_lease_is_granted_while_all_fit(tmp_path: Path) -> None:
    leases = of(tmp_path)
    assert take([(leases, Lease(ONE, 60, RUNS), 100)])
    assert not take([(leases, Lease(OTHER, 41, RUNS), 100)])
    assert take([(leases, Lease(OTHER, 40, RUNS), 100)])
    assert sorted(leases.all()) == [Lease(ONE, 60, RUNS), Lease(OTHER, 40, RUNS)]
    leases.put(Lease(ONE, 5, IDLE))
    assert take([(leases, Lease(THIRD, 55, RUNS), 100)])


@pytest.mark.parametrize(
    ("state", "beside", "granted"),
    [(ALONE, IDLE, True), (ALONE, RUNS, False), (ALONE, ALONE, False), (ALONE, WAITS, False), (RUNS, ALONE, False), (RUNS, WAITS, False)],
)
def test_a_test_alone_on_the_gpu_waits_for_the_others_and_they_for_it(tmp_path: Path, state: str, beside: str, granted: bool) -> None:
    leases = of(tmp_path)
    leases.put(Lease(OTHER, 10, beside, 5 if beside == WAITS else 0))
    assert take([(leases, Lease(ONE, 10, state), 100)]) is granted


def test_of_two_that_wait_the_first_has_its_turn(tmp_path: Path) -> None:
    leases = of(tmp_path)
    leases.put(Lease(ONE, 0, WAITS, 7))
    leases.put(Lease(OTHER, 0, WAITS, 8))
    assert not take([(leases, Lease(OTHER, 10, ALONE, 8), 100)])
    assert take([(leases, Lease(ONE, 10, ALONE, 7), 100)])


def test_two_gpus_are_taken_at_once_or_not_at_all(tmp_path: Path) -> None:
    first, second = (Leases(tmp_path / name, lambda process: True) for name in ("a", "b"))
    second.put(Lease(OTHER, 90, RUNS))
    wanted = Lease(ONE, 20, RUNS)
    assert not take([(first, wanted, 100), (second, wanted, 100)])
    assert first.all() == []
    second.leave(OTHER)
    assert take([(first, wanted, 100), (second, wanted, 100)])
    assert first.all() == second.all() == [wanted]


def test_what_a_dead_process_held_is_free(tmp_path: Path) -> None:
    of(tmp_path, ONE).put(Lease(ONE, 100, ALONE))
    leases = of(tmp_path, OTHER)
    assert leases.all() == []
    assert take([(leases, Lease(OTHER, 100, RUNS), 100)])


def test_a_process_is_told_from_a_later_one_with_its_number(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = this_process(child.pid)
    leases = Leases(tmp_path / "gpu.leases")
    leases.put(Lease(process, 1))
    leases.put(Lease(Process(os.getpid(), this_process().start + 1), 1))
    assert [lease.process for lease in leases.all()] == [process]
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie holds no memory
    assert leases.all() == []
    child.communicate()


def test_a_full_disk_stops_no_later_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = of(tmp_path)
    size = leases.path.stat().st_size
    for number in range(LINES):
        leases.put(Lease(Process(number, 1), 2**50, WAITS, 2**63))
    assert leases.path.stat().st_size == size
    monkeypatch.setattr(os, "pwrite", lambda *_: 10)
    with pytest.raises(LeaseError, match=rf"new, cannot be used: {os.strerror(errno.ENOSPC)}"):
        Leases(tmp_path / "new")


def test_what_is_held_between_tests_takes_no_lease_of_a_test_away(tmp_path: Path) -> None:
    leases = of(tmp_path)
    leases.hold(ONE, 5)
    leases.hold(ONE, 6)
    assert leases.all() == [Lease(ONE, 6)]
    leases.put(Lease(ONE, 50, RUNS))
    leases.hold(ONE, 7)
    assert leases.all() == [Lease(ONE, 50, RUNS)]


def test_a_line_that_is_none_is_no_lease(tmp_path: Path) -> None:
    leases = of(tmp_path)
    leases.put(Lease(ONE, 7))
    with open(leases.path, "r+b") as file:
        file.seek(leases_module._LENGTH)
        file.write("2 1 é idle 0".encode())
    assert leases.all() == [Lease(ONE, 7)]


def test_too_many_processes_and_a_missing_folder_are_one_line(tmp_path: Path) -> None:
    leases = Leases(tmp_path / "gpu.leases", lambda process: True)
    for number in range(LINES):
        leases.put(Lease(Process(number, 1), 1))
    with pytest.raises(LeaseError, match=f"{LINES} processes hold leases"):
        leases.put(Lease(Process(LINES, 1), 1))
    with pytest.raises(LeaseError, match="No such file or directory"):
        Leases(tmp_path / "none" / "gpu.leases")
