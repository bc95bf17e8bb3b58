"""Persisting L2: what a window gains, what thrashing costs, and that both are measured against a set-aside of zero.

The look-up table experiment follows "CUDA L2 Persistent Cache" (Lei Mao); the sliding window the CUDA C++ Best Practices Guide,
9.2.2. Tables are 8 and 24 MiB where L2 has 50 MiB or more, and shares of a smaller L2; what must not fit is 0.8 of L2.
"""

from __future__ import annotations

from statistics import fmean

import pytest

from pytest_gpumem import KiB, MiB
from pytest_gpumem.devices.protocol import AccessProperty, WindowSpec
from pytest_gpumem.memory.l2 import Thrashing

pytestmark = pytest.mark.gpumem(budget="0.3 s")
LEAN_GRID = 32
"""Blocks of the seed's launch: too few to saturate memory, so the table's latency shows."""


def gained(gpu_benchmark, kernel, persisting_stream, window, *arguments, **options) -> float:
    """How many times faster a kernel is with `window` persisting than with a set-aside of zero."""
    with persisting_stream(window, set_aside="off") as stream:
        off = gpu_benchmark(kernel, *arguments, stream=stream, label="off")
    with persisting_stream(window, **options) as stream:
        persisting = gpu_benchmark(kernel, *arguments, stream=stream, label="persisting")
    return off.latency / persisting.latency


@pytest.fixture
def large_l2(gpu_device) -> None:
    """A saturated kernel gains on the devices that were measured, all with an L2 of 40 MiB or more; a small one is another matter."""
    if gpu_device.facts.l2_bytes < 32 * MiB:
        pytest.skip(
            f"no measurement says that a saturated kernel gains with an L2 of {gpu_device.facts.l2_bytes / MiB:.0f} MiB"
        )


def test_lookup_table_stays_in_l2(
    gpu_benchmark, gpu_kernels, device_buffer, persisting_stream, of_l2, swept_bytes
):
    """A table that is read over and over beside a stream gains from persistence: the seed's launch, which is short of threads."""
    out, table = device_buffer(swept_bytes, "i4"), device_buffer(of_l2(0.48, 24 * MiB), "i4")
    assert (
        gained(
            gpu_benchmark,
            gpu_kernels.reset_data.with_grid(LEAN_GRID),
            persisting_stream,
            table,
            out,
            table,
        )
        > 1.15
    )


def test_lookup_table_stays_in_l2_of_a_busy_gpu(
    large_l2, gpu_benchmark, gpu_kernels, device_buffer, persisting_stream, of_l2, swept_bytes
):
    """The same with a grid that saturates memory, where a set-aside larger than needed would cost more than it gains."""
    out, table = device_buffer(swept_bytes, "i4"), device_buffer(of_l2(0.16, 8 * MiB), "i4")
    assert (
        gained(gpu_benchmark, gpu_kernels.reset_data, persisting_stream, table, out, table) > 1.25
    )


@pytest.mark.parametrize("where", ["graph", "launch"])
def test_a_window_on_a_graph_or_on_a_launch_gains_too(
    large_l2,
    gpu_benchmark,
    gpu_kernels,
    device_buffer,
    persisting_stream,
    of_l2,
    streamed_bytes,
    where,
):
    """The window is an attribute of the kernels' nodes of a graph, or of each launch; the stream has none."""
    out, table = device_buffer(streamed_bytes, "i4"), device_buffer(of_l2(0.16, 8 * MiB), "i4")
    assert (
        gained(
            gpu_benchmark, gpu_kernels.reset_data, persisting_stream, table, out, table, where=where
        )
        > 1.25
    )


@pytest.mark.parametrize(("hit", "miss"), [("persisting", "normal"), ("streaming", "streaming")])
def test_the_driver_holds_the_window_that_was_asked_for(
    gpu_device, device_buffer, persisting_stream, of_l2, hit, miss
):
    """A part of a buffer, read back from the stream: its address, bytes, hit ratio and both properties."""
    table = device_buffer(of_l2(0.16, 8 * MiB), "i4")
    half = table.nbytes // 2
    with persisting_stream(
        table, window=half // 2, offset=half, hit_ratio=0.5, hit=hit, miss=miss
    ) as stream:
        stream.handle  # noqa: B018, nothing is measured on it
        held = gpu_device.l2.window(stream.stream)
    assert held == WindowSpec(
        table.address + half, half // 2, 0.5, AccessProperty(hit), AccessProperty(miss)
    )


