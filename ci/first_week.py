"""Live the first week of a CI owner: run the jobs of both templates on the simulated device.

    python ci/first_week.py                      # both, as docs/ci.md tells the week
    python ci/first_week.py github --until fork  # the first days of one of them

It clones this repository, makes a project with the template of the clone in it, and sends the
events of pushes and pull requests to a small runner: conditions and matrices are evaluated; caches,
artifacts and branches are kept in folders. In place of an installation the jobs use the environment
of this script. A line `expected` or `NOT EXPECTED` follows each check that docs/ci.md promises.
Exits with 1 after one that was not expected. A week takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import pytest_gpumem

ROOT = Path(__file__).resolve().parents[1]
BRANCH = "main"
PROJECT = {
    "pytest.ini": """\
[pytest]
gpumem_budget = 5 ms
gpumem_placements = 2
gpumem_max_regression = 2%
addopts = -p no:cacheprovider
""",
    ".gitignore": "__pycache__\n",
    "pixels.py": "STRIDE = 1\n",
    "test_pixels.py": """\
from pixels import STRIDE
from pytest_gpumem import MiB


def test_blur(gpu_benchmark, device_buffer, gpu_kernels):
    image, out = (device_buffer(16 * MiB * STRIDE, "f4") for _ in range(2))
    gpu_benchmark(gpu_kernels.stride_copy, out, image, STRIDE)
""",
}
SLOW = {"pixels.py": "STRIDE = 4\n"}
FLAKY = {
    "test_flaky.py": """\
import random

from pytest_gpumem import MiB

SIZE = random.choice(range(14, 19)) * MiB  # each process has another one


def test_lottery(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(SIZE, "f4"), device_buffer(SIZE, "f4"))
"""
}
SCRIPTS = {
    "venv": """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then shift 2; set -- -m venv --without-pip "$@"; fi
exec "{python}" "$@"
""",
    "link": """#!/bin/sh
ln -sf "{programs}/gpumem" .venv/bin/gpumem
printf '{packages}' > "$(echo .venv/lib/python*/site-packages)/environment.pth"
""",
    "gh": "#!/bin/sh\nexit 0\n",
}


def say(text: str, mark: str = "") -> None:
    """Print each line after a mark, at once: a step's name stands before its output."""
    for line in text.splitlines():
        print(f"{mark}{line}".rstrip(), flush=True)


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    command += ["-c", "init.defaultBranch=main", "-c", "advice.detachedHead=false", *words]
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stdout}")
    return done.stdout.strip()


