"""Suites that reset the device, fork, profile, or work in contexts of their own: each passes as it does without the plugin.

Run it without --gpumem: it starts sessions of its own.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("free_gpu")

RESETS = """
import gc
import pytest
from cuda.bindings import runtime

def checked(result):
    assert result[0] == runtime.cudaError_t.cudaSuccess, result[0]
    return result[1] if len(result) == 2 else None

@pytest.fixture(autouse=True)
def reset_after_test():
    yield
    gc.collect()
    checked(runtime.cudaDeviceReset())

@pytest.fixture(scope="module", autouse=True)
def of_module():
    yield checked(runtime.cudaGetDeviceCount())

def use(nbytes, free=True):
    address = checked(runtime.cudaMalloc(nbytes))
    checked(runtime.cudaMemset(address, 1, nbytes))
    if free:
        checked(runtime.cudaFree(address))

def test_a(): use(64 << 20)
def test_b(): use(16 << 20, free=False)
def test_c(): use(8 << 20)
"""
MEASURES = """
def test_measures(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.copy, device_buffer("64 MiB"), device_buffer("64 MiB"))
"""
PROFILES = """
import pytest
import torch

@pytest.fixture(scope="session")
def profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield profile

def measured(gpu_benchmark):
    x = torch.ones(4096, device="cuda")
    y = torch.empty_like(x)
    return gpu_benchmark(lambda: torch.mul(x, 2, out=y), moved=2 * x.nbytes)

def test_beside(profiler, gpu_benchmark): measured(gpu_benchmark)

@pytest.mark.gpumem(max_kernels=0)
def test_counts(profiler, gpu_benchmark): measured(gpu_benchmark)

def test_of_pytest_benchmark(profiler, benchmark):
    x = torch.ones(1 << 24, device="cuda")
    y = torch.empty_like(x)
    benchmark(torch.mul, x, 2, out=y)
"""
FORKS = """
import functools
import os
import pytest

def forked(test):
    @functools.wraps(test)
    def run():
        child = os.fork()
        if child == 0:
            try:
                test()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    return run

def use():
    import torch
    x = torch.ones(16 << 20, device="cuda")
    assert x.mul_(2).sum().item() == 32 << 20

@forked
def test_one(): use()

@forked
def test_two(): use()

@pytest.mark.gpumem(max_peak="1 MiB")
@forked
def test_limit(): use()
"""
OWN_CONTEXTS = """
import pytest
from cuda.bindings import driver, nvrtc

def checked(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
    return result[1] if len(result) == 2 else None

@pytest.fixture
def own():
    checked(driver.cuInit(0))
    device = checked(driver.cuDeviceGet(0))
    context = checked(driver.cuCtxCreate(None, 0, device))
    stream = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value))
    yield device, stream
    checked(driver.cuStreamDestroy(stream))
    checked(driver.cuCtxDestroy(context))

def loaded(device):
    major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    architecture = f"--gpu-architecture=sm_{checked(driver.cuDeviceGetAttribute(major, device))}0"
    program = nvrtc.nvrtcCreateProgram(b'extern "C" __global__ void empty() {}', b"k.cu", 0, [], [])[1]
    assert int(nvrtc.nvrtcCompileProgram(program, 1, [architecture.encode()])[0]) == 0
    cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    nvrtc.nvrtcGetCUBIN(program, cubin)
    module = checked(driver.cuModuleLoadData(cubin))
    return module, checked(driver.cuModuleGetFunction(module, b"empty"))

def launch(function, stream):
    driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0)

def test_empty(benchmark, own):
    device, stream = own
    module, function = loaded(device)
    benchmark(launch, function, stream)
    checked(driver.cuCtxSynchronize())
    checked(driver.cuModuleUnload(module))

def test_memory(own):
    address = checked(driver.cuMemAlloc(32 << 20))
    checked(driver.cuMemsetD8(address, 1, 32 << 20))
    checked(driver.cuCtxSynchronize())
    checked(driver.cuMemFree(address))

