"""The templates of ci/github and ci/gitlab: they parse, and their shell steps do on the simulated device what they are for."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ci_project import BRANCH, SIMULATED, TESTS, Project, make_three
from sessions import gate_result

ROOT = Path(__file__).parents[2]
GITHUB, GITLAB = (
    yaml.safe_load((ROOT / "ci" / kind / "gpumem.yml").read_text()) for kind in ("github", "gitlab")
)


def github(job: str) -> list[tuple[str, str, dict[str, str]]]:
    """Name, script and variables of each step of a job that runs something; expressions stand for what GitHub puts there."""
    given = {"github.base_ref || github.event.repository.default_branch": BRANCH}
    found = []
    for step in GITHUB["jobs"][job]["steps"]:
        if "run" in step:
            variables = {
                **GITHUB["env"],
                **GITHUB["jobs"][job].get("env", {}),
                **step.get("env", {}),
            }
            filled = {
                name: re.sub(r"\$\{\{ (.*?) \}\}", lambda m: given.get(m[1], "?"), value)
                for name, value in variables.items()
            }
            found.append((step["name"], step["run"], filled))
    return found


def gitlab(job: str) -> tuple[str, dict[str, str]]:
    """Script and variables of a job, without what prepares its environment."""
    return "\n".join([". .venv/bin/activate", *GITLAB[job]["script"]]), {
        **GITLAB["variables"],
        **{name: str(value) for name, value in GITLAB[job].get("variables", {}).items()},
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
    checkouts = [
        step for job in jobs.values() for step in job["steps"] if "checkout" in step.get("uses", "")
    ]
    assert len(checkouts) == 3
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    assert {name for name, job in jobs.items() if "self-hosted" in job["runs-on"]} == {
        "gate",
        "save",
    }
    assert "head.repo.full_name == github.repository" in jobs["gate"]["if"]
    # `pull_request_target` would run a fork's code with this project's rights. YAML reads the key `on` as true.
    assert set(GITHUB[True]) == {"pull_request", "push", "schedule"}
    assert (
        "SOURCE_PROJECT_ID == $CI_MERGE_REQUEST_PROJECT_ID"
        in GITLAB["gpumem:gate"]["rules"][0]["if"]
    )


def test_only_the_default_branch_writes_the_baseline() -> None:
    jobs: dict[str, Any] = GITHUB["jobs"]
    writes = [
        (name, step)
        for name, job in jobs.items()
        for step in job["steps"]
        if step.get("uses", "").startswith(("actions/cache@", "actions/cache/save@"))
        and step["with"]["path"] == GITHUB["env"]["GPUMEM_BASELINE"]
    ]
    assert [name for name, _ in writes] == ["save"]
    # Of GitLab's cache every pipeline of the project may write what it may read: it holds no baseline.
    parts = {
        name: part
        for name, part in GITLAB.items()
        if isinstance(part, dict) and name != "variables"
    }
    assert {name: part["cache"]["paths"] for name, part in parts.items() if "cache" in part} == {
        "gpumem:simulated": [".cache/pip"]
    }
    writers = [
        name
        for name, part in parts.items()
        if "BASELINE_TOKEN" in yaml.dump(part) or " push " in yaml.dump(part)
    ]
    assert writers == ["gpumem:save"]
    assert (
        '$CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH && $CI_COMMIT_REF_PROTECTED == "true"'
        in parts["gpumem:save"]["rules"][-1]["if"]
    )


OWN = {"full_name": "we/it"}
EVENTS: dict[str, dict[str, Any]] = {
    "push": {"ref": f"refs/heads/{BRANCH}"},
    "push of another branch": {"ref": "refs/heads/topic"},
    "push of a bot's branch": {"ref": "refs/heads/pull-request/7"},
    "schedule": {"ref": f"refs/heads/{BRANCH}"},
    "pull_request": {"ref": "refs/pull/1/merge", "head": OWN},
    "pull_request of a fork": {"ref": "refs/pull/1/merge", "head": {"full_name": "they/it"}},
}


def jobs_of(event: str, **results: str) -> set[str]:
    """The jobs of GitHub's template that an event starts, if each ends as `results` says, and else well."""
    github = {"event_name": event.split()[0], "ref": EVENTS[event]["ref"], "repository": "we/it"}
    given: dict[str, Any] = {"github": github, "github.event.repository.default_branch": BRANCH}
    given["github.event.pull_request.head.repo.full_name"] = (
        EVENTS[event].get("head", {}).get("full_name", "")
    )
    ended: dict[str, str] = {}
    for name, job in GITHUB["jobs"].items():
        condition = str(job.get("if", "success()")).removeprefix("${{").removesuffix("}}").strip()
        needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        text = re.sub(r"needs\.(\w+)\.result", lambda m: repr(ended[m[1]]), condition)
        text = re.sub(
            r"github(\.\w+)+",
            lambda m: repr(given.get(m[0], github.get(m[0].removeprefix("github."), ""))),
            text,
        )
        text = (
            text.replace("&&", " and ")
            .replace("||", " or ")
            .replace("!cancelled()", "True")
            .replace("always()", "True")
        )
        functions = {
            "format": lambda form, *values: form.format(*values),
            "startsWith": str.startswith,
            "success": lambda: True,
        }
        met = eval(text, functions)
        # Without a status function a job also asks that what it needs went well.
        met = met and (
            "cancelled()" in condition
            or "always()" in condition
            or all(ended[need] == "success" for need in needs)
        )
        ended[name] = results.get(name, "success") if met else "skipped"
    return {name for name, result in ended.items() if result != "skipped"}


