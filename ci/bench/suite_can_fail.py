"""Remove techniques of the seeds one at a time: tests of the memory suite fail of each.

    python ci/bench/suite_can_fail.py --part 1/3    # a third of them, on a GPU

A copy of the project runs the tests, whole and with each removal. The simulated device runs no
kernel's code. Exits with 1 if a removal survives. Other options are pytest's.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
RED = ("failure", "error")


@dataclass
class Removal:
    file: str
    tests: list[str]  # node ids
    old: str
    new: str


class Suite:
    def __init__(self, folder: Path, options: list[str]) -> None:
        """Copy the project into a folder. `options`: for pytest."""
        self._folder, self._options = folder, options
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)

    def pytest(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", *self._options, *arguments]
        paths = f"{self._folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        env = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(
            command, cwd=self._folder, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 1):
            print(f"pytest ended with {done.returncode}:", done.stdout[-2000:], done.stderr[-500:])
        return done.stdout

    def run(self, tests: Iterable[str]) -> dict[str, str]:
        """Return how each test ended, by name: "passed", "skipped", "failure" or "error"."""
        file = self._folder / "ends.xml"
        file.write_text("<testcases/>")  # it stays if pytest crashes
        self.pytest("--gpumem", f"--junitxml={file}", *tests)
        ends = {}
        for case in ElementTree.parse(file).iter("testcase"):
            kinds = [child.tag for child in case if child.tag in ("skipped", *RED)]
            ends[case.attrib["name"]] = (kinds or ["passed"])[0]
        return ends

    def run_without(self, removal: Removal) -> dict[str, str]:
        path = self._folder / removal.file
        text = path.read_text()
        path.write_text(text.replace(removal.old, removal.new))
        ends = self.run(removal.tests)
        path.write_text(text)
        return ends


def read_removals(collected: list[str]) -> list[Removal]:
    """`collected`: all node ids."""
    removals = []
    for block in Path(__file__).with_suffix(".txt").read_text().split("\n# ")[1:]:
        file, *hunks = block.replace(r"\n", "\n").split("\n@ ")
        for hunk in hunks:
            patterns, _, change = hunk.strip().partition("\n- ")
            old, _, new = change.partition("\n+ ")
            tests = []
            for pattern in patterns.split(", "):
                tests += fnmatch.filter(collected, f"*::test_{pattern}")
            if not tests:
                sys.exit(f"no test matches {patterns}")
            removals.append(Removal(file, tests, old, new))
    return removals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="as --gpumem-device")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="each Nth, from the Kth")
    arguments, options = parser.parse_known_args()
    options.append(f"--gpumem-device={arguments.device}")
    first, step = map(int, arguments.part.split("/"))
    survives = "needs a GPU" if arguments.device.startswith("sim") else "SURVIVES"
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(Path(folder), options)
        removals = read_removals(suite.pytest("--co", "tests/memory").splitlines())
        part = range(first - 1, len(removals), step)
        whole = suite.run(sorted({test for number in part for test in removals[number].tests}))
        print("whole:", {test: end for test, end in whole.items() if end != "passed"})
        for number in part:
            removal, begun = removals[number], time.perf_counter()
            ends = suite.run_without(removal)
            red = [name for name in ends if ends[name] in RED and whole.get(name) == "passed"]
            result = "found" if red else survives
            counts[result] += 1
            seconds = time.perf_counter() - begun
            print(f"{number + 1} {result}, {seconds:.1f} s: {removal.file}: {removal.old}")
            print(f"   {len(red)} of {len(ends)} fail:", *red, flush=True)
    print(dict(counts))
    return int(counts["SURVIVES"] > 0)


if __name__ == "__main__":
    sys.exit(main())
