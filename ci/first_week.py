"""Live the first week of a CI owner: run the jobs of the GitHub and the GitLab template, step by step, on the simulated device.

    python ci/first_week.py                # both, as docs/ci.md tells the week; every step's output is printed
    python ci/first_week.py github draft   # one day of one of them, with the days that it needs
    python ci/first_week.py --install      # with the environments that the templates install; needs a package index

It clones this repository, makes a project with the template of the clone in it, and sends the events of pushes and pull requests to a
small runner: conditions and matrices are evaluated; caches, artifacts and comments are kept in folders. A line `expected` or `NOT EXPECTED`
follows each check that docs/ci.md promises. Exits with 1 after one that was not expected. A week takes about four minutes.
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
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BRANCH = "main"
PROJECT = {
    "pyproject.toml": """\
[project]
name = "pixelbox"
version = "1"
[tool.setuptools]
py-modules = ["pixels"]
[tool.pytest.ini_options]
gpumem_budget = "5 ms"
gpumem_placements = "2"
gpumem_max_regression = "2%"
addopts = "-p no:cacheprovider"
""",
    ".gitignore": "__pycache__\n*.egg-info\n",
    "pixels.py": "STRIDE = 1\n",
    "test_pixels.py": """\
from pixels import STRIDE
from pytest_gpumem import MiB


def test_blur(gpu_benchmark, device_buffer, gpu_kernels):
    image, out = (device_buffer(16 * MiB * STRIDE, "f4") for _ in range(2))
    gpu_benchmark(gpu_kernels.stride_copy, out, image, STRIDE)


def test_scale(gpu_benchmark, device_buffer, gpu_kernels):
    a, b, c = (device_buffer(16 * MiB, "f4") for _ in range(3))
    gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)
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
# In place of an installation: the environment of this script, which a virtual environment without pip uses.
LINK = (
    'ln -sf "{programs}/gpumem" .venv/bin/gpumem; echo "{packages}" > "$(echo .venv/lib/python*/site-packages)/here.pth"; '
    'echo "(in place of an installation: the environment of this script)"'
)
VENV = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then shift 2; set -- -m venv --without-pip "$@"; fi
exec "{python}" "$@"
"""
GH = """#!/usr/bin/env python3
import pathlib, re, sys
words, place = sys.argv[1:], pathlib.Path("{place}")
if "--jq" in words:
    print("1" if place.exists() else "")
else:
    place.write_text(pathlib.Path("body.md").read_text())
    print("comment", "replaced" if "PATCH" in words else "made")
