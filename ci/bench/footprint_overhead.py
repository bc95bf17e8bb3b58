"""What `--gpumem-footprint` costs somebody else's test suite, and what it shows of it: CuPy's own tests, unchanged.

Runs the tests without the plugin and with `--gpumem --gpumem-footprint`, in turns whose order alternates, after one turn that fills CuPy's
cache of kernels. Prints the overhead, the ten tests that take most memory, and what the suite keeps.

    pip download cupy --no-deps --no-binary cupy    # the source distribution; unpack its folder "tests"
    python ci/bench/footprint_overhead.py --tests cupy-tests --json footprint_overhead.json

Exits with 1 if the overhead is above 5 % of the suite's time, if tests end otherwise, or if no test's memory is found.
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
MOST = 10
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore")
WATCHED = ("--gpumem", "--gpumem-device=cuda", "--gpumem-footprint=on")


def session(tests: Path, selection: Sequence[str], cache: Path, *, watched: bool) -> dict[str, Any]:
    """Run the suite once: its wall time, the time in its tests, how they ended, and the footprints by test."""
    with tempfile.TemporaryDirectory() as folder:
        junit, results = Path(folder) / "junit.xml", Path(folder) / "results.json"
        options = [*WATCHED, f"--benchmark-json={results}"] if watched else ["-p", "no:gpumem"]
        command = [*PYTEST, *options, "-c", os.devnull, "--rootdir", str(tests), f"--junitxml={junit}", *selection]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMEM", "PYTEST_"))}
        environment |= {"CUPY_CACHE_DIR": str(cache)}
        begun = time.perf_counter()
        done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, errors="replace", check=False)
        wall = time.perf_counter() - begun
        if not junit.exists():
            sys.exit(f"footprint_overhead: {' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
        ends = {f"{case.get('classname')}::{case.get('name')}": _end(case) for case in cases}
        found = {
            "wall": wall,
            "in_tests": sum(float(case.get("time") or 0) for case in cases),
            "ends": ends,
            "rows": [],
            "printed": done.stdout[-2000:],
        }
        if watched and results.exists() and results.stat().st_size:
            document = json.loads(results.read_text())["gpumem"]
            found |= {"rows": document["rows"], "device": document["device"]}
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
    walls = record["wall_seconds"]
    lines = [
        f"{record['tests']} tests of CuPy {record['versions']['cupy']}: {walls['without']:.1f} s without, {walls['with']:.1f} s with, "
        f"overhead {100 * record['overhead']:+.1f} % (in tests {100 * record['overhead_in_tests']:+.1f} %)",
        f"{record['with_memory']} tests take memory, {record['allocations']} allocations; {record['keeping']} keep {record['kept']} B",
        "",
        f"{'peak':>14}{'kept':>10}{'allocations':>13}  test",
    ]
    lines += [f"{one['peak']:>14}{one['kept']:>10}{one['allocations']:>13}  {one['test']}" for one in record["largest"]]
    if record["keeps_most"]:
        lines += ["", f"{'kept':>14}  test"]
        lines += [f"{one['kept']:>14}  {one['test']}" for one in record["keeps_most"]]
    return "\n".join(lines)


def main() -> int:
    """Run, print and record."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, metavar="FOLDER", help="the folder tests of CuPy's source distribution")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--turns", type=int, default=2, help="sessions of each kind (default 2)")
    parser.add_argument("selection", nargs="*", default=SELECTION, help="arguments for pytest: files, tests, -k ...")
    options = parser.parse_args()
    tests = options.tests.resolve()
    with tempfile.TemporaryDirectory() as cache:
        session(tests, options.selection, Path(cache), watched=False)
        sides: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for turn in range(options.turns):
            for watched in (False, True) if turn % 2 == 0 else (True, False):
                sides[watched].append(session(tests, options.selection, Path(cache), watched=watched))
    plain, watched_sessions = sides[False], sides[True]
    rows = [row for row in watched_sessions[-1]["rows"] if row["footprint"] is not None]
    changed = {
        name: (plain[-1]["ends"].get(name), end) for name, end in watched_sessions[-1]["ends"].items() if plain[-1]["ends"].get(name) != end
    }
    walls = {side: statistics.median(one["wall"] for one in of) for side, of in (("without", plain), ("with", watched_sessions))}
    inside = {side: statistics.median(one["in_tests"] for one in of) for side, of in (("without", plain), ("with", watched_sessions))}
    keeping = [row for row in rows if row["footprint"]["kept"] > 0]
    record = {
        "kind": "footprint_overhead",
        "device": watched_sessions[-1].get("device"),
        "selection": list(options.selection),
        "tests": len(plain[-1]["ends"]),
        "wall_seconds": walls,
        "seconds_in_tests": inside,
        "all_wall_seconds": {"without": [one["wall"] for one in plain], "with": [one["wall"] for one in watched_sessions]},
        "overhead": walls["with"] / walls["without"] - 1,
        "overhead_in_tests": inside["with"] / max(inside["without"], 1e-9) - 1,
        "with_memory": len(rows),
        "allocations": sum(row["footprint"]["allocations"] for row in rows),
        "keeping": len(keeping),
        "kept": sum(row["footprint"]["kept"] for row in keeping),
        "largest": largest(rows, "peak"),
        "keeps_most": largest(rows, "kept"),
        "changed": {name: list(ends) for name, ends in list(changed.items())[:20]},
        "not_watched": sorted({why for row in rows for why in row["footprint"]["not_watched"]}),
        "versions": {name: version(name) for name in ("pytest", "pytest-gpumem")} | {"cupy": _cupy()},
        "python": platform.python_version(),
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    print(table(record))
    broken = []
    if record["overhead"] > LIMIT:
        broken.append(f"the overhead is above {100 * LIMIT:.0f} %")
    if changed:
        broken.append(f"{len(changed)} tests end otherwise: {dict(list(changed.items())[:5])}")
    if not rows:
        broken.append(f"no test's memory was found: {watched_sessions[-1]['printed']}")
    for one in broken:
        print(f"BROKEN: {one}")
    if options.json:
        write_record(options.json, record, indent=1)
    return 1 if broken else 0


def _cupy() -> str:
    import cupy

    return str(cupy.__version__)


if __name__ == "__main__":
    sys.exit(main())
