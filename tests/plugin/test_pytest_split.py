"""A suite on several runners: pytest-split gives each a part of the tests, all share a baseline, and each gates what it ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ci_project import BRANCH, SIMULATED, Done, Project, make_three
from committing import commit

pytest.importorskip("pytest_split", reason="pytest-split is of the extra test")

TESTS = """
import os
import pytest
from kern import NBYTES

@pytest.mark.gpumem(max_regression=os.environ.get("LIMIT", "2%"))
@pytest.mark.parametrize("number", range(2))
def test_{name}(gpu_benchmark, device_buffer, gpu_kernels, number):
    nbytes = NBYTES if number == 1 else 64 << 20
    gpu_benchmark(gpu_kernels.copy, device_buffer(nbytes), device_buffer(nbytes))
"""
NAMES = (
    "first",
    "second",
    "third",
)  # six tests in three files: the first runner ends in the middle of the second file
PARTS = {
    1: ["test_first[0]", "test_first[1]", "test_second[0]"],
    2: ["test_second[1]", "test_third[0]", "test_third[1]"],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Project:
    """A project with a baseline of three runs, each of which two runners measured."""
    folder = tmp_path_factory.mktemp("saved")
    made = Project(folder, programs)
    made.git("rm", "-q", "test_it.py")
    for name in NAMES:
        made.write(f"test_{name}.py", TESTS.format(name=name))
    commit(made.folder, "tests")
    made.git("push", "-q", "--force", "origin", f"HEAD:refs/heads/{BRANCH}-tests")
    made.git("update-ref", f"refs/remotes/origin/{BRANCH}", "HEAD")
    for group in PARTS:
        saved = runner(made, group, "python -m pytest -q --gpumem --gpumem-save")
        assert saved.returncode == 0, saved.stdout
    stored = sorted((folder / "store").rglob("*.json"))
    assert len(stored) == 2
    for number, file in enumerate(stored):
        (alone := folder / f"of-{number}").mkdir()
        (copy := alone / file.name).write_bytes(file.read_bytes())
        make_three(copy)
        for again in alone.glob("again-*.json"):
            again.rename(file.with_name(f"of-{number}-{again.name}"))
    return made


@pytest.fixture
def project(saved: Project, tmp_path: Path) -> Project:
    return saved.copied(tmp_path)


def runner(project: Project, group: int, command: str, **variables: str) -> Done[str]:
    """One of two runners; both have the store."""
    script = f". .venv/bin/activate; {command} --splits 2 --group {group}"
    return project.run(
        script, SIMULATED, GPUMEM_BASELINE=str(project.folder.parent / "store"), **variables
    )


def results(project: Project, file: str) -> dict[str, Any]:
    return dict(json.loads((project.folder / file).read_text())["gpumem"])


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(row["nodeid"].partition("::")[2] for row in rows)


def test_rows_of_the_other_runner_are_not_run_and_not_lost(project: Project) -> None:
    for group, own in PARTS.items():
        done = runner(project, group, "python -m pytest --gpumem --benchmark-json=../out.json")
        assert done.returncode == 0, done.stdout
        found = results(project, "../out.json")
        assert ids(found["rows"]) == own
        assert {row["verdict"]["outcome"] for row in found["rows"]} == {"PASS"}
        (other,) = (part for number, part in PARTS.items() if number != group)
        assert ids(found["missing"]) == other
        assert {(one["status"], one["reason"]) for one in found["missing"]} == {
            ("not run", "deselected by plugin.py")
        }


def test_each_runner_gates_its_part(project: Project) -> None:
    for group in PARTS:
        done = runner(project, group, f"gpumem gate origin/{BRANCH} --")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "green (simulated): 3 rows" in done.stdout


def test_a_part_is_red_by_its_own_tests_alone(project: Project) -> None:
    """The change slows `number == 1` down, of which each part has tests."""
    project.change("75 << 20")
    done = runner(project, 2, f"gpumem gate origin/{BRANCH} --")
    assert done.returncode == 1, done.stdout + done.stderr
    slow = [name for name in PARTS[2] if name.endswith("[1]")]
    assert f"red (simulated): {len(slow)} of 3 rows fail" in done.stdout
    duet = json.loads((project.folder / "gpumem-results" / "duet.json").read_text())
    judged = {one["key"].partition("::")[2]: one["outcome"] for one in duet["verdicts"]}
    assert judged == dict.fromkeys(slow, "FAIL")