class Service:
    """What both services have in common: a repository, the developer's clone, and jobs."""

    name = ""
    template_file = ""

    def __init__(self, folder: Path, plugin: Path) -> None:
        self.folder = folder
        self.origin, self.work = folder / "pixelbox.git", folder / "pixelbox"
        self.kept = folder / "kept"  # caches and artifacts
        self.programs = folder / "bin"
        self.clones = 0
        self.missed: list[str] = []
        for made in (self.kept, self.programs):
            made.mkdir(parents=True)
        git(folder, "init", "-q", "--bare", str(self.origin))
        git(folder, "clone", "-q", str(self.origin), str(self.work))
        self.files = {self.template_file: self.filled_in(plugin)}

    def filled_in(self, plugin: Path) -> str:
        """The template with the lines marked "yours" filled in."""
        packages = [str(Path(pytest_gpumem.__file__).parents[1])]
        packages += [path for path in sys.path if path.endswith("site-packages")]
        for name, text in SCRIPTS.items():
            script = text.replace("{python}", sys.executable)
            script = script.replace("{programs}", str(Path(sys.executable).parent))
            script = script.replace("{packages}", "\\n".join(packages))
            (self.programs / name).write_text(script)
            (self.programs / name).chmod(0o755)
        text = (plugin / "ci" / self.name / "gpumem.yml").read_text(encoding="utf-8")
        link = str(self.programs / "link")
        values = {"PYTHON": str(self.programs / "venv"), "PLUGIN": "none", "INSTALL": link}
        for name, value in {**values, "INSTALL_WITHOUT_GPU": link}.items():
            line = re.compile(rf"^  {name}: .*$", re.MULTILINE)
            text, count = line.subn(f"  {name}: {value}", text)
            assert count == 1, name
        return text

    def commit(self, branch: str, files: Mapping[str, str], message: str) -> None:
        """Push a commit of these files on a branch, which begins at the default branch if new."""
        git(self.work, "fetch", "-q")
        branches = git(self.work, "branch", "--list", "--format=%(refname:short)").split()
        if branch in branches:
            git(self.work, "checkout", "-q", branch)
        elif branch == BRANCH:
            git(self.work, "checkout", "-q", "-B", BRANCH)
        else:
            git(self.work, "checkout", "-q", "-b", branch, f"origin/{BRANCH}")
        for name, text in files.items():
            (self.work / name).parent.mkdir(parents=True, exist_ok=True)
            (self.work / name).write_text(text, encoding="utf-8")
        git(self.work, "add", "-A")
        git(self.work, "commit", "-q", "--allow-empty", "-m", message)
        git(self.work, "push", "-q", "origin", branch)

    def merge(self, branch: str) -> None:
        git(self.work, "checkout", "-q", BRANCH)
        git(self.work, "merge", "-q", "--no-ff", "-m", f"merge {branch}", f"origin/{branch}")
        git(self.work, "push", "-q", "origin", BRANCH)

    def checked_out(self, revision: str) -> Path:
        """A new clone at a revision, as a runner makes it for a job."""
        self.clones += 1
        place = self.folder / "runner" / str(self.clones)
        git(self.folder, "clone", "-q", "--no-checkout", str(self.origin), str(place))
        git(place, "fetch", "-q", "origin", revision)
        git(place, "checkout", "-q", "FETCH_HEAD")
        return place

    def run(self, script: str, place: Path, variables: Mapping[str, str]) -> bool:
        """True if a script ends well on a runner whose device is simulated."""
        environment = {"HOME": os.environ["HOME"], "CI": "true", "CUDA_VISIBLE_DEVICES": ""}
        environment["PATH"] = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        environment |= {"GPUMEM_DEVICE": "sim", "COLUMNS": "120", **variables}
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        say(done.stdout, "      | ")
        if done.returncode:
            say(f"      exit code {done.returncode}")
        return done.returncode == 0

    def expect(self, what: str, result: str, expected: str) -> None:
        """Say whether the pipeline does what docs/ci.md promises."""
        if result == expected:
            say(f"expected: {what}: {result}")
        else:
            self.missed.append(f"{self.name}: {what}: {result}, not {expected}")
            say(f"NOT EXPECTED: {self.missed[-1]}")

    def push(self) -> dict[str, str]:
        """The jobs of a push to the default branch, and how each ends."""
        raise NotImplementedError

    def pull_request(self, branch: str, *, fork: bool = False) -> dict[str, str]:
        """The jobs of a pull request, and how each ends."""
        raise NotImplementedError

    def results(self) -> Path:
        """The folder of the last gate's results."""
        raise NotImplementedError


