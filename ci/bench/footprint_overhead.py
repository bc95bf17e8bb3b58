"""What `--gpumem-footprint` costs somebody else's test suite, and what it shows of it: CuPy's own tests, unchanged.

Fills CuPy's cache of kernels by workers of xdist. Then runs the tests without the plugin and with `--gpumem --gpumem-footprint`, in turns
whose order alternates, and once more by stop-watches. Prints the overhead in the time of the tests, the ten tests that take most memory,
what the suite keeps, and where the plugin's time goes.

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
from contextlib import suppress
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
WORKERS = min(12, os.cpu_count() or 1)
"""Of xdist, which compile."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "some_tests", "-W", "ignore")
WATCHED = ("--gpumem", "--gpumem-device=cuda", "--gpumem-footprint=on")


def compile_kernels(tests: Path, selection: Sequence[str], cache: Path, count: int, seconds: float) -> None:
    """Run the tests in workers of xdist, for some seconds at most: whatever they compile stays in the cache."""
    command = [*PYTEST, "-p", "no:gpumem", "-n", str(WORKERS), "-c", os.devnull, "--rootdir", str(tests), *selection]
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=tests, env=_environment(cache, count), capture_output=True, timeout=seconds, check=False)


def _environment(cache: Path, count: int) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMEM", "PYTEST_"))}
    return found | {"CUPY_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "SOME_TESTS": str(count)}


def session(tests: Path, selection: Sequence[str], cache: Path, count: int, *, watched: bool, profile: bool = False) -> dict[str, Any]:
    """Run the suite once: its wall time, the time in its tests, how they ended, the rows with footprints, and a profile."""
    with tempfile.TemporaryDirectory() as folder:
        junit, results = Path(folder) / "junit.xml", Path(folder) / "results.json"
        options = [*WATCHED, f"--benchmark-json={results}"] if watched else ["-p", "no:gpumem"]
        command = [*PYTEST, "-p", "no:xdist", *options, "-c", os.devnull, "--rootdir", str(tests), f"--junitxml={junit}", *selection]
        environment = _environment(cache, count) | ({"SOME_PROFILE": str(Path(folder) / "profile")} if profile else {})
        begun = time.perf_counter()
        done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, errors="replace", check=False)
        wall = time.perf_counter() - begun
        if not junit.exists():
            sys.exit(f"footprint_overhead: {' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
        found: dict[str, Any] = {
            "wall": wall,
            "seconds": {_name(case): float(case.get("time") or 0) for case in cases},
            "ends": {_name(case): _end(case) for case in cases},
            "rows": [],
            "printed": done.stdout[-2000:],
        }
        if watched and results.exists() and results.stat().st_size:
            document = json.loads(results.read_text())["gpumem"]
            found |= {"rows": [row for row in document["rows"] if row["footprint"] is not None], "device": document["device"]}
        if profile:
            found["profile"] = _costs(Path(folder) / "profile")
        return found


def _costs(path: Path) -> list[dict[str, Any]]:
    """What the plugin does in the tests, by the time that it takes."""
    found = [{"function": name, "calls": calls, "seconds": seconds} for name, (calls, seconds) in json.loads(path.read_text()).items()]
    return sorted(found, key=lambda one: -one["seconds"])


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


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
    per_test = {name: 1e3 * seconds for name, seconds in record["more_per_test_seconds"].items()}
    lines = [
        f"{record['tests']} tests of CuPy {record['versions']['cupy']}, {record['sessions']} sessions each",
        f"{inside['without']:.2f} s without, {inside['with']:.2f} s with, overhead {overhead:+.1f} %",
        f"more a test: median {per_test['median']:.2f} ms, 90 % below {per_test['90 %']:.2f} ms, the first {per_test['first']:.1f} ms",
        f"start and end of a session {record['start_seconds']:+.1f} s",
        f"{record['with_memory']} tests take memory, {record['allocations']} allocations; {record['keeping']} keep {record['kept']} B",
        "",
        f"{'peak':>14}{'kept':>10}{'allocations':>13}  test",
    ]
    lines += [f"{one['peak']:>14}{one['kept']:>10}{one['allocations']:>13}  {one['test']}" for one in record["largest"]]
    if record["keeps_most"]:
        lines += ["", f"{'kept':>14}  test"]
        lines += [f"{one['kept']:>14}  {one['test']}" for one in record["keeps_most"]]
    if record["profile"]:
        lines += ["", f"{'seconds':>10}{'calls':>9}  by stop-watches"]
        lines += [f"{one['seconds']:>10.3f}{one['calls']:>9}  {one['function']}" for one in record["profile"]]
    return "\n".join(lines)


def record_of(plain: Sequence[dict[str, Any]], watched: Sequence[dict[str, Any]], selection: Sequence[str]) -> dict[str, Any]:
    """The record of the sessions so far: medians of the times, and the footprints of the last session."""
    walls = {side: statistics.median(one["wall"] for one in of) for side, of in (("without", plain), ("with", watched))}
    inside = {side: statistics.median(sum(one["seconds"].values()) for one in of) for side, of in (("without", plain), ("with", watched))}
    by_test = {side: _by_test(of) for side, of in (("without", plain), ("with", watched))}
    more = [seconds - by_test["without"].get(name, 0.0) for name, seconds in by_test["with"].items()]
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
        "more_per_test_seconds": {
            "first": more[0],
            "median": statistics.median(more),
            "90 %": sorted(more)[int(0.9 * len(more))],
        },
        "most_more": [{"test": name, "seconds": seconds} for seconds, name in sorted(zip(more, by_test["with"], strict=True))[-MOST:]],
        "start_seconds": walls["with"] - walls["without"] - (inside["with"] - inside["without"]),
        "with_memory": len(rows),
        "allocations": sum(row["footprint"]["allocations"] for row in rows),
        "keeping": len(keeping),
        "kept": sum(row["footprint"]["kept"] for row in keeping),
        "profile": [],
        "largest": largest(rows, "peak"),
        "keeps_most": largest(rows, "kept"),
        "changed": dict(list(changed.items())[:MOST]),
        "not_watched": sorted({why for row in rows for why in row["footprint"]["not_watched"]}),
        "versions": {name: version(name) for name in ("pytest", "pytest-gpumem")} | {"cupy": _cupy()},
        "python": platform.python_version(),
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _by_test(sessions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each test: the median of the sessions."""
    return {name: statistics.median(one["seconds"].get(name, 0.0) for one in sessions) for name in sessions[-1]["seconds"]}


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
    parser.add_argument("--number", type=int, default=400, help="tests, spread evenly over the selection (default 400)")
    parser.add_argument("selection", nargs="*", default=SELECTION, help="arguments for pytest: files, tests, -k ...")
    options = parser.parse_args()
    tests, begun, count = options.tests.resolve(), time.perf_counter(), options.number
    record: dict[str, Any] = {}
    plain: list[dict[str, Any]] = []
    watched: list[dict[str, Any]] = []

    def left() -> float:
        return float(options.seconds) - (time.perf_counter() - begun)

    def run(side: bool, profile: bool = False) -> dict[str, Any]:
        return session(tests, options.selection, Path(cache), count, watched=side, profile=profile)

    with tempfile.TemporaryDirectory() as cache:
        compile_kernels(tests, options.selection, Path(cache), count, options.seconds / 3)
        # A few tests tell how many fit: two turns, the profile, and what is left to compile.
        count = max(20, count // 10)
        few = run(False)
        in_tests = max(sum(few["seconds"].values()), 1e-3)
        each = left() / 7 - (few["wall"] - in_tests)
        count = max(count, min(options.number, int(count * each / in_tests)))
        while True:
            started = time.perf_counter()
            for side in (False, True) if len(plain) % 2 == 0 else (True, False):
                (watched if side else plain).append(run(side))
            record = record_of(plain, watched, options.selection)
            if options.json:
                write_record(options.json, record, indent=1)
            turn = time.perf_counter() - started
            if turn + turn > left():  # the next turn, and the profile
                break
        if left() > 0:
            record["profile"] = run(True, profile=True)["profile"]
            if options.json:
                write_record(options.json, record, indent=1)
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
