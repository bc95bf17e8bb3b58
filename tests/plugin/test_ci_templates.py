"""The templates of ci/github and ci/gitlab: they parse, and their shell steps do on the simulated device what they are for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_gpumem.baselines.layout import digest

ROOT = Path(__file__).parents[2]
GITHUB, GITLAB = (yaml.safe_load((ROOT / "ci" / kind / "gpumem.yml").read_text()) for kind in ("github", "gitlab"))
BRANCH = "main"

TESTS = """
import pytest
from kern import NBYTES

@pytest.mark.gpumem(max_regression="2%")
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(NBYTES), device_buffer(NBYTES))
"""

Done = subprocess.CompletedProcess


def github(job: str) -> list[tuple[str, str, dict[str, str]]]:
    """Name, script and variables of each step of a job that runs something; expressions stand for what GitHub puts there."""
    given = {"github.base_ref": BRANCH}
    found = []
    for step in GITHUB["jobs"][job]["steps"]:
        if "run" in step:
            variables = {**GITHUB["env"], **GITHUB["jobs"][job].get("env", {}), **step.get("env", {})}
            filled = {name: re.sub(r"\$\{\{ (.*?) \}\}", lambda m: given.get(m[1], "?"), value) for name, value in variables.items()}
            found.append((step["name"], step["run"], filled))
    return found


def gitlab(job: str) -> tuple[str, dict[str, str]]:
    """Script and variables of a job, without what prepares its environment."""
    return "\n".join([". .venv/bin/activate", *GITLAB[job]["script"]]), {
        **GITLAB["variables"],
        "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": BRANCH,
    }


def test_no_name_that_anybody_can_choose_is_part_of_a_script() -> None:
    """An expression is pasted into a script before the shell reads it; a variable is not."""
    scripts = [script for job in GITHUB["jobs"] for _, script, _ in github(job)]
    assert len(scripts) > 5
    assert not [script for script in scripts if "${{" in script]


def test_who_may_do_what() -> None:
    jobs: dict[str, Any] = GITHUB["jobs"]
    assert GITHUB["permissions"] == {"contents": "read"}
    assert {name for name, job in jobs.items() if "permissions" in job} == {"comment"}
    assert jobs["comment"]["permissions"] == {"pull-requests": "write"}
    assert not any("checkout" in step.get("uses", "") for step in jobs["comment"]["steps"])
    checkouts = [step for job in jobs.values() for step in job["steps"] if "checkout" in step.get("uses", "")]
    assert len(checkouts) == 3
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    on_gpu = {name for name, job in jobs.items() if "gpu" in job["runs-on"]}
    assert on_gpu == {"gate", "save"}
    assert "head.repo.full_name == github.repository" in jobs["gate"]["if"]
    # `pull_request_target` would run a fork's code with this project's rights. YAML reads the key `on` as true.
    assert set(GITHUB[True]) == {"pull_request", "push"}
    assert "SOURCE_PROJECT_ID == $CI_MERGE_REQUEST_PROJECT_ID" in GITLAB["gpumem:gate"]["rules"][0]["if"]


def test_only_a_push_to_the_default_branch_writes_the_baseline() -> None:
    jobs: dict[str, Any] = GITHUB["jobs"]
    writes = ("actions/cache@", "actions/cache/save@")
    assert {name for name, job in jobs.items() if any(step.get("uses", "").startswith(writes) for step in job["steps"])} == {"save"}
    assert jobs["save"]["if"] == (
        "github.event_name == 'push' && github.ref == format('refs/heads/{0}', github.event.repository.default_branch)"
    )
    # Of GitLab's cache every pipeline of the project may write what it may read.
    assert "cache" not in GITLAB
    parts = {name: part for name, part in GITLAB.items() if isinstance(part, dict) and name != "variables"}
    assert not [name for name, part in parts.items() if "cache" in part]
    assert [name for name, part in parts.items() if "BASELINE_TOKEN" in yaml.dump(part)] == ["gpumem:save"]
    assert [name for name, part in parts.items() if " push " in yaml.dump(part)] == ["gpumem:save"]
    assert GITLAB["gpumem:save"]["rules"] == [{"if": '$CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH && $CI_COMMIT_REF_PROTECTED == "true"'}]


def test_no_step_of_a_gate_may_fail_unnoticed() -> None:
    for text in ((ROOT / "ci" / kind / "gpumem.yml").read_text() for kind in ("github", "gitlab")):
        assert not re.search(r"continue-on-error|allow_failure|\|\| true", text)


def test_what_the_templates_call_is_there() -> None:
    whole = [script for job in GITHUB["jobs"] for _, script, _ in github(job)]
    whole += [line for job in GITLAB.values() if isinstance(job, dict) for line in job.get("before_script", []) + job.get("script", [])]
    options = set(re.findall(r"--gpumem[\w-]*", "\n".join(whole)))
    assert options == {"--gpumem", "--gpumem-device", "--gpumem-budget", "--gpumem-save", "--gpumem-report"}
    assert set(re.findall(r"\bgpumem (\w+)", "\n".join(whole))) == {"doctor", "gate"}


class Project:
    """A clone of a small project, with everything that a job finds where it begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        upstream = folder / "upstream"
        upstream.mkdir()
        self.git("init", "-q", "-b", BRANCH, cwd=upstream)
        # In place of the step that makes a virtual environment: this interpreter, and the command.
        programs = folder / "bin"
        programs.mkdir()
        for name, code in (("python", ""), ("gpumem", " -c 'from pytest_gpumem.cli import main; main()'")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{code} "$@"\n')
            (programs / name).chmod(0o755)
        (upstream / ".venv" / "bin").mkdir(parents=True)
        (upstream / ".venv" / "bin" / "activate").write_text(f'PATH="{programs}:$PATH"\n')
        (upstream / ".gitignore").write_text(".gpumem-baseline\n__pycache__\n")
        (upstream / "pytest.ini").write_text(
            "[pytest]\ngpumem_budget = 5 ms\ngpumem_placements = 2\naddopts = -p no:cacheprovider -p no:hypothesispytest\n"
        )
        (upstream / "test_it.py").write_text(TESTS)
        (upstream / "kern.py").write_text("NBYTES = 64 << 20\n")
        self.git("add", ".", cwd=upstream)
        self.git("commit", "-qm", "base", cwd=upstream)
        self.git("clone", "-q", str(upstream), str(self.folder), cwd=folder)

    def git(self, *arguments: str, cwd: Path | None = None) -> None:
        command = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org", *arguments]
        subprocess.run(command, cwd=cwd or self.folder, check=True, capture_output=True)

    def change(self, nbytes: str) -> None:
        (self.folder / "kern.py").write_text(f"NBYTES = {nbytes}\n")
        self.git("commit", "-qam", "change")

    def run(self, script: str, variables: dict[str, str], **more: str) -> Done[str]:
        """A script as a runner runs it, in a CI that has no GPU."""
        own = {"CI": "true", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(self.folder.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        environment = {**os.environ, **own, **variables, **more}
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script], cwd=self.folder, env=environment, capture_output=True, text=True
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def step(job: str, name: str) -> tuple[str, dict[str, str]]:
    return next((script, variables) for named, script, variables in github(job) if named == name)


SIMULATED = {"GPUMEM_DEVICE": "sim"}


def test_save_then_green_then_a_planted_regression_turns_it_red(project: Project, tmp_path: Path) -> None:
    """GitHub's saves and turns red, GitLab's is green before; both gates are one command. The screen alone decides, because a duet takes
    some twenty processes."""
    saved = project.run(*step("save", "Save"), **SIMULATED)
    assert saved.returncode == 0, saved.stdout
    baseline = next((project.folder / ".gpumem-baseline").rglob("*.json"))
    for number in range(2):
        again(baseline, number)
    green = project.run(*gitlab("gpumem:gate"), **SIMULATED, GATE_OPTIONS="--screen-only")
    assert green.returncode == 0, green.stdout + green.stderr
    assert "gpumem gate: green: 1 rows" in green.stdout
    assert "::error" not in green.stdout

    project.change("72 << 20")
    summary = tmp_path / "summary"
    actions = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_WORKSPACE": str(project.folder)}
    red = project.run(*step("gate", "Gate"), **SIMULATED, GATE_OPTIONS="--screen-only", **actions)
    assert red.returncode == 1, red.stdout + red.stderr
    assert red.stdout.splitlines()[-1] == "gpumem gate: red: 1 of 1 rows fail"
    (error,) = (line for line in red.stdout.splitlines() if line.startswith("::"))
    assert error.startswith("::error file=test_it.py,line=5,title=gpumem%3A FAIL (simulated)::FAIL (simulated) test_it.py::test_copy: ")
    assert summary.read_text() == (project.folder / "gpumem-results" / "summary.md").read_text() + "\n"
    assert "**1 measured (simulated): 1 FAIL**" in summary.read_text()
    (finding,) = json.loads((project.folder / "gpumem-results" / "code-quality.json").read_text())
    assert (finding["severity"], finding["location"]["path"]) == ("major", "test_it.py")


def test_a_gitlab_baseline_is_a_branch(project: Project) -> None:
    """The job that saves makes it and adds to it, also where a test fails; a later job finds it."""
    (fetch,) = (line for line in GITLAB[".gpumem:gpu"]["before_script"] if "ls-remote" in line)
    script, variables = gitlab("gpumem:save")
    upstream = str(project.folder.parent / "upstream")
    own = {"CI_REPOSITORY_URL": upstream, "BASELINE_PUSH_URL": upstream, "CI_COMMIT_SHA": "abc", **SIMULATED}
    for number, code in ((1, 0), (2, 1)):
        if code:
            (project.folder / "test_it.py").write_text(TESTS + TESTS.replace("test_copy", "test_wrong") + "    assert False\n")
        done = project.run(f"{fetch}\n{script}", {**variables, **own})
        assert done.returncode == code, done.stdout + done.stderr
        shutil.rmtree(project.folder / ".gpumem-baseline")
        fetched = project.run(fetch, {**variables, **own})
        assert fetched.returncode == 0, fetched.stderr
        assert len(list((project.folder / ".gpumem-baseline").glob("*/gpumem/*.json"))) == number
        shutil.rmtree(project.folder / ".gpumem-baseline")
    # A server that does not answer is no empty baseline.
    assert project.run(fetch, {**variables, **own, "CI_REPOSITORY_URL": f"{upstream}/nowhere"}).returncode != 0


def again(baseline: Path, number: int) -> None:
    """The same process once more, as if the branch had been saved again: a FAIL takes three."""
    stored = json.loads(baseline.read_text())
    stored["content"]["id"] += str(number)
    baseline.with_name(f"again-{number}.json").write_text(json.dumps({**stored, "sha256": digest(stored["content"])}))


@pytest.mark.parametrize(
    "job",
    [lambda: step("gate", "Gate"), lambda: step("save", "Save"), lambda: gitlab("gpumem:gate")],
    ids=["GitHub's gate", "GitHub's save", "GitLab's gate"],
)
def test_a_broken_driver_turns_nothing_green(project: Project, job: Callable[[], tuple[str, dict[str, str]]]) -> None:
    done = project.run(*job())
    assert done.returncode == 4, done.stdout + done.stderr
    assert "a broken driver must not turn a pipeline green" in done.stderr


def test_without_a_gpu_the_tests_run_simulated(project: Project) -> None:
    script, variables = gitlab("gpumem:simulated")
    done = project.run(script, variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIMULATED NVIDIA" in done.stdout
    assert [script for _, script, _ in github("simulated")][-1].strip().endswith('--gpumem-device sim --gpumem-budget "50 ms" $TESTS')