class Github(Service):
    """GitHub Actions, as far as the template needs it."""

    name = "github"
    template_file = ".github/workflows/gpumem.yml"
    cache: tuple[str, ...] = ()  # keys, the newest last

    def push(self) -> dict[str, str]:
        return self.event({"event_name": "push", "ref": f"refs/heads/{BRANCH}"}, BRANCH)

    def pull_request(self, branch: str, *, fork: bool = False) -> dict[str, str]:
        revision = "refs/pull/1/merge"
        git(self.work, "fetch", "-q")
        git(self.work, "checkout", "-q", "--detach", f"origin/{BRANCH}")
        git(self.work, "merge", "-q", "--no-ff", "-m", "merge it", f"origin/{branch}")
        git(self.work, "push", "-qf", "origin", f"HEAD:{revision}")
        head = {"repo": {"full_name": "mallory/pixelbox" if fork else "ada/pixelbox"}}
        github = {"event_name": "pull_request", "ref": revision, "base_ref": BRANCH}
        return self.event(
            {**github, "event": {"pull_request": {"head": head, "number": 1}}}, revision
        )

    def event(self, github: dict[str, Any], revision: str) -> dict[str, str]:
        """Run every job whose condition an event meets."""
        say(f"\n=== {github['event_name']} of {github['ref']}")
        workflow = yaml.safe_load(self.files[self.template_file])
        event = {**github.get("event", {}), "repository": {"default_branch": BRANCH}}
        names = {"repository": "ada/pixelbox", "run_id": str(self.clones), "run_attempt": "1"}
        github = {**github, **names, "event": event}
        shutil.rmtree(self.kept / "artifacts", ignore_errors=True)
        ended: dict[str, str] = {}
        for name, job in workflow["jobs"].items():
            needs = job.get("needs", [])
            if isinstance(needs, str):
                needs = [needs]
            context: dict[str, Any] = {"github": github, "vars": {}, "runner": {"os": "Linux"}}
            context["needs"] = {need: {"result": ended[need]} for need in needs}
            context["well"] = all(ended[need] == "success" for need in needs)
            condition = str(job.get("if", "success()"))
            if not re.search(r"\b(success|failure|always|cancelled)\(\)", condition):
                condition = f"success() && ({condition})"
            if not value(condition, context):
                say(f"--- job {name}: skipped")
                ended[name] = "skipped"
                continue
            matrix = job.get("strategy", {}).get("matrix", {})
            context["matrix"] = {key: first(values, context) for key, values in matrix.items()}
            well = self.job(name, job, {**workflow["env"], **job.get("env", {})}, context, revision)
            ended[name] = "success" if well else "failure"
            say(f"--- job {name}: {ended[name]}")
        return ended

    def job(
        self, name: str, job: Any, env: dict[str, str], context: dict[str, Any], revision: str
    ) -> bool:
        """True if every step ends well."""
        say(f"--- job {name}")
        place = self.folder / "runner" / f"{name}-{self.clones}"
        place.mkdir(parents=True)
        context = {**context, "well": True}
        for step in job["steps"]:
            if not value(str(step.get("if", "success()")), context):
                continue
            uses = step.get("uses", "").partition("@")[0]
            say(f"    step: {step.get('name', uses)}")
            if uses == "actions/checkout":
                place = self.checked_out(revision)
            elif uses:
                options = {}
                for key, text in step.get("with", {}).items():
                    options[key] = filled(str(text), context)
                self.action(uses, options, place)
            else:
                variables = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(place)}
                variables["GITHUB_STEP_SUMMARY"] = str(place.with_suffix(".summary"))
                for key, text in {**env, **step.get("env", {})}.items():
                    variables[key] = filled(str(text), context)
                if not self.run(step["run"], place, variables):
                    context["well"] = False
        return bool(context["well"])

    def action(self, name: str, options: dict[str, str], place: Path) -> None:
        """Do what an action of the template does with its folders."""
        key = options.get("key", "").replace("/", "+")
        if name == "actions/cache/save":
            shutil.copytree(place / options["path"], self.kept / key)
            self.cache = (*self.cache, key)
        elif name == "actions/cache/restore":
            prefix = options["restore-keys"].strip().replace("/", "+")
            hits = [entry for entry in self.cache if entry.startswith(prefix)]
            if hits:
                shutil.copytree(self.kept / hits[-1], place / options["path"])
        elif name == "actions/upload-artifact":
            source, target = place / options["path"], self.kept / "artifacts" / options["name"]
            if source.is_dir():
                shutil.copytree(source, target)
        elif name == "actions/download-artifact":
            for source in (self.kept / "artifacts").glob(options["pattern"]):
                shutil.copytree(source, place / options["path"] / source.name)

    def results(self) -> Path:
        return next((self.kept / "artifacts").glob("gpumem-results-*"))


def first(values: Any, context: Mapping[str, Any]) -> Any:
    """The first value of a list of a matrix, which an expression may give."""
    return (value(values, context) if isinstance(values, str) else values)[0]


