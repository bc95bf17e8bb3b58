"""The tutorial as a script: its steps, the change that it makes, and what it says that is printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
STEP = re.compile(
    r"^<!-- step( on a GPU)?: ([^\n]+) -->\n```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
CHANGE = re.compile(r"^<!-- change: ([^\n]+) -->\n```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """Commands of the page."""

    commands: tuple[str, ...]
    shown: tuple[str, ...]
    """Lines that the page says are printed; "..." stands for anything."""
    needs_gpu: bool


def steps() -> dict[str, Step]:
    """Every step by its name, in order."""
    text = PAGE.read_text(encoding="utf-8")
    found = list(STEP.finditer(text))
    ends = [*(following.start() for following in found[1:]), len(text)]
    return {
        step[2]: Step(
            tuple(step[3].splitlines()),
            tuple(
                line
                for block in SHOWN.findall(text[step.end() : end])
                for line in block.splitlines()
            ),
            needs_gpu=step[1] is not None,
        )
        for step, end in zip(found, ends, strict=True)
    }


def change(name: str) -> str:
    """A change that the page makes, as a diff."""
    return str(dict(CHANGE.findall(PAGE.read_text(encoding="utf-8")))[name])


def missing(shown: tuple[str, ...], output: str) -> list[str]:
    """The lines that the page shows and that were not printed."""
    printed = output.splitlines()
    patterns = [
        re.compile(".*".join(re.escape(part) for part in line.split("...")).replace(r"\ .*", ".*"))
        for line in shown
    ]
    return [
        line
        for line, pattern in zip(shown, patterns, strict=True)
        if not any(pattern.match(one) for one in printed)
    ]


class Project:
    """A copy of the example project in a repository of its own, and the environment in which its commands run."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder / "pixelbox"
        shutil.copytree(
            ROOT / "tests" / "examples" / "pixelbox",
            self.folder,
            ignore=shutil.ignore_patterns("__pycache__", ".benchmarks"),
        )
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GPUMEM", "PYTEST", "GITHUB", "CI", "GIT_"))
        }
        author = {
            f"GIT_{who}_{what}": value
            for who in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", "a"), ("EMAIL", "a@example.org"))
        }
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # Wide enough for the lines that the page shows.
        self.environment = {
            **kept,
            **author,
            "PATH": path,
            "COLUMNS": "120",
            "PYTHONDONTWRITEBYTECODE": "1",
            **variables,
        }
        for command in ("git init -q -b main", "git add .", "git commit -q -m pixelbox"):
            assert self.run(command)[0] == 0

    def run(self, command: str) -> tuple[int, str]:
        """Exit code and all output of one command line."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout

    def apply(self, diff: str) -> None:
        """Change the project as the page says."""
        subprocess.run(["git", "apply", "-"], cwd=self.folder, input=diff, text=True, check=True)
