"""What is started at once, what is known of tests, and how long a session is expected to take."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpumem.packing.jobs import Asked, Job, expected, jobs_of, ordered, useful_workers
from pytest_gpumem.packing.shares import PAGE, Learnt, Shares, load, save
from pytest_gpumem.units import GiB


@pytest.mark.parametrize(
    ("test", "known", "why"),
    [
        (Asked("a"), None, "never measured"),
        (Asked("a", alone="measures"), None, "measures"),
        (Asked("a", gpus=2, alone="takes 2 GPUs"), Learnt(1, (GiB,)), "takes 2 GPUs"),
        (Asked("a"), Learnt(1, (GiB,), alone="measures"), "measures"),
        (Asked("a"), Learnt(1, ()), "never measured"),
        (Asked("a"), Learnt(1, (GiB,)), ""),
        (Asked("a"), Learnt(1, (0,)), ""),
    ],
)
def test_why_a_test_has_the_gpu_to_itself(test: Asked, known: Learnt | None, why: str) -> None:
    (job,) = jobs_of([test], {} if known is None else {"a": known})
    assert job.alone == why


def test_a_group_is_one_job_with_its_largest_share() -> None:
    known = {"a": Learnt(1, (2 * GiB,)), "b": Learnt(2, (5 * GiB,)), "c": Learnt(4, (GiB,))}
    group, single = jobs_of([Asked("a", "g"), Asked("b", "g"), Asked("c")], known)
    assert (group.tests, group.seconds, group.share) == ((0, 1), 3, 5 * GiB)
    assert single.tests == (2,)


def test_short_tests_of_one_file_with_like_shares_start_at_once() -> None:
    ids = ["f.py::a", "f.py::b", "f.py::c", "f.py::d", "g.py::a"]
    known = {nodeid: Learnt(0.1, (GiB,)) for nodeid in ids} | {"f.py::c": Learnt(0.1, (9 * GiB,))}
    assert [job.tests for job in jobs_of([Asked(nodeid) for nodeid in ids], known)] == [
        (0, 1, 3),
        (2,),
        (4,),
    ]


def test_what_is_alone_starts_first_and_then_the_longest() -> None:
    jobs = [
        Job((0,), 1, GiB),
        Job((1,), 3, GiB),
        Job((2,), 1, GiB, "measures"),
        Job((3,), 1, 4 * GiB),
    ]
    assert [job.tests[0] for job in ordered(jobs)] == [2, 1, 3, 0]


def test_the_expected_time_follows_memory_and_workers() -> None:
    jobs = [Job((number,), 10, 30 * GiB) for number in range(6)]
    assert expected(jobs, [90 * GiB], 3, 0) == 20
    assert expected(jobs, [90 * GiB], 3, GiB) == 30  # a third test has no room beside the contexts
    assert expected(jobs, [90 * GiB, 90 * GiB], 6, 0) == 10
    assert expected([*jobs, Job((6,), 10, 0)], [90 * GiB], 4, 0) == 20
    assert expected([*jobs, Job((6,), 10, 0, "measures")], [90 * GiB], 3, 0) == 30
    assert useful_workers(jobs, [90 * GiB], 0) == 3


def test_the_largest_of_three_sessions_is_the_share() -> None:
    known = Learnt(2, (3 * PAGE,))
    for grown in (5 * PAGE - 1, PAGE, PAGE):
        known = known.after(Learnt(1, (grown,)), failed=False)
    assert (known.share, known.seconds) == (5 * PAGE, 1)
    assert known.after(Learnt(9, (PAGE,)), failed=False).share == PAGE
    assert known.after(Learnt(9, (PAGE,)), failed=False).seconds == pytest.approx(1.1)


def test_a_failed_test_teaches_only_that_it_takes_more() -> None:
    known = Learnt(2, (3 * PAGE,))
    assert known.after(Learnt(0, (PAGE,)), failed=True) == known
    assert known.after(Learnt(0, (4 * PAGE,)), failed=True) == Learnt(2, (3 * PAGE, 4 * PAGE))


def test_shares_of_two_sessions_are_kept_and_a_broken_file_is_none(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    save(file, Shares(idle=5), {"a": Learnt(1, (PAGE,))})
    save(file, Shares(idle=6), {"b": Learnt(2, (0,))})
    assert load(file) == Shares(idle=6, tests={"a": Learnt(1, (PAGE,)), "b": Learnt(2, (0,))})
    file.write_bytes(file.read_bytes()[:-5])
    assert load(file) == Shares()
    file.write_text('{"schema": 99}')
    assert load(file) == Shares()
