"""What the distributions hold, what their page shows, and which names the package gives out."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from installing import ROOT

import pytest_gpumem


def test_the_public_names_are_there_and_cost_nothing_until_they_are_used() -> None:
    for name in pytest_gpumem.__all__:
        assert (
            getattr(pytest_gpumem, name).__name__ == name
            if name[0] in "BCR" or "Gpu" in name
            else getattr(pytest_gpumem, name) > 0
        )
    program = "import sys, pytest_gpumem; print(sorted(name for name in sys.modules if name.startswith('pytest_gpumem')))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['pytest_gpumem', 'pytest_gpumem.units']"


def test_actions_of_every_workflow_are_pinned() -> None:
    """A tag of somebody else's action can be moved; a commit cannot."""
    files = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / "ci" / "github" / "gpumem.yml"]
    used = [
        line.split("uses:")[1].strip()
        for file in files
        for line in file.read_text().splitlines()
        if "uses:" in line
    ]
    assert len(files) == 3
    assert not [
        one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)
    ]


def test_a_wrong_release_ends_before_it_builds() -> None:
    for arguments, tag, reason in [
        (["--publish"], "", "unknown arguments: --publish; accepted is --tag"),
        ([], "v9.9", "the tag is v9.9, the version in pyproject.toml is"),
    ]:
        environment = {
            **os.environ,
            "GITHUB_REF_TYPE": "tag" if tag else "",
            "GITHUB_REF_NAME": tag,
        }
        done = subprocess.run(
            [ROOT / "ci" / "release.sh", *arguments],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, reason in done.stderr) == (1, True), done.stderr
