"""Packed sessions on a GPU: the time of `--gpumem-pack` over the bound that memory sets, and what kernels of several processes gain.

    python ci/bench/packed_sessions.py --only sixty --seconds 80 --json packed_sessions.json

The parts, each of which `--only` runs alone:

    sixty  60 tests of 0 to 40 GiB and 0.05 to 1 s, which mostly wait on the host. A session with one worker learns what they take;
           then three sessions with ten workers, each with the tests in another order.
    busy   twelve tests of kernels that keep the GPU busy, with one worker and with six.
    cupy   a part of CuPy's own tests, unchanged: with one worker and with eight, without the plugin and packed.

The bound of the 60 tests is the larger of: memory x time over the memory of the GPU; the longest test. Sessions are left out, or ended,
that would not end within `--seconds`; the record, which is written after each session, says which. Exits with 1 if the 60 tests break a
promise: a test fails or runs out of memory, tests have more memory at once than there is, or a session takes more
than 1.25 times the bound.
On the simulated device the tests are those of `sixty` and `busy`, smaller in time and without kernels.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import chosen_device, device_of, installed, record_parser, utc_now, write_record

from pytest_gpumem.units import GiB

LIMIT = 1.25  # times the bound
TESTS, LARGEST, LONGEST = 60, 40 * GiB, 1.0
ORDERS = 3
LEARN, PACKED = 60.0, 20.0  # seconds that a session of the 60 tests needs, before one is timed
LOOK = 0.05  # seconds between two readings of how busy the GPU is
SELECTION = (
    "cupy_tests/creation_tests",
    "cupy_tests/manipulation_tests",
    "cupy_tests/statistics_tests",
)
WORK = {
    "cuda": """
import time, cupy, pytest

@pytest.fixture
def work():
    def run(n, seconds):
        array = cupy.empty(n, "u1")
        array[: 1 << 30].fill(1)
        cupy.cuda.Device().synchronize()
        time.sleep(seconds)
    return run

@pytest.fixture
def compute():
    def run():
        array = cupy.ones((8192, 8192), "f4")
        for _ in range(40):
            for _ in range(40):
                cupy.multiply(array, 1.0001, out=array)
            cupy.cuda.Device().synchronize()
    return run
""",
    "sim": """
import time, pytest

@pytest.fixture
def work(device_buffer):
    def run(n, seconds):
        device_buffer(n, "u1")
        time.sleep(seconds)
    return run

@pytest.fixture
def compute(work):
    return lambda: work(1 << 28, 0.05)
""",
}
"""By device: the fixtures that the tests call."""


# A plugin of the sessions


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note when a test begins and ends, all hooks around it included."""
    begun = time.time()
    result = yield
    with open(os.environ["PACKED_TIMES"], "a", encoding="utf-8") as file:
        file.write(
            json.dumps([begun, time.time(), item.nodeid, os.environ.get("PYTEST_XDIST_WORKER", "")])
            + "\n"
        )
    return result


# The sessions


