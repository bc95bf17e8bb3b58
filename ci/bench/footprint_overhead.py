"""The cost of `--gpumem-footprint=on`, or of each `--measured`, in CuPy's own tests, unchanged.

One process runs the tests in rounds, each with a session of every side: the tests alone, with a memory hook of CuPy that does nothing, and
with the plugin by each `--measured`. Rounds alternate in their order, and the first does not count. The time of a test is that of all hooks
around it in its fastest round, by the wall clock.

    git archive v14.2.0 tests | tar -x    # in a checkout of CuPy; the folder "tests"
    export CUPY_CACHE_DIR=kernels
    python ci/bench/footprint_overhead.py --tests tests --measured=--gpumem-footprint=on --measured=--gpumem-waits --json footprint_overhead.json

The first round compiles the kernels that CUPY_CACHE_DIR lacks, which takes minutes. Exits with 1 if options cost 5 % more than the hook,
which `--gpumem-waits` does not have; if tests end otherwise; or if no test has a row.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import installed, record_parser, utc_now, write_record

LIMIT = 0.05  # largest overhead, as a share of the time of the tests alone
SELECTION = (
    "cupy_tests/creation_tests",
    "cupy_tests/manipulation_tests",
    "cupy_tests/statistics_tests",
    "cupy_tests/linalg_tests/test_product.py",
    "cupy_tests/core_tests/test_ndarray.py",
    "-k",
    "not huge and not large and not no_oom",  # what compiles, or runs NumPy on the host, for most of a minute
)
NUMBER = 60  # of tests, about
WITHOUT, HOOK = "without", "empty hook"  # sides; the others are those of `--measured`


class Session:
    """A plugin of a session: notes the time and the end of each test."""

    def __init__(self, number: int | None) -> None:
        """`number`: run as many tests, of each file the first ones; None: all that are named."""
        self._number = number
        self.seconds: dict[str, float] = {}
        self.ends: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._number is None:
            return
        of_files, places, kept = Counter(item.path for item in items), Counter[Path](), []
        for item in items:
            first = places[item.path] * len(items) < self._number * of_files[item.path]
            places[item.path] += 1
            # pytest takes what follows the first bracket for parameters of the function.
            if first and "[" not in item.nodeid.rpartition("::")[0]:
                kept.append(item)
        items[:] = kept

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        begun = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - begun
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.ends[report.nodeid] = report.outcome


def run(side: str, tests: Sequence[str], number: int | None, results: Path | None) -> Session:
    """Run a session of a side. `results`: file for pytest-benchmark's JSON."""
    import cupy

    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "-c", os.devnull]
    options += ["--rootdir", os.curdir, *tests]
    if side in (WITHOUT, HOOK):
        options += ["-p", "no:gpumem"]
    else:
        options += ["--gpumem", *side.split()]
        if results is not None:
            options.append(f"--benchmark-json={results}")
    session, printed = Session(number), io.StringIO()
    hook = cupy.cuda.MemoryHook() if side == HOOK else contextlib.nullcontext()
    gc.collect()
    with contextlib.redirect_stdout(printed), hook:
        status = pytest.main(options, plugins=[session])
    if not session.ends:
        sys.exit(f"footprint_overhead: {side} ended with {status}:\n{printed.getvalue()[-3000:]}")
    return session


def fastest(sessions: Sequence[Session]) -> float:
    """The sum of the tests' seconds, each in its fastest session."""
    total = 0.0
    for name in sessions[-1].seconds:
        total += min(session.seconds[name] for session in sessions)
    return total


def cost(sessions: Sequence[Session], alone: Sequence[Session]) -> dict[str, Any]:
    """What the sessions of a side cost beside those of the tests alone, also in single rounds."""
    seconds, overheads = fastest(sessions), []
    for ours, theirs in zip(sessions, alone, strict=True):
        overheads.append(fastest([ours]) / fastest([theirs]) - 1)
    return {"seconds": seconds, "overhead": seconds / fastest(alone) - 1, "overheads": overheads}


