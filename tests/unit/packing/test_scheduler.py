"""Which job starts next, and what happens where none fits."""

from __future__ import annotations

from pathlib import Path

from pytest_gpumem.packing.jobs import Job
from pytest_gpumem.packing.leases import ALONE, IDLE, RUNS, WAITS, Gpu, Process
from pytest_gpumem.packing.scheduler import (
    GIVE_UP_AFTER,
    RELIEF,
    RESERVED_AFTER,
    TELL_EVERY,
    PackScheduler,
)

FOREIGN = Process(99, 1)


class Node:
    """A worker, as xdist shows it."""

    def __init__(self, number: int) -> None:
        self.process, self.shutting_down = Process(number, 1), False
        self.sent: list[list[int]] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent.append(indices)

    def shutdown(self) -> None:
        self.shutting_down = True


class Machine:
    """A GPU of 100 bytes, a clock, and a session with some workers that each hold 10 bytes."""

    def __init__(self, folder: Path, jobs: list[Job], workers: int = 2) -> None:
        self.now, self.alive = 1000.0, {FOREIGN}
        self.told: list[str] = []
        self.stopped: list[str] = []
        self.gpu = Gpu(folder / "leases", "the GPU", lambda: 100, self.alive.__contains__)
        self.nodes = [Node(number) for number in range(1, workers + 1)]
        self.ids = [f"test_{number}" for job in jobs for number in job.tests]
        self.scheduler = PackScheduler(
            workers,
            lambda: jobs,
            lambda node: (node.process, (self.gpu,)),
            lambda: self.now,
            self.told.append,
            self.stopped.append,
        )
        for node in self.nodes:
            self.alive.add(node.process)
            self.gpu.put(node.process, held=10)
            self.scheduler.add_node(node)
            self.scheduler.add_node_collection(node, self.ids)

    def look(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.scheduler.remove_pending_tests_from_node(None, ())

    def end(self, node: Node, test: int, lives: tuple[str, ...] = ()) -> None:
        """A worker has ended its test."""
        self.gpu.put(node.process, share=0, state=IDLE)
        self.scheduler.lives(node, lives)
        self.scheduler.mark_test_complete(node, test)

    def states(self) -> dict[int, str]:
        return {lease.process.pid: lease.state for lease in self.gpu.leases()}


def test_the_longest_that_fits_starts_and_a_worker_keeps_the_fixtures_of_a_file_that_goes_on(
    tmp_path: Path,
) -> None:
    jobs = [Job((0,), 3, 60, file="a"), Job((1,), 2, 40, file="a"), Job((2,), 1, 20, file="b")]
    machine = Machine(tmp_path, jobs)
    one, other = machine.nodes
    machine.scheduler.schedule()
    assert (other.sent, one.sent) == (
        [[0, 4]],
        [[2, 3]],
    )  # 4: a place holder under which fixtures stay
    machine.end(other, 0)
    assert other.sent[1:] == [[1, 3]]
    finished = [machine.scheduler.tests_finished]
    machine.end(one, 2)
    machine.end(other, 1)
    assert [*finished, machine.scheduler.tests_finished] == [False, True]
    assert machine.scheduler.most == 2


def test_what_lives_in_a_worker_is_not_charged_again(tmp_path: Path) -> None:
    fixtures = (("a::model", 50),)
    machine = Machine(
        tmp_path,
        [Job((0,), 2, 60, file="a"), Job((1,), 1, 70, file="a", fixtures=fixtures)],
        workers=1,
    )
    (node,) = machine.nodes
    machine.scheduler.schedule()
    machine.gpu.put(node.process, held=60)
    machine.end(node, 0, ("a::model",))
    assert node.sent == [[0, 3], [1, 2]]
    assert [(lease.held, lease.share) for lease in machine.gpu.leases()] == [(60, 20)]


def test_of_the_workers_that_do_nothing_one_with_fixtures_gets_the_next_job(tmp_path: Path) -> None:
    machine = Machine(
        tmp_path,
        [Job((0,), 3, 40, file="a"), Job((1,), 2, 40, file="a"), Job((2,), 1, 40, file="a")],
    )
    one, other = machine.nodes
    machine.gpu.put(FOREIGN, held=30)
    machine.scheduler.schedule()
    machine.end(other, 0)
    assert (one.sent, other.sent) == ([], [[0, 4], [1, 4]])
    machine.gpu.put(FOREIGN, held=60)
    machine.end(other, 1, ())
    machine.scheduler.lives(one, ("a::model",))
    machine.gpu.put(FOREIGN, held=0)
    machine.look()
    assert (one.sent, other.sent[2:]) == ([[2, 3]], [])


def test_a_job_that_does_not_fit_gets_the_gpu_reserved_and_memory_back(tmp_path: Path) -> None:
    jobs = [
        Job((0,), 50, 5, file="a"),
        Job((1,), 40, 5, file="a"),
        Job((2,), 3, 80, file="b"),
        Job((3,), 1, 5, file="a"),
    ]
    machine = Machine(tmp_path, jobs)
    one, other = machine.nodes
    machine.scheduler.schedule()
    assert (other.sent, one.sent) == (
        [[0, 5]],
        [[1, 5]],
    )  # the third one is larger than what is left
    machine.gpu.put(one.process, held=20)
    machine.end(one, 1, ("a::model",))
    assert one.sent[1:] == [[3, 4]]
    machine.end(one, 3, ("a::model",))
    machine.look(RESERVED_AFTER)
    assert machine.states() == {1: WAITS, 2: RUNS}
    machine.gpu.put(other.process, held=20)
    machine.end(other, 0, ("a::model",))
    assert other.sent[1:] == [[4]]  # it gives back its fixtures
    machine.look(RELIEF - 1)
    ends = [other.shutting_down]
    machine.look(1)
    assert [*ends, other.shutting_down] == [False, True]
    assert one.sent[2:] == []
    machine.alive.discard(other.process)
    assert machine.scheduler.remove_node(other) is None
    machine.look()
    assert one.sent[2:] == [[2, 4]]
    assert machine.states() == {1: RUNS}


def test_a_job_that_fits_nowhere_starts_when_nobody_else_is_there(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [Job((0,), 1, 200)], workers=1)
    machine.scheduler.schedule()
    machine.look(RESERVED_AFTER)
    assert machine.nodes[0].sent == [[0, 1]]
    assert machine.states() == {1: ALONE}


def test_a_session_in_which_nothing_runs_says_so_and_ends(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [Job((0,), 1, 50)])
    machine.gpu.put(FOREIGN, held=80, state=ALONE)
    machine.scheduler.schedule()
    machine.look(TELL_EVERY - 1)
    assert machine.told == []
    machine.look(1)
    assert machine.told == [
        "gpumem: no test can start: the GPU leaves 0.0 GiB to tests (process 2 waits, process 99 alone); gives up in 570 s"
    ]
    machine.look(1)
    assert len(machine.told) == 1
    machine.look(GIVE_UP_AFTER)
    assert machine.stopped[0].startswith(
        "gpumem: --gpumem-pack: 600 s without a test: no test can start: "
    )


def test_a_crash_gives_the_other_tests_of_a_job_to_another_worker(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [Job((0, 1, 2), 1, 50)])
    one, other = machine.nodes
    machine.scheduler.schedule()
    machine.scheduler.mark_test_complete(other, 0)
    machine.alive.discard(other.process)
    assert machine.scheduler.remove_node(other) == "test_1"
    machine.scheduler.mark_test_pending("test_1")
    assert one.sent == [[2, 4]]
    machine.end(one, 2)
    assert one.sent[1:] == [[1, 3]]


def test_workers_that_collect_other_tests_end_the_session(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [Job((0,), 1, 50)], workers=1)
    late = Node(7)
    machine.scheduler.add_node(late)
    machine.scheduler.add_node_collection(late, ["test_0", "test_x"])
    assert machine.stopped == ["gpumem: --gpumem-pack: workers collected different tests: test_x"]
