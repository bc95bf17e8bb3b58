"""Plant fail-opens in copies of the core: the property tests find each of them.

    python ci/fail_opens.py                      # all of them; -n 4: four copies at a time
    python ci/fail_opens.py 3 7                  # some, by number

Each is one edit after which something that was to be judged ends green without a word: a discharge,
a status, an exit code or an origin of expectations is dropped. A copy of the package with it runs
the tests of its module and the sessions and gates of `QUICK`, and all draws only if these pass.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("pytest_gpumem", "pytest_gpumem_entry.py", "kernels", "tests", "pyproject.toml")
CORE_DRAWS = "tests/unit/judging/test_discharge.py"
DRAWS = "tests/plugin/test_planted_faults.py"
SESSIONS = f"{DRAWS}::test_a_planted_fault_is_never_green_in_silence"
GATES = f"{DRAWS}::test_a_gate_is_green_of_what_is_accepted_or_unchanged_alone"
QUICK = [f"{SESSIONS}[{seed}]" for seed in (1, 4, 71)] + [f"{GATES}[{seed}]" for seed in (0, 2)]
"""The draws that find today's fail-opens. Where they find none, all draws run."""

CORE, COLLECTED, SESSION = "judging/expectations.py", "plugin/expecting.py", "plugin/outputs.py"
RESULTS = "plugin/results.py"
GATE = "runs/decisions.py"
TESTS = {
    CORE: CORE_DRAWS,
    COLLECTED: "tests/plugin/test_expectations.py",
    GATE: "tests/unit/runs/test_decisions.py",
}
FAIL_OPENS = [
    # A discharge
    (CORE, "ran and expectation.label in labels", "ran"),
    (CORE, "(ran and (measured or not expectation.unmeasured))", "ran"),
    (CORE, "any(what in judged(row) for row in rows)", "ran"),
    (CORE, "read = row.measurement is not None", "read = True"),
    (CORE, "(row.footprint.ended or name not in AT_THE_END)", "True"),
    (
        RESULTS,
        "        gpu.missing.extend(Endings(gpu, expectations, complete).omissions())\n",
        "        pass\n",
    ),
    (COLLECTED, " or any(self.limits.values())", ""),
    # A status
    (
        CORE,
        'return LOST, "its test passed unmeasured"',
        'return NOT_RUN, "its test passed unmeasured"',
    ),
    (
        CORE,
        'return LOST, "its test is no longer collected"',
        'return NOT_RUN, "its test is no longer collected"',
    ),
    (CORE, 'return UNDECIDED, f"the test', 'return "accepted", f"the test'),
    (CORE, "return ending._replace(by_words=divided, in_base=not divided)", "return ending"),
    (CORE, "divided = ending.plugin in base.dividing", "divided = bool(ending.plugin)"),
    (CORE, "if expectation.what == ROW and base.leaves_out(nodeid):", "if False:"),
    (RESULTS, "        return bool(value)\n", "        return True\n"),
    # An exit code
    (CORE, "if omission.status in (LOST, NOT_RUN)]", "if omission.status == LOST]"),
    (
        CORE,
        "if omission.status != ACCEPTED and not (omission.by_words or omission.base_too):",
        "if omission.status == LOST:",
    ),
    (RESULTS, "gpu.settings.strict and bool(open_under_strict(gpu.missing))", "False"),
    (SESSION, "        session.exitstatus = pytest.ExitCode.TESTS_FAILED\n", "        pass\n"),
    (GATE, "causes = _lost(missing)", "causes = []"),
    (GATE, "    if looser:\n", "    if False:\n"),
    (GATE, "(len(others), ", "(0, "),
    (GATE, "    if states[State.OPEN]:\n", "    if False:\n"),
    # An origin of expectations
    (RESULTS, "in gpu.baseline.expected(gpu.settings.mode).items():", "in ():"),
    (
        RESULTS,
        "            for name in LIMITS:\n                # A limit of the session",
        "            for name in ():\n                # A limit of the session",
    ),
    (
        COLLECTED,
        "merge_limits(None, marker, settings, LIMITS)",
        "merge_limits(None, marker, Settings(), LIMITS)",
    ),
    (CORE, "unmeasured = nodeid not in base.idle and nodeid in idle", "unmeasured = False"),
    (CORE, "if not accepted(name, now):", "if False:"),
]
"""File, old text, new text."""


def copy_with(number: int, folder: str) -> None:
    """Copy the project, with a fail-open. Raises `ValueError` unless the file has the text once."""
    name, old, new = FAIL_OPENS[number - 1]
    for copied in COPIED:
        source, target = ROOT / copied, Path(folder, copied)
        if source.is_dir():
            # A process beside this one may write bytecode, under another name at first.
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            shutil.copyfile(source, target)
    file = Path(folder, "pytest_gpumem", name)
    text = file.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{name} has {text.count(old)} times: {old}")
    file.write_text(text.replace(old, new))


def first_failure(folder: str, *tests: str) -> str | None:
    """The first test that fails in a copy; None if all pass."""
    variables = {"PYTHONPATH": folder, "DRAWS": "200"}
    for name, value in os.environ.items():
        if not name.startswith(("PYTEST_", "GPUMEM_", "PYTHONPATH")):
            variables[name] = value
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    # The sessions inside of tests print such lines, too.
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return str(failed[-1]).partition("::")[2]
    if done.returncode != 0:
        output = done.stdout[-3000:] + done.stderr[-1000:]
        raise ValueError(f"{' '.join(tests)} ended with {done.returncode}:\n{output}")
    return None


def planted(number: int) -> str | None:
    """The property test that finds a fail-open; None if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy_with(number, folder)
        own = TESTS.get(FAIL_OPENS[number - 1][0])
        quick = [own, *QUICK] if own else QUICK
        return first_failure(folder, *quick) or first_failure(folder, CORE_DRAWS, DRAWS)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, help="default: all")
    parser.add_argument("-n", type=int, default=1, dest="copies", help="at a time; default: 1")
    given = parser.parse_args()
    numbers = given.numbers or range(1, len(FAIL_OPENS) + 1)
    survivors = 0
    with ThreadPoolExecutor(given.copies) as pool:
        for number, found in zip(numbers, pool.map(planted, numbers), strict=True):
            name, old, _ = FAIL_OPENS[number - 1]
            survivors += found is None
            text = " ".join(old.split())[:60]
            print(f"{number:>2} {name}: {text}: {found or 'NOT FOUND'}", flush=True)
    print(f"{len(numbers) - survivors} of {len(numbers)} fail-opens are found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
