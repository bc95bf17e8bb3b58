"""The cost of a measuring test besides sampling, checking and first-use work: allocation, placements, conditions, reports.

Runs the STREAM tests of the suite and a triad on 256 MiB arrays several times in one pytest session that saves its rows, with
stop-watches around the parts of a test, and prints the median of the rest, of its parts, and of the checks; then what a saved row of
managed memory costs besides.

    python ci/bench/overhead.py --json ci/records/nvidia-h200/overhead.json

Exits with 1 above the limits: 30 ms for the rest, 50 ms for the two checks of a 256 MiB triad, in the median.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import record_parser, write_record

from pytest_gpumem.measuring import conductor
from pytest_gpumem.measuring.harness import Harness
from pytest_gpumem.measuring.sampling import Sampling
from pytest_gpumem.measuring.target_kernel import KernelLaunches
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.plugin import running
from pytest_gpumem.plugin.replay import Replay
from pytest_gpumem.plugin.state import GpuSession, GpuTest

REST_LIMIT = 0.030
CHECK_LIMIT = 0.050
ROUNDS = 5
OUTSIDE = ("sampling", "checking", "once a session", "compiling")
"""Parts that are not of the rest."""
REST: tuple[tuple[Any, str, str], ...] = (
    (Arena, "buffer", "buffers"),
    (KernelLaunches, "_move", "copies at new places"),
    (Sampling, "_move", "waiting for the copies"),
    (KernelLaunches, "_leave", "leaving the places"),
    (conductor, "find_what_ran", "what a launch runs"),
    (conductor, "watch_launch", "times of a launch, to explain"),
    (conductor.Conductor, "_measure", "conditions, record"),
    (conductor.Conductor, "target", "describing the kernel"),
    (Replay, "feed", "pytest-benchmark"),
    (running, "judge_test", "judging"),
    (GpuTest, "close", "freeing"),
    (GpuSession, "wait", "waiting for the test's work"),
    (GpuSession, "make_room", "giving back the spare memory"),
)
"""Parts of the rest: owner and name of what is watched, name of the part."""
PAGES = "page faults, to explain"
"""The part of a row of managed memory."""

TESTS = """
import pytest
from pytest_gpumem import MiB
from pytest_gpumem.kernels.stream import tile_bytes

ROUNDS = range({rounds})
NBYTES = {mib} * MiB

