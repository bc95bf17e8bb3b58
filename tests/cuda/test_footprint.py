"""The memory of tests of other libraries: known patterns, leaks of each kind, and tests that leave nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

MIB = 2**20

PATTERNS = '''
import gc
import os
import threading

import numpy
import pytest

MIB = 2**20
KEPT = []


class Ring:
    """Something that only a collection frees."""

    def __init__(self, held):
        self.held, self.itself = held, self


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch")
    torch.cuda.init()
    return torch


@pytest.fixture(scope="module")
def numba():
    return pytest.importorskip("numba.cuda")


@pytest.fixture(scope="module")
def rmm():
    rmm = pytest.importorskip("rmm")
    before = rmm.mr.get_current_device_resource()
    rmm.mr.set_current_device_resource(rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), 64 * MIB))
    yield rmm
    rmm.mr.set_current_device_resource(before)


@pytest.fixture(scope="module")
def jax():
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else its pool takes most of the GPU
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    jax.numpy.zeros(256, "uint8").block_until_ready()
    return jax


@pytest.fixture(scope="module")
def driver():
    return pytest.importorskip("cuda.bindings.runtime")


def done(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) > 1 else None


def test_cupy_pattern(cupy):
    cupy.get_default_memory_pool().free_all_blocks()
    a = cupy.empty(4 * MIB, "u1")
    b = cupy.empty(2 * MIB, "u1")
    del a
    c = cupy.empty(1 * MIB, "u1")


def test_cupy_keeps(cupy):
    KEPT.append(cupy.empty(4096, "u1"))


def test_cupy_cycle(cupy):
    Ring(cupy.empty(4 * MIB, "u1"))


@pytest.fixture
def of_cupy(cupy):
    return cupy.empty(3 * MIB, "u1")


def test_cupy_fixture(of_cupy):
    assert of_cupy.size


def test_cupy_fails(cupy):
    held = cupy.empty(3 * MIB, "u1")
    assert held.size == 0


@pytest.fixture(scope="module")
def wide(cupy):
    return cupy.empty(8 * MIB, "u1")


def test_cupy_wide_1(wide):
    wide + 1


def test_cupy_wide_2(wide):
    wide + 1


def test_cupy_threads(cupy):
    """Each of eight threads holds 4 MiB at the same time."""
    cupy.get_default_memory_pool().free_all_blocks()
    together = threading.Barrier(8, timeout=60)

    def works():
        held = cupy.empty(4 * MIB, "u1")
        together.wait()
        del held

    threads = [threading.Thread(target=works) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def test_cupy_pinned(cupy):
    cupy.cuda.alloc_pinned_memory(1 * MIB)


def test_cupy_keeps_pinned(cupy):
    KEPT.append(cupy.cuda.alloc_pinned_memory(1 * MIB))


def test_cupy_drops_pinned(cupy):
    KEPT.pop()  # into CuPy's pool


def test_cupy_pinned_of_the_pool(cupy):
    cupy.cuda.alloc_pinned_memory(1 * MIB)


def test_cupy_keeps_pinned_of_the_pool(cupy):
    KEPT.append(cupy.cuda.alloc_pinned_memory(1 * MIB))


@pytest.mark.parametrize("turn", [0, 1])
def test_cupy_copies_from_the_host(cupy, turn):
    cupy.asarray(numpy.ones(700_000, "u1"))


def test_cupy_pinned_drops_in_a_measurement(cupy, gpu_benchmark):
    held = [cupy.cuda.alloc_pinned_memory(2 * MIB)]
    array = cupy.zeros(MIB)

    def work():
        held.clear()
        array.fill(1)

    gpu_benchmark(work)


@pytest.fixture(scope="module")
def wide_pinned(cupy):
    return cupy.cuda.alloc_pinned_memory(2 * MIB)  # of the pool


def test_cupy_wide_pinned(wide_pinned):
    assert wide_pinned.ptr


def test_cupy_managed(cupy):
    memory = cupy.cuda.ManagedMemory(2 * MIB)
    assert memory.ptr


def test_cupy_async(cupy):
    with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
        a = cupy.empty(4 * MIB, "u1")
        del a
    cupy.cuda.Device().synchronize()


def test_cupy_matmul(cupy):
    a = cupy.ones((512, 512), "f4")
    a @ a


def test_torch_pattern(torch):
    torch.cuda.empty_cache()
    a = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    b = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    del a
    c = torch.empty(1 * MIB, dtype=torch.uint8, device="cuda")


def test_torch_keeps(torch):
    KEPT.append(torch.empty(4096, dtype=torch.uint8, device="cuda"))


def test_torch_cycle(torch):
    Ring(torch.empty(4 * MIB, dtype=torch.uint8, device="cuda"))


def test_torch_fails(torch):
    held = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert held.numel() == 0


def test_torch_pinned(torch):
    torch.empty(1 * MIB, dtype=torch.uint8, pin_memory=True)


def test_torch_keeps_pinned(torch):
    KEPT.append(torch.empty(1 * MIB, dtype=torch.uint8, pin_memory=True))


def test_torch_matmul(torch):
    a = torch.ones(512, 512, device="cuda")
    (a @ a).sum().item()


def captured(torch):
    x = torch.ones(1 * MIB, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    graph.replay()
    torch.cuda.synchronize()
    return graph


def test_torch_graph(torch):
    captured(torch)


def test_driver_pattern(driver):
    a = done(driver.cudaMalloc(4 * MIB))
    b = done(driver.cudaMalloc(2 * MIB))
    done(driver.cudaFree(a))
    c = done(driver.cudaMalloc(1 * MIB))
    done(driver.cudaFree(b))
    done(driver.cudaFree(c))


def test_driver_keeps(driver):
    done(driver.cudaMalloc(4096))


def test_driver_managed(driver):
    done(driver.cudaFree(done(driver.cudaMallocManaged(2 * MIB, driver.cudaMemAttachGlobal))))


def test_driver_pinned(driver):
    done(driver.cudaFreeHost(done(driver.cudaHostAlloc(1 * MIB, 0))))


def test_driver_keeps_pinned(driver):
    done(driver.cudaHostAlloc(4096, 0))


def test_driver_ordered(driver):
    a = done(driver.cudaMallocAsync(4 * MIB, 0))
    done(driver.cudaFreeAsync(a, 0))
    done(driver.cudaDeviceSynchronize())


def test_driver_keeps_ordered(driver):
    done(driver.cudaMallocAsync(4096, 0))
    done(driver.cudaDeviceSynchronize())


def test_driver_pitched(driver):
    a, pitch = driver.cudaMallocPitch(1000, 64)[1:]
    assert pitch == 1024
    done(driver.cudaFree(a))


def array(driver):
    """A CUDA array of 4 MiB."""
    done(driver.cudaFree(0))  # makes the context
    api = pytest.importorskip("cuda.bindings.driver")
    of = api.CUDA_ARRAY_DESCRIPTOR()
    of.Width, of.Height, of.NumChannels, of.Format = 1024, 256, 4, api.CUarray_format.CU_AD_FORMAT_FLOAT
    return api, done(api.cuArrayCreate(of))


def test_driver_array(driver):
    api, made = array(driver)
    done(api.cuArrayDestroy(made))


def test_driver_keeps_array(driver):
    KEPT.append(array(driver))


def test_driver_captured(driver):
    """What a graph allocates and frees in each launch is the graph's."""
    stream = done(driver.cudaStreamCreate())
    done(driver.cudaStreamBeginCapture(stream, driver.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    done(driver.cudaFreeAsync(done(driver.cudaMallocAsync(4 * MIB, stream)), stream))
    graph = done(driver.cudaStreamEndCapture(stream))
    launched = done(driver.cudaGraphInstantiate(graph, 0))
    done(driver.cudaGraphLaunch(launched, stream))
    done(driver.cudaStreamSynchronize(stream))
    done(driver.cudaGraphExecDestroy(launched))
    done(driver.cudaGraphDestroy(graph))


def test_numba_pattern(numba):
    import numpy

    a = numba.device_array(4 * MIB, numpy.uint8)
    b = numba.device_array(2 * MIB, numpy.uint8)
    del a
    numba.current_context().memory_manager.deallocations.clear()  # frees late otherwise
    c = numba.device_array(1 * MIB, numpy.uint8)


def test_numba_keeps(numba):
    import numpy

    KEPT.append(numba.device_array(4096, numpy.uint8))


def test_core_pattern():
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    a = device.allocate(4 * MIB, stream=stream)
    a.close(stream)
    stream.sync()


def test_core_keeps():
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    KEPT.append(device.allocate(4096, stream=stream))


def test_rmm_pattern(rmm):
    a = rmm.DeviceBuffer(size=4 * MIB)
    b = rmm.DeviceBuffer(size=2 * MIB)
    del a
    c = rmm.DeviceBuffer(size=1 * MIB)


def test_rmm_keeps(rmm):
    KEPT.append(rmm.DeviceBuffer(size=4096))


def test_rmm_cycle(rmm):
    Ring(rmm.DeviceBuffer(size=4 * MIB))


def test_rmm_keeps_without_its_pool(rmm):
    KEPT.append(rmm.DeviceBuffer(size=4096, mr=rmm.mr.CudaMemoryResource()))


def test_jax_pattern(jax):
    a = jax.numpy.zeros(4 * MIB, "uint8").block_until_ready()
    b = jax.numpy.zeros(2 * MIB, "uint8").block_until_ready()
    del a
    c = jax.numpy.zeros(1 * MIB, "uint8").block_until_ready()


def test_jax_keeps(jax):
    KEPT.append(jax.numpy.zeros(4096, "uint8").block_until_ready())


def test_jax_cycle(jax):
    Ring(jax.numpy.zeros(4 * MIB, "uint8").block_until_ready())


def test_fixtures_measured(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.copy, device_buffer("8 MiB"), device_buffer("8 MiB"))


@pytest.mark.parametrize("library", ["cupy", "torch", "numba", "rmm", "jax", "driver"])
@pytest.mark.parametrize("number", range(50))
def test_clean(request, library, number):
    module = request.getfixturevalue(library)
    if library == "cupy":
        a = module.arange(1000 * (number + 1), dtype="f4")
        assert float((a * 2 + 1).max()) > 0
    elif library == "torch":
        a = module.ones(200, 10 * (number + 1), device="cuda")
        assert float((a @ a.T).sum()) > 0
    elif library == "rmm":
        assert module.DeviceBuffer(size=1000 * (number + 1)).size
    elif library == "jax":
        assert float((module.numpy.ones((100, 100 * (number % 3 + 1))) * 2 + 1).max()) > 0
    elif library == "numba":
        import numpy

        assert module.to_device(numpy.ones(1000 * (number + 1))).copy_to_host().sum() > 0
    else:
        done(module.cudaFree(done(module.cudaMalloc(4096 * (number + 1)))))


def test_torch_keeps_graph(torch):
    """The last one: while a graph lives, workspaces that it may use stay, and count as kept."""
    KEPT.append(captured(torch))
'''

PINNED_OF_CUPY = {"kept": 0, "pinned_peak": MIB, "CUDA pinned": {"allocations": 1, "largest": MIB}}
"""Of page-locked memory of a MiB, in whatever test CuPy's pool has had it before."""

FOUND: dict[str, dict[str, Any]] = {
    # name of the test: what its footprint has, and of one library's memory of one kind
    "cupy_pattern": {
        "peak": 6 * MIB,
        "kept": 0,
        "CuPy device": {"allocations": 3, "largest": 4 * MIB},
    },
    "cupy_keeps": {"kept": 4096, "CuPy device": {"kept": 4096, "allocations": 1}},
    "cupy_cycle": {"peak": 4 * MIB, "kept": 0},
    "cupy_fixture": {"peak": 3 * MIB, "kept": 0},
    "cupy_fails": {"kept": 3 * MIB},  # by the traceback of its failure
    "cupy_wide_1": {"peak": 8 * MIB, "kept": 0},
    "cupy_wide_2": {"peak": 8 * MIB, "kept": 0},
    "cupy_threads": {"peak": 32 * MIB, "kept": 0, "CuPy device": {"allocations": 8}},
    "cupy_pinned": PINNED_OF_CUPY,
    "cupy_keeps_pinned": {"kept": MIB, "pinned_peak": MIB, "CUDA pinned": {"kept": MIB}},
    "cupy_drops_pinned": {"kept": 0, "pinned_peak": 0, "CUDA pinned": {"kept": -MIB}},
    "cupy_pinned_of_the_pool": PINNED_OF_CUPY,
    "cupy_keeps_pinned_of_the_pool": {"kept": MIB, "CUDA pinned": {"kept": MIB}},
    "cupy_copies_from_the_host[0]": PINNED_OF_CUPY,
    "cupy_copies_from_the_host[1]": PINNED_OF_CUPY,
    "cupy_pinned_drops_in_a_measurement": {"kept": 0, "pinned_peak": 2 * MIB},
    "cupy_wide_pinned": {"kept": 0, "pinned_peak": 0},
    "cupy_managed": {"kept": 0, "managed_peak": 2 * MIB, "peak": 0},
    "cupy_async": {"peak": 4 * MIB, "kept": 0},
    "cupy_matmul": {"CuPy device": {"kept": 0}},  # the driver's are kept by a handle of cuBLAS
    "torch_pattern": {
        "peak": 6 * MIB,
        "kept": 0,
        "reserved": 22 * MIB,
        "PyTorch device": {"allocations": 3, "largest": 4 * MIB},
    },
    "torch_keeps": {"kept": 4096, "PyTorch device": {"kept": 4096, "allocations": 1}},
    "torch_cycle": {"peak": 4 * MIB, "kept": 0},
    "torch_fails": {"kept": 3 * MIB},
    "torch_pinned": {"kept": 0},
    "torch_keeps_pinned": {"kept": MIB},
    "torch_matmul": {"PyTorch device": {"kept": 0}},
    "torch_graph": {"kept": 0},
    "torch_keeps_graph": {
        "kept": 20 * MIB + 16
    },  # its pool, and two numbers of its random generator
    "driver_pattern": {
        "peak": 6 * MIB,
        "kept": 0,
        "CUDA device": {"allocations": 3, "largest": 4 * MIB},
    },
    "driver_keeps": {"kept": 4096, "CUDA device": {"kept": 4096}},
    "driver_managed": {"kept": 0, "managed_peak": 2 * MIB},
    "driver_pinned": {"kept": 0, "pinned_peak": MIB},
    "driver_keeps_pinned": {"kept": 4096},
    "driver_ordered": {"peak": 4 * MIB, "kept": 0},
    "driver_keeps_ordered": {"peak": 4096, "kept": 4096},
    "driver_pitched": {"peak": 64 * 1024, "kept": 0},
    "driver_array": {"peak": 4 * MIB, "kept": 0},
    "driver_keeps_array": {"peak": 4 * MIB, "kept": 4 * MIB, "CUDA device": {"allocations": 1}},
    "driver_captured": {
        "kept": 0,
        "peak": range(4 * MIB, 64 * MIB),
    },  # the driver gives graphs 32 MiB at once
    "numba_pattern": {"peak": 6 * MIB, "kept": 0},
    "numba_keeps": {"kept": 4096},
    "fixtures_measured": {"peak": 16 * MIB, "kept": 0, "reserved": 0},
    "rmm_pattern": {"peak": 6 * MIB, "kept": 0, "reserved": 0, "RMM device": {"allocations": 3}},
    "rmm_keeps": {"kept": 4096, "RMM device": {"kept": 4096, "allocations": 1}},
    "rmm_cycle": {"kept": 0, "RMM device": {"allocations": 1}},
    "rmm_keeps_without_its_pool": {"kept": 4096, "CUDA device": {"kept": 4096, "allocations": 1}},
    "jax_pattern": {"peak": range(6 * MIB, 6 * MIB + 4096), "kept": 0},
    "jax_keeps": {"kept": 4096, "JAX device": {"kept": 4096}},
    "jax_cycle": {"kept": 0},
    "core_pattern": {"peak": 4 * MIB, "kept": 0},
    "core_keeps": {"kept": 4096},
}


@cache
def footprints(folder: Path, conftest: str = "") -> dict[str, dict[str, Any]]:
    """By the name of the test without "test_": the footprints of one session, which every test here reads."""
    (folder / "test_patterns.py").write_text(PATTERNS)
    (folder / "conftest.py").write_text(conftest)
    options = (
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--gpumem",
        "--gpumem-device=cuda:0",
        "--gpumem-footprint=on",
        "--benchmark-json=out.json",
    )
    command = [sys.executable, "-m", "pytest", *options, "test_patterns.py"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=400, check=False
    )
    assert (folder / "out.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout[-6000:])
    print(done.stderr[-2000:])
    found = json.loads((folder / "out.json").read_text())["gpumem"]["rows"]
    by_name = {row["nodeid"].partition("::test_")[2]: row["footprint"] for row in found}
    for name, one in by_name.items():
        if one["kept"] or one["not_watched"]:
            print(
                name, one["kept"], one["not_watched"], [use for use in one["uses"] if use["kept"]]
            )
    return by_name


@pytest.fixture(scope="module")
def watched(free_gpu: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return footprints(tmp_path_factory.mktemp("watched"))


def uses(footprint: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By library and kind."""
    return {f"{use['library']} {use['kind']}": use for use in footprint["uses"]}


@pytest.mark.parametrize("name", FOUND)
def test_a_known_pattern_is_found(watched: dict[str, dict[str, Any]], name: str) -> None:
    if name not in watched:
        pytest.skip("the library is not here")
    footprint = watched[name]
    wanted = {key: value for key, value in FOUND[name].items() if not isinstance(value, dict)}
    of_uses = {key: value for key, value in FOUND[name].items() if isinstance(value, dict)}
    shown = {key: footprint[key] for key in wanted}
    # The statistics of RMM and JAX know the largest peak of the process alone.
    unseen = [
        why
        for why in footprint["not_watched"]
        if not why.endswith("which is below an earlier one of this process")
    ]
    # A range holds what an allocator adds: JAX keeps blocks of 256 B of its own.
    wanted = {
        key: shown[key] if isinstance(value, range) and shown[key] in value else value
        for key, value in wanted.items()
    }
    assert (shown, unseen) == (wanted, []), footprint["uses"]
    for use, figures in of_uses.items():
        assert {key: uses(footprint)[use][key] for key in figures} == figures


def test_a_peak_is_unknown_only_to_the_test_that_uses_its_library(
    watched: dict[str, dict[str, Any]],
) -> None:
    for name, footprint in watched.items():
        if not name.startswith(("rmm", "jax", "clean")):
            assert footprint["not_watched"] == [], name


def test_two_hundred_clean_tests_keep_nothing(watched: dict[str, dict[str, Any]]) -> None:
    clean = {name: footprint for name, footprint in watched.items() if name.startswith("clean[")}
    assert len(clean) >= 150
    assert {name: footprint["uses"] for name, footprint in clean.items() if footprint["kept"]} == {}
    assert [
        name
        for name, footprint in clean.items()
        if not footprint["peak"] and not footprint["peak_bound"]
    ] == []


def test_nothing_counts_twice(watched: dict[str, dict[str, Any]]) -> None:
    for name, footprint in watched.items():
        assert footprint["peak"] <= sum(
            use["peak"] for use in footprint["uses"] if use["kind"] == "device"
        ), name
        segments = [
            use
            for use in footprint["uses"]
            if use["library"] == "CUDA" and use["kind"] == "device" and "cupy_pattern" in name
        ]
        assert segments == [], name


def test_without_cupti_the_rest_is_a_bound(
    free_gpu: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = footprints(
        tmp_path_factory.mktemp("bound"), "import sys\nsys.modules['cupti'] = None\n"
    )
    assert all(
        any(why.startswith("CUPTI: cupti-python cannot be imported") for why in one["not_watched"])
        for one in found.values()
    )
    assert {one["driver_watched"] for one in found.values()} == {False}
    if "cupy_pattern" in found:
        assert (found["cupy_pattern"]["peak"], found["cupy_pattern"]["kept"]) == (6 * MIB, 0)
    assert (
        found["fixtures_measured"]["bound"] < 256 * MIB
    )  # without the gigabytes that the harness takes


def test_without_cupti_a_limit_on_the_peak_is_undecided(
    free_gpu: int, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile("""
        import sys
        import pytest

        sys.modules["cupti"] = None
        runtime = pytest.importorskip("cuda.bindings.runtime")

        @pytest.mark.gpumem(max_peak="32 MiB")
        def test_it():
            failed, address = runtime.cudaMalloc(256 << 20)
            assert int(failed) == 0 and int(runtime.cudaFree(address)[0]) == 0
    """)
    done = pytester.runpytest_subprocess(
        "--gpumem", "--gpumem-device=cuda:0", "--benchmark-json=out.json", timeout=240
    )
    done.assert_outcomes(passed=1)
    (row,) = json.loads((pytester.path / "out.json").read_text())["gpumem"]["rows"]
    assert row["verdict"]["outcome"] == "UNDECIDED"


def test_arrays_of_a_thread_that_ran_before_leave_the_peak_undecided(
    free_gpu: int, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile("""
        from concurrent.futures import ThreadPoolExecutor
        import pytest

        cupy = pytest.importorskip("cupy")
        BEFORE = ThreadPoolExecutor(1)
        BEFORE.submit(int).result()

        @pytest.mark.gpumem(max_peak="32 MiB", max_kept="0 B")
        def test_it():
            cupy.get_default_memory_pool().free_all_blocks()
            BEFORE.submit(lambda: cupy.empty(256 << 20, "u1").size).result()
    """)
    done = pytester.runpytest_subprocess(
        "--gpumem", "--gpumem-device=cuda:0", "--benchmark-json=out.json", timeout=240
    )
    done.assert_outcomes(passed=1)
    (row,) = json.loads((pytester.path / "out.json").read_text())["gpumem"]["rows"]
    assert (row["verdict"]["outcome"], row["footprint"]["kept"]) == ("UNDECIDED", 0)
    assert row["footprint"]["peak_bound"] >= 256 * MIB


def test_what_an_own_pool_holds_is_reserved(free_gpu: int, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        driver, runtime = (pytest.importorskip(f"cuda.bindings.{name}") for name in ("driver", "runtime"))

        def done(answer):
            assert int(answer[0]) == 0, answer
            return answer[1] if len(answer) > 1 else None

        @pytest.mark.gpumem(max_kept="0 B")
        def test_it():
            of = runtime.cudaMemPoolProps()
            of.allocType = runtime.cudaMemAllocationType.cudaMemAllocationTypePinned
            of.location.type, of.location.id = runtime.cudaMemLocationType.cudaMemLocationTypeDevice, 0
            pool = done(runtime.cudaMemPoolCreate(of))
            threshold = runtime.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
            done(runtime.cudaMemPoolSetAttribute(pool, threshold, driver.cuuint64_t(1 << 40)))
            done(runtime.cudaFreeAsync(done(runtime.cudaMallocFromPoolAsync(4 << 20, pool, 0)), 0))
            done(runtime.cudaDeviceSynchronize())
    """)
    pytester.runpytest_subprocess(
        "--gpumem", "--gpumem-device=cuda:0", "--benchmark-json=out.json", timeout=240
    )
    (row,) = json.loads((pytester.path / "out.json").read_text())["gpumem"]["rows"]
    assert (row["verdict"]["outcome"], row["footprint"]["kept"], row["footprint"]["peak"]) == (
        "PASS",
        0,
        4 * MIB,
    )
    assert row["footprint"]["reserved"] >= 4 * MIB


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_leaks_by_another_allocator_of_torch_fail(
    free_gpu: int, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile("""
        import pytest

        torch = pytest.importorskip("torch")
        KEPT = []

        @pytest.mark.gpumem(max_kept="0 B")
        def test_it():
            KEPT.append(torch.zeros(4 << 20, dtype=torch.uint8, device="cuda"))
    """)
    for backend in ("backend:cudaMallocAsync", "expandable_segments:True"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", backend)
        pytester.runpytest_subprocess(
            "--gpumem", "--gpumem-device=cuda:0", "--benchmark-json=out.json", timeout=240
        )
        (row,) = json.loads((pytester.path / "out.json").read_text())["gpumem"]["rows"]
        assert row["verdict"]["outcome"] == "FAIL", backend
        assert row["footprint"]["kept"] >= 4 * MIB, backend


def test_what_is_kept_on_purpose_is_no_leak(free_gpu: int, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        plans='import cupy\n\ndef plan():\n    return cupy.empty(4 << 20, "u1")\n',
        test_it="""
        import pytest

        cupy = pytest.importorskip("cupy")
        import plans

        KEPT = {}

        @pytest.mark.gpumem(warmups=1, max_kept="0 B", max_peak="1 MiB")
        def test_plans_first():
            if "first" not in KEPT:
                KEPT["first"] = plans.plan()

        @pytest.mark.gpumem(warmups=1, max_kept="0 B")
        def test_plans_each_time():
            KEPT["each", len(KEPT)] = plans.plan()

        @pytest.mark.gpumem(allow_kept="plans.py:*", max_kept="0 B")
        def test_allowed():
            KEPT["allowed"] = plans.plan()

        @pytest.mark.gpumem(allow_kept="plans.py:*", max_kept="0 B")
        def test_leaks_besides():
            KEPT["besides"] = plans.plan(), cupy.empty(1 << 20, "u1")
        """,
    )
    pytester.runpytest_subprocess(
        "--gpumem", "--gpumem-device=cuda:0", "--benchmark-json=out.json", timeout=240
    )
    found = json.loads((pytester.path / "out.json").read_text())["gpumem"]["rows"]
    assert {
        row["nodeid"].partition("::test_")[2]: (row["verdict"]["outcome"], row["footprint"]["kept"])
        for row in found
    } == {
        "plans_first": ("PASS", 0),
        "plans_each_time": ("FAIL", 4 * MIB),
        "allowed": ("PASS", 0),
        "leaks_besides": ("FAIL", MIB),
    }


@pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
def test_a_history_that_a_test_records_is_its_own(free_gpu: int, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        torch = pytest.importorskip("torch")
        SIZE = 4 << 20

        def seen():
            entries = torch.cuda.memory._snapshot()["device_traces"][0]
            return [one["size"] for one in entries if one["action"] == "alloc"]

        def test_before(gpu_memory):
            torch.empty(8 * SIZE, dtype=torch.uint8, device="cuda")

        @pytest.mark.gpumem(max_kept="0 B")
        def test_records(gpu_memory):
            torch.cuda.memory._record_memory_history()
            torch.empty(SIZE, dtype=torch.uint8, device="cuda")
            with gpu_memory.watch("part") as used:
                assert used.peak == 0
            torch.empty(2 * SIZE, dtype=torch.uint8, device="cuda")
            assert seen() == [SIZE, 2 * SIZE]
            torch.cuda.memory._record_memory_history(None)

        @pytest.mark.gpumem(max_peak="4 MiB", max_kept="0 B")
        def test_after(gpu_memory):
            torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    """)
    done = pytester.runpytest_subprocess(
        "--gpumem", "--gpumem-device=cuda:0", "--benchmark-json=out.json", timeout=240
    )
    done.assert_outcomes(passed=3)
    rows = {
        row["key"].partition("::test_")[2]: row
        for row in json.loads((pytester.path / "out.json").read_text())["gpumem"]["rows"]
    }
    assert any(
        "history of the test's own" in why for why in rows["records"]["footprint"]["not_watched"]
    )
    assert (rows["after"]["footprint"]["not_watched"], rows["after"]["verdict"]["outcome"]) == (
        [],
        "PASS",
    )
    assert rows["after"]["footprint"]["peak"] == 4 * MIB