def test_each_event_starts_its_jobs() -> None:
    for event, results, jobs in [
        ("pull_request", {}, {"simulated", "gate", "verdict", "comment"}),
        ("pull_request", {"gate": "failure"}, {"simulated", "gate", "verdict", "comment"}),
        ("pull_request", {"simulated": "failure"}, {"simulated", "verdict"}),
        ("pull_request of a fork", {}, {"simulated", "verdict"}),
        ("push", {}, {"simulated", "save"}),
        ("push of another branch", {}, {"simulated"}),
        ("push of a bot's branch", {}, {"simulated", "gate", "verdict", "comment"}),
        ("schedule", {}, {"save"}),
    ]:
        assert jobs_of(event, **results) == jobs


def test_the_required_check_says_why_it_is_red(project: Project) -> None:
    """GitHub takes a skipped job for a success."""
    for simulated, gates, own, code, why in [
        ("success", "success", "true", 0, "the gate is green on every card"),
        ("success", "failure", "true", 1, "the gate is red"),
        ("success", "cancelled", "true", 1, "gate with cancelled"),
        ("success", "skipped", "false", 1, "takes no code of a fork"),
        ("success", "skipped", "true", 1, "gate with skipped"),
        ("failure", "skipped", "false", 1, "fails on the simulated device"),
    ]:
        script, variables = step("verdict", "Every gate is green")
        done = project.run(
            script, {**variables, "SIMULATED": simulated, "GATES": gates, "OWN": own}
        )
        assert done.returncode == code
        assert why in done.stdout
        assert done.stdout.startswith("::error title=gpumem::") == bool(code)


def test_gitlab_has_a_red_job_for_what_no_gate_measures() -> None:
    """Its pipelines are green without the gate, which a fork's merge request does not get."""
    (rule,), (gates,) = GITLAB["gpumem:verdict"]["rules"], GITLAB["gpumem:gate"]["rules"]
    assert rule["if"] == gates["if"].replace("_ID == $", "_ID != $")
    assert GITLAB["gpumem:verdict"]["script"][-1] == "exit 1"