def test_a_small_window_gets_a_granule_more_than_holds_it(
    gpu_device, device_buffer, persisting_stream
):
    """With the least set-aside that holds a window, its lines overflow some sets of L2 at some placements."""
    if gpu_device.facts.mps:
        pytest.skip("under MPS the L2 set-aside is fixed")
    step = gpu_device.facts.l2_step_bytes
    with persisting_stream(device_buffer(step * 3 // 2 // 4096 * 4096, "i4")) as stream:
        stream.handle  # noqa: B018, nothing is measured on it
        granted = gpu_device.l2.set_aside()
    assert granted == 3 * step


def test_a_hit_ratio_is_fitted_to_what_the_driver_granted(
    gpu_device, device_buffer, persisting_stream
):
    """The driver rounds a set-aside up to steps of L2/16, and the window fills all of it."""
    step = gpu_device.facts.l2_step_bytes
    with persisting_stream(
        device_buffer(2 * step // 4096 * 4096, "i4"), set_aside=step + 4096
    ) as stream:
        stream.handle  # noqa: B018, nothing is measured on it
        held = gpu_device.l2.window(stream.stream)
        assert gpu_device.l2.set_aside() == 2 * step
    assert held is not None
    assert held.hit_ratio == 1.0


def test_a_window_beyond_its_set_aside_is_said_to_thrash(
    gpu_device, device_buffer, persisting_stream, recwarn
):
    step = gpu_device.facts.l2_step_bytes
    table = device_buffer(2 * step // 4096 * 4096, "i4")
    with persisting_stream(table, set_aside=step, hit_ratio=1.0) as stream:
        stream.handle  # noqa: B018, nothing is measured on it
    assert "evict each other" in str(recwarn.pop(Thrashing).message)


def test_a_set_aside_that_nothing_uses_slows_a_saturated_kernel(
    large_l2, gpu_benchmark, gpu_kernels, device_buffer, persisting_stream, streamed_bytes
):
    """The guide says that other accesses use what no persisting access uses of the set-aside."""
    out, table = device_buffer(streamed_bytes, "i4"), device_buffer(1 * MiB, "i4")
    with persisting_stream(table, set_aside="off") as stream:
        off = gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="no set-aside")
    with persisting_stream(device_buffer(64 * KiB, "i4"), set_aside="max") as other:
        other.handle  # noqa: B018, nothing is measured on it
        unused = gpu_benchmark(
            gpu_kernels.reset_data, out, table, label="the largest set-aside, without a window"
        )
    assert unused.latency > 1.2 * off.latency


@pytest.mark.parametrize("kernel", ["reset_data", "sliding_window"])
@pytest.mark.parametrize("of_32", [1, 2, 4, 8, 12, 16, 24, 32, 48])
def test_a_fitted_window_is_never_slower_than_none(
    large_l2,
    gpu_benchmark,
    gpu_kernels,
    device_buffer,
    persisting_stream,
    gpu_device,
    streamed_bytes,
    kernel,
    of_32,
):
    """Saturated kernels on tables up to 1.5 times L2, beyond the two intervals and half a percent."""
    nbytes = gpu_device.facts.l2_bytes * of_32 // 32
    out, table = device_buffer(streamed_bytes, "i4"), device_buffer(nbytes, "i4")
    arguments = (out, table) if kernel == "reset_data" else (table, out)
    found = {}
    for label, options in (("off", {"set_aside": "off"}), ("fitted", {})):
        with persisting_stream(table, **options) as stream:
            found[label] = gpu_benchmark(
                getattr(gpu_kernels, kernel), *arguments, stream=stream, label=label
            ).measurement
    off, fitted = found["off"], found["fitted"]
    assert fitted.latency - fitted.half_width <= 1.005 * (off.latency + off.half_width)


def test_a_fitted_hit_ratio_avoids_thrashing(
    gpu_benchmark, gpu_kernels, device_buffer, persisting_stream, of_l2, swept_bytes
):
    """A window beyond the set-aside evicts itself at hit ratio 1; the ratio that fits keeps a part."""
    out, table = device_buffer(swept_bytes, "i4"), device_buffer(of_l2(0.8), "i4")
    kernel = gpu_kernels.reset_data.with_grid(LEAN_GRID)
    with persisting_stream(table, set_aside="max", hit_ratio=1.0, allow_thrash=True) as stream:
        thrashing = gpu_benchmark(kernel, out, table, stream=stream, label="thrashing")
    with persisting_stream(table, set_aside="max", hit_ratio="fit") as stream:
        fitted = gpu_benchmark(kernel, out, table, stream=stream, label="fitted")
    assert thrashing.latency > 1.03 * fitted.latency


def test_a_fitted_hit_ratio_costs_nothing_where_the_table_stays(
    large_l2,
    gpu_benchmark,
    gpu_device,
    gpu_kernels,
    device_buffer,
    persisting_stream,
    of_l2,
    streamed_bytes,
):
    """A table that L2 would keep by itself, and of which the set-aside holds a part: its other lines are not evicted first."""
    out, table = device_buffer(streamed_bytes, "i4"), device_buffer(of_l2(0.1), "i4")
    found = {}
    for label, set_aside in (("off", "off"), ("fitted", gpu_device.facts.l2_step_bytes)):
        with persisting_stream(table, set_aside=set_aside) as stream:
            kernel = gpu_kernels.reset_data.with_grid(LEAN_GRID)
            # Of all placements: a few are faster, with the window and without.
            found[label] = fmean(
                gpu_benchmark(kernel, out, table, stream=stream, label=label).measurement.medians
            )
    assert found["fitted"] < 1.05 * found["off"]


def test_sliding_window(
    large_l2, gpu_benchmark, gpu_kernels, device_buffer, persisting_stream, of_l2, swept_bytes
):
    """The guide's experiment: a region that is updated over and over beside a stream that is updated once."""
    streaming, region = device_buffer(swept_bytes, "i4"), device_buffer(of_l2(0.4, 20 * MiB), "i4")
    assert (
        gained(
            gpu_benchmark, gpu_kernels.sliding_window, persisting_stream, region, region, streaming
        )
        > 1.02
    )
