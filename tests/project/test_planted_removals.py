"""The planted removals of techniques fit today's sources, and have tests."""

from __future__ import annotations

import subprocess
import sys

import suite_can_fail


def test_each_replaces_one_place_of_its_file_and_has_tests() -> None:
    command = [sys.executable, "-m", "pytest", "--co", "-q", "tests/memory"]
    collected = subprocess.run(
        command, cwd=suite_can_fail.ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    removals = suite_can_fail.read_removals(collected)  # ends this session if one has no test
    assert len(removals) == 37
    for removal in removals:
        text = (suite_can_fail.ROOT / removal.file).read_text()
        assert (removal.file, removal.old, text.count(removal.old)) == (
            removal.file,
            removal.old,
            1,
        )
        assert removal.old != removal.new