def filled(text: str, context: Mapping[str, Any]) -> str:
    """Text whose expressions are filled in."""

    def text_of(match: re.Match[str]) -> str:
        result = value(match[1], context)
        return str(result).lower() if isinstance(result, bool) else str(result)

    return re.sub(r"\$\{\{(.*?)\}\}", text_of, text, flags=re.DOTALL)


def value(expression: str, context: Mapping[str, Any]) -> Any:
    """The value of an expression of GitHub, by Python's words for it."""

    def at(name: str) -> Any:
        place: Any = context
        for part in name.split("."):
            place = place.get(part, "") if isinstance(place, Mapping) else ""
        return place

    text = expression.strip().removeprefix("${{").removesuffix("}}").strip()
    parts = re.split(r"('[^']*')", text)  # every second part is a quoted text
    for index in range(0, len(parts), 2):
        part = parts[index].replace("&&", " and ").replace("||", " or ")
        part = re.sub(r"!(?!=)", " not ", part)
        names = r"\b(?:github|matrix|needs|vars|runner)(?:\.\w+)+"
        parts[index] = re.sub(names, r"at('\g<0>')", part)
    known: dict[str, Any] = {
        "at": at,
        "fromJSON": json.loads,
        "startsWith": str.startswith,
        "format": lambda form, *values: form.format(*values),
        "hashFiles": lambda *_: "files",
        "always": lambda: True,
        "success": lambda: context["well"],
        "failure": lambda: not context["well"],
        "cancelled": lambda: False,
    }
    return eval(" ".join("".join(parts).split()), known)


class Gitlab(Service):
    """GitLab CI, as far as the template needs it."""

    name = "gitlab"
    template_file = "gpumem.yml"

    def push(self) -> dict[str, str]:
        protected = {"CI_COMMIT_BRANCH": BRANCH, "CI_COMMIT_REF_PROTECTED": "true"}
        return self.pipeline({"CI_PIPELINE_SOURCE": "push", **protected}, BRANCH)

    def pull_request(self, branch: str, *, fork: bool = False) -> dict[str, str]:
        variables = {
            "CI_PIPELINE_SOURCE": "merge_request_event",
            "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": BRANCH,
            "CI_MERGE_REQUEST_SOURCE_PROJECT_ID": "2" if fork else "1",
            "CI_MERGE_REQUEST_PROJECT_ID": "1",
        }
        return self.pipeline(variables, branch)

    def pipeline(self, variables: dict[str, str], revision: str) -> dict[str, str]:
        """Run every job whose rules are met, stage by stage."""
        say(f"\n=== {variables['CI_PIPELINE_SOURCE']} of {revision}")
        template = yaml.safe_load(self.files[self.template_file])
        variables = {**template["variables"], **variables, "CI_DEFAULT_BRANCH": BRANCH}
        variables |= {"CI_REPOSITORY_URL": str(self.origin), "CI_COMMIT_SHA": revision}
        ended: dict[str, str] = {}
        for stage in template["stages"]:
            if "failure" in ended.values():
                break
            for name, part in template.items():
                if not name.startswith("gpumem:"):
                    continue
                job = {**template.get(part.get("extends", ""), {}), **part}
                if job["stage"] == stage and any(met(r["if"], variables) for r in job["rules"]):
                    well = self.job(name, job, variables, revision)
                    ended[name.partition(":")[2]] = "success" if well else "failure"
        return ended

    def job(self, name: str, job: Any, variables: Mapping[str, str], revision: str) -> bool:
        say(f"--- job {name}")
        place = self.checked_out(revision)
        environment = {"CARD": "gpu", "CI_PROJECT_DIR": str(place)}
        for key, text in {**variables, **job.get("variables", {})}.items():
            environment[key] = str(text)
        if "BASELINE_PUSH_URL" in environment:
            environment["BASELINE_PUSH_URL"] = str(self.origin)  # which BASELINE_TOKEN opens
        script = "\n".join([*job.get("before_script", []), *job["script"]])
        well = self.run(script, place, environment)
        if (place / "gpumem-results").is_dir():
            shutil.rmtree(self.kept / "results", ignore_errors=True)
            shutil.copytree(place / "gpumem-results", self.kept / "results")
        return well

    def results(self) -> Path:
        return self.kept / "results"