"""


def say(text: str, mark: str = "") -> None:
    """Print text, each line after a mark, at once: the output of a step and its name keep their order."""
    print("\n".join(f"{mark}{line}".rstrip() for line in text.splitlines()), flush=True)


def git(folder: Path, *words: str) -> str:
    who = (
        "-c",
        "user.name=Ada",
        "-c",
        "user.email=ada@example.org",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "advice.detachedHead=false",
    )
    done = subprocess.run(
        ["git", *who, *words],
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
    """What both services have in common: a repository, a clone of the developer, and jobs that run scripts."""

    name = ""

    def __init__(self, folder: Path, plugin: Path, *, install: bool) -> None:
        self.folder = folder
        self.origin, self.work = folder / "pixelbox.git", folder / "pixelbox"
        self.kept = folder / "kept"  # caches, artifacts, comments
        self.kept.mkdir(parents=True)
        self.home = folder / "bin"
        self.home.mkdir()
        self.runs = 0
        self.missed: list[str] = []
        git(folder, "init", "-q", "--bare", str(self.origin))
        git(folder, "clone", "-q", str(self.origin), str(self.work))
        self.template = self.filled_in(plugin, install=install)

    def filled_in(self, plugin: Path, *, install: bool) -> str:
        """The template with the lines marked "yours" filled in."""
        text = (plugin / "ci" / self.name / "gpumem.yml").read_text(encoding="utf-8")
        revision = git(plugin, "rev-parse", "HEAD")
        given = {"PLUGIN": f"git+file://{plugin}@{revision}"}
        if not install:
            import pytest_gpumem

            packages = [
                Path(pytest_gpumem.__file__).parents[1],
                *(Path(one) for one in sys.path if one.endswith("site-packages")),
            ]
            link = LINK.format(
                programs=Path(sys.executable).parent, packages="\\n".join(map(str, packages))
            )
            (self.home / "venv").write_text(VENV.format(python=sys.executable))
            (self.home / "venv").chmod(0o755)
            (self.home / "link").write_text(
                f"#!/bin/bash\n{link.replace('echo ', 'echo -e ', 1)}\n"
            )
            (self.home / "link").chmod(0o755)
            given |= {
                "PYTHON": str(self.home / "venv"),
                "INSTALL": str(self.home / "link"),
                "INSTALL_WITHOUT_GPU": str(self.home / "link"),
            }
        for name, value in given.items():
            text, count = re.subn(
                rf"^  {name}: .*$", f"  {name}: {value}", text, flags=re.MULTILINE
            )
            assert count == 1, name
        return text

    def commit(
        self, branch: str, files: Mapping[str, str], message: str, *, at: str = BRANCH
    ) -> None:
        """A commit of these files on a branch, which begins at another one if it is new; pushed."""
        if branch == BRANCH:
            git(
                self.work,
                "checkout",
                "-q",
                "-B",
                BRANCH,
                *([f"origin/{BRANCH}"] if git(self.work, "branch", "-r") else []),
            )
        elif branch not in git(self.work, "branch", "--list", "--format=%(refname:short)").split():
            git(self.work, "checkout", "-q", "-b", branch, f"origin/{at}")
        else:
            git(self.work, "checkout", "-q", branch)
        for name, text in files.items():
            (self.work / name).parent.mkdir(parents=True, exist_ok=True)
            (self.work / name).write_text(text, encoding="utf-8")
        git(self.work, "add", "-A")
        git(self.work, "commit", "-q", "--allow-empty", "-m", message)
        git(self.work, "push", "-q", "origin", branch)

    def merge(self, branch: str) -> None:
        """The branch of a pull request into the default branch."""
        git(self.work, "checkout", "-q", "-B", BRANCH, f"origin/{BRANCH}")
        git(self.work, "merge", "-q", "--no-ff", "-m", f"merge {branch}", f"origin/{branch}")
        git(self.work, "push", "-q", "origin", BRANCH)
        git(self.work, "fetch", "-q")

    def checked_out(self, revision: str) -> Path:
        """A new clone at a revision, as a runner makes it for a job."""
        place = self.folder / "runner" / f"{self.runs}"
        self.runs += 1
        git(self.folder, "clone", "-q", "--no-checkout", str(self.origin), str(place))
        git(place, "fetch", "-q", "origin", revision)
        git(place, "checkout", "-q", "FETCH_HEAD")
        return place

    def run(self, script: str, place: Path, variables: Mapping[str, str]) -> int:
        """A script to its end, on a runner without a GPU. What a device measures is simulated: `--gpumem-device sim`."""
        environment = {
            name: os.environ[name]
            for name in ("PATH", "HOME", "LANG", "USER")
            if name in os.environ
        }
        environment["PATH"] = f"{self.home}{os.pathsep}{environment['PATH']}"
        environment |= {
            "CI": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "GPUMEM_DEVICE": "sim",
            "COLUMNS": "140",
            **variables,
        }
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
        return done.returncode

    def expect(self, what: str, found: object, expected: object) -> None:
        """Say whether the pipeline did what docs/ci.md promises."""
        say(
            f"{'expected' if found == expected else 'NOT EXPECTED'}: {what}: {found}"
            + ("" if found == expected else f", not {expected}")
        )
        if found != expected:
            self.missed.append(f"{self.name}: {what}: {found}, not {expected}")


class Github(Service):
    """GitHub Actions, as far as the template needs it."""

    name = "github"

    def __init__(self, folder: Path, plugin: Path, *, install: bool) -> None:
        super().__init__(folder, plugin, install=install)
        self.files = {".github/workflows/gpumem.yml": self.template}
        self.cache: list[str] = []  # keys, the newest last
        (self.home / "gh").write_text(GH.format(place=self.kept / "comment.md"))
        (self.home / "gh").chmod(0o755)

    def push(self) -> dict[str, str]:
        """The jobs of a push to the default branch, and how each ended."""
        return self.event({"event_name": "push", "ref": f"refs/heads/{BRANCH}"}, BRANCH)

    def pull_request(
        self, branch: str, *, fork: bool = False, draft: bool = False, action: str = "opened"
    ) -> dict[str, str]:
        """The jobs of a pull request, on the merge of its branch with the default branch."""
        git(self.work, "fetch", "-q")
        git(self.work, "checkout", "-q", "--detach", f"origin/{BRANCH}")
        git(
            self.work, "merge", "-q", "--no-ff", "-m", "merge of a pull request", f"origin/{branch}"
        )
        git(self.work, "push", "-qf", "origin", "HEAD:refs/pull/1/merge")
        head = {"repo": {"full_name": "mallory/pixelbox" if fork else "ada/pixelbox"}}
        event = {"pull_request": {"head": head, "draft": draft, "number": 1}, "action": action}
        revision = "refs/pull/1/merge"
        return self.event(
            {"event_name": "pull_request", "ref": revision, "base_ref": BRANCH, "event": event},
            revision,
        )

    def event(self, github: dict[str, Any], revision: str) -> dict[str, str]:
        """Every job whose condition an event meets, by the workflow of its revision."""
        say(f"\n=== {github['event_name']} of {github['ref']}")
        file = git(
            self.work,
            "show",
            f"{'HEAD' if 'pull' in revision else f'origin/{BRANCH}'}:.github/workflows/gpumem.yml",
        )
        workflow = yaml.safe_load(file)
        types = (workflow[True].get(github["event_name"]) or {}).get(
            "types", ["opened", "synchronize", "reopened"]
        )
        if github["event_name"] == "pull_request" and github["event"]["action"] not in types:
            say("    (no workflow begins by it)")
            return {}
        github |= {
            "repository": "ada/pixelbox",
            "run_id": str(self.runs + 1000),
            "run_attempt": "1",
            "token": "t",
            "server_url": "https://git.example",
        }
        github["event"] = {**github.get("event", {}), "repository": {"default_branch": BRANCH}}
        shutil.rmtree(self.kept / "artifacts", ignore_errors=True)
        ended: dict[str, str] = {}
        for name, job in workflow["jobs"].items():
            needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
            context = {
                "github": github,
                "vars": {},
                "runner": {"os": "Linux"},
                "needs": {one: {"result": ended[one]} for one in needs},
            }
            condition = str(job.get("if", "success()"))
            well = all(ended[one] == "success" for one in needs)
            if not re.search(r"\b(success|failure|always|cancelled)\(\)", condition):
                condition = f"success() && ({condition})"
            if not self.value(condition, context, well):
                say(f"--- job {name}: skipped")
                ended[name] = "skipped"
                continue
            results = [
                self.job(name, job, {**context, "matrix": one}, workflow["env"], revision)
                for one in self.matrix(job, context)
            ]
            ended[name] = "success" if all(results) else "failure"
        return ended

    def matrix(self, job: dict[str, Any], context: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The values of each job of a matrix; of one list each, the others are of one value."""
        lists = {
            name: self.value(values, context, True) if isinstance(values, str) else values
            for name, values in job.get("strategy", {}).get("matrix", {}).items()
        }
        for index in range(max(map(len, lists.values()), default=1)):
            yield {name: values[min(index, len(values) - 1)] for name, values in lists.items()}

    def job(
        self,
        name: str,
        job: dict[str, Any],
        context: dict[str, Any],
        env: Mapping[str, Any],
        revision: str,
    ) -> bool:
        """True if every step of it did well."""
        shown = ", ".join(str(one) for one in context["matrix"].values())
        say(f"--- job {job.get('name', name)}{f' ({shown})' if shown else ''}")
        place, well = self.folder / "runner" / f"{name}-{self.runs}", True
        place.mkdir(parents=True)
        summary = place.with_suffix(".summary")
        for step in job["steps"]:
            if not self.value(str(step.get("if", "success()")), context, well):
                continue
            title = step.get("name", step.get("uses", "").partition("@")[0])
            say(f"    step: {title}")
            own = {**env, **job.get("env", {}), **step.get("env", {})}
            variables = {
                key: str(self.text(str(value), context, well)) for key, value in own.items()
            }
            if "run" in step:
                variables |= {
                    "GITHUB_ACTIONS": "true",
                    "GITHUB_STEP_SUMMARY": str(summary),
                    "GITHUB_WORKSPACE": str(place),
                }
                code = self.run(step["run"], place, variables)
                if code:
                    say(f"      exit code {code}")
                well = well and code == 0
            else:
                given = {
                    key: self.text(str(value), context, well)
                    for key, value in step.get("with", {}).items()
                }
                found = self.action(step["uses"].partition("@")[0], given, place, revision)
                place = found if found is not None else place
        say(f"--- {job.get('name', name)}: {'success' if well else 'failure'}")
        return well

    def action(self, name: str, given: dict[str, str], place: Path, revision: str) -> Path | None:
        """An action that the template uses; the folder of a checkout, which later steps run in."""
        key = given.get("key", "").replace("/", "+")
        if name == "actions/checkout":
            return self.checked_out(revision)
        if name in ("actions/cache/restore", "actions/cache/save"):
            if name.endswith("save"):
                shutil.copytree(place / given["path"], self.kept / "cache" / key)
                self.cache.append(key)
                say("      | cache saved")
            else:
                prefix = given["restore-keys"].strip().replace("/", "+")
                hits = [one for one in self.cache if one == key or one.startswith(prefix)]
                if hits:
                    shutil.copytree(
                        self.kept / "cache" / hits[-1], place / given["path"], dirs_exist_ok=True
                    )
                say(f"      | {'cache restored' if hits else 'no cache yet'}")
        elif name == "actions/upload-artifact":
            here, there = place / given["path"], self.kept / "artifacts" / given["name"]
            if not here.exists():
                say(f"      | no {given['path']}")
                return None
            there.mkdir(parents=True, exist_ok=True)
            for one in here.iterdir() if here.is_dir() else [here]:
                shutil.copy(one, there)
            say(f"      | {given['name']}: {' '.join(sorted(one.name for one in there.iterdir()))}")
        elif name == "actions/download-artifact":
            for one in (self.kept / "artifacts").glob(given["pattern"]):
                shutil.copytree(one, place / given["path"] / one.name)
        else:
            assert name == "actions/cache", name
        return None

    def text(self, text: str, context: Mapping[str, Any], well: bool) -> str:
        """Text whose expressions are filled in."""
        return re.sub(
            r"\$\{\{(.*?)\}\}",
            lambda found: str(self.value(found[1], context, well)),
            text,
            flags=re.DOTALL,
        )

    def value(self, expression: str, context: Mapping[str, Any], well: bool) -> Any:
        """The value of an expression, by Python's words for GitHub's."""

        def at(name: str) -> Any:
            found: Any = context
            for one in name.split("."):
                found = found.get(one, "") if isinstance(found, Mapping) else ""
            return found

        inner = expression.strip().removeprefix("${{").removesuffix("}}").strip()
        parts = re.split(r"('[^']*')", inner)
        for index in range(0, len(parts), 2):
            part = parts[index].replace("&&", " and ").replace("||", " or ")
            part = re.sub(r"!(?!=)", " not ", part)
            parts[index] = re.sub(
                r"\b(?:github|matrix|needs|vars|runner)(?:\.\w+)+",
                lambda found: f"at({found[0]!r})",
                part,
            )
        known: dict[str, Any] = {
            "at": at,
            "true": True,
            "false": False,
            "fromJSON": json.loads,
            "format": lambda form, *values: form.format(*values),
            "hashFiles": lambda *_: "files",
            "always": lambda: True,
            "success": lambda: well,
            "failure": lambda: not well,
            "cancelled": lambda: False,
        }
        return eval(" ".join("".join(parts).split()), known)

    def downloaded(self) -> None:
        """The results of the gate, in the working tree of the developer."""
        shutil.rmtree(self.work / "gpumem-results", ignore_errors=True)
        shutil.copytree(
            next((self.kept / "artifacts").glob("gpumem-results-*")), self.work / "gpumem-results"
        )