@pytest.mark.parametrize("round", ROUNDS)
@pytest.mark.parametrize("name", ["copy", "mul", "stream_add", "triad", "write", "read", "dot"])
def test_stream(gpu_benchmark, gpu_kernels, device_buffer, name, round):
    kernel = getattr(gpu_kernels, name)
    arrays = {{"copy": 2, "mul": 2, "write": 1, "read": 1, "dot": 2}}.get(name, 3)
    buffers = [device_buffer(NBYTES, "f4") for _ in range(arrays)]
    if name in ("read", "dot"):
        buffers.append(device_buffer((NBYTES // tile_bytes(name),), "f4"))
    gpu_benchmark(kernel, *buffers)

@pytest.mark.parametrize("round", ROUNDS)
def test_managed(gpu_benchmark, gpu_kernels, managed_buffer, round):
    gpu_benchmark(gpu_kernels.add, managed_buffer(NBYTES // 4), managed_buffer(NBYTES // 4))
"""


class Watch:
    """Stop-watches that do not count each other's time: a pytest plugin."""

    def __init__(self) -> None:
        self.spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        """Seconds by test and part."""
        self._running: list[float] = []
        """Seconds that parts inside took, of each running part."""
        self._test = ""

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            self._running.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                inside, took = self._running.pop(), time.perf_counter() - begun
                self.spent[self._test][part] += took - inside
                if self._running:
                    self._running[-1] += took

        return wrapper

    def watch(self, owner: Any, name: str, part: str) -> None:
        setattr(owner, name, self.timed(part, getattr(owner, name)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._test = item.nodeid
        begun = time.perf_counter()
        try:
            return (yield)
        finally:
            self.spent[item.nodeid]["whole"] = time.perf_counter() - begun
            self._test = ""


def measured(device: str, mib: int) -> tuple[Watch, dict[str, Any]]:
    """Run the tests in this process; the watch and the run's JSON."""
    watch = Watch()
    watch.watch(Sampling, "_warm_up", "sampling")
    watch.watch(Sampling, "_fill", "sampling")
    watch.watch(Sampling, "_take", "sampling")  # also where placements are new, to warm them up
    watch.watch(KernelLaunches, "check", "checking")
    for owner, name, part in REST:
        watch.watch(owner, name, part)
    watch.watch(conductor, "count_migrations", PAGES)
    watch.watch(Harness, "wake", "once a session")
    watch.watch(Harness, "floors", "once a session")
    watch.watch(Harness, "flush", "once a session")
    GpuSession.device = property(watch.timed("once a session", GpuSession.device.fget))  # type: ignore[method-assign,assignment,attr-defined]
    if not device.startswith("sim"):
        from pytest_gpumem.devices.cuda.compiler import Compiler

        watch.watch(Compiler, "_load", "compiling")
    with tempfile.TemporaryDirectory() as folder:
        file, result = Path(folder) / "test_costs.py", Path(folder) / "result.json"
        file.write_text(TESTS.format(rounds=ROUNDS, mib=mib))
        options = [
            "--gpumem",
            f"--gpumem-device={device}",
            "--gpumem-save",
            f"--gpumem-baseline={folder}/baseline",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--benchmark-json={result}",
            f"--rootdir={folder}",
        ]
        code = pytest.main([*options, "--benchmark-columns=median", str(file)], plugins=[watch])
        if code:
            sys.exit(f"pytest ended with {code}")
        return watch, json.loads(result.read_text())["gpumem"]


def rests(watch: Watch) -> list[dict[str, Any]]:
    """Each test's parts and what is left of its whole time; the first round of each test, which compiles and loads, is left out."""
    found = []
    for nodeid, parts in watch.spent.items():
        if not nodeid or "-0]" in nodeid:
            continue
        counted = sum(parts.get(part, 0.0) for part in OUTSIDE)
        found.append(
            {"test": nodeid.rpartition("::")[2], **parts, "rest": parts["whole"] - counted}
        )
    return found


def main() -> int:
    parser = record_parser(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="MiB of each array")
    chosen = parser.parse_args()
    watch, document = measured(chosen.device, chosen.mib)
    every = rests(watch)
    tests = [one for one in every if one["test"].startswith("test_stream")]
    pages = statistics.median(one[PAGES] for one in every if one not in tests)
    rest = statistics.median(t["rest"] for t in tests)
    checks = [t["checking"] for t in tests if t["test"].startswith("test_stream[triad")]
    check = statistics.median(checks)
    medians = {
        part: statistics.median(t.get(part, 0.0) for t in tests)
        for part in ("whole", "sampling", "checking", "rest")
    }
    of_rest = {part: statistics.median(t.get(part, 0.0) for t in tests) for _, _, part in REST}
    of_rest["hooks, fixtures, reports"] = statistics.median(
        t["rest"] - sum(t.get(part, 0.0) for part in of_rest) for t in tests
    )
    for part, seconds in (medians | of_rest).items():
        print(
            f"{'  ' if part in of_rest else ''}{part:30s} {1e3 * seconds:8.2f} ms in the median of {len(tests)} tests"
        )
    print(f"{PAGES}, of a row of managed memory: {1e3 * pages:.1f} ms")
    print(f"rest: {1e3 * rest:.1f} ms, limit {1e3 * REST_LIMIT:.0f} ms")
    print(
        f"two checks of a {chosen.mib} MiB triad: {1e3 * check:.1f} ms, limit {1e3 * CHECK_LIMIT:.0f} ms"
    )
    if chosen.json:
        record = {
            "kind": "test overhead",
            "device": document["device"],
            "mib": chosen.mib,
            "limits_s": {"rest": REST_LIMIT, "checking": CHECK_LIMIT},
            "median_s": {"rest": rest, "checking_triad": check, "pages_managed": pages},
            "rest_s": of_rest,
            "tests": every,
        }
        write_record(chosen.json, record, indent=1)
    return int(not (rest <= REST_LIMIT and check <= CHECK_LIMIT))


if __name__ == "__main__":
    sys.exit(main())