def test_a_gate_of_a_part(project: Project) -> None:
    pytest.importorskip("pytest_split", reason="pytest-split is of the extra test")
    project.write("test_other.py", TESTS.replace("test_copy", "test_other"))
    assert project.run(*step("save", "Save"), **SIMULATED).returncode == 0
    script, variables = step("gate", "Gate")
    parts = {**variables, "SPLIT": "--splits 2", "PART": "2"}
    done = project.run(script, parts, **SIMULATED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpumem gate: green (simulated): 1 row" in done.stdout


def test_no_step_of_a_gate_may_fail_unnoticed() -> None:
    """The lines that make it advice only are comments."""
    for template in (GITHUB, GITLAB):
        assert not re.search(r"continue-on-error|allow_failure|\|\| true", yaml.dump(template))


@pytest.mark.parametrize(
    ("kind", "lines"),
    [("github", ["continue-on-error", "pull-request"]), ("gitlab", ["allow_failure", "if: $CI_"])],
)
def test_a_commented_line_is_all_that_another_project_needs(kind: str, lines: list[str]) -> None:
    text = (ROOT / "ci" / kind / "gpumem.yml").read_text()
    for line in lines:
        text, count = re.subn(rf"^( *)# ((?:- )?\"?{re.escape(line)})", r"\1\2", text, flags=re.M)
        assert count == 1, line
    yaml.safe_load(text)


@pytest.fixture
def project(tmp_path: Path, programs: Path) -> Project:
    return Project(tmp_path, programs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Project:
    """A project whose baseline has three runs, after GitHub's step."""
    made = Project(tmp_path_factory.mktemp("saved"), programs)
    done = made.run(*step("save", "Save"), **SIMULATED)
    assert done.returncode == 0, done.stdout
    make_three(next((made.folder / ".gpumem-baseline").rglob("*.json")))
    return made


def step(job: str, name: str) -> tuple[str, dict[str, str]]:
    return next((script, variables) for named, script, variables in github(job) if named == name)


def test_save_then_green_then_red_then_accepted_and_saved(saved: Project, tmp_path: Path) -> None:
    """GitHub's saves and turns red, GitLab's is green before and of what is accepted; both gates are one command."""
    project = saved.copied(tmp_path)
    github_gate, gitlab_gate = step("gate", "Gate"), gitlab("gpumem:gate")
    assert "\ngpumem gate --accept-from-change $GATE_OPTIONS -- " in github_gate[0]
    green = project.run(*gitlab_gate, **SIMULATED, GATE_OPTIONS="--screen-only")
    assert green.returncode == 0, green.stdout + green.stderr
    assert "gpumem gate: green (simulated): 1 row" in green.stdout
    assert "::error" not in green.stdout

    project.change("76 << 20")
    summary = tmp_path / "summary"
    actions = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_WORKSPACE": str(project.folder),
    }
    red = project.run(*github_gate, **SIMULATED, **actions)
    assert red.returncode == 1, red.stdout + red.stderr
    assert gate_result(red.stdout) == "gpumem gate: red (simulated): 1 of 1 row fails"
    (error,) = (line for line in red.stdout.splitlines() if line.startswith("::"))
    assert error.startswith(
        "::error file=test_it.py,line=5,title=gpumem%3A FAIL (simulated)::FAIL (simulated) test_it.py::test_copy: "
    )
    assert (
        summary.read_text() == (project.folder / "gpumem-results" / "summary.md").read_text() + "\n"
    )
    assert "**1 row (simulated): 1 FAIL**" in summary.read_text()

    accept = (
        ". .venv/bin/activate; gpumem accept test_it.py::test_copy --reason '$(touch planted) why'"
    )
    assert project.run(accept, {}).returncode == 0
    assert not (project.folder / "planted").exists()
    done = project.run(*gitlab_gate, **SIMULATED)
    assert done.returncode == 0, done.stdout + done.stderr
    last = "gpumem gate: green (simulated): 1 row, 1 of them accepted"
    assert gate_result(done.stdout) == last
    done = project.run(*step("save", "Save"), **SIMULATED)
    assert done.returncode == 0, done.stdout


def test_a_gitlab_baseline_is_a_branch(project: Project) -> None:
    """The job that saves makes it and adds to it, also where a test fails; a later job finds it."""
    (fetch,) = (line for line in GITLAB[".gpumem:gpu"]["before_script"] if "ls-remote" in line)
    script, variables = gitlab("gpumem:save")
    upstream = str(project.folder.parent / "upstream")
    own = {
        "CI_REPOSITORY_URL": upstream,
        "BASELINE_PUSH_URL": upstream,
        "CI_COMMIT_SHA": "abc",
        **SIMULATED,
    }
    for number, code in ((1, 0), (2, 1)):
        if code:
            (project.folder / "test_it.py").write_text(
                TESTS + TESTS.replace("test_copy", "test_wrong") + "    assert False\n"
            )
        done = project.run(f"{fetch}\n{script}", {**variables, **own})
        assert done.returncode == code, done.stdout + done.stderr
        shutil.rmtree(project.folder / ".gpumem-baseline")
        fetched = project.run(fetch, {**variables, **own})
        assert fetched.returncode == 0, fetched.stderr
        assert len(list((project.folder / ".gpumem-baseline").glob("*/gpumem/*.json"))) == number
        shutil.rmtree(project.folder / ".gpumem-baseline")
    # A server that does not answer is no empty baseline.
    nowhere = {**variables, **own, "CI_REPOSITORY_URL": f"{upstream}/nowhere"}
    assert project.run(fetch, nowhere).returncode != 0


@pytest.mark.parametrize(
    "job",
    [lambda: step("gate", "Gate"), lambda: step("save", "Save"), lambda: gitlab("gpumem:gate")],
    ids=["GitHub's gate", "GitHub's save", "GitLab's gate"],
)
def test_a_broken_driver_turns_nothing_green(
    project: Project, job: Callable[[], tuple[str, dict[str, str]]]
) -> None:
    done = project.run(*job())
    # GitLab's script ends with `gpumem doctor` already, which is a step of its own at GitHub.
    if done.returncode == 1:
        assert "Nothing can be measured here" in done.stdout
        return
    assert done.returncode == 4, done.stdout + done.stderr
    assert "a broken driver must not turn a pipeline green" in done.stderr


NEEDS_A_GPU, FAILS, IS_BROKEN = (
    "import pytest\npytest.importorskip('no_such_cuda_library')\n",
    "def test_wrong(): assert False\n",
    "import no_such_library\n",
)


@pytest.mark.parametrize(
    ("tests", "gitlabs", "code"),
    [(NEEDS_A_GPU, False, 0), (NEEDS_A_GPU, True, 0), (FAILS, True, 1), (IS_BROKEN, False, 2)],
)
def test_a_suite_that_needs_the_gpu_does_not_block_the_gate(
    project: Project, tests: str, gitlabs: bool, code: int
) -> None:
    project.write("test_it.py", tests)
    job = gitlab("gpumem:simulated")
    if not gitlabs:
        job = step("simulated", "Run on the simulated device")
    assert project.run(*job).returncode == code


GH = """
import json, pathlib, sys
arguments = sys.argv[1:]
calls = pathlib.Path("calls.json")
calls.write_text(json.dumps([*json.loads(calls.read_text() if calls.exists() else "[]"), arguments]))
if "--jq" in arguments:
    query, comments = arguments[arguments.index("--jq") + 1], json.loads(pathlib.Path("comments.json").read_text())
    assert '"github-actions[bot]"' in query and 'startswith("<!-- gpumem -->")' in query
    for one in comments:
        if one["login"] == "github-actions[bot]" and one["body"].startswith("<!-- gpumem -->"):
            print(one["id"])
"""


@pytest.mark.parametrize("own", [False, True])
def test_the_comment_replaces_its_own_earlier_one_only(project: Project, own: bool) -> None:
    (project.folder.parent / "bin" / "gh").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" "$PWD/gh.py" "$@"\n'
    )
    (project.folder.parent / "bin" / "gh").chmod(0o755)
    (project.folder / "gh.py").write_text(GH)
    for card in ("a", "b"):
        (project.folder / "results" / f"gpumem-results-{card}").mkdir(parents=True)
        (project.folder / "results" / f"gpumem-results-{card}" / "summary.md").write_text(
            f"card {card}\n" + "x" * 70_000
        )
    comments = [
        {"id": 1, "login": "github-actions[bot]", "body": "coverage"},
        {"id": 2, "login": "mallory", "body": "<!-- gpumem -->"},
    ]
    comments += [{"id": 3, "login": "github-actions[bot]", "body": "<!-- gpumem -->\nold"}] * own
    (project.folder / "comments.json").write_text(json.dumps(comments))
    script, variables = step("comment", "Comment")
    given = {**variables, "GH_REPO": "we/it", "NUMBER": "7", "RUN": "https://example.org/run/1"}
    done = project.run(f". .venv/bin/activate\n{script}", given)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, written = json.loads((project.folder / "calls.json").read_text())
    where = "repos/we/it/issues/comments/3" if own else "repos/we/it/issues/7/comments"
    assert written[2:5] == ["--method", "PATCH" if own else "POST", where]
    body = (project.folder / "body.md").read_text()
    assert body.startswith("<!-- gpumem -->\n")
    assert "card a\n" in body
    assert "card b\n" in body
    assert len(body) < 65_536
    assert body.endswith("[Reports and results](https://example.org/run/1#artifacts)\n")
