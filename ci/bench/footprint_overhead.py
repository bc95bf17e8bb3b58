"""The cost of `--gpumem-footprint`, or of other options, in CuPy's own tests, unchanged, and what it shows of them.

Fills CuPy's cache of kernels by workers of xdist, and runs the tests once without the plugin and once with it. What follows counts:
rounds of sessions, in an order that alternates. The sides of a round are the tests alone; the tests with a memory hook of CuPy that does
nothing; and the tests with the plugin by each `--measured`. The time of a test is that of all hooks around it, in the fastest session of its
side: on a host with neighbours the same session takes up to half as long again.

    git archive v14.2.0 tests | tar -x    # in a checkout of CuPy; the folder "tests"
    python ci/bench/footprint_overhead.py --tests cupy-tests --json footprint_overhead.json

The cost of counting waits:

    python ci/bench/footprint_overhead.py --tests cupy-tests --measured=--gpumem-waits

Exits with 1 if options cost more than 5 %, or 3 points more than the empty hook where they record allocations; if tests end otherwise; or
if no test has a row.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import record_parser, utc_now, write_record

LIMIT, ABOVE_HOOK = 0.05, 0.03
"""Largest overhead, as a share of the suite's time; and above the empty hook's, of options that record allocations."""
SELECTION = (
    "cupy_tests/creation_tests",
    "cupy_tests/manipulation_tests",
    "cupy_tests/statistics_tests",
    "cupy_tests/linalg_tests/test_product.py",
    "cupy_tests/core_tests/test_ndarray.py",
    "-k",
    "not huge and not large and not no_oom",  # what compiles, or runs NumPy on the host, for most of a minute
)
HERE = Path(__file__).resolve().parent
NUMBER = 60
"""Tests that are run."""
WORKERS = min(28, os.cpu_count() or 1)
"""Of xdist, which compile."""
PYTEST = (
    f"{sys.executable} -m pytest -q -p no:cacheprovider -p some_tests -W ignore -c {os.devnull}"
)
WITHOUT, HOOK = "without", "empty hook"  # sides; the others are those of `--measured`
DEFAULT = "--gpumem-footprint=on"


class Suite:
    """Sessions of the suite."""

    def __init__(self, tests: Path, selection: Sequence[str], cache: Path) -> None:
        self._tests, self._command = tests, [*PYTEST.split(), "--rootdir", str(tests), *selection]
        found = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GPUMEM", "PYTEST_"))
        }
        self._environment = found | {
            "CUPY_CACHE_DIR": str(cache),
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            "SOME_TESTS": str(NUMBER),
        }

    def compile_kernels(self, seconds: float) -> None:
        """Run the tests in workers of xdist, for some seconds at most: whatever they compile stays in the cache."""
        with suppress(subprocess.TimeoutExpired):
            self._run(["-p", "no:gpumem", "-n", str(WORKERS)], {}, seconds)

    def _run(
        self, options: Sequence[str], environment: dict[str, str], seconds: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *options],
            cwd=self._tests,
            env=self._environment | environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )

    def session(self, side: str, *, rows: bool = False) -> dict[str, Any]:
        """Run the suite once: its wall time, the time of its tests and how they ended. `rows`: and the rows with footprints."""
        with tempfile.TemporaryDirectory() as folder:
            times, results = Path(folder) / "times.json", Path(folder) / "results.json"
            ours = (
                ("-p", "no:gpumem")
                if side in (WITHOUT, HOOK)
                else ("--gpumem", "--gpumem-device=cuda", *side.split())
            )
            options = ["-p", "no:xdist", *ours, *([f"--benchmark-json={results}"] if rows else [])]
            begun = time.perf_counter()
            done = self._run(options, {"SOME_TIMES": str(times), "SOME_HOOK": "1" * (side == HOOK)})
            wall = time.perf_counter() - begun
            if not times.exists():
                printed = done.stdout[-3000:] + done.stderr[-3000:]
                sys.exit(
                    f"footprint_overhead: {' '.join(options)} ended with {done.returncode}:\n{printed}"
                )
            found: dict[str, Any] = {
                "wall": wall,
                "rows": [],
                "device": None,
                "printed": done.stdout[-2000:],
            }
            found |= json.loads(times.read_text())
            if results.exists() and results.stat().st_size:
                document = json.loads(results.read_text())["gpumem"]
                found |= {
                    "rows": [row for row in document["rows"] if row["footprint"] is not None],
                    "device": document["device"],
                }
            return found


def table(record: dict[str, Any]) -> str:
    """The record's figures as text."""
    lines = [f"{record['tests']} tests of CuPy, {record['rounds']} rounds of sessions"]
    for name, side in record["sides"].items():
        rounds = ", ".join(f"{100 * one:+.1f}" for one in side["overheads"])
        lines.append(
            f"{side['seconds']:.2f} s {name}: {100 * side['overhead']:+.1f} % (single rounds: {rounds} %)"
        )
    memory = f"{record['with_memory']} tests take memory, {record['allocations']} allocations"
    return "\n".join([*lines, f"{memory}; {record['counted']} have {record['waits']} waits"])