class Gitlab(Service):
    """GitLab CI, as far as the template needs it."""

    name = "gitlab"

    def __init__(self, folder: Path, plugin: Path, *, install: bool) -> None:
        super().__init__(folder, plugin, install=install)
        self.files = {
            "gpumem.yml": self.template,
            ".gitlab-ci.yml": "include: {local: gpumem.yml}\n",
        }

    def push(self) -> dict[str, str]:
        """The jobs of a push to the default branch, and how each ended."""
        return self.pipeline(
            {
                "CI_PIPELINE_SOURCE": "push",
                "CI_COMMIT_BRANCH": BRANCH,
                "CI_COMMIT_REF_PROTECTED": "true",
            },
            BRANCH,
        )

    def pull_request(
        self, branch: str, *, fork: bool = False, draft: bool = False, action: str = "opened"
    ) -> dict[str, str]:
        """The jobs of a merge request. GitLab runs them for a draft too, which it does not let anybody merge."""
        source = {
            "CI_PIPELINE_SOURCE": "merge_request_event",
            "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": BRANCH,
        }
        project = {
            "CI_MERGE_REQUEST_SOURCE_PROJECT_ID": "2" if fork else "1",
            "CI_MERGE_REQUEST_PROJECT_ID": "1",
        }
        return self.pipeline({**source, **project}, branch)

    def pipeline(self, given: dict[str, str], revision: str) -> dict[str, str]:
        """Every job whose rules are met, stage by stage."""
        say(f"\n=== {given['CI_PIPELINE_SOURCE']} of {revision}")
        place = self.checked_out(revision)
        template = yaml.safe_load((place / "gpumem.yml").read_text(encoding="utf-8"))
        given |= {
            "CI_DEFAULT_BRANCH": BRANCH,
            "CI_REPOSITORY_URL": str(self.origin),
            "CI_PROJECT_DIR": str(place),
            "CI_COMMIT_SHA": revision,
        }
        ended: dict[str, str] = {}
        for stage in template["stages"]:
            if "failure" in ended.values():
                break
            for name, part in template.items():
                if not name.startswith("gpumem:"):
                    continue
                job = {**template.get(part.get("extends", ""), {}), **part}
                if job["stage"] == stage and any(
                    self.met(rule["if"], given) for rule in job["rules"]
                ):
                    ended[name] = self.job(name, job, {**template["variables"], **given}, revision)
        return ended

    def met(self, rule: str, given: Mapping[str, str]) -> bool:
        text = re.sub(r"\$(\w+)", lambda found: repr(given.get(found[1], "")), rule)
        return bool(eval(text.replace("&&", " and ").replace("||", " or ")))

    def job(self, name: str, job: dict[str, Any], variables: dict[str, Any], revision: str) -> str:
        """How it ended."""
        say(f"--- job {name}")
        place = self.checked_out(revision)
        own = {
            key: str(value)
            for key, value in {**variables, "CARD": "gpu", **job.get("variables", {})}.items()
        }
        if "BASELINE_PUSH_URL" in own:
            own["BASELINE_PUSH_URL"] = str(self.origin)  # which BASELINE_TOKEN opens
        lines = [*job.get("before_script", []), *job["script"]]
        # As GitLab's runner does: each command is printed before it runs.
        shown = "\n".join(f"echo {_quoted('$ ' + line.splitlines()[0])}\n{line}" for line in lines)
        code = self.run(shown, place, own)
        shutil.rmtree(self.kept / name, ignore_errors=True)
        for path in job.get("artifacts", {}).get("paths", []):
            if (place / path).is_dir():
                shutil.copytree(place / path, self.kept / name)
        say(f"--- {name}: {'success' if code == 0 else f'failure, exit code {code}'}")
        return "success" if code == 0 else "failure"

    def downloaded(self) -> None:
        """The results of the gate, in the working tree of the developer."""
        shutil.rmtree(self.work / "gpumem-results", ignore_errors=True)
        shutil.copytree(self.kept / "gpumem:gate", self.work / "gpumem-results")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# The days. Each takes a service, after the days that it needs.


