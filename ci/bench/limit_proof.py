"""Does a limit on slow-downs keep its promises on this machine, in a project that somebody else could have written?

Makes a git repository with fifteen tests of CuPy, PyTorch and Triton, and calls pytest, `gpumem duet` and `gpumem gate` as a user does.
One test copies some per cent more bytes than it declares, as `planted.py` of the current branch says.

    python ci/bench/limit_proof.py --json ci/records/nvidia-h200/limit_proof.json
    python ci/bench/limit_proof.py --json FILE --folder DIR --only save unchanged --runs 5

Each part adds what it saw to the record after every run. With `--folder`, several calls on one machine share project and baseline.
Prints the record with its targets. Exits with 1 where a target is missed.

    save       accept 3 runs of 3 processes
    unchanged  compare unchanged code, limit 1 %
    bytes      compare 1.5 % more bytes, limit 1 %
    gross      compare 50 % more bytes, limit 1 %
    five       compare 3.2 % and 7 % more bytes, limit 5 %
    duet       play a duet of unchanged code and one of 1.5 % more bytes, limit 1 %
    gate       gate branches that change a comment, one kernel, and one wait of the host; limit 1 %
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import write_record

from pytest_gpumem.records.row import Row
from pytest_gpumem.result_files import FileError, load
from pytest_gpumem.units import format_time

ROOT = Path(__file__).resolve().parents[2]
GPUMEM = (sys.executable, "-c", "from pytest_gpumem.cli import main; main()")
LIBRARIES = ("cupy", "torch", "triton")
SAVES, PROCESSES, RUNS = 3, 3, 20
TIMEOUT = 560.0
"""Seconds for one command; lent machines end one after 600 s."""
WORDS = 2000
"""Last characters of a failed command that are recorded."""
AGAIN = "LIMIT_PROOF_AGAIN"
"""Variable with the file in which the processes of a command record their times."""

PASSES = 0.9
"""Least share of unchanged rows that pass."""
GROSS_SECONDS = 15.0
"""Most seconds of measuring again after a gross slow-down."""
DUET_SECONDS = 60.0
"""Most seconds of a duet of unchanged code."""
GATES: dict[str, tuple[float, int]] = {
    "comment": (2.0, 0),
    "wait": (math.inf, 1),
    "kernel": (1.5, 0),
}
"""By what a branch changes: most time of its gate, in plain runs, and the exit code."""

COMPARED = {
    "bytes": ((1.5, "1%", "FAIL"),) * 5,
    "gross": ((50.0, "1%", "FAIL"),),
    "five": ((3.2, "5%", "PASS"), (7.0, "5%", "FAIL")),
}
"""By part: per cent of more bytes in the planted row, its limit, and its verdict, of each run."""

CONFTEST = f'''
"""Records when each process began, ran its first and its last test, and ended, and how long the session measured again."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

clock = {{"begun": time.time()}}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart():
    clock.setdefault("first", time.time())


@pytest.hookimpl(wrapper=True, trylast=True)  # inside of what measures again
def pytest_runtestloop():
    try:
        return (yield)
    finally:
        clock["last"] = time.time()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    if "last" in clock and "{AGAIN}" in os.environ:
        experiment = Path(sys.modules["__main__"].__file__).name == "experiment_process.py"
        kind = "session" if not experiment else "further" if "_GPUMEM_FURTHER_PROCESS" in os.environ else "duet"
        with open(os.environ["{AGAIN}"], "a") as file:
            file.write(json.dumps({{"kind": kind, **clock, "end": time.time()}}) + "\\n")
