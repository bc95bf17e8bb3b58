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
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import device_of, installed, record_parser, utc_now, write_record

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
    """A plugin of a session: notes the time and the end of each test, and the footprints."""

    def __init__(self, number: int | None) -> None:
        """`number`: run as many tests, of each file the first ones; None: all that are named."""
        self._number = number
        self.seconds: dict[str, float] = {}
        self.ends: dict[str, str] = {}
        self.footprints: list[Any] = []
        self.device: dict[str, Any] | None = None

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

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        gpumem = session.config.pluginmanager.getplugin("gpumem-session")
        if gpumem is not None:
            self.device = device_of(gpumem.facts)
            self.footprints = [row.footprint for row in gpumem.rows if row.footprint is not None]


def run(side: str, tests: Sequence[str], number: int | None = None) -> Session:
    """Run a session of a side."""
    import cupy

    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "-c", os.devnull]
    options += ["--rootdir", os.curdir, *tests]
    options += ["-p", "no:gpumem"] if side in (WITHOUT, HOOK) else ["--gpumem", *side.split()]
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
    tests = sessions[0].seconds
    return sum(min(session.seconds[name] for session in sessions) for name in tests)


def record_of(rounds: Sequence[dict[str, Session]]) -> dict[str, Any]:
    """The record of the rounds that count."""
    last, sides = rounds[-1], {}
    alone = [sessions[WITHOUT] for sessions in rounds]
    footprints, changed = [], {}
    for side, session in last.items():
        ours = [sessions[side] for sessions in rounds]
        overheads = []
        for one_of_ours, one_alone in zip(ours, alone, strict=True):
            overheads.append(fastest([one_of_ours]) / fastest([one_alone]) - 1)
        seconds = fastest(ours)
        overhead = seconds / fastest(alone) - 1
        sides[side] = {"seconds": seconds, "overhead": overhead, "overheads": overheads}
        footprints += session.footprints
        for name, end in session.ends.items():
            if alone[-1].ends.get(name) != end:
                changed[name] = [alone[-1].ends.get(name), end]
    waits = [footprint.waits for footprint in footprints if footprint.waits is not None]
    return {
        "kind": "footprint_overhead",
        "device": [session.device for session in last.values()][-1],
        "selection": list(SELECTION),
        "tests": len(alone[-1].seconds),
        "rounds": len(rounds),
        "sides": sides,
        "with_memory": sum(bool(footprint.uses) for footprint in footprints),
        "allocations": sum(footprint.allocations for footprint in footprints),
        "counted": sum(each.not_read is None for each in waits),
        "waits": sum(each.count for each in waits),
        "changed": changed,
        "versions": installed("pytest", "pytest-gpumem", "cupy-cuda13x"),
        "python": platform.python_version(),
        "ended": utc_now(),
    }


def table(record: dict[str, Any]) -> str:
    """The record's figures as text, and the promises that it breaks."""
    lines, sides = [f"{record['tests']} tests of CuPy, {record['rounds']} rounds"], record["sides"]
    for name, side in sides.items():
        rounds = ", ".join(f"{each:+.1%}" for each in side["overheads"])
        lines.append(f"{side['seconds']:.3f} s {name}: {side['overhead']:+.1%} ({rounds})")
    memory = f"{record['with_memory']} tests take memory, {record['allocations']} allocations"
    lines.append(f"{memory}; {record['counted']} have {record['waits']} waits")
    for name, side in sides.items():
        most = LIMIT + (sides[HOOK]["overhead"] if "footprint" in name else 0.0)
        if name not in (WITHOUT, HOOK) and side["overhead"] > most:
            lines.append(f"BROKEN: {name} costs {side['overhead']:.1%}, more than {most:.1%}")
    if record["changed"]:
        lines.append(f"BROKEN: tests end otherwise: {record['changed']}")
    if not record["with_memory"] and not record["counted"]:
        lines.append("BROKEN: no test has a row")
    return "\n".join(lines)


def main() -> int:
    """Run, print and record."""
    parser = record_parser(__doc__, device=None)
    add = parser.add_argument
    add("--tests", type=Path, required=True, help="the folder tests of CuPy's source distribution")
    add("--seconds", type=float, default=120, help="begin no round that would end after this long")
    add("--measured", action="append", metavar="OPTIONS", help="options whose cost is measured")
    options = parser.parse_args()
    json_file = options.json.resolve() if options.json else None
    begun = time.perf_counter()
    for name in [name for name in os.environ if name.startswith(("GPUMEM", "PYTEST_"))]:
        del os.environ[name]
    os.chdir(options.tests)
    sides = [WITHOUT, HOOK, *(options.measured or ["--gpumem-footprint=on"])]
    tests = list(run(WITHOUT, SELECTION, NUMBER).seconds)
    rounds: list[dict[str, Session]] = []
    turn = 0.0  # seconds of the last round
    while len(rounds) < 2 or time.perf_counter() - begun + turn < options.seconds:
        started = time.perf_counter()
        order = sides[::-1] if len(rounds) % 2 else sides
        done = {side: run(side, tests) for side in order}
        rounds.append({side: done[side] for side in sides})
        turn = time.perf_counter() - started
    record = record_of(rounds[1:])
    if json_file is not None:
        write_record(json_file, record, indent=1)
    shown = table(record)
    print(shown)
    return 1 if "BROKEN" in shown else 0


if __name__ == "__main__":
    sys.exit(main())
