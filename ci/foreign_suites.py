"""Test suites of other projects end the same with this plugin as without it: switched off, installed, and active.

    python ci/foreign_suites.py

Downloads the source of pytest-benchmark and pluggy in their installed versions, and runs their own tests three times each. Exits with 1 if
the outcome of a test differs. A test that differs is run again on both sides, because some of theirs depend on time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

SUITES = {
    # Their notebook, and the storage of a service, need more packages.
    "pytest-benchmark": (
        "tests",
        "--ignore=tests/test_elasticsearch_storage.py",
        "-o",
        "addopts=--strict-markers",
    ),
    "pluggy": ("testing",),
}
SIDES = {
    "without": ("-p", "no:gpumem"),
    "installed": (),
    "active": ("--gpumem", "--gpumem-device", "sim"),
}
RETRIES = 2


def unpacked(project: str, folder: Path) -> Path:
    """The source of the installed version, as it was published."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        project,
        "-d",
        str(folder),
    ]
    subprocess.run([*command, f"{project}=={version(project)}"], check=True)
    (archive,) = folder.glob(f"{project.replace('-', '?')}-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def outcomes(source: Path, arguments: Sequence[str]) -> Mapping[str, str]:
    """The outcome of each test, by its name."""
    return session(source, arguments)[0]


def session(
    source: Path, arguments: Sequence[str], seconds: float | None = None
) -> tuple[Mapping[str, str], str]:
    """The outcome of each test, by its name, and what the session printed. Raises `subprocess.TimeoutExpired`: after this many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *arguments,
        ]
        # The sessions that the tests start get the variables too. A CI asks for a GPU where none was chosen.
        environment = {
            name: value
            for name, value in os.environ.items()
            if name != "CI" and not name.startswith(("GPUMEM", "PYTEST_"))
        }
        done = subprocess.run(
            command,
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if not report.is_file():
            sys.exit(
                f"foreign_suites: {' '.join(command)} in {source.name} wrote no report:\n{done.stdout}{done.stderr}"
            )
        found: dict[str, str] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = [
                kind for kind in ("error", "failure", "skipped") if case.find(kind) is not None
            ]
            found[f"{case.get('classname')}::{case.get('name')}"] = kinds[0] if kinds else "passed"
        return found, done.stdout


def different(left: Mapping[str, str], right: Mapping[str, str]) -> set[str]:
    """Names of the tests that ended differently, or ran on one side alone."""
    return {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "suites", nargs="*", choices=[*SUITES, []], help="projects; all if none is given"
    )
    chosen = parser.parse_args().suites or list(SUITES)
    failed = False
    for project in chosen:
        with tempfile.TemporaryDirectory() as folder:
            source, tests = unpacked(project, Path(folder)), SUITES[project]
            ran = {side: outcomes(source, (*options, *tests)) for side, options in SIDES.items()}
            for side in ("installed", "active"):
                stays = different(ran["without"], ran[side])
                for _ in range(RETRIES if stays else 0):
                    stays &= different(
                        outcomes(source, (*SIDES["without"], *tests)),
                        outcomes(source, (*SIDES[side], *tests)),
                    )
                passed = sum(outcome == "passed" for outcome in ran[side].values())
                print(
                    f"{project} {version(project)}, {side}: {len(ran[side])} tests, {passed} passed, {len(stays)} differ"
                )
                for name in sorted(stays):
                    print(
                        f"  {name}: {ran['without'].get(name, 'not run')} without, {ran[side].get(name, 'not run')} {side}"
                    )
                failed |= bool(stays) or passed == 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
