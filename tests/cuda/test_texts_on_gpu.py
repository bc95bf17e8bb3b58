"""Statements of CUDA's guides that only kernels of one's own can show: the default stream, and which lines a hit ratio keeps."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem import GpuBenchmark
from pytest_gpumem.devices.protocol import Device

cupy = pytest.importorskip("cupy")
np = pytest.importorskip("numpy")

SOURCE = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds, unsigned long long* at) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
    at[0] = start;
    at[1] = now;
}
extern "C" __global__ void touch(const int* data, unsigned long long sectors, int* out) {
    int sum = 0;
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < sectors; i += gridDim.x * blockDim.x)
        sum += __ldcg(data + 8 * i);
    if (sum == 12345) *out = sum;
}
// A load begins when the one before has ended, so that two readings of the clock lie one load apart.
extern "C" __global__ void cycles(const int* data, unsigned long long lines, unsigned short* taken) {
    __shared__ volatile int arrived;
    for (unsigned long long i = 0; i < lines; ++i) {
        int value;
        long long before = clock64();
        asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(data + 32 * i) : "memory");
        arrived = value;  // the clock is read once the value is here
        long long now = clock64();
        taken[i] = now - before < 65535 ? now - before : 65535;
    }
}
"""
LINE, SECTOR = 128, 32
MILLISECONDS = 2


@pytest.fixture(scope="module")
def module() -> Any:
    return cupy.RawModule(code=SOURCE)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_default_stream_waits_for_all_before_it_and_all_after_it_wait(
    gpu_benchmark: GpuBenchmark, module: Any, blocking: bool
) -> None:
    """Best Practices Guide, 9.1.2. It holds for streams made with `cudaStreamDefault`; those made non-blocking run beside it."""
    spin, at = module.get_function("spin"), cupy.zeros((3, 2), dtype="u8")
    first, last = (cupy.cuda.Stream(non_blocking=not blocking) for _ in range(2))

    def three() -> None:
        for stream, stamps in zip((first, cupy.cuda.Stream.null, last), at, strict=True):
            with stream:
                spin((1,), (1,), (np.uint64(MILLISECONDS * 1_000_000), stamps))
        cupy.cuda.runtime.deviceSynchronize()

    three()  # loads the kernel
    three()
    (_, a_ended), (b_began, b_ended), (c_began, _) = at.get().astype("i8").tolist()
    seconds = gpu_benchmark(
        three, label="waiting streams" if blocking else "non-blocking streams"
    ).latency
    if blocking:
        assert a_ended <= b_began < b_ended <= c_began
        assert seconds > 2.9e-3 * MILLISECONDS
    else:
        assert b_began < a_ended
        assert c_began < b_ended
        assert seconds < 2e-3 * MILLISECONDS


@pytest.mark.filterwarnings(
    "ignore:ExternalStream is deprecated:DeprecationWarning"
)  # its successor is not in CuPy 13
def test_a_hit_ratio_keeps_that_share_of_the_lines(
    gpu_benchmark: GpuBenchmark,
    gpu_device: Device,
    module: Any,
    device_buffer: Any,
    persisting_stream: Any,
) -> None:
    """Programming Guide, `hitRatio`: of a window, lines chosen at random persist, as many as the ratio says.

    After plain reads of four times L2 each line is read by itself. It is there if that takes fewer cycles than half-way from a line that
    was just read to one that nothing kept. Whether the same lines are chosen again is a figure of the row.
    """
    facts = gpu_device.facts
    if not facts.persists or facts.mps:
        pytest.skip("needs a set-aside of its own")
    table = device_buffer(2 * facts.l2_step_bytes // 4096 * 4096, "i4", like=cupy)
    lines, plain = table.nbytes // LINE, cupy.cuda.Stream(non_blocking=True)
    other, taken, out = (
        cupy.zeros(facts.l2_bytes, dtype="i4"),
        cupy.zeros(lines, dtype="u2"),
        cupy.zeros(1, dtype="i4"),
    )
    touch, cycles = module.get_function("touch"), module.get_function("cycles")

    def read(what: Any, stream: Any) -> None:
        with stream:
            touch((4 * facts.sm_count,), (256,), (what, np.uint64(what.nbytes // SECTOR), out))
        stream.synchronize()

    def probed() -> Any:
        with plain:
            cycles((1,), (1,), (table, np.uint64(lines), taken))
        plain.synchronize()
        return taken.get()

    def kept(ratio: float, limit: float) -> Any:
        """Whether each line is in L2 after a read under a window and reads of other lines."""
        with persisting_stream(
            table, set_aside=4 * facts.l2_step_bytes, hit_ratio=ratio, miss="streaming"
        ) as stream:
            read(table, cupy.cuda.ExternalStream(stream.handle))
            read(other, plain)
            return probed() < limit

    gpu_device.l2.reset_persisting()
    read(other, plain)
    cold, hot = (float(np.median(probed())) for _ in range(2))
    assert cold > 1.3 * hot
    ratios = (0.0, 0.5, 1.0)
    found = {ratio: [kept(ratio, (hot + cold) / 2) for _ in range(2)] for ratio in ratios}
    row = gpu_benchmark(lambda: read(table, plain), label="the reads that are under the window")
    for ratio in ratios:
        row.extra[f"share kept at hit ratio {ratio:g}"] = float(np.mean(found[ratio]))
    row.extra["kept again at 0.5"] = float(np.mean(found[0.5][1][found[0.5][0]]))
    shares = {ratio: [float(one.mean()) for one in found[ratio]] for ratio in ratios}
    assert max(shares[0.0]) < 0.1, shares
    assert all(0.35 < share < 0.65 for share in shares[0.5]), shares
    assert min(shares[1.0]) > 0.8, shares
