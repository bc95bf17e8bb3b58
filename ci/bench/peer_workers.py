"""One fresh process that measures the triad in one peer's way: started by peers.py, with the job as JSON on its command line.

The answer holds one case for each way and size: the reported value and the wall time in seconds, the number of samples, and the conditions
before and after.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from triad_bench import SCALAR, TriadBench

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.measuring.measure import Plan
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.units import KiB, MiB

Arrays = tuple[Buffer, Buffer, Buffer]
Case = dict[str, Any]

TINY = 64 * KiB
"""Arrays of the case that is run first and not recorded: it compiles, loads and allocates what the peer needs once."""
TINY_PLAN_SECONDS = 0.05
ONE_PLACEMENT = "hot, one placement"
"""Hot on the arrays as they were allocated: what `do_bench_cudagraph`, which knows one placement alone, is to be compared with."""
WAYS = {
    "clean-cold": Plan(mode="clean-cold"),
    "dirty-cold": Plan(mode="dirty-cold"),
    "hot": Plan(mode="hot"),
    ONE_PLACEMENT: Plan(mode="hot", placements=1),
}
CUPY_REPEATS = 100
TORCH_SECONDS = 0.1
"""Least time of `torch.utils.benchmark`'s blocks together, as `do_bench`'s; its default is 0.2 s."""
NVBENCH_BATCH_SECONDS = 0.1
"""GPU time of nvbench's batched pass in place of its 0.5 s. The cold pass, which is compared, keeps all of nvbench's defaults."""


class NvbenchSkipped(RuntimeError):
    """nvbench skipped a state, or gave no value for it: what it said."""


def gpumem(bench: TriadBench, mib: list[int]) -> list[Case]:
    """This project, as a test measures: the default plan in each mode, and hot on one placement."""
    with bench.arrays(TINY) as arrays:
        for plan in WAYS.values():
            bench.measure((*arrays, SCALAR), dataclasses.replace(plan, budget=TINY_PLAN_SECONDS))
    cases: list[Case] = []
    for size in mib:
        for way, plan in WAYS.items():
            with _recorded(bench, cases, f"gpumem {way}", size) as (case, arrays):
                measurement, wall = bench.measure((*arrays, SCALAR), plan)
                case.update(
                    value=measurement.latency,
                    overhead=measurement.overhead,
                    wall=wall,
                    samples=len(measurement.samples),
                    medians=list(measurement.medians),
                )
    return cases


def nvbench(bench: TriadBench, mib: list[int]) -> list[Case]:
    """cuda-bench with its default stopping criterion: the mean GPU time of its cold pass, and of its batched pass.

    It runs all benchmarks of a process in one call, so each state times its own `exec`. The batched pass cannot be had alone: it is taken
    in a second benchmark whose cold pass stops after 100 samples.
    """
    import cuda.bench as nv

    index = bench.index
    with bench.arrays(TINY) as arrays:
        bench.launcher(arrays)(0)
        bench.device.streams.synchronize()
    seen: dict[tuple[str, int], Case] = {}
    failures: list[BaseException] = []

    def body(name: str, batched: bool) -> Callable[[Any], None]:
        def run(state: Any) -> None:
            kib = state.get_int64("KiB")
            try:
                with bench.arrays(kib * KiB) as arrays:
                    launch = bench.launcher(arrays)
                    case = _case(bench, f"nvbench {name}", kib // 1024)
                    begun = time.perf_counter()
                    state.exec(
                        lambda launched: launch(launched.get_stream().addressof()), batched=batched
                    )
                    case["wall"] = time.perf_counter() - begun
                    seen[name, kib] = _ended(bench, case)
            except BaseException as error:
                failures.append(error)  # nvbench turns it into a skipped state
                raise

        run.__name__ = name
        return run

    kib = [size * 1024 for size in mib]
    warm_up = nv.register(body("warm-up", False))
    warm_up.set_stopping_criterion("sample-count")
    warm_up.add_int64_axis("KiB", [TINY // KiB])
    nv.register(body("cold", False)).add_int64_axis("KiB", kib)
    batch = nv.register(body("batch", True))
    batch.set_stopping_criterion("sample-count")
    batch.set_batch_target_time(NVBENCH_BATCH_SECONDS)
    batch.add_int64_axis("KiB", kib)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "nvbench.json"
        nv.run_all_benchmarks(["-q", "--devices", str(index), "--json", str(file)])
        if failures:
            raise failures[0]
        results = json.loads(file.read_text())
    cases = []
    for size in mib:
        for name, mean, count in (
            ("cold", "nv/cold/time/gpu/mean", "nv/cold/sample_size"),
            ("batch", "nv/batch/time/gpu/mean", "nv/batch/sample_size"),
        ):
            summaries = nvbench_summaries(results, name, size * 1024)
            value, samples = summaries.get(mean), summaries.get(count)
            if value is None or not samples:
                raise NvbenchSkipped(
                    f"nvbench gave no {mean} for {size} MiB; it gave {sorted(summaries)}"
                )
            cases.append({**seen[name, size * 1024], "value": value, "samples": int(samples)})
    return cases


def nvbench_summaries(results: dict[str, Any], benchmark: str, kib: int) -> dict[str, float | None]:
    """The numbers that nvbench's JSON holds for one state: summary values by tag; 64-bit integers and floats are written as text there.

    Raises:
        NvbenchSkipped: the state is missing or was skipped.
    """
    states: list[dict[str, Any]] = next(
        (b["states"] for b in results["benchmarks"] if b["name"] == benchmark), []
    )
    for state in states:
        axes = {axis["name"]: axis.get("value") for axis in state.get("axis_values") or []}
        if str(axes.get("KiB")) != str(kib):
            continue
        if state.get("is_skipped"):
            raise NvbenchSkipped(
                f"nvbench skipped {benchmark!r} at {kib} KiB: {state.get('skip_reason')}"
            )
        found: dict[str, float | None] = {}
        for summary in state.get("summaries") or []:
            for entry in summary.get("data") or []:
                if entry.get("name") == "value" and entry.get("type") in ("int64", "float64"):
                    number = float("nan") if entry.get("value") is None else float(entry["value"])
                    found[summary["tag"]] = number if math.isfinite(number) else None
        return found
    raise NvbenchSkipped(f"nvbench gave no result of {benchmark!r} at {kib} KiB")


def triton(bench: TriadBench, mib: list[int]) -> list[Case]:
    """`triton.testing.do_bench`, median and mean of one run, `do_bench_cudagraph`, its default mean, and `torch.utils.benchmark`."""
    import statistics

    import torch
    import triton.testing as testing
    from torch.utils.benchmark import Timer

    index = bench.index
    torch.cuda.set_device(index)

    def timed(arrays: Arrays, how: Callable[..., Any]) -> tuple[list[float], float]:
        launch = bench.launcher(arrays)

        def function() -> None:
            launch(torch.cuda.current_stream().cuda_stream)

        begun = time.perf_counter()
        milliseconds = how(function, return_mode="all")
        return [m * 1e-3 for m in milliseconds], time.perf_counter() - begun

    with bench.arrays(TINY) as arrays:
        timed(arrays, testing.do_bench)
        timed(arrays, testing.do_bench_cudagraph)
    cases: list[Case] = []
    for size in mib:
        with bench.arrays(size * MiB) as arrays:
            case = _case(bench, "triton do_bench", size)
            samples, wall = timed(arrays, testing.do_bench)
            case.update(wall=wall, samples=len(samples))
            _ended(bench, case)
            cases.append(
                {**case, "way": "triton do_bench median", "value": statistics.median(samples)}
            )
            cases.append(
                {**case, "way": "triton do_bench mean", "value": statistics.fmean(samples)}
            )
        with _recorded(bench, cases, "triton do_bench_cudagraph", size) as (case, arrays):
            samples, wall = timed(arrays, testing.do_bench_cudagraph)
            case.update(wall=wall, samples=len(samples), value=statistics.fmean(samples))
        with _recorded(bench, cases, "torch Timer", size) as (case, arrays):
            timer = Timer("launch(0)", globals={"launch": bench.launcher(arrays)})
            begun = time.perf_counter()
            blocks = timer.blocked_autorange(min_run_time=TORCH_SECONDS)
            case.update(
                wall=time.perf_counter() - begun, samples=len(blocks.times), value=blocks.median
            )
    return cases


def cupy(bench: TriadBench, mib: list[int]) -> list[Case]:
    """`cupyx.profiler.benchmark`: the mean GPU time of 100 repeats."""
    from cupyx.profiler import benchmark

    def timed(arrays: Arrays, repeats: int) -> tuple[float, float]:
        launch = bench.launcher(arrays)

        def function() -> None:
            launch(0)

        begun = time.perf_counter()
        result = benchmark(function, n_repeat=repeats)
        return float(result.gpu_times[0].mean()), time.perf_counter() - begun

    with bench.arrays(TINY) as arrays:
        timed(arrays, 10)
    cases: list[Case] = []
    for size in mib:
        with _recorded(bench, cases, "cupyx benchmark", size) as (case, arrays):
            value, wall = timed(arrays, CUPY_REPEATS)
            case.update(value=value, wall=wall, samples=CUPY_REPEATS)
    return cases


PEERS: dict[str, Callable[..., list[Case]]] = {
    "gpumem": gpumem,
    "nvbench": nvbench,
    "triton": triton,
    "cupy": cupy,
}


@contextmanager
def _recorded(
    bench: TriadBench, cases: list[Case], way: str, mib: int
) -> Iterator[tuple[Case, Arrays]]:
    """The arrays of a case, and the case, which is recorded at the end."""
    with bench.arrays(mib * MiB) as arrays:
        case = _case(bench, way, mib)
        yield case, arrays
        cases.append(_ended(bench, case))


def _case(bench: TriadBench, way: str, mib: int) -> Case:
    return {"way": way, "mib": mib, "before": bench.conditions()}


def _ended(bench: TriadBench, case: Case) -> Case:
    case["after"] = bench.conditions()
    return case


def main() -> None:
    job = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    bench = TriadBench(choose(job["device"]))
    cases = PEERS[job["peer"]](bench, job["mib"])
    bench.close()
    answers.write(json.dumps({"cases": cases}) + "\n")
    answers.flush()
    sys.stderr.flush()
    # Not through the libraries' own clean-up, which costs GPU time and may crash: the driver frees what the process held.
    os._exit(0)


if __name__ == "__main__":
    main()
