"""Builds and installs the project without a network, for tests of what an installation has."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

needs_pip = pytest.mark.skipif(
    find_spec("pip") is None or find_spec("setuptools") is None,
    reason="pip and setuptools are needed to build without a network",
)


def copied_as_tracked(folder: Path) -> Path:
    """A copy of every file of the repository; of the whole folder, if it is none."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = (
        listed.stdout.split("\0")[:-1]
        if listed.returncode == 0
        else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
    )
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def build(what: str, project: Path, folder: Path) -> Path:
    """Build an "sdist" or a "wheel" of a project into a folder."""
    program = f"from setuptools import build_meta; print(build_meta.build_{what}({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def pip(*arguments: str, cwd: Path) -> None:
    """Run pip without a network; what it installs gets no dependencies."""
    alone = ["--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, *alone, "-q"]
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def environment(folder: Path) -> tuple[Path, Path]:
    """A new virtual environment without pip, which finds this interpreter's packages behind its own; its Python and its own packages."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        check=True,
        capture_output=True,
    )
    python = folder / "bin" / "python"
    site = Path(
        subprocess.check_output(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    # The .pth files of a folder that a .pth file adds are not read: an editable install of this checkout stays out.
    (site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python, site