class Sessions:
    """Sessions of pytest, in a time that they share, and what they show."""

    def __init__(self, device: str, seconds: float, folder: Path) -> None:
        self.device, self.folder, self._until = device, folder, time.monotonic() + seconds
        self.pack = ("--gpumem", f"--gpumem-device={device}", "--gpumem-pack")

    @property
    def left(self) -> float:
        """Seconds until all sessions have to be over."""
        return self._until - time.monotonic()

    def suite(self, name: str, tests: str) -> Path:
        """A folder with these tests, the same one for each name: the cache of earlier sessions stays in it."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        (place / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        (place / "test_it.py").write_text(
            WORK[self.device.partition(":")[0]] + tests, encoding="utf-8"
        )
        return place

    def run(self, place: Path, *options: str, needs: float = 0.0) -> dict[str, Any] | None:
        """Run a session, and print what it says; None if less than `needs` seconds are left."""
        if self.left < max(needs, 1.0):
            print(f"left out: {' '.join(options[-4:])}: {self.left:.0f} s are left")
            return None
        times = self.folder / "times"
        times.unlink(missing_ok=True)
        unwanted = ("CI", "GPUMEM", "PYTEST_")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(unwanted)
        }
        path = os.pathsep.join(
            [str(Path(__file__).resolve().parent), environment.get("PYTHONPATH", "")]
        )
        environment |= {
            "PACKED_TIMES": str(times),
            "PYTHONPATH": path,
            "CUPY_CACHE_DIR": str(self.folder / "cupy"),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-W",
            "ignore",
            "-p",
            "packed_sessions",
            "-p",
            "no:randomly",
            *options,
        ]
        begun = time.time()
        with _busy(self.device) as busy:
            # A session of its own: the workers of one that takes too long end with it.
            process = subprocess.Popen(
                command,
                cwd=place,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                printed, _ = process.communicate(timeout=self.left)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate()
                printed += "\ngpumem: ended by the time that was left"
        spans = [span for span in map(json.loads, _lines(times)) if "gpumem-pack" not in span[2]]
        said = [
            line
            for line in printed.splitlines()
            if line.startswith("gpumem: ") or re.search(r"\d+ (passed|failed|error)", line)
        ]
        print(f"$ pytest {' '.join(options)}", *said, sep="\n  ", flush=True)
        if process.returncode != 0:
            print(printed[-3000:], flush=True)
        return {
            "options": [option for option in options if not option.startswith("/")],
            "exit": process.returncode,
            "seconds": time.time() - begun,
            "tests": len({span[2] for span in spans}),
            "first_test_after": min(span[0] for span in spans) - begun if spans else None,
            "tests_seconds": max(span[1] for span in spans) - min(span[0] for span in spans)
            if spans
            else None,
            "spans": spans,
            "gpu_busy": sum(busy) / len(busy) / 100 if busy else None,
            "said": said,
        }


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@contextmanager
def _busy(device: str) -> Iterator[list[int]]:
    """Per cent of the time in which kernels run, read again and again; nothing on the simulated device."""
    found: list[int] = []
    if not device.startswith("cuda"):
        yield found
        return
    import pynvml

    ended = threading.Event()
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(int(device.partition(":")[2] or 0))

    def read() -> None:
        while not ended.wait(LOOK):
            with suppress(pynvml.NVMLError):
                found.append(int(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


# The parts


def most_at_once(spans: list[list[Any]], nbytes: dict[str, int]) -> int:
    """The most bytes that tests which run at once have together. `nbytes`: by node id."""
    # At the same moment an end comes first.
    changes = sorted(
        change
        for begun, ended, name, _ in spans
        for change in ((begun, nbytes[name]), (ended, -nbytes[name]))
    )
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def beyond(spans: list[list[Any]], slept: dict[str, float]) -> dict[str, float]:
    """Mean seconds of a test beyond its sleep: of the first test of each worker, which makes the context, and of the others."""
    seen, found = set[str](), dict[str, list[float]]()
    for begun, ended, name, worker in sorted(spans):
        found.setdefault("others" if worker in seen else "first of a worker", []).append(
            ended - begun - slept[name]
        )
        seen.add(worker)
    return {which: sum(seconds) / len(seconds) for which, seconds in found.items()}


def sixty(sessions: Sessions, total: int, write: Callable[[dict[str, Any]], None]) -> list[str]:
    """60 tests that wait on the host: what is wrong with packing."""
    draw, slower = random.Random(1), 1.0 if sessions.device.startswith("cuda") else 0.2
    largest = min(LARGEST, total // 2)
    plan = [
        (int(draw.uniform(0, largest)), draw.uniform(0.05, LONGEST) * slower) for _ in range(TESTS)
    ]
    nbytes = {f"test_it.py::test_{number}": size for number, (size, _) in enumerate(plan)}
    bound = max(
        sum(size * seconds for size, seconds in plan) / total, *(seconds for _, seconds in plan)
    )
    found: dict[str, Any] = {
        "bound": bound,
        "total": total,
        "serial": sum(seconds for _, seconds in plan),
        "limit": LIMIT,
        "sessions": [],
    }
    wrong, needs = list[str](), LEARN
    for order in range(ORDERS + 1):
        numbers = [*range(TESTS)]
        if order:
            random.Random(order).shuffle(numbers)
        tests = "".join(
            f"\ndef test_{number}(work):\n    work{plan[number]}\n" for number in numbers
        )
        one = sessions.run(
            sessions.suite("sixty", tests),
            *sessions.pack,
            "-n",
            "10" if order else "1",
            needs=needs * slower,
        )
        if one is None:
            break
        needs = one["seconds"] if order else PACKED
        spans = one.pop("spans")
        ratio = one["tests_seconds"] / bound if spans else None
        took = {name: end - begun for begun, end, name, _ in spans}
        more = beyond(
            spans,
            {f"test_it.py::test_{number}": seconds for number, (_, seconds) in enumerate(plan)},
        )
        as_ran = (
            max(
                sum(nbytes[name] * seconds for name, seconds in took.items()) / total,
                *took.values(),
            )
            if spans
            else None
        )
        twice = sum(int(line.split()[1]) for line in one["said"] if "ran twice (memory)" in line)
        at_once = most_at_once(spans, nbytes)
        found["sessions"].append(
            {
                "order": order,
                "ratio": ratio,
                "bound_as_ran": as_ran,
                "twice": twice,
                "most_bytes": at_once,
                "beyond": more,
                **one,
            }
        )
        write(found)
        name = f"order {order}" if order else "the session that learns"
        of = f"{one['tests_seconds']} s, ratio {ratio}, bound {bound:.2f} s, with the times that the tests took {as_ran} s"
        print(
            f"{name}: {of}, at most {at_once / GiB:.1f} GiB, beyond its sleep {more}, GPU busy {one['gpu_busy']}",
            flush=True,
        )
        if one["exit"] != 0 or one["tests"] != TESTS:
            wrong.append(f"{name}: exit code {one['exit']}, {one['tests']} tests")
        if twice:
            wrong.append(f"{name}: {twice} tests ran out of memory")
        if at_once > total:
            wrong.append(f"{name}: tests have {at_once} bytes at once")
        if order and ratio is not None and ratio > LIMIT:
            wrong.append(f"{name}: {ratio:.2f} times the bound")
    return wrong if len(found["sessions"]) > 1 else [*wrong, "no session was packed"]


def busy(sessions: Sessions, total: int, write: Callable[[dict[str, Any]], None]) -> list[str]:
    """Tests that keep the GPU busy: the factor that packing gains."""
    place = sessions.suite(
        "busy",
        "\n@pytest.mark.parametrize('number', range(12))\ndef test_busy(number, compute):\n    compute()\n",
    )
    found: dict[str, Any] = {}
    for name, workers in (("learns", "1"), ("one worker", "1"), ("six workers", "6")):
        if (one := sessions.run(place, *sessions.pack, "-n", workers)) is not None:
            one.pop("spans")
            write({**found, name: one})
            found[name] = one
    if len(found) == 3 and all(one["tests_seconds"] for one in found.values()):
        found["factor"] = (
            found["one worker"]["tests_seconds"] / found["six workers"]["tests_seconds"]
        )
        print("busy kernels: factor", found["factor"])
        write(found)
    return []


def cupy(sessions: Sessions, total: int, write: Callable[[dict[str, Any]], None]) -> list[str]:
    """CuPy's own tests: times and failures with one worker, with eight, and packed."""
    place = Path(os.environ.get("CUPY_TESTS", "cupy-tests")).resolve()
    if not place.is_dir():
        return [f"CuPy's tests are not in {place}: CUPY_TESTS names their folder"]
    os.environ["SOME_TESTS"] = "800"
    common = [
        "-p",
        "some_tests",
        "-c",
        "/dev/null",
        "--rootdir",
        str(place),
        "-o",
        f"cache_dir={sessions.folder / 'cache'}",
    ]
    common += [*SELECTION, "-k", "not huge and not large and not no_oom"]
    plain, found = ("-p", "no:gpumem"), dict[str, Any]()
    for name, options in {
        "compiles": (*plain, "-n", "12"),
        "-n 1": (*plain, "-n", "1"),
        "-n 8": (*plain, "-n", "8"),
        "learns": (*sessions.pack, "-n", "8"),
        "-n 8 --gpumem-pack": (*sessions.pack, "-n", "8"),
    }.items():
        if (one := sessions.run(place, *common, *options)) is not None:
            one.pop("spans")
            found[name] = one
            write(found)
            print(
                f"{name}: {one['tests_seconds']} s for {one['tests']} tests, exit code {one['exit']}"
            )
    return []