def set_up(at: Github | Gitlab) -> None:
    say("\n##### The template goes in, and the first pull request comes before anything was saved")
    at.commit(BRANCH, {**PROJECT, **at.files}, "Gate performance")
    at.commit("first", {"README": "pixels\n"}, "Say what it is")
    at.expect("a first run without a baseline", verdict(at.pull_request("first")), "success")


def save(at: Github | Gitlab) -> None:
    say("\n##### The default branch saves a baseline")
    at.expect("the job save", ended(at.push(), "save"), "success")


def unchanged(at: Github | Gitlab) -> None:
    say("\n##### A pull request that changes nothing")
    at.commit("docs", {"README": "pixels, blurred\n"}, "Say more")
    at.expect("a pull request that changes nothing", verdict(at.pull_request("docs")), "success")


def slow(at: Github | Gitlab) -> None:
    say("\n##### A pull request with a slow-down")
    at.commit("slow", SLOW, "Skip three pixels")
    at.expect("a pull request with a slow-down", verdict(at.pull_request("slow")), "failure")


def accept(at: Github | Gitlab) -> None:
    say("\n##### It is meant: the file of gpumem accept, reviewed with the change")
    git(at.work, "checkout", "-q", "slow")
    at.downloaded()
    command = [
        sys.executable,
        "-c",
        "from pytest_gpumem.cli import main; main()",
        "accept",
        "test_pixels.py::test_blur",
    ]
    say('$ gpumem accept test_pixels.py::test_blur --reason "a smaller image"')
    done = subprocess.run(
        [*command, "--reason", "a smaller image"],
        cwd=at.work,
        capture_output=True,
        text=True,
        check=False,
    )
    say(done.stdout + done.stderr, "      | ")
    shutil.rmtree(at.work / "gpumem-results")
    at.commit("slow", {}, "Accept the slow-down")
    at.expect("the same with its acceptance", verdict(at.pull_request("slow")), "success")
    at.merge("slow")
    at.expect("the save after its merge", ended(at.push(), "save"), "success")
    at.commit("after", {"README": "pixels, skipped\n"}, "Say so")
    at.expect("the next pull request", verdict(at.pull_request("after")), "success")


