"""Print a session on the simulated device as a terminal of 100 columns shows it, for the documents.

    python ci/docs_sessions.py failing

Times of day, durations, versions and paths are replaced, so that every machine prints the same. Exits with 1 if a session takes more than
`MOST` lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH, MOST = 100, 51
PROJECT = "/home/me/project"
DATE = "2026-11-22T12:00:00+00:00"
TESTS = """\
import pytest
from pytest_gpumem import MiB

STRIDE = 1


@pytest.mark.parametrize("mib", [64, 128, 256])
def test_copy(gpu_benchmark, device_buffer, gpu_kernels, mib):
    gpu_benchmark(gpu_kernels.copy, device_buffer(mib * MiB), device_buffer(mib * MiB))


def test_blur(gpu_benchmark, device_buffer, gpu_kernels):
    image, out = (device_buffer(128 * MiB * STRIDE, "f4") for _ in range(2))
    gpu_benchmark(gpu_kernels.stride_copy, out, image, STRIDE)


def test_histogram(gpu_benchmark, device_buffer, gpu_kernels):
    a, b, c = (device_buffer(128 * MiB, "f4") for _ in range(3))
    result = gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)
    assert result.bandwidth > 0.85 * result.device.peak_bandwidth
"""
OPTIONS = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
PYTEST = [sys.executable, "-m", "pytest", *OPTIONS]
GPUMEM = [sys.executable, "-c", "from pytest_gpumem.cli import main; main()"]
REPLACED = (
    (r"Python [\d.]+, pytest-[\d.]+, pluggy-[\d.]+", "Python 3.12, pytest-9, pluggy-1"),
    (r"^plugins: .*$", "plugins: benchmark-5, gpumem-0.1.0"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", DATE),
    (r"processes in \d+ s", "processes in 9 s"),
    (r"; \d+ s on ", "; 19 s on "),
    (r"at most [\d.]+ (s|min) more", "at most 3 min more"),
    (r", about [\d.]+ (s|min) left", ", about 5 s left"),
)


class Session:
    """A project in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = ("CI", "PYTEST_ADDOPTS", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "CODSPEED_ENV")
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if name not in names and not name.startswith(("GPUMEM", "_GPUMEM", "PYTEST_XDIST"))
        }
        for role in ("AUTHOR", "COMMITTER"):
            for what, value in (("NAME", "me"), ("EMAIL", "me@example"), ("DATE", DATE)):
                self.environment[f"GIT_{role}_{what}"] = value
        self.environment |= {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "GPUMEM_DEVICE": "sim"}
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"

    def run(self, *command: str) -> str:
        """The output of a command, whatever its exit code."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout

    def commit(self, tests: str) -> None:
        """Write the tests, and commit them."""
        (self.folder / "test_image.py").write_text(tests)
        (self.folder / ".gitignore").write_text(".benchmarks\n__pycache__\n")
        for words in (["add", "."], ["commit", "-qm", "state"]):
            subprocess.run(["git", *words], cwd=self.folder, env=self.environment, check=True)

    def slowed(self) -> None:
        """A repository with a baseline of three processes, and a slow-down in one test; as it is, if it is there already."""
        if not (self.folder / ".git").exists():
            subprocess.run(
                ["git", "init", "-qb", "main"], cwd=self.folder, env=self.environment, check=True
            )
            self.commit(TESTS)
            self.run(*PYTEST, "--gpumem", "--gpumem-save", "--gpumem-processes=3")
            self.commit(TESTS.replace("STRIDE = 1", "STRIDE = 2"))


def failing(session: Session) -> str:
    """A slow-down in one test."""
    session.slowed()
    return session.run(*PYTEST, "--gpumem", "--gpumem-max-regression", "2%")


def gate(session: Session) -> str:
    """A pull request with a slow-down, from the duet on: the second step is a session as `failing` shows it."""
    session.slowed()
    text = session.run(*GPUMEM, "gate", "HEAD~1", "--max-regression", "2%", "--", *OPTIONS)
    return text[text.index("gpumem gate: a duet") :]


SESSIONS = {"failing": failing, "gate": gate}


def shown(text: str, folder: Path) -> list[str]:
    """The lines of a terminal of `WIDTH` columns."""
    text = text.replace(str(folder), PROJECT)
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    lines = []
    for line in text.splitlines():
        if re.match(r"gpumem: \d+ of \d+ tests, ", line):
            continue  # a line a minute, on a slow machine
        known = line
        if ended := re.fullmatch(r"=+ (.* in )[\d.]+s( \(.*\))? =+", line):
            known = f" {ended[1]}9s ".center(WIDTH, "=")
        elif line.startswith("-") and "generated xml" in line:
            known = " generated xml file: gpumem-results/junit.xml ".center(WIDTH, "-")
        if re.search(r": (gpumem|pytest) ", known):  # a line with a command is copied whole
            lines.append(known)
            continue
        lines += [
            known[start : start + WIDTH].rstrip() for start in range(0, len(known) or 1, WIDTH)
        ]
    return lines


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        session = Session(Path(name).resolve())
        text = SESSIONS[sys.argv[1]](session)
        lines = shown(text, session.folder)
    print("\n".join(lines))
    return 1 if len(lines) > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
