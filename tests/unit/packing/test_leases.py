"""The memory of one GPU, shared out among processes by a file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpumem.packing.leases import (
    ALONE,
    IDLE,
    RUNS,
    WAITS,
    Gpu,
    Lease,
    LeaseError,
    Process,
    running,
    take,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

ONE, OTHER, THIRD = (Process(number, 1) for number in (1, 2, 3))


def of(path: Path, *alive: Process) -> Gpu:
    return Gpu(path / "gpu.leases", "", lambda: 100, set(alive or (ONE, OTHER, THIRD)).__contains__)


def test_a_lease_is_granted_while_all_fit(tmp_path: Path) -> None:
    gpu = of(tmp_path)
    gpu.put(ONE, held=10)
    assert take([gpu], ONE, 50, alone=False)
    assert not take([gpu], OTHER, 41, alone=False)
    assert take([gpu], OTHER, 40, alone=False)
    assert sorted(gpu.leases()) == [Lease(ONE, 10, 50, RUNS), Lease(OTHER, 0, 40, RUNS)]
    gpu.put(ONE, held=5, share=0, state=IDLE)
    assert take([gpu], THIRD, 55, alone=False)


@pytest.mark.parametrize(
    ("state", "beside", "granted"),
    [
        (ALONE, IDLE, True),
        (ALONE, RUNS, False),
        (ALONE, ALONE, False),
        (ALONE, WAITS, False),
        (RUNS, ALONE, False),
        (RUNS, WAITS, False),
    ],
)
def test_a_test_alone_on_the_gpu_waits_for_the_others_and_they_for_it(
    tmp_path: Path, state: str, beside: str, granted: bool
) -> None:
    gpu = of(tmp_path)
    gpu.put(OTHER, held=10, state=beside, ticket=5)
    assert take([gpu], ONE, 10, alone=state == ALONE) is granted


def test_of_two_that_wait_the_first_has_its_turn(tmp_path: Path) -> None:
    gpu = of(tmp_path)
    gpu.put(ONE, state=WAITS, ticket=7)
    gpu.put(OTHER, state=WAITS, ticket=8)
    assert not take([gpu], OTHER, 10, alone=True)
    assert take([gpu], ONE, 10, alone=True)


def test_two_gpus_are_taken_at_once_or_not_at_all(tmp_path: Path) -> None:
    first, second = (
        Gpu(tmp_path / name, name, lambda: 100, lambda process: True) for name in ("a", "b")
    )
    second.put(OTHER, share=90, state=RUNS)
    assert not take([first, second], ONE, 20, alone=False)
    assert first.leases() == []
    second.put(OTHER, share=0, state=IDLE)
    assert take([first, second], ONE, 20, alone=False)
    assert first.leases() == second.leases() == [Lease(ONE, 0, 20, RUNS)]


def test_what_a_dead_process_held_is_free(tmp_path: Path) -> None:
    of(tmp_path, ONE).put(ONE, held=100, state=ALONE)
    gpu = of(tmp_path, OTHER)
    assert gpu.leases() == []
    assert take([gpu], OTHER, 100, alone=False)


def test_a_process_is_told_from_a_later_one_with_its_number(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, own = running(child.pid), running(os.getpid())
    gpu = Gpu(tmp_path / "gpu.leases")
    gpu.put(process, held=1)
    gpu.put(Process(os.getpid(), own.start + 1), held=1)
    assert [lease.process for lease in gpu.leases()] == [process]
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie holds no memory
    assert gpu.leases() == []
    child.communicate()


def test_a_full_disk_stops_no_later_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(tmp_path / "gpu.leases", alive=lambda process: True)
    assert gpu.leases() == []
    size = gpu.path.stat().st_size
    for number in range(100):
        gpu.put(Process(2**22 + number, 2**40), held=2**40, share=2**40, state=WAITS, ticket=2**63)
    assert gpu.path.stat().st_size == size
    monkeypatch.setattr(os, "pwrite", lambda *_: 10)
    with pytest.raises(LeaseError, match=rf"new, cannot be used: {os.strerror(errno.ENOSPC)}"):
        Gpu(tmp_path / "new").leases()


def test_what_is_held_between_tests_takes_no_lease_of_a_test_away(tmp_path: Path) -> None:
    gpu = of(tmp_path)
    gpu.put(ONE, held=5)
    assert gpu.leases() == [Lease(ONE, 5)]
    assert take([gpu], ONE, 50, alone=False)
    gpu.put(ONE, held=7)
    assert gpu.leases() == [Lease(ONE, 7, 50, RUNS)]


def test_a_line_that_is_none_is_no_lease(tmp_path: Path) -> None:
    gpu = of(tmp_path)
    gpu.put(ONE, held=7)
    text = gpu.path.read_text().rstrip()
    gpu.path.write_text(f"{text}\n2 1 é 0 idle 0\n2 1 5\n3 1 1 0 sleeps 0", encoding="utf-8")
    assert gpu.leases() == [Lease(ONE, 7)]


def test_too_many_processes_and_a_missing_folder_are_one_line(tmp_path: Path) -> None:
    gpu = Gpu(tmp_path / "gpu.leases", alive=lambda process: True)
    with gpu.locked() as found:
        found |= {
            Process(number, 2**40): Lease(Process(number, 2**40), 2**40) for number in range(100)
        }
    with pytest.raises(LeaseError, match="too many processes hold leases"), gpu.locked() as found:
        found |= {Process(number, 1): Lease(Process(number, 1), 1) for number in range(2000)}
    assert len(gpu.leases()) == 100
    with pytest.raises(LeaseError, match="No such file or directory"):
        Gpu(tmp_path / "none" / "gpu.leases").leases()