'''
TRIAD = "test_triad.py::test_triad"
TEST_TRIAD = """
from pytest_gpumem import MiB


def test_triad(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.triad, *(device_buffer(32 * MiB, "f4") for _ in range(3)), 3.0)
"""
PLANTED = "test_copy.py::test_copy"
TEST_COPY = """
import numpy
import pytest
from planted import LOAD, MORE, WAITS
from pytest_gpumem import Case

cupy = pytest.importorskip("cupy")

NEEDED = 40 << 20  # elements
COPIED = NEEDED + int(NEEDED * MORE / 100)
ROOM = NEEDED * 3 // 2  # the same arrays, however many elements are copied

SOURCE = r'''
extern "C" __global__ void copy(const float* x, float* y, long long n) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i < n) {
        y[i] = LOAD;
    }
}
'''.replace("LOAD", LOAD)


def test_copy(gpu_benchmark):
    kernel = cupy.RawKernel(SOURCE, "copy")

    def case(memory):
        x, y = (memory.device((ROOM,), "f4", like=cupy) for _ in range(2))

        def copy():
            kernel(((COPIED + 255) // 256,), (256,), (x, y, numpy.int64(COPIED)))
            if WAITS:
                cupy.cuda.Device().synchronize()

        return Case(
            copy,
            check=lambda: bool((y[:COPIED] == x[:COPIED]).all()),
            moved=2 * 4 * NEEDED,
        )

    gpu_benchmark.case(case)
"""
TEST_CUPY = """
import pytest
from pytest_gpumem import Case

cupy = pytest.importorskip("cupy")


def test_axpy(gpu_benchmark):
    axpy = cupy.ElementwiseKernel("float32 a, float32 x, float32 y", "float32 z", "z = a * x + y", "axpy")

    def case(memory):
        x, y, z = (memory.device((1 << 24,), "f4", like=cupy) for _ in range(3))
        return Case(
            lambda: axpy(2.0, x, y, z),
            check=lambda: bool(cupy.allclose(z, 2 * x + y)),
            reads=[x, y],
            writes=[z],
        )

    gpu_benchmark.case(case)


def test_sum(gpu_benchmark):
    def case(memory):
        x = memory.device((8192, 4096), "f4", like=cupy)
        sums = memory.device((8192,), "f4", like=cupy)
        return Case(
            lambda: cupy.sum(x, axis=1, out=sums),
            check=lambda: bool(cupy.allclose(sums, x.sum(axis=1, dtype="f8"), rtol=1e-4)),
            reads=[x],
            writes=[sums],
        )

    gpu_benchmark.case(case)


def test_cumsum(gpu_benchmark, device_buffer):
    x = device_buffer("64 MiB", "f4", like=cupy)
    gpu_benchmark(cupy.cumsum, x, moved=2 * x.nbytes)


def test_take(gpu_benchmark):
    def case(memory):
        table = memory.device((1 << 24,), "f4", like=cupy)
        index = memory.device((1 << 22,), "i4", like=cupy)
        index[...] = (cupy.arange(index.size, dtype="i8") * 1000003 % table.size).astype("i4")  # scattered, each once
        cupy.cuda.Device().synchronize()
        y = memory.device((1 << 22,), "f4", like=cupy)
        return Case(
            lambda: cupy.take(table, index, out=y),
            check=lambda: bool((y == table[index]).all()),
            moved=index.nbytes + 2 * y.nbytes,
        )

    gpu_benchmark.case(case)


def test_managed(gpu_benchmark):
    source = r'''
    extern "C" __global__ void twice(const float* x, float* y) {
        const int i = blockIdx.x * blockDim.x + threadIdx.x;
        y[i] = 2 * x[i];
    }
    '''
    kernel = cupy.RawKernel(source, "twice")

    def case(memory):
        x, y = (memory.prefetched((1 << 24,), "f4", like=cupy) for _ in range(2))
        return Case(
            lambda: kernel((x.size // 256,), (256,), (x, y)),
            check=lambda: bool((y == 2 * x).all()),
            reads=[x],
            writes=[y],
        )

    gpu_benchmark.case(case)
"""
TEST_TORCH = """
import pytest
from pytest_gpumem import Case

torch = pytest.importorskip("torch")


def test_softmax(gpu_benchmark):
    x = torch.rand((8192, 2048), device="cuda")
    gpu_benchmark(torch.softmax, x, 1, moved=2 * x.nbytes)


def test_cumsum(gpu_benchmark):
    x = torch.rand(1 << 24, device="cuda")
    gpu_benchmark(torch.cumsum, x, 0, moved=2 * x.nbytes)


@pytest.mark.gpumem(max_regression="5%")  # processes differ by 1 %
def test_layer_norm(gpu_benchmark):
    def case(memory):
        x = memory.device((8192, 4096), "f4", like=torch)
        return Case(lambda: torch.nn.functional.layer_norm(x, (4096,)), moved=2 * x.nbytes)

    gpu_benchmark.case(case)


def test_index_select(gpu_benchmark):
    def case(memory):
        table = memory.device((1 << 17, 256), "f4", like=torch)
        index = memory.device((1 << 16,), "i8", like=torch)
        index.copy_(torch.arange(index.numel(), device="cuda") * 1000003 % table.shape[0])  # scattered, each once
        torch.cuda.synchronize()
        y = memory.device((1 << 16, 256), "f4", like=torch)
        return Case(
            lambda: torch.index_select(table, 0, index, out=y),
            check=lambda: torch.equal(y, table[index]),
            moved=index.nbytes + 2 * y.nbytes,
        )

    gpu_benchmark.case(case)


def test_add_in_place(gpu_benchmark):
    def case(memory):
        x, y = (memory.device((1 << 22,), "f4", like=torch) for _ in range(2))
        return Case(
            lambda: y.add_(x),
            restore=lambda: y.fill_(1),
            check=lambda: torch.equal(y, 1 + x),
            reads=[x, y],
            writes=[y],
        )

    gpu_benchmark.case(case)


@pytest.mark.gpumem(max_regression="20%")  # the link: processes differ by 3 %
def test_upload(gpu_benchmark):
    def case(memory):
        x = memory.pinned((1 << 22,), "f4", like=torch)
        y = memory.device((1 << 22,), "f4", like=torch)
        return Case(
            lambda: y.copy_(x, non_blocking=True),
            check=lambda: torch.equal(y.cpu(), x),
            moved=y.nbytes,
        )

    gpu_benchmark.case(case)
"""
OWN_TRITON = """
import triton
import triton.language as tl


@triton.jit
def scale(x, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < size), mask=at < size)


@triton.jit
def row_softmax(x, y, columns, BLOCK: tl.constexpr):
    first = tl.program_id(0) * columns
    at = tl.arange(0, BLOCK)
    values = tl.load(x + first + at, mask=at < columns, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + first + at, powers / tl.sum(powers, axis=0), mask=at < columns)
"""
TEST_TRITON = """
import pytest
from pytest_gpumem import Case

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from own_triton import row_softmax, scale


def test_scale(gpu_benchmark):
    def case(memory):
        x, y = (memory.device((1 << 24,), "f4", like=torch) for _ in range(2))
        grid = (triton.cdiv(x.numel(), 1024),)
        return Case(
            lambda: scale[grid](x, y, x.numel(), BLOCK=1024),
            check=lambda: torch.testing.assert_close(y, 2 * x),
            reads=[x],
            writes=[y],
        )

    gpu_benchmark.case(case)


def test_row_softmax(gpu_benchmark):
    def case(memory):
        x, y = (memory.device((16384, 2048), "f4", like=torch) for _ in range(2))
        return Case(
            lambda: row_softmax[(x.shape[0],)](x, y, x.shape[1], BLOCK=2048),
            check=lambda: torch.testing.assert_close(y, torch.softmax(x, 1)),
            reads=[x],
            writes=[y],
        )

    gpu_benchmark.case(case)
"""
ROWS = (
    PLANTED, TRIAD,
    *(f"test_cupy.py::test_{name}" for name in ("axpy", "sum", "cumsum", "take", "managed")),
    *(f"test_torch.py::test_{name}" for name in ("softmax", "cumsum", "layer_norm", "index_select", "add_in_place", "upload")),
    *(f"test_triton.py::test_{name}" for name in ("scale", "row_softmax")),
)  # fmt: skip


class Failed(Exception):
    """A command did not do its work; its last words."""


def planted(more: float, note: str = "", *, load: str = "x[i]", waits: bool = False) -> str:
    """The module that says how many per cent more bytes are copied, how the kernel loads, and whether the host waits for it."""
    text = f"# Per cent of bytes that test_copy copies beyond those that it needs{note}.\nMORE = {more!r}\n"
    return f"{text}LOAD = {load!r}\nWAITS = {waits!r}\n"


def call(command: Sequence[str], folder: Path, **variables: str) -> tuple[int, str, float]:
    """Run a command; its exit code, output and seconds.

    Raises:
        Failed: it did not end within `TIMEOUT`.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GPUMEM_", "PYTEST_", "GIT_", "GITHUB_"))
    }
    begun = time.perf_counter()
    # A session of its own: a command that is killed takes its processes along.
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**kept, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        print(f"{' '.join(command[2:5])} was ended: {output[-WORDS:]}", file=sys.stderr, flush=True)
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failed(f"no end within {TIMEOUT:g} s: {output[-WORDS:]}") from None
        raise
    return process.returncode, output, time.perf_counter() - begun


def short(value: float | None) -> float | None:
    """Six digits: a record needs no more."""
    return None if value is None else float(f"{value:.6g}")


def plain_row(row: Row) -> dict[str, Any]:
    """What the record keeps of a row."""
    change = row.verdict.comparison
    return {
        "key": row.key,
        "outcome": row.verdict.outcome.value,
        "code": None if row.verdict.code is None else row.verdict.code.value,
        "processes": 0 if row.measurement is None else 1 + len(row.measurement.further),
        "latency": None if row.measurement is None else short(row.measurement.latency),
        "change": None if change is None else short(change.delta),
        "low": None if change is None else short(change.low),
        "high": None if change is None else short(change.high),
        **_doubts(row),
    }


def _doubts(row: Row) -> dict[str, Any]:
    """Of a row that is undecided: why, how it was timed, and whether it was watched."""
    if row.verdict.outcome.quiet or row.measurement is None:
        return {}
    ran, measurement = row.measurement.what_ran, row.measurement
    watched = "not recorded" if ran is None else ran.not_watched or ran.digest
    return {
        "reason": row.verdict.reason,
        "sampler": f"{measurement.sampler}: {measurement.sampler_reason}",
        "watched": watched,
    }


@dataclass
class Proof:
    """The project, and how its tests are run. Each part gives one entry of the record after another."""

    folder: Path
    """Of the project, with `scratch` beside it."""
    device: str
    budget: str
    runs: int
    """Of unchanged code, and gates of it."""
    arguments: Sequence[str]
    """More arguments of pytest."""
    record: dict[str, Any]

    @property
    def scratch(self) -> Path:
        """For files that are no part of the project."""
        return self.folder.parent / "scratch"

    @property
    def options(self) -> list[str]:
        """Options of every process that measures."""
        return [f"--gpumem-device={self.device}", f"--gpumem-budget={self.budget}", *self.arguments]

    def make(self) -> None:
        """Write the project and commit it, unless an earlier call did."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        if (self.folder / ".git").is_dir():
            return
        self.folder.mkdir()
        files = {
            ".gitignore": "__pycache__/\n.benchmarks/\ngpumem-results/\n",
            "pytest.ini": "[pytest]\n",
            "conftest.py": CONFTEST,
            "planted.py": planted(0.0),
            "test_triad.py": TEST_TRIAD,
            "test_copy.py": TEST_COPY,
            "test_cupy.py": TEST_CUPY,
            "test_torch.py": TEST_TORCH,
            "own_triton.py": OWN_TRITON,
            "test_triton.py": TEST_TRITON,
        }
        if self.device.startswith("sim"):  # CuPy, PyTorch and Triton need a GPU
            files = {
                name: text
                for name, text in files.items()
                if not name.startswith(("test_", "own_")) or name == "test_triad.py"
            }
        for name, text in files.items():
            (self.folder / name).write_text(text.lstrip("\n"))
        self.git("init", "-q", "-b", "main")
        for name, value in {
            "user.name": "somebody",
            "user.email": "somebody@example.org",
            "commit.gpgsign": "false",
        }.items():
            self.git("config", name, value)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "Measure the kernels")

    def git(self, *words: str) -> None:
        """A command of git in the project. Raises `Failed`."""
        code, output, _ = call(["git", *words], self.folder)
        if code:
            raise Failed(f"git {' '.join(words)} ended with {code}: {output[-WORDS:]}")

    def head(self, more: float, *, load: str = "x[i]", waits: bool = False) -> None:
        """Check out a branch with one commit after main: another comment, and what `planted` changes."""
        self.git("checkout", "-q", "-B", "head", "main")
        (self.folder / "planted.py").write_text(
            planted(more, ", on this branch", load=load, waits=waits)
        )
        self.git("commit", "-q", "-a", "-m", f"Copy {more:g} % more")
        self.forget()

    def forget(self) -> None:
        """Remove byte code: that of a planted.py of the same size and second would pass for this one's."""
        shutil.rmtree(self.folder / "__pycache__", ignore_errors=True)

    def output(self, name: str) -> Path:
        """A file for a command's results, not there yet."""
        path = self.scratch / name
        path.unlink(missing_ok=True)
        return path

    def of(self, device: dict[str, Any]) -> None:
        """Note the device. Raises `Failed` where the record is of another one."""
        found = {name: device[name] for name in ("key", "name", "driver", "uuid")}
        if (known := self.record.setdefault("device", found))["key"] != found["key"]:
            raise Failed(f"the record is of {known['key']}, this device is {found['key']}")

    def rows(self, results: Path, output: str) -> list[dict[str, Any]]:
        """The rows in a result file. Raises `Failed`."""
        try:
            document = load(results)
        except FileError as error:
            raise Failed(f"no results ({error}): {output[-WORDS:]}") from None
        if document is None:
            raise Failed(f"nothing was measured: {output[-WORDS:]}")
        facts = document.device
        self.of({"key": facts.key, "name": facts.name, "driver": facts.driver, "uuid": facts.uuid})
        return [plain_row(row) for row in document.rows]

    def times(self, path: Path, begun: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Seconds of measuring again, 0 where no row was; and the processes of a command, by what the project's conftest.py wrote.
        `begun`: when the command began, in seconds of the epoch.
        """
        seen = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        again = sum(
            one["end"] - one["last"]
            for one in seen
            if one["kind"] == "session" and any(row["processes"] > 1 for row in rows)
        )
        names = ("begun", "first", "last", "end")
        processes = [
            [one["kind"], *(round(one[name] - begun, 2) if name in one else None for name in names)]
            for one in seen
        ]
        return {"again": short(again), "times": processes}

    def session(self, more: float, limit: str | None, expected: int, *words: str) -> dict[str, Any]:
        """One call of pytest with these further words."""
        results, again, begun = self.output("results.json"), self.output("again"), time.time()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--benchmark-quiet",
            f"--benchmark-json={results}",
        ]
        command += [
            "--gpumem",
            *([] if limit is None else [f"--gpumem-max-regression={limit}"]),
            *words,
            *self.options,
        ]
        code, output, wall = call(command, self.folder, **{AGAIN: str(again)})
        rows = self.rows(results, output)
        found = {
            "more": more,
            "limit": limit,
            "exit": code,
            "wall": short(wall),
            **self.times(again, begun, rows),
            "rows": rows,
        }
        return found if code == expected else {**found, "words": output[-WORDS:]}

    def save(self) -> Iterator[dict[str, Any]]:
        """Accept runs of the main branch."""
        self.git("checkout", "-q", "main")
        self.forget()
        for _ in range(SAVES):
            yield self.session(0.0, None, 0, "--gpumem-save", f"--gpumem-processes={PROCESSES}")

    def unchanged(self) -> Iterator[dict[str, Any]]:
        """Compare all rows of unchanged code."""
        self.head(0.0)
        for _ in range(self.runs):
            yield self.session(0.0, "1%", 0)

    def slower(self, part: str) -> Iterator[dict[str, Any]]:
        """Compare the planted row alone, which copies more bytes."""
        for more, limit, outcome in COMPARED[part]:
            self.head(more)
            yield self.session(more, limit, int(outcome == "FAIL"), PLANTED.partition("::")[0])

    def duet(self) -> Iterator[dict[str, Any]]:
        """Duets of one test: unchanged, and a small slow-down."""
        for test, more in ((TRIAD, 0.0), (PLANTED, 1.5)):
            self.head(more)
            results, journal = self.output("duet.json"), self.output("journal")
            command = [*GPUMEM, "duet", "main", "--test", test, "--max-regression", "1%"]
            command += ["--json", str(results), "--journal", str(journal), "--", *self.options]
            code, output, wall = call(command, self.folder)
            if not results.exists():
                raise Failed(f"gpumem duet ended with {code}: {output[-WORDS:]}")
            document = json.loads(results.read_text())
            if document["device"] is None or not document["verdicts"]:
                raise Failed(f"the duet measured nothing: {output[-WORDS:]}")
            self.of(document["device"])
            (verdict,) = document["verdicts"]
            pairs = verdict["paired"] or {}
            yield {
                "more": more,
                "exit": code,
                "wall": short(wall),
                "key": verdict["key"],
                "outcome": verdict["outcome"],
                "pairs": pairs.get("pairs", 0),
                **{name: short(pairs.get(name)) for name in ("change", "low", "high")},
                "sentence": verdict["sentence"],
            }

    def gate(self) -> Iterator[dict[str, Any]]:
        """Gate branches that change a comment, one kernel, and one wait of the host."""
        results = self.folder / "gpumem-results" / "results.json"
        changes = ["comment"] * self.runs + (
            [] if self.device.startswith("sim") else ["wait", "kernel"]
        )
        for kind in changes:
            expected = GATES[kind][1]
            self.head(
                0.0, load="__ldg(x + i)" if kind == "kernel" else "x[i]", waits=kind == "wait"
            )
            again, begun = self.output("again"), time.time()
            command = [*GPUMEM, "gate", "main", "--max-regression", "1%", "--", *self.options]
            code, output, wall = call(command, self.folder, **{AGAIN: str(again)})
            rows = self.rows(results, output)
            found = {
                "more": 0.0,
                "changes": kind,
                "exit": code,
                "wall": short(wall),
                **self.times(again, begun, rows),
                "rows": rows,
            }
            found["duet"] = self.played(results.with_name("duet.json"))
            yield found if code == expected else {**found, "words": output[-WORDS:]}

    @staticmethod
    def played(duet: Path) -> dict[str, Any] | None:
        """Time, processes and verdicts of a gate's duet; None if it had none."""
        if not duet.exists():
            return None
        document = json.loads(duet.read_text())
        pairs = {
            one["key"]: [one["outcome"], one["paired"]["pairs"] if one["paired"] else 0]
            for one in document["verdicts"]
        }
        return {
            "seconds": short(document["seconds"]),
            "processes": len(document["processes"]),
            "pairs": pairs,
        }


PARTS: dict[str, Callable[[Proof], Iterator[dict[str, Any]]]] = {
    "save": Proof.save,
    "unchanged": Proof.unchanged,
    **{part: partial(Proof.slower, part=part) for part in COMPARED},
    "duet": Proof.duet,
    "gate": Proof.gate,
}
NEED_A_BASELINE = ("unchanged", *COMPARED, "gate")


@dataclass(frozen=True)
class Target:
    """One promise, and what was seen of it."""

    part: str
    text: str
    seen: str
    met: bool | None
    """None: its part was not run."""


def targets(record: dict[str, Any]) -> list[Target]:
    """All promises."""
    found: list[Target] = []
    for part in PARTS:
        entries = record["parts"].get(part, [])
        seen = [one for one in entries if "error" not in one]
        found += [
            Target(part, "runs to its end", one["error"].strip().splitlines()[-1], False)
            for one in entries
            if "error" in one
        ]
        if not entries:
            found.append(Target(part, "", "not run", None))
        elif seen:
            found += [Target(part, *one) for one in _CHECKS[part](seen, record)]
    return found


Checked = Iterator[tuple[str, str, bool]]


def _save(seen: list[dict[str, Any]], record: dict[str, Any]) -> Checked:
    rows = sorted({len(one["rows"]) for one in seen})
    codes = sorted({one["exit"] for one in seen})
    text = f"{len(seen)} runs of {' or '.join(map(str, rows))} rows, exit {' or '.join(map(str, codes))}"
    yield f"{SAVES} runs accepted", text, len(seen) >= SAVES and codes == [0]


def _unchanged(seen: list[dict[str, Any]], record: dict[str, Any]) -> Checked:
    outcomes = Counter(row["outcome"] for one in seen for row in one["rows"])
    total = outcomes.total()
    failing = [one for one in seen if one["exit"]]
    text = f"{outcomes['FAIL']} of {total} rows, {len(failing)} of {len(seen)} runs"
    yield "unchanged at 1 %: no FAIL", text, not outcomes["FAIL"] and not failing
    share = outcomes["PASS"] / total if total else 0.0
    yield (
        f"unchanged at 1 %: {PASSES:.0%} PASS",
        f"{share:.1%} of {total} rows in {len(seen)} runs",
        share >= PASSES,
    )


def _slower(seen: list[dict[str, Any]], record: dict[str, Any], part: str) -> Checked:
    for (more, limit, expected), least in Counter(COMPARED[part]).items():
        rows = [
            row
            for one in seen
            if one["more"] == more
            for row in one["rows"]
            if row["key"] == PLANTED
        ]
        outcomes = Counter(row["outcome"] for row in rows)
        text = (
            ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "not measured"
        )
        if rows:
            processes = _span([row["processes"] for row in rows], "{:.0f}")
            text += f", {_span([row['change'] for row in rows], '{:+.2%}')}, processes: {processes}"
        yield (
            f"{more:+g} % at {limit.replace('%', ' %')}: {expected}",
            text,
            outcomes[expected] == len(rows) >= least,
        )
    if part == "gross":
        longest = max(one["again"] for one in seen)
        yield (
            f"measures again for {GROSS_SECONDS:g} s or less",
            f"{longest:.1f} s",
            longest <= GROSS_SECONDS,
        )


def _duet(seen: list[dict[str, Any]], record: dict[str, Any]) -> Checked:
    for more, name, expected in ((0.0, "unchanged", "PASS"), (1.5, "+1.5 %", "FAIL")):
        played = [one for one in seen if one["more"] == more]
        outcomes = Counter(one["outcome"] or "no verdict" for one in played)
        text = (
            ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "not measured"
        )
        if played:
            text += f", {_span([one['change'] for one in played], '{:+.2%}')}, {_span([one['pairs'] for one in played], '{}')} pairs"
            text += f", {_span([one['wall'] for one in played], '{:.1f}')} s"
        yield f"{name} at 1 %: {expected}", text, outcomes[expected] == len(played) > 0
        if played and not more:
            longest = max(one["wall"] for one in played)
            yield f"{name}: {DUET_SECONDS:g} s or less", f"{longest:.1f} s", longest <= DUET_SECONDS


def _gate(seen: list[dict[str, Any]], record: dict[str, Any]) -> Checked:
    plain = plain_seconds(record)
    for kind, (most, expected) in GATES.items():
        if not (gates := [one for one in seen if one.get("changes", "comment") == kind]):
            continue
        codes, longest = sorted({one["exit"] for one in gates}), max(one["wall"] for one in gates)
        text = f"exit {' or '.join(map(str, codes))}"
        if all("duet" in one for one in gates):
            dueted = max(len(one["duet"]["pairs"]) if one["duet"] else 0 for one in gates)
            text += f", {dueted} of {len(gates[0]['rows'])} rows in a duet"
        yield f"one {kind} changed: exit {expected}", text, codes == [expected]
        if math.isfinite(most):
            text = f"one {kind}: {most:g} runs or less"
            if plain is None:
                yield text, f"{longest:.1f} s; part unchanged has no plain run", False
            else:
                yield (
                    text,
                    f"{longest:.1f} s, {longest / plain:.2f} plain runs of {plain:.1f} s",
                    longest <= most * plain,
                )


_CHECKS: dict[str, Callable[[list[dict[str, Any]], dict[str, Any]], Checked]] = {
    "save": _save,
    "unchanged": _unchanged,
    **{part: partial(_slower, part=part) for part in COMPARED},
    "duet": _duet,
    "gate": _gate,
}


def _unchanged_runs(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in record["parts"].get("unchanged", []) if "error" not in one]


def plain_seconds(record: dict[str, Any]) -> float | None:
    """Mean seconds of a run of unchanged code without what it measured again; None without such a run."""
    seen = _unchanged_runs(record)
    return statistics.fmean(one["wall"] - one["again"] for one in seen) if seen else None


def _span(values: Sequence[float | None], form: str) -> str:
    """The least and the largest value; one where they read alike."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = form.format(min(known)), form.format(max(known))
    return low if low == high else f"{low} to {high}"


def table(record: dict[str, Any]) -> str:
    """The record as text, 100 columns at most."""
    device, simulated = record["device"], "SIMULATED " if record["simulated"] else ""
    driver = f", driver {device['driver']}" if device["driver"] else ""
    lines = [
        f"{simulated}{device['name']}{driver}, {record['ended'][:10]}, --gpumem-budget {record['budget']}"
    ]
    lines.append(
        ", ".join(
            f"{name} {version or 'not installed'}" for name, version in record["libraries"].items()
        )
    )
    if record["left_out"]:
        lines.append(f"left out: {len(record['left_out'])} rows")
        lines += [f"  {key}" for key in record["left_out"]]
    lines += ["", f"{'part':<11}{'target':<34}seen"]
    for one in targets(record):
        met = "" if one.met is None else "ok" if one.met else "MISSED"
        lines.append(f"{one.part:<11}{one.text:<34}{one.seen[:46]:<48}{met}".rstrip())
    if seen := _unchanged_runs(record):
        lines += [
            "",
            f"{'unchanged code':<34}{'latency':>10}{'PASS':>6}{'UNDEC.':>8}{'FAIL':>6}{'processes':>11}{'change %':>17}",
        ]
        by_key: dict[str, list[dict[str, Any]]] = {}
        for row in (row for one in seen for row in one["rows"]):
            by_key.setdefault(row["key"], []).append(row)
        for key, rows in by_key.items():
            outcomes = Counter(row["outcome"] for row in rows)
            latencies = [row["latency"] for row in rows if row["latency"] is not None]
            latency = format_time(statistics.fmean(latencies)) if latencies else "-"
            changes = _span(
                [None if row["change"] is None else 100 * row["change"] for row in rows], "{:+.2f}"
            )
            counts = f"{outcomes['PASS']:>6}{outcomes['UNDECIDED']:>8}{outcomes['FAIL']:>6}"
            lines.append(
                f"{key[:33]:<34}{latency:>10}{counts}{_span([r['processes'] for r in rows], '{:.0f}'):>11}{changes:>17}"
            )
        codes = Counter(
            row["code"] for one in seen for row in one["rows"] if row["code"] is not None
        )
        lines += (
            [f"codes: {', '.join(f'{count} {code}' for code, count in codes.most_common())}"]
            if codes
            else []
        )
        wall, again = (statistics.fmean(one[name] for one in seen) for name in ("wall", "again"))
        lines.append(
            f"{len(seen)} runs of {wall:.1f} s on average, {again:.1f} s of it measuring again"
        )
    return "\n".join(lines)


def versions() -> dict[str, str | None]:
    """The installed version of each library that the project uses; None: it is not installed."""
    packages = importlib.metadata.packages_distributions()
    return {
        name: importlib.metadata.version(packages[name][0]) if name in packages else None
        for name in LIBRARIES
    }


def begin(path: Path | None, budget: str, device: str) -> dict[str, Any]:
    """The record in a file, to go on with, or a new one.

    Raises:
        ValueError: it is another script's, or of another budget or device.
    """
    new: dict[str, Any] = {
        "kind": "limit_proof",
        "simulated": device.startswith("sim"),
        "budget": budget,
    }
    if path is None or not path.exists():
        return {**new, "parts": {}}
    record: dict[str, Any] = json.loads(path.read_text())
    for name, value in new.items():
        if record[name] != value:
            raise ValueError(f"its {name} is {record[name]!r}, of this call {value!r}")
    return record


def play(proof: Proof, parts: Sequence[str], path: Path | None) -> None:
    """Run the parts; write the record after each entry."""
    record = proof.record

    def note(part: str, entry: dict[str, Any]) -> None:
        text = json.dumps(entry)
        for place, name in (
            (proof.folder.parent, "FOLDER"),
            (sys.prefix, "PYTHON"),
            (ROOT, "REPOSITORY"),
        ):
            text = text.replace(str(place), name)  # a record names no folder of a machine
        entry = json.loads(text)
        record["parts"].setdefault(part, []).append(entry)
        measured = {
            row["key"]
            for entries in record["parts"].values()
            for one in entries
            for row in one.get("rows", ())
        }
        wanted = (TRIAD,) if record["simulated"] else ROWS
        record["left_out"] = [key for key in wanted if key not in measured]
        record["ended"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        if path is not None:
            write_record(path, record)
        outcome = (
            entry.get("error")
            or f"exit {entry['exit']} after {entry['wall']:.1f} s\n{entry.get('words', '')}".rstrip()
        )
        print(f"{part}: {outcome}", file=sys.stderr, flush=True)

    for part in parts:
        try:
            for entry in PARTS[part](proof):
                note(part, entry)
        except (Failed, OSError, ValueError, KeyError) as error:
            note(
                part,
                {
                    "error": str(error)
                    if isinstance(error, Failed)
                    else f"{type(error).__name__}: {error}"
                },
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and record."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda", help="as --gpumem-device (default: %(default)s)"
    )
    parser.add_argument(
        "--budget", default="300ms", help="as --gpumem-budget (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"of {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=RUNS,
        help="of unchanged code in this call, and gates of it (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record, which is added to")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="keeps project and baseline for further calls (default: none)",
    )
    parser.add_argument(
        "pytest_arguments",
        nargs="*",
        metavar="PYTEST_ARGUMENT",
        help="after --, for every process that measures",
    )
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"--runs {options.runs}: accepted is 1 or more")
    parts = [part for part in PARTS if part in options.only]
    try:
        record = begin(options.json, options.budget, options.device)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--json {options.json}: {error}")
    record["libraries"] = versions()
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proof = Proof(
            folder.resolve() / "project",
            options.device,
            options.budget,
            options.runs,
            options.pytest_arguments,
            record,
        )
        needs = [part for part in parts if part in NEED_A_BASELINE]
        if needs and "save" not in parts and not (proof.folder / ".benchmarks").is_dir():
            parser.error(
                f"part {needs[0]} needs a baseline: run part save too, or give the --folder of a call that did"
            )
        try:
            proof.make()
        except (Failed, OSError) as error:
            parser.error(f"cannot make the project in {proof.folder}: {error}")
        play(proof, parts, options.json)
    if "device" not in record:
        print("nothing was measured", file=sys.stderr)
        return 1
    print(table(record))
    return 1 if any(one.met is False for one in targets(record)) else 0


if __name__ == "__main__":
    sys.exit(main())