def fork(at: Github | Gitlab) -> None:
    say("\n##### The pull request of a fork")
    at.commit("theirs", {"README": "mine now\n"}, "Send a change")
    ran = at.pull_request("theirs", fork=True)
    at.expect("the pull request of a fork", verdict(ran), "failure")
    at.expect("its gate", ended(ran, "gate"), "skipped")


def draft(at: Github | Gitlab) -> None:
    say("\n##### A draft")
    at.commit("draft", {"README": "to do\n"}, "Begin")
    at.expect("a draft", ended(at.pull_request("draft", draft=True), "gate"), "success")
    if not isinstance(at, Github):
        return
    say("\n##### A draft, where the template leaves drafts out as docs/ci.md describes it")
    name, text = ".github/workflows/gpumem.yml", at.template
    text = text.replace(
        "  pull_request: #",
        "  pull_request:\n    types: [opened, reopened, synchronize, ready_for_review] #",
    )
    own = "github.event.pull_request.head.repo.full_name == github.repository"
    text = text.replace(own, f"{own} && github.event.pull_request.draft == false")
    at.commit("draft", {name: text}, "Leave drafts out")
    ran = at.pull_request("draft", draft=True)
    at.expect(
        "a draft that is left out", (ended(ran, "gate"), verdict(ran)), ("skipped", "failure")
    )
    at.expect(
        "the same, ready for review",
        verdict(at.pull_request("draft", action="ready_for_review")),
        "success",
    )


