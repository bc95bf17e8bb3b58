"""What `--gpumem-footprint` costs somebody else's test suite, and what it shows of it: CuPy's own tests, unchanged.

Runs the tests without the plugin and with `--gpumem --gpumem-footprint`, in turns whose order alternates, after one session that fills
CuPy's cache of kernels. Prints the overhead in the time of the tests, the ten tests that take most memory, and what the suite keeps.

    pip download cupy --no-deps --no-binary cupy    # the source distribution; unpack its folder "tests"
    python ci/bench/footprint_overhead.py --tests cupy-tests --json footprint_overhead.json

Exits with 1 if the overhead is above 5 %, if tests end otherwise, or if no test's memory is found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import write_record

LIMIT = 0.05
"""Largest overhead, as a share of the suite's time."""
SELECTION = (
    "cupy_tests/creation_tests",
    "cupy_tests/manipulation_tests",
    "cupy_tests/statistics_tests",
    "cupy_tests/linalg_tests/test_product.py",
    "cupy_tests/core_tests/test_ndarray.py",
)
HERE = Path(__file__).resolve().parent
MOST = 10
"""Tests that are shown."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "first_tests", "-W", "ignore")
WATCHED = ("--gpumem", "--gpumem-device=cuda", "--gpumem-footprint=on")


def session(tests: Path, selection: Sequence[str], cache: Path, *, watched: bool, **first: str) -> dict[str, Any]:
    """Run the suite once: its wall time, the time in its tests, how they ended, and the rows with footprints.

    `first` is for the plugin `first_tests`.
    """
    with tempfile.TemporaryDirectory() as folder:
        junit, results = Path(folder) / "junit.xml", Path(folder) / "results.json"
        options = [*WATCHED, f"--benchmark-json={results}"] if watched else ["-p", "no:gpumem"]
        command = [*PYTEST, *options, "-c", os.devnull, "--rootdir", str(tests), f"--junitxml={junit}", *selection]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMEM", "PYTEST_"))}
        environment |= {"CUPY_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), **first}
        begun = time.perf_counter()
        done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, errors="replace", check=False)
        wall = time.perf_counter() - begun
        if not junit.exists():
            sys.exit(f"footprint_overhead: {' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
        found: dict[str, Any] = {
            "wall": wall,
            "in_tests": sum(float(case.get("time") or 0) for case in cases),
            "ends": {f"{case.get('classname')}::{case.get('name')}": _end(case) for case in cases},
            "rows": [],
            "printed": done.stdout[-2000:],
        }
        if watched and results.exists() and results.stat().st_size:
            document = json.loads(results.read_text())["gpumem"]
            found |= {"rows": [row for row in document["rows"] if row["footprint"] is not None], "device": document["device"]}
        return found


def _end(case: ElementTree.Element) -> str:
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")


def largest(rows: Sequence[dict[str, Any]], figure: str) -> list[dict[str, Any]]:
    """The tests with most of a figure."""
    found = sorted((row for row in rows if row["footprint"][figure] > 0), key=lambda row: -row["footprint"][figure])
    return [
        {
            "test": row["key"],
            **{name: row["footprint"][name] for name in ("peak", "kept", "reserved", "allocations", "largest")},
            "libraries": sorted({use["library"] for use in row["footprint"]["uses"]}),
        }
        for row in found[:MOST]
    ]


def table(record: dict[str, Any]) -> str:
    """The record's figures as text."""
    inside, overhead = record["seconds_in_tests"], 100 * record["overhead"]
    lines = [
        f"{record['tests']} tests of CuPy {record['versions']['cupy']}, {record['sessions']} sessions each",
        f"{inside['without']:.2f} s without, {inside['with']:.2f} s with, overhead {overhead:+.1f} %",
        f"start and end of a session {record['start_seconds']:+.1f} s",
        f"{record['with_memory']} tests take memory, {record['allocations']} allocations; {record['keeping']} keep {record['kept']} B",
        "",
        f"{'peak':>14}{'kept':>10}{'allocations':>13}  test",
    ]
    lines += [f"{one['peak']:>14}{one['kept']:>10}{one['allocations']:>13}  {one['test']}" for one in record["largest"]]
    if record["keeps_most"]:
        lines += ["", f"{'kept':>14}  test"]
        lines += [f"{one['kept']:>14}  {one['test']}" for one in record["keeps_most"]]
    return "\n".join(lines)


