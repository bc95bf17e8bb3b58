"""Workers of xdist on real GPUs: each has one of its own, in CuPy and in PyTorch. Needs two GPUs."""

from __future__ import annotations

import json

import pytest
from sessions_of_their_own import need_a_free_gpu

cupy = pytest.importorskip("cupy")
pytest.importorskip("xdist")


@pytest.fixture(autouse=True)
def _real_gpu(request: pytest.FixtureRequest) -> None:
    """Replaces that of the folder: the GPUs are for the sessions inside."""
    need_a_free_gpu(request.config)
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    try:
        if pynvml.nvmlDeviceGetCount() < 2:
            pytest.skip("needs two GPUs")
    finally:
        pynvml.nvmlShutdown()


TESTS = """
    import uuid
    import pytest

    def current():
        "UUIDs of the device that CuPy uses, and PyTorch."
        import cupy
        index = cupy.cuda.runtime.getDevice()
        found = ["GPU-" + str(uuid.UUID(bytes=bytes(cupy.cuda.runtime.getDeviceProperties(index)["uuid"])))]
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
def test_each_worker_measures_on_its_own_gpu(pytester: pytest.Pytester, workers: int) -> None:
    pytester.makepyfile(TESTS)
    arguments = ("--gpumem", "--gpumem-device", "cuda", "--gpumem-processes", "1", "-n", str(workers), "--benchmark-json=out.json")
    result = pytester.runpytest_subprocess(*arguments, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=7, skipped=1)
    assert "automatically disabled" not in result.stdout.str() + result.stderr.str()
    rows = json.loads((pytester.path / "out.json").read_text())["gpumem"]["rows"]
    assert len({row["measurement"]["taken"]["card"] for row in rows}) == 2
    # Contexts of the other workers, and of the test with two GPUs, spoil no row.
    assert [row["nodeid"] for row in rows if row["verdict"]["code"] == "conditions"] == []