def test_pedantic(benchmark, own):
    device, stream = own
    module, function = loaded(device)
    benchmark.pedantic(launch, args=(function, stream), rounds=50, iterations=10)
    checked(driver.cuCtxSynchronize())
    checked(driver.cuModuleUnload(module))
"""
READING = ((), ("--gpumem-footprint=on",), ("--gpumem-waits",))


def needs_torch() -> None:
    """Skip without PyTorch, which cannot be imported twice in one process: sessions of pytester forget the modules that they import."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")


def session(pytester: pytest.Pytester, text: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_it=text)
    result = pytester.runpytest_subprocess(
        "--gpumem",
        "--gpumem-device=cuda",
        "--benchmark-json=out.json",
        "-p",
        "no:cacheprovider",
        "-rA",
        *options,
    )
    everything = result.stdout.str() + result.stderr.str()
    assert result.ret in (0, 1), everything  # -11: a crash at Python's end, which says nothing
    for word in ("INTERNALERROR", "Segmentation fault", "Exception ignored", "Fatal Python error"):
        assert word not in everything
    return result


def rows(folder: Path) -> dict[str, Any]:
    """The rows of `out.json`, by the name of the test."""
    found = json.loads((folder / "out.json").read_text())["gpumem"]["rows"]
    return {row["nodeid"].partition("::")[2]: row for row in found}


@pytest.mark.parametrize("reading", READING)
def test_a_suite_that_resets_the_device_passes(
    pytester: pytest.Pytester, reading: tuple[str, ...]
) -> None:
    result = session(pytester, RESETS, *reading)
    result.assert_outcomes(passed=3)
    assert result.ret == 0


def test_a_measurement_after_resets_passes_or_names_the_reset(pytester: pytest.Pytester) -> None:
    result = session(pytester, RESETS + MEASURES)
    outcomes = result.parseoutcomes()
    assert outcomes.get("passed", 0) >= 3
    if outcomes.get("passed", 0) < 4 or outcomes.get("errors", 0):
        result.stdout.re_match_lines([".*(reset|context).*"])


def test_memory_that_a_reset_frees_never_passes_a_limit(pytester: pytest.Pytester) -> None:
    session(pytester, RESETS, "--gpumem-footprint=on", "--gpumem-max-kept=0 B")
    row = rows(pytester.path).get("test_b")
    assert row is None or row["verdict"]["outcome"] != "PASS"


def test_a_suite_under_a_profiler_is_measured(pytester: pytest.Pytester) -> None:
    needs_torch()
    result = session(pytester, PROFILES)
    assert result.parseoutcomes().get("passed", 0) >= 2
    found = rows(pytester.path)
    assert found["test_beside"]["verdict"]["outcome"] in ("UNDECIDED", "MEASURED")
    assert found["test_counts"]["verdict"]["outcome"] in ("FAIL", "UNDECIDED")
    assert "NotCounted" not in result.stdout.str()


@pytest.mark.parametrize("reading", READING)
def test_a_suite_that_forks_passes(pytester: pytest.Pytester, reading: tuple[str, ...]) -> None:
    needs_torch()
    result = session(pytester, FORKS, *reading)
    result.stdout.no_fnmatch_line("*CUDA driver initialization failed*")
    outcomes = result.parseoutcomes()
    assert outcomes.get("passed", 0) >= 2
    limited = rows(pytester.path).get("test_limit")
    assert limited is not None
    assert limited["verdict"]["outcome"] in ("FAIL", "UNDECIDED")


@pytest.mark.parametrize("reading", READING)
def test_a_suite_with_contexts_of_its_own_passes(
    pytester: pytest.Pytester, reading: tuple[str, ...]
) -> None:
    result = session(pytester, OWN_CONTEXTS, "--benchmark-max-time=0.1", *reading)
    result.assert_outcomes(passed=3)
    assert result.ret == 0