def record_of(plain: Sequence[dict[str, Any]], watched: Sequence[dict[str, Any]], selection: Sequence[str]) -> dict[str, Any]:
    """The record of the sessions so far: medians of the times, and the footprints of the last session."""
    walls = {side: statistics.median(one["wall"] for one in of) for side, of in (("without", plain), ("with", watched))}
    inside = {side: statistics.median(one["in_tests"] for one in of) for side, of in (("without", plain), ("with", watched))}
    rows, before = watched[-1]["rows"], plain[-1]["ends"]
    keeping = [row for row in rows if row["footprint"]["kept"] > 0]
    changed = {name: [before.get(name), end] for name, end in watched[-1]["ends"].items() if before.get(name) != end}
    return {
        "kind": "footprint_overhead",
        "device": watched[-1].get("device"),
        "selection": list(selection),
        "tests": len(before),
        "sessions": len(watched),
        "wall_seconds": walls,
        "seconds_in_tests": inside,
        "overhead": inside["with"] / max(inside["without"], 1e-9) - 1,
        "start_seconds": walls["with"] - walls["without"] - (inside["with"] - inside["without"]),
        "with_memory": len(rows),
        "allocations": sum(row["footprint"]["allocations"] for row in rows),
        "keeping": len(keeping),
        "kept": sum(row["footprint"]["kept"] for row in keeping),
        "largest": largest(rows, "peak"),
        "keeps_most": largest(rows, "kept"),
        "changed": dict(list(changed.items())[:MOST]),
        "not_watched": sorted({why for row in rows for why in row["footprint"]["not_watched"]}),
        "versions": {name: version(name) for name in ("pytest", "pytest-gpumem")} | {"cupy": _cupy()},
        "python": platform.python_version(),
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def broken(record: dict[str, Any]) -> list[str]:
    """The promises that a record breaks."""
    found = []
    if record["overhead"] > LIMIT:
        found.append(f"the overhead is above {100 * LIMIT:.0f} %")
    if record["changed"]:
        found.append(f"tests end otherwise: {record['changed']}")
    if not record["with_memory"]:
        found.append("no test's memory was found")
    return found


def main() -> int:
    """Run, print and record."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, metavar="FOLDER", help="the folder tests of CuPy's source distribution")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written, after every turn")
    parser.add_argument("--seconds", type=float, default=120, help="begin no turn that would end after this long (default 120)")
    parser.add_argument("selection", nargs="*", default=SELECTION, help="arguments for pytest: files, tests, -k ...")
    options = parser.parse_args()
    tests, begun = options.tests.resolve(), time.perf_counter()
    record: dict[str, Any] = {}
    plain: list[dict[str, Any]] = []
    watched: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        # Compiling takes most of the first turn; so many tests as it reached in a third of the time run in the others.
        first = session(tests, options.selection, Path(cache), watched=False, FIRST_SECONDS=f"{options.seconds / 3:.0f}")
        count = {"FIRST_TESTS": str(len(first["ends"]))}
        while True:
            started = time.perf_counter()
            for side in (False, True) if len(plain) % 2 == 0 else (True, False):
                (watched if side else plain).append(session(tests, options.selection, Path(cache), watched=side, **count))
            record = record_of(plain, watched, options.selection)
            if options.json:
                write_record(options.json, record, indent=1)
            now = time.perf_counter()
            if now - begun + (now - started) > options.seconds:
                break
    print(table(record))
    print(watched[-1]["printed"][-300:])
    for one in broken(record):
        print(f"BROKEN: {one}")
    return 1 if broken(record) else 0


def _cupy() -> str:
    import cupy

    return str(cupy.__version__)


if __name__ == "__main__":
    sys.exit(main())
