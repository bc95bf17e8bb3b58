"""Ten operations of CuPy, PyTorch and Triton, by this project and by the timers of the libraries, in fresh processes.

    python ci/bench/operations.py --processes 3 --json ci/records/nvidia-h200/peers_operations.json

Each process is a session of pytest on the tests of this file. Hot are `torch.utils.benchmark` and
`cupyx.profiler.benchmark`; `triton.testing.do_bench` fills the cache with zeros before each call, as dirty-cold does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import device_of, head, installed, record_parser, utc_now, write_record

from pytest_gpumem.records.schema import document_from_json

N = 1 << 24
COLUMNS = 8192
OPERATIONS = (
    *("cupy add", "cupy sum", "cupy sort", "cupy small", "torch layer_norm", "torch softmax"),
    *("torch matmul", "torch cumsum", "torch small", "triton scale"),
)
WAYS = ("torch Timer", "cupyx benchmark", "gpumem hot", "triton do_bench", "gpumem dirty-cold")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--gpumem", "--gpumem-budget", "0.3s")


def work_of(name: str) -> Callable[[], object]:
    """An operation on arrays of its own."""
    import cupy
    import torch

    sys.path.append(str(Path(__file__).parents[2] / "tests" / "cuda"))
    from triton_kernels import scale

    flat, few = cupy.ones(N, "f4"), cupy.ones(1024, "f4")
    x, y = torch.rand(N, device="cuda"), torch.empty(N, device="cuda")
    matrix = x.reshape(-1, COLUMNS)
    square = matrix[:, : N // COLUMNS]
    works: dict[str, Callable[[], object]] = {
        "cupy add": lambda: flat + flat,
        "cupy sum": flat.sum,
        "cupy sort": lambda: cupy.sort(flat),
        "cupy small": lambda: few + 1,
        "torch layer_norm": lambda: torch.nn.functional.layer_norm(matrix, (COLUMNS,)),
        "torch softmax": lambda: torch.softmax(matrix, -1),
        "torch matmul": lambda: square @ square,
        "torch cumsum": lambda: torch.cumsum(matrix, 1),
        "torch small": lambda: x[:1024] + 1,
        "triton scale": lambda: scale[(N // 1024,)](x, y, N, BLOCK=1024),
    }
    return works[name]


# Peers first, in a process that has not used CUPTI.
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("way", [*WAYS[:2], WAYS[3], WAYS[2], WAYS[4]])
def test_operation(request: pytest.FixtureRequest, way: str, name: str) -> None:
    from cupyx.profiler import benchmark
    from torch.utils.benchmark import Timer
    from triton.testing import do_bench

    work = work_of(name)
    begun = time.perf_counter()
    if way == "torch Timer":
        timer = Timer("work()", globals={"work": work})
        seconds = timer.blocked_autorange(min_run_time=0.1).median
    elif way == "cupyx benchmark":
        seconds = benchmark(work, n_repeat=100).gpu_times[0].mean()
    elif way == "triton do_bench":
        seconds = 1e-3 * do_bench(work, return_mode="median")
    else:
        mode = way.removeprefix("gpumem ")
        seconds = request.getfixturevalue("gpu_benchmark")(work, mode=mode).latency
    case = {"seconds": float(seconds), "wall": time.perf_counter() - begun}
    with Path(os.environ["OPERATIONS_FILE"]).open("a") as file:
        file.write(json.dumps([name, way, case]) + "\n")


def process(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Run a session; its device, and what it found: operation, way and case."""
    results, lines = folder / "results.json", folder / "lines"
    command = [sys.executable, *PYTEST, "-c", os.devnull, f"--rootdir={folder}"]
    command += [f"--benchmark-json={results}", str(Path(__file__).resolve())]
    environment = {**os.environ, "OPERATIONS_FILE": str(lines)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"operations: the session ended with {done.returncode}:\n{done.stdout[-3000:]}")
    document = document_from_json(json.loads(results.read_text())["gpumem"])
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    return device_of(document.device), found


def table(record: dict[str, Any]) -> str:
    """Microseconds, and the standard deviation between the processes."""
    lines = [f"{head(record)}, {record['processes']} processes; us, and % between processes", ""]
    lines.append(" " * 17 + "".join(f"{way:>19}" for way in WAYS))
    for name, ways in record["operations"].items():
        cells = []
        for way in WAYS:
            seconds = ways[way]["seconds"]
            spread = 100 * ways[way]["spread"]
            cells.append(f"{f'{1e6 * seconds:.2f} {spread:5.1f}':>19}")
        lines.append(f"{name:<17}{''.join(cells)}")
    walls = [
        statistics.median(ways[way]["wall"] for ways in record["operations"].values())
        for way in WAYS
    ]
    lines.append(f"{'wall s':<17}" + "".join(f"{wall:>19.2f}" for wall in walls))
    return "\n".join(lines)


def main() -> None:
    """Run, print and record."""
    parser = record_parser(__doc__, device=None)
    parser.add_argument("--processes", type=int, default=3)
    options = parser.parse_args()
    device: dict[str, Any] = {}
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.processes):
        with tempfile.TemporaryDirectory() as folder:
            device, cases = process(Path(folder))
        for name, way, case in cases:
            found.setdefault((name, way), []).append(case)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for (name, way), of_way in found.items():
        seconds = [case["seconds"] for case in of_way]
        mean = statistics.fmean(seconds)
        spread = statistics.stdev(seconds) / mean if len(seconds) > 1 else 0.0
        wall = statistics.median(case["wall"] for case in of_way)
        figures.setdefault(name, {})[way] = {"seconds": mean, "spread": spread, "wall": wall}
    record = {
        "kind": "operations",
        "device": device,
        "versions": installed("pytest-gpumem", "cupy-cuda13x", "torch", "triton"),
        "processes": options.processes,
        "operations": figures,
        "ended": utc_now(),
    }
    print(table(record))
    if options.json:
        write_record(options.json, record)


if __name__ == "__main__":
    main()