def cost(of: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the sessions of a side cost beside those of the tests alone."""
    ours, theirs = _by_test(of), _by_test(plain)
    overheads = []
    for session, alone in zip(of, plain, strict=True):
        overheads.append(sum(session["seconds"].values()) / sum(alone["seconds"].values()) - 1)
    return {
        "seconds": sum(ours.values()),
        "overhead": sum(ours.values()) / sum(theirs.values()) - 1,
        "overheads": overheads,
    }


def record_of(shown: dict[str, Any], rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The record of the rounds so far. `shown`: the session of the last side with rows, which does not count."""
    sides = {side: [one[side] for one in rounds] for side in rounds[-1]}
    plain = sides[WITHOUT]
    rows, before = shown["rows"], plain[-1]["ends"]
    waits = [row["footprint"]["waits"] for row in rows if row["footprint"]["waits"] is not None]
    changed = {}
    for sessions in sides.values():
        for name, end in sessions[-1]["ends"].items():
            if before.get(name) != end:
                changed[name] = [before.get(name), end]
    return {
        "kind": "footprint_overhead",
        "device": shown["device"],
        "selection": list(SELECTION),
        "tests": len(before),
        "rounds": len(rounds),
        "sides": {side: cost(of, plain) for side, of in sides.items()},
        "with_memory": sum(bool(row["footprint"]["uses"]) for row in rows),
        "allocations": sum(row["footprint"]["allocations"] for row in rows),
        "counted": sum(one["not_read"] is None for one in waits),
        "waits": sum(line["count"] for one in waits for line in one["lines"]),
        "changed": changed,
        "versions": {name: version(name) for name in ("pytest", "pytest-gpumem", "cupy-cuda13x")},
        "python": platform.python_version(),
        "ended": utc_now(),
    }


def _by_test(sessions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each test in the fastest session."""
    return {
        name: min(one["seconds"][name] for one in sessions if name in one["seconds"])
        for name in sessions[-1]["seconds"]
    }


def broken(record: dict[str, Any]) -> list[str]:
    """The promises that a record breaks."""
    found, hook = [], record["sides"][HOOK]["overhead"]
    for side, cost in record["sides"].items():
        limit = LIMIT if "footprint=auto" in side else hook + ABOVE_HOOK
        if side not in (WITHOUT, HOOK) and cost["overhead"] > limit:
            found.append(f"{side} costs {cost['overhead']:.1%}, which is above {limit:.1%}")
    if record["changed"]:
        found.append(f"tests end otherwise: {record['changed']}")
    if not record["with_memory"] and not record["counted"]:
        found.append("no test has a row")
    return found


def main() -> int:
    """Run, print and record."""
    assert __doc__
    parser = record_parser(__doc__, device=None)
    parser.add_argument(
        "--tests",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="the folder tests of CuPy's source distribution",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120,
        help="begin no round that would end after this long (default 120)",
    )
    parser.add_argument(
        "--measured",
        action="append",
        metavar="OPTIONS",
        help=f"what costs; may be given again (default: {DEFAULT})",
    )
    options = parser.parse_args()
    measured = options.measured or [DEFAULT]
    sides = [WITHOUT, HOOK, *measured]
    begun = time.perf_counter()
    rounds: list[dict[str, dict[str, Any]]] = []

    with tempfile.TemporaryDirectory() as cache:
        suite = Suite(options.tests.resolve(), SELECTION, Path(cache))
        suite.compile_kernels(options.seconds / 2)  # it ends earlier where all is compiled
        suite.session(WITHOUT)
        shown = suite.session(sides[-1], rows=True)
        turn = 0.0
        while not rounds or time.perf_counter() - begun + 1.5 * turn < options.seconds:
            started = time.perf_counter()
            done = {side: suite.session(side) for side in (sides, sides[::-1])[len(rounds) % 2]}
            rounds.append({side: done[side] for side in sides})
            record = record_of(shown, rounds)
            if options.json:
                write_record(options.json, record, indent=1)
            turn = time.perf_counter() - started
    print(table(record))
    print(rounds[-1][sides[-1]]["printed"][-300:])
    for one in broken(record):
        print(f"BROKEN: {one}")
    return 1 if broken(record) else 0


if __name__ == "__main__":
    sys.exit(main())
