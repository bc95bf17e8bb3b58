"""`gpumem bisect` from outside: real commits, real processes of pytest on the simulated device."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from sessions import PROCESSES, Repository

TEST = "test_it.py::test_mine"
TESTS = """
from kern import NBYTES

def test_mine(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(NBYTES), device_buffer(NBYTES))
"""
LABELLED = """
import pytest
from kern import NBYTES

@pytest.mark.parametrize("name", ["same", "changes"])
def test_mine(gpu_benchmark, device_buffer, gpu_kernels, name):
    for label in ("one", "other"):
        nbytes = NBYTES if (name, label) == ("changes", "other") else 1 << 20
        gpu_benchmark(gpu_kernels.copy, device_buffer(nbytes), device_buffer(nbytes), label=label)
"""


class Project(Repository):
    def add(self, subject: str, mib: int | str, tests: str = TESTS) -> str:
        """A commit whose test copies so many MiB; its id."""
        self.write("kern.py", f"NBYTES = {mib} << 20\n# {subject}\n")
        self.write("test_it.py", tests)
        return self.commit(subject)

    def bisect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("bisect", *arguments, "--", *PROCESSES)

    def left(self) -> list[str]:
        """What a search left behind, in git and in the temporary folder."""
        return ["worktree"] * (self.worktrees - 1) + [
            path.name for path in self.temporary.iterdir() if path.name.startswith("gpumem-")
        ]

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.temporary / "out.json").read_text())
        return found


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def ended_by(
    number: signal.Signals, project: Project, arguments: tuple[str, ...], processes: int
) -> tuple[int, str]:
    """The exit code and the errors of a search that a signal ends once its journal holds so many processes."""
    journal = Path(arguments[arguments.index("--journal") + 1])
    search = project.start("bisect", *arguments, "--", *PROCESSES, stdout=subprocess.DEVNULL)
    while (
        sum(path.read_bytes().count(b"\n") - 1 for path in journal.glob("*.jsonl")) < processes
        and search.poll() is None
    ):
        time.sleep(0.01)
    search.send_signal(number)
    _, errors = search.communicate(timeout=60)
    return search.returncode, errors


def test_comments_cost_no_duet_and_the_cause_is_told(project: Project) -> None:
    """Of one row of a test; interrupted, it goes on. A merge is one step; of two slow-downs one is found, and the command for the other is
    printed."""
    row = f"{TEST}[changes][other]"
    commits = [project.add(f"comment {number}", 16, LABELLED) for number in range(2)]
    project.git("checkout", "-qb", "side")
    project.add("faster, only on the branch", 20, LABELLED)
    commits.append(project.add("comment of the branch", 64, LABELLED))
    project.git("checkout", "-q", "main")
    project.git("merge", "-q", "--no-ff", "-m", "merge the branch", "side")
    merge = project.git("rev-parse", "HEAD")
    project.add("comment 3", 64, LABELLED)
    project.add("a little slower", 80, LABELLED)
    (project.folder / "kern.py").write_text("NBYTES = 1 << 20\n")
    asked = (
        "--good",
        commits[0],
        row,
        "--journal",
        str(project.temporary / "journal"),
        "--json",
        str(project.temporary / "out.json"),
    )
    code, errors = ended_by(signal.SIGINT, project, asked, 4)  # in the first duet
    assert (code, project.left()) == (130, [])
    assert "the same command goes on from there" in errors
    done = project.bisect(*asked)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert project.left() == []
    document = project.document()
    assert document["processes"] > document["resumed"] >= 4
    found = document["found"]
    assert (found["commit"], found["author"], found["parent"]) == (merge, "Ada", commits[1])
    assert found["paired"]["low"] <= found["paired"]["change"] <= found["paired"]["high"]
    assert 0.5 < found["share"] < 0.95
    assert found["another"].startswith(
        f"gpumem bisect --good {merge[:10]} --bad HEAD 'test_it.py::test_mine[changes][other]' --"
    )
    assert "uncommitted changes take no part" in done.stderr
    assert f"git merge-base {merge[:10]}^1 {merge[:10]}^2" in done.stdout
    assert "ran differently: kernel copy" in done.stdout
    assert (
        document["duets"] <= 3
    )  # bad against good, a commit that runs other code than both, and the proof
    assert document["key"] == row
    assert document["simulated"] is True


def test_bytes_and_counts_take_one_process_a_commit(project: Project) -> None:
    """Killed, a search goes on, and past commits that cannot be measured."""
    commits = [project.add(f"commit {number}", 16) for number in range(3)]
    commits.append(project.add("commit 3 lacks the test", 16, "def test_other(): pass\n"))
    commits.append(project.add("commit 4 does not build", "no_such_name"))
    commits += [project.add(f"commit {number}", mib) for number, mib in ((5, 17), (6, 20))]
    common = ("--json", str(project.temporary / "out.json"), "--no-explain", TEST)
    first = (
        "--good",
        commits[0],
        "--bad",
        commits[5],
        *common,
        "--figure",
        "peak",
        "--journal",
        str(project.temporary / "journal"),
    )
    assert ended_by(signal.SIGKILL, project, first, 2)[0] == -signal.SIGKILL
    for _ in range(2):  # the second time, every process is there already
        done = project.bisect(*first)
        assert done.returncode == 6, (done.stdout, done.stderr)
        assert project.left() == []
        document = project.document()
        assert (document["left"], document["found"], document["duets"]) == (commits[3:6], None, 0)
        skipped = {
            step["commit"]: step["skipped"]
            for step in document["steps"]
            if step["skipped"] is not None
        }
        assert sorted(skipped) == sorted(commits[3:5])
        assert "there is no such test" in skipped[commits[3]]
        assert "no_such_name" in skipped[commits[4]]
        assert document["processes"] == 2 + len(document["steps"])
        assert document["resumed"] >= 2
    assert document["resumed"] == document["processes"]
    done = project.bisect("--good", commits[5], *common, "--figure", "peak")
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert project.document()["found"]["commit"] == commits[6]
    assert project.document()["found"]["values"] == [34 << 20, 40 << 20]
    assert "34 MiB → 40 MiB against" in done.stdout
    assert project.bisect("--good", commits[5], *common, "--figure", "kernels").returncode == 1
    assert project.document()["nothing"] is True
    assert project.bisect("--good", commits[5], *common, "--figure", "waits").returncode == 1
    assert project.left() == []


def test_what_cannot_be_searched_is_one_line(project: Project) -> None:
    first = project.add("first", 16)
    (project.folder / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(project.folder)!r}); import kern\n"
    )
    imports = project.add("takes a module of the working tree", 16)
    (project.folder / "conftest.py").write_text("")
    last = project.add("last", 16, "def test_other(): pass\n")
    for arguments, message in (
        (("--good", last, "--bad", first, TEST), f"'{last}' is no ancestor of '{first}'"),
        (("--good", "v9", TEST), "'v9' is no commit of"),
        (("--good", "HEAD", TEST), "are the same commit"),
        (
            ("--good", first, TEST, "--figure", "peak", "--max-regression", "2%"),
            "--max-regression and --figure exclude each other",
        ),
        (("--good", first, TEST, "--max-regression", "2 apples"), "--max-regression: '2 apples'"),
        (
            ("--good", first, TEST),
            f"--bad HEAD: {TEST} measures nothing there: there is no such test",
        ),
        (("--good", first, "--bad", imports, TEST), "did not run its own code: kern from"),
        (
            ("--good", first, "test_no.py::test_no"),
            f"--good {first}: test_no.py::test_no measures nothing there: there is no test_no.py",
        ),
    ):
        done = project.bisect(*arguments)
        assert done.returncode == 4, (arguments, done.stdout, done.stderr)
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert message in done.stderr.splitlines()[-1]
    assert project.left() == []
