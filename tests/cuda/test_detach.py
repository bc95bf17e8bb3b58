"""What the use of CUPTI leaves behind in the process: nothing.

Run it without --gpumem: it starts sessions of its own.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.usefixtures("free_gpu"),
    pytest.mark.skipif(importlib.util.find_spec("cupti") is None, reason="needs CUPTI"),
]

LAUNCHES = """
import cupy
import pytest

KERNEL = cupy.RawKernel('extern "C" __global__ void k(float *a) { a[threadIdx.x] += 1; }', "k")

@pytest.mark.parametrize("number", range(9))
def test_launch(benchmark, number):
    arguments = (1,), (256,), (cupy.zeros(1024, "f4"),)
    benchmark.pedantic(KERNEL, arguments, rounds=300, iterations=10, warmup_rounds=100)
"""
FORKS = """
import os
import cupy
import pytest

cupy.zeros(4)

@pytest.fixture
def forked():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

@pytest.mark.gpumem(max_peak="1 GiB")
def test_frees(forked):
    cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(64))
"""
PART = """
def test_part(gpu_memory, forked):
    with gpu_memory.watch("part", max_peak="1 KiB"):
        cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(1 << 20))
"""
PROFILES = """
import json
import sys
import torch
from torch.profiler import ProfilerActivity, profile
from pytest_gpumem.devices.errors import NotCounted
from pytest_gpumem.devices.opening import choose

device = choose("cuda").open()
x = torch.ones(1 << 16, device="cuda")

def work():
    torch.sqrt(x)
    torch.cuda.synchronize()

def profiled():
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
    return any("cuda" in str(event.device_type).lower() for event in seen.events())

def counted():
    spans = []
    for _ in range(3):  # CUPTI may lose the first records
        try:
            spans = device.counters.spans(work)
        except NotCounted as why:
            return str(why)
    return len(spans)

steps = {"profile": profiled, "count": counted, "detach": device.counters.detach}
seen = [steps[step]() for step in sys.argv[1:]]
print(json.dumps([each for each in seen if each is not None]))
"""
FIRST_OURS = ("count", "detach", "profile", "count", "detach", "profile", "count")
FIRST_THEIRS = ("profile", "detach", "count", "detach", "profile", "detach", "count", "profile")


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def session(pytester: pytest.Pytester, text: str, *options: str) -> dict[str, Any]:
    pytester.makepyfile(test_it=text)
    ours = ("--gpumem", "--gpumem-device=cuda", "-p", "no:cacheprovider")
    result = pytester.runpytest_subprocess(*ours, "--benchmark-json=out.json", *options)
    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    return document(pytester.path)


def test_the_hosts_median_is_that_of_the_first_test(pytester: pytest.Pytester) -> None:
    """Without `detach`, all but the first are 1.3 times as long."""
    pytest.importorskip("cupy")
    benchmarks = session(pytester, LAUNCHES)["benchmarks"]
    host = [entry["stats"]["median"] for entry in benchmarks if "[gpu]" not in entry["name"]]
    assert len(benchmarks) == 2 * len(host) == 18
    first, *later = host
    print(f"host's median {first * 1e6:.2f} us, then", [f"{each / first:.3f}" for each in later])
    assert statistics.median(later) < 1.1 * first


def test_a_wait_counts_in_a_test_that_has_forked(pytester: pytest.Pytester) -> None:
    pytest.importorskip("cupy")
    (row,) = session(pytester, FORKS, "--gpumem-waits")["gpumem"]["rows"]
    assert "not read: the test forked" in str(row["verdict"])  # its peak
    waits = row["footprint"]["waits"]
    assert waits["not_read"] is None
    assert [line["call"] for line in waits["lines"]] == ["cuMemFree"]


def test_no_part_passes_in_a_test_that_has_forked(pytester: pytest.Pytester) -> None:
    pytest.importorskip("cupy")
    rows = session(pytester, FORKS + PART, "-k", "part")["gpumem"]["rows"]
    (verdict,) = [row["verdict"] for row in rows if row["label"] == "part"]
    assert verdict["outcome"] == "UNDECIDED"
    assert "not read: the test forked" in str(verdict)


@pytest.mark.parametrize("steps", [FIRST_OURS, FIRST_THEIRS])
def test_profilers_record_the_same_where_cupti_was_detached(steps: tuple[str, ...]) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    seen = []
    for chosen in (steps, [step for step in steps if step != "detach"]):
        command = [sys.executable, "-c", PROFILES, *chosen]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    with_detach, without = seen
    print(without)
    assert with_detach == without
    assert True in without