def record_of(
    sides: Mapping[str, Sequence[Session]], rows: Sequence[dict[str, Any]], device: object
) -> dict[str, Any]:
    """The record of the rounds so far. `rows`: of all sides of the first round."""
    alone, footprints = sides[WITHOUT], [row["footprint"] for row in rows if row["footprint"]]
    waits = [footprint["waits"] for footprint in footprints if footprint["waits"]]
    changed = {}
    for sessions in sides.values():
        for name, end in sessions[-1].ends.items():
            if alone[-1].ends.get(name) != end:
                changed[name] = [alone[-1].ends.get(name), end]
    return {
        "kind": "footprint_overhead",
        "device": device,
        "selection": list(SELECTION),
        "tests": len(alone[-1].seconds),
        "rounds": len(alone),
        "sides": {side: cost(sessions, alone) for side, sessions in sides.items()},
        "with_memory": sum(bool(footprint["uses"]) for footprint in footprints),
        "allocations": sum(footprint["allocations"] for footprint in footprints),
        "counted": sum(each["not_read"] is None for each in waits),
        "waits": sum(line["count"] for each in waits for line in each["lines"]),
        "changed": changed,
        "versions": installed("pytest", "pytest-gpumem", "cupy-cuda13x"),
        "python": platform.python_version(),
        "ended": utc_now(),
    }


def table(record: dict[str, Any]) -> str:
    """The record's figures as text."""
    lines = [f"{record['tests']} tests of CuPy, {record['rounds']} rounds"]
    for name, side in record["sides"].items():
        rounds = ", ".join(f"{each:+.1%}" for each in side["overheads"])
        lines.append(f"{side['seconds']:.3f} s {name}: {side['overhead']:+.1%} ({rounds})")
    memory = f"{record['with_memory']} tests take memory, {record['allocations']} allocations"
    return "\n".join([*lines, f"{memory}; {record['counted']} have {record['waits']} waits"])


def broken(record: dict[str, Any]) -> list[str]:
    """The promises that a record breaks."""
    lines, sides = [], record["sides"]
    for side, its in sides.items():
        beside = sides[HOOK]["overhead"] if "footprint" in side else 0.0
        if side not in (WITHOUT, HOOK) and its["overhead"] > beside + LIMIT:
            lines.append(f"{side} costs {its['overhead']:.1%}, more than {beside + LIMIT:.1%}")
    if record["changed"]:
        lines.append(f"tests end otherwise: {record['changed']}")
    if not record["with_memory"] and not record["counted"]:
        lines.append("no test has a row")
    return lines


def main() -> int:
    """Run, print and record."""
    parser = record_parser(__doc__, device=None)
    add = parser.add_argument
    add("--tests", type=Path, required=True, help="the folder tests of CuPy's source distribution")
    add("--seconds", type=float, default=120, help="begin no round that would end after this long")
    add("--measured", action="append", metavar="OPTIONS", help="options whose cost is measured")
    options = parser.parse_args()
    begun = time.perf_counter()
    for name in [name for name in os.environ if name.startswith(("GPUMEM", "PYTEST_"))]:
        del os.environ[name]
    json_file = options.json.resolve() if options.json else None
    os.chdir(options.tests)
    names = [WITHOUT, HOOK, *(options.measured or ["--gpumem-footprint=on"])]
    rows: list[dict[str, Any]] = []
    device = None
    tests = list(run(WITHOUT, SELECTION, NUMBER, None).seconds)
    with tempfile.TemporaryDirectory() as folder:
        for side in names:
            results = Path(folder, "results.json")
            run(side, tests, None, results)
            if results.exists() and results.stat().st_size:
                document = json.loads(results.read_text())["gpumem"]
                rows, device = [*rows, *document["rows"]], document["device"]
                results.unlink()
    sides: dict[str, list[Session]] = {side: [] for side in names}
    turn = 0.0  # seconds of the last round
    while not sides[WITHOUT] or time.perf_counter() - begun + turn < options.seconds:
        started = time.perf_counter()
        for side in names:
            sides[side].append(run(side, tests, None, None))
        names.reverse()
        record = record_of(sides, rows, device)
        if json_file is not None:
            write_record(json_file, record, indent=1)
        turn = time.perf_counter() - started
    print(table(record))
    for line in broken(record):
        print(f"BROKEN: {line}")
    return 1 if broken(record) else 0


if __name__ == "__main__":
    sys.exit(main())
