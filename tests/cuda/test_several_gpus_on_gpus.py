"""Workers of xdist on real GPUs: each has one of its own, in CuPy and in PyTorch."""

from __future__ import annotations

import json

import pytest

cupy = pytest.importorskip("cupy")
pytest.importorskip("xdist")
pytestmark = pytest.mark.usefixtures("free_gpu")


TESTS = """
    import pynvml
    import pytest

    def current():
        "UUIDs of the device that CuPy uses, and PyTorch."
        import cupy
        place = cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.runtime.getDevice())
        pynvml.nvmlInit()
        found = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByPciBusId(place))]
        try:
            import torch
        except ImportError:
            return found
        one = torch.empty(4, device="cuda")
        return [*found, "GPU-" + str(torch.cuda.get_device_properties(one.device).uuid)]

    @pytest.mark.parametrize("number", range(6))
    def test_copy(gpu_benchmark, gpu_device, gpu_kernels, device_buffer, number):
        gpu_benchmark(gpu_kernels.copy, device_buffer("64 MiB"), device_buffer("64 MiB"))
        assert set(current()) == {gpu_device.facts.uuid}

    def test_peer(gpu_benchmark, gpu_kernels, device_buffer, peer_buffer):
        gpu_benchmark(gpu_kernels.memcpy, device_buffer("64 MiB"), peer_buffer("64 MiB"))

    @pytest.mark.gpumem(gpus=9)
    def test_more_than_there_are(gpu_device):
        pass
"""


@pytest.mark.parametrize("workers", [2, 3])
def test_each_worker_measures_on_its_own_gpu(
    pytester: pytest.Pytester, free_gpu: int, workers: int
) -> None:
    if free_gpu < 2:
        pytest.skip("needs two GPUs")
    pytester.makepyfile(TESTS)
    arguments = (
        "--gpumem",
        "--gpumem-device",
        "cuda",
        "--gpumem-processes",
        "1",
        "-n",
        str(workers),
        "--benchmark-json=out.json",
    )
    result = pytester.runpytest_subprocess(*arguments, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=7, skipped=1)
    assert "automatically disabled" not in result.stdout.str() + result.stderr.str()
    rows = json.loads((pytester.path / "out.json").read_text())["gpumem"]["rows"]
    assert len({row["measurement"]["card"] for row in rows}) == 2
    # Contexts of the other workers, and of the test with two GPUs, spoil no row.
    assert [row["nodeid"] for row in rows if row["verdict"]["code"] == "conditions"] == []


def test_a_process_that_numbers_its_gpus_otherwise_is_refused(pytester: pytest.Pytester) -> None:
    """The facts and the lock are of the GPU that was device 0 when the session began."""
    pytester.makepyfile(
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\ndef test_it(gpu_device): pass"
    )
    result = pytester.runpytest_subprocess(
        "--gpumem", "--gpumem-device", "cuda", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*DeviceError: opening device 0: this process sees 0 GPUs*"])