def flaky(at: Github | Gitlab) -> None:
    say("\n##### A flaky row: each process has another size")
    at.commit(BRANCH, FLAKY, "Add a lottery")
    at.expect("its save", ended(at.push(), "save"), "success")
    at.commit("lottery", {"README": "numbers\n"}, "Say numbers")
    at.expect("a flaky row", verdict(at.pull_request("lottery")), "failure")


DAYS: Mapping[str, tuple[Callable[[Github | Gitlab], None], tuple[str, ...]]] = {
    "set-up": (set_up, ()),
    "save": (save, ("set-up",)),
    "unchanged": (unchanged, ("save",)),
    "slow": (slow, ("save",)),
    "accept": (accept, ("slow",)),
    "fork": (fork, ("set-up",)),
    "draft": (draft, ("save",)),
    "flaky": (flaky, ("set-up",)),
}


def ended(jobs: Mapping[str, str], name: str) -> str:
    """How the job of this name ended, of either template."""
    return next(
        (result for job, result in jobs.items() if job.rpartition(":")[2] == name), "skipped"
    )


def verdict(jobs: Mapping[str, str]) -> str:
    """The required check: of GitHub the job `verdict`, of GitLab the pipeline."""
    return (
        jobs["verdict"]
        if "verdict" in jobs
        else "failure"
        if "failure" in jobs.values()
        else "success"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("service", nargs="?", choices=["github", "gitlab", "both"], default="both")
    parser.add_argument(
        "days", nargs="*", metavar="DAY", help=f"of {', '.join(DAYS)}; without one, all"
    )
    parser.add_argument("--install", action="store_true", help="install what the templates install")
    given = parser.parse_args()
    if unknown := [day for day in given.days if day not in DAYS]:
        parser.error(f"{unknown[0]} is no day; accepted are {', '.join(DAYS)}")
    wanted, begun, missed = list(given.days or DAYS), time.monotonic(), list[str]()
    for day in list(wanted):
        need = DAYS[day][1]
        while need:
            wanted += need
            need = DAYS[need[0]][1]
    with tempfile.TemporaryDirectory(prefix="first-week-") as folder:
        plugin = Path(folder, "pytest-gpumem")
        say(f"$ git clone {ROOT.name}")
        git(Path(folder), "clone", "-q", str(ROOT), str(plugin))
        for kind in (Github, Gitlab):
            if given.service not in (kind.name, "both"):
                continue
            say(
                f'\n################ {kind.__name__}: ci/{kind.name}/gpumem.yml, the lines "yours" filled in'
            )
            place = Path(folder, kind.name)
            place.mkdir()
            at = kind(place, plugin, install=given.install)
            for day, (live, _) in DAYS.items():
                if day in wanted:
                    live(at)
            missed += at.missed
    say("")
    for one in missed:
        say(f"missed: {one}")
    say(
        f"{time.monotonic() - begun:.0f} s; {'all as docs/ci.md says' if not missed else f'{len(missed)} not as docs/ci.md says'}"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
