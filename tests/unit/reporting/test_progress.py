from __future__ import annotations

from pytest_gpumem.reporting.progress import Progress, of_processes, rounded


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_line_counts_tests_and_samples_and_says_what_is_left() -> None:
    clock = Clock()
    progress = Progress(clock)
    assert not progress
    progress.expect(["t.py::a", "t.py::b", "t.py::c"])
    assert progress
    progress.begin("t.py::a_test_with_a_long_name")  # measures nothing
    assert progress.line(100) == "gpumem: 0 of 3 tests, 0 samples"
    progress.begin("t.py::a")
    assert progress.line(100) == "gpumem: 0 of 3 tests, 0 samples: t.py::a"
    clock.now += 300
    progress.end("t.py::a", 640)
    progress.end("t.py::of another kind", 0)
    assert progress.line(100) == "gpumem: 1 of 3 tests, 640 samples, about 10 min left"
    # A rerun replaces what the test had taken before.
    progress.end("t.py::a", 320)
    progress.begin("t.py::b")
    assert progress.line(100) == "gpumem: 1 of 3 tests, 320 samples, about 10 min left: t.py::b"
    assert len(progress.line(30)) == 30
    for test in ("t.py::b", "t.py::c"):
        progress.end(test, 0)
    assert progress.line(100) == "gpumem: 3 of 3 tests, 320 samples"


def test_a_rough_time() -> None:
    for seconds, said in [
        (0.2, "1 s"),
        (7.4, "7 s"),
        (33, "35 s"),
        (54.9, "55 s"),
        (58, "1 min"),
        (3540, "59 min"),
        (3599, "1 h 0 min"),
        (7830, "2 h 10 min"),
    ]:
        assert rounded(seconds) == said, seconds


def test_the_processes_of_a_run_count_their_tests_and_the_time_left() -> None:
    for ended, finished, seconds, said in [
        (0, 0, 0.0, "gpumem: 0 of 3 processes measured"),
        (
            0,
            5,
            10.0,
            "gpumem: 0 of 3 processes measured, 5 of 10 tests of the next, about 50 s left",
        ),
        (1, 0, 10.0, "gpumem: 1 of 3 processes measured, about 20 s left"),
        (3, 0, 30.0, "gpumem: 3 of 3 processes measured"),
    ]:
        assert of_processes(ended, 3, finished, 10, seconds) == said, (
            ended,
            finished,
            seconds,
            said,
        )