def met(rule: str, variables: Mapping[str, str]) -> bool:
    """True if a rule of GitLab is met."""
    text = re.sub(r"\$(\w+)", lambda match: repr(variables.get(match[1], "")), rule)
    return bool(eval(text.replace("&&", " and ").replace("||", " or ")))


def verdict(jobs: Mapping[str, str]) -> str:
    """The required check: GitHub's job `verdict`, GitLab's pipeline."""
    if "comment" in jobs:
        return jobs["verdict"]
    return "failure" if "failure" in jobs.values() else "success"


# The days


def set_up(at: Service) -> None:
    at.commit(BRANCH, {**PROJECT, **at.files}, "Gate performance")
    at.commit("first", {"README": "pixels\n"}, "Say what it is")
    at.expect("a first run without a baseline", verdict(at.pull_request("first")), "success")


def fork(at: Service) -> None:
    at.commit("theirs", {"README": "mine now\n"}, "Send a change")
    jobs = at.pull_request("theirs", fork=True)
    at.expect("the pull request of a fork", verdict(jobs), "failure")
    at.expect("its gate", jobs.get("gate", "skipped"), "skipped")


def save(at: Service) -> None:
    at.expect("the job save", at.push()["save"], "success")


def unchanged(at: Service) -> None:
    at.commit("docs", {"README": "pixels, blurred\n"}, "Say more")
    at.expect("a pull request that changes nothing", verdict(at.pull_request("docs")), "success")


def slow(at: Service) -> None:
    at.commit("slow", SLOW, "Skip three pixels")
    at.expect("a pull request with a slow-down", verdict(at.pull_request("slow")), "failure")


def accept(at: Service) -> None:
    git(at.work, "checkout", "-q", "slow")
    shutil.copytree(at.results(), at.work / "gpumem-results")
    command = [sys.executable, "-c", "from pytest_gpumem.cli import main; main()", "accept"]
    command += ["test_pixels.py::test_blur", "--reason", "a smaller image"]
    subprocess.run(command, cwd=at.work, check=True)
    shutil.rmtree(at.work / "gpumem-results")
    at.commit("slow", {}, "Accept the slow-down")
    at.expect("the same with its acceptance", verdict(at.pull_request("slow")), "success")
    at.merge("slow")
    at.expect("the save after its merge", at.push()["save"], "success")
    at.commit("after", {"README": "pixels, skipped\n"}, "Say so")
    at.expect("the next pull request", verdict(at.pull_request("after")), "success")


def flaky(at: Service) -> None:
    at.commit(BRANCH, FLAKY, "Add a lottery")
    at.expect("the save of a flaky row", at.push()["save"], "success")
    at.commit("lottery", {"README": "numbers\n"}, "Say numbers")
    at.expect("a flaky row", verdict(at.pull_request("lottery")), "failure")


DAYS = (set_up, fork, save, unchanged, slow, accept, flaky)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("service", nargs="?", choices=["github", "gitlab"], help="default: both")
    names = [day.__name__ for day in DAYS]
    parser.add_argument("--until", choices=names, default=names[-1], help="the last day")
    given = parser.parse_args()
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="first-week-") as folder:
        plugin = Path(folder, "pytest-gpumem")
        git(Path(folder), "clone", "-q", str(ROOT), str(plugin))
        for kind in (Github, Gitlab):
            if given.service in (None, kind.name):
                at = kind(Path(folder, kind.name), plugin)
                for day in DAYS[: names.index(given.until) + 1]:
                    say(f"\n##### {kind.__name__}: {day.__name__}")
                    day(at)
                missed += at.missed
    say("")
    for line in missed:
        say(f"missed: {line}")
    say("not all as docs/ci.md says" if missed else "all as docs/ci.md says")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
