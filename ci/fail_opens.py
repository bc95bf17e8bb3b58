"""Plant fail-opens in copies of the core: the property tests find each of them.

    python ci/fail_opens.py                      # all of them; -n 4: in four processes of pytest each
    python ci/fail_opens.py 3 7                  # some, by number

Each is one edit after which something that was to be judged ends green without a word: a discharge, a status, an exit code or an origin of
expectations is dropped. A copy of the package with it runs the draws on the pure core, and if these pass the whole sessions and gates.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("pytest_gpumem", "pytest_gpumem_entry.py", "kernels", "tests", "pyproject.toml")
PROPERTIES = ("tests/unit/judging/test_discharge.py", "tests/plugin/test_planted_faults.py")
DRAWS = "200"  # of whole sessions

CORE, COLLECTED, SESSION = "judging/expectations.py", "plugin/expecting.py", "plugin/session.py"
REPORTED, GATE = "plugin/reported.py", "runs/conclusion.py"
FAIL_OPENS = [
    # A discharge
    (
        CORE,
        "if ran and any(row.label == one.label and row.measurement is not None for row in rows):",
        "if ran:",
    ),
    (
        CORE,
        'if ran and (\n            ended.how == "failed"\n            or not one.unmeasured\n'
        "            or any(row.measured_something for row in rows)\n        ):",
        "if ran:",
    ),
    (CORE, 'if ended.how == "failed" or any(one.what in judged(row) for row in rows):', "if ran:"),
    (
        CORE,
        "names &= {*OF_FOOTPRINT, *((MAX_WAITS,) if reads_waits else ())}",
        "names &= set(LIMITS)",
    ),
    (CORE, "elif not row.footprint.ended:", "elif False:"),
    (
        SESSION,
        "            gpu.lacks(self._expectations.discharged(complete=complete))\n",
        "            pass\n",
    ),
    # A status
    (
        CORE,
        'return LOST, "its test passed without it"',
        'return NOT_RUN, "its test passed without it"',
    ),
    (
        CORE,
        'return LOST, f"{its} test is no longer collected"',
        'return NOT_RUN, f"{its} test is no longer collected"',
    ),
    (
        CORE,
        'return UNJUDGED, f"the test {ended.how} and {measured}"',
        'return "accepted", f"the test {ended.how} and {measured}"',
    ),
    (CORE, "return ended._replace(by_words=False, in_base=True)", "return ended"),
    (CORE, "if ended.plugin and ended.plugin in base.dividing:", "if ended.plugin:"),
    (CORE, "    if doubtful:\n        return ended\n", ""),
    (
        COLLECTED,
        "        return any(\n            word == option",
        "        return True or any(\n            word == option",
    ),
    # An exit code
    (
        CORE,
        "if one.status in (LOST, NOT_RUN) and not one.accounted]",
        "if one.status == LOST and not one.accounted]",
    ),
    (
        CORE,
        "return [one for one in missing if not one.accounted]",
        "return [one for one in missing if one.status == LOST]",
    ),
    (SESSION, "open_ = open_under_strict(gpu.missing)", "open_ = ()"),
    (
        REPORTED,
        "return int(pytest.ExitCode.TESTS_FAILED) if failed and fine else code",
        "return code",
    ),
    (GATE, "    if lost_ones:\n        causes.append(", "    if False:\n        causes.append("),
    (GATE, "    if looser:\n", "    if False:\n"),
    (GATE, "    if others:\n", "    if False:\n"),
    (GATE, "    if states[State.OPEN]:\n", "    if False:\n"),
    # An origin of expectations
    (COLLECTED, "in gpu.baseline.expected(gpu.settings.mode).items():", "in ():"),
    (
        COLLECTED,
        "            for name in LIMITS:\n                # A limit of the session",
        "            for name in ():\n                # A limit of the session",
    ),
    (
        COLLECTED,
        "merge_limits(None, marker, settings, LIMITS)",
        "merge_limits(None, marker, Settings(), LIMITS)",
    ),
    (CORE, "unmeasured=one.measures and not measures.get(nodeid, True)", "unmeasured=False"),
    (CORE, "if demands_more(limit, asked, here) and not allowed(limit, here):", "if False:"),
]
"""File, old text, new text."""


def planted(number: int, workers: str) -> str | None:
    """The property test that finds a fail-open; None if none does. Raises `ValueError`: the file has not the old text once."""
    name, old, new = FAIL_OPENS[number - 1]
    with tempfile.TemporaryDirectory() as folder:
        for one in COPIED:
            source, target = ROOT / one, Path(folder, one)
            shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
        file = Path(folder, "pytest_gpumem", name)
        text = file.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{name} has {text.count(old)} times: {old}")
        file.write_text(text.replace(old, new))
        variables = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PYTEST_", "GPUMEM_"))
        }
        for tests in PROPERTIES:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-qx",
                "-p",
                "no:cacheprovider",
                *([f"-n{workers}"] if workers else []),
                tests,
            ]
            done = subprocess.run(
                command,
                cwd=folder,
                env=variables | {"DRAWS": DRAWS},
                capture_output=True,
                text=True,
                check=False,
            )
            # 2: pytest-xdist stopped after the first failure. The sessions inside of tests print such lines, too.
            if done.returncode in (1, 2) and (
                found := re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
            ):
                return str(found[-1]).partition("::")[2]
            if done.returncode != 0:
                raise ValueError(
                    f"{tests} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
                )
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "numbers",
        nargs="*",
        type=int,
        default=[*range(1, len(FAIL_OPENS) + 1)],
        help="default: all",
    )
    parser.add_argument(
        "-n", dest="workers", default="", help="as that of pytest-xdist; default: one process"
    )
    given = parser.parse_args()
    survivors = 0
    for number in given.numbers:
        name, old, _ = FAIL_OPENS[number - 1]
        found = planted(number, given.workers)
        survivors += found is None
        print(
            f"{number:>2} {name}: {' '.join(old.split())[:60]}: {found or 'NOT FOUND'}", flush=True
        )
    print(f"{len(given.numbers) - survivors} of {len(given.numbers)} fail-opens are found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