PARTS: dict[str, Callable[[Sessions, int, Callable[[dict[str, Any]], None]], list[str]]] = {
    "sixty": sixty,
    "busy": busy,
    "cupy": cupy,
}


def main() -> int:
    """Run, print and record."""
    parser = record_parser(__doc__)
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="this part alone; can be given several times"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="for all parts together (default: %(default)s)"
    )
    given = parser.parse_args()
    chosen = chosen_device(parser, given.device)
    seen = chosen.occupancy(chosen.facts.uuid or chosen.facts.key)
    if seen is None:
        parser.error(f"--device {given.device}: NVML does not say how much memory it has")
    record: dict[str, Any] = {
        "kind": "packed_sessions",
        "begun": utc_now(),
        "ended": None,
        "device": device_of(chosen.facts),
        "versions": installed("pytest-gpumem", "pytest", "pytest-xdist", "cupy-cuda13x"),
        "cpus": os.cpu_count(),
        "parts": {},
    }
    wrong = []
    with tempfile.TemporaryDirectory(
        prefix="packed-sessions-", ignore_cleanup_errors=True
    ) as folder:
        sessions = Sessions(given.device, given.seconds, Path(folder))
        for name in given.only or PARTS:

            def write(found: dict[str, Any], name: str = name) -> None:
                record["parts"][name] = found
                record["ended"] = utc_now()
                if given.json is not None:
                    write_record(given.json, record, indent=1)

            wrong += PARTS[name](sessions, seen.total, write)
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
