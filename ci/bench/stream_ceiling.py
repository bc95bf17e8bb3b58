"""Our STREAM kernels against the ceiling, taken in BabelStream's way.

copy, mul, add, triad and dot on three arrays of 2^27 doubles, one after another, a hundred times; the first time is left out and the
best of the others counts. BabelStream reads the host's clock around launch and synchronisation; the same is done here, and once more with
events around the launch alone. Our dot leaves one sum for each tile, which the kernel's bytes count; "dot with final sum" adds them up and
brings the total to the host too. Then read and write in turn on 1 GiB of floats, whose median by events is set against the theoretical
peak. A read that follows a write pays for the lines that the write has left dirty in L2.

On a GPU the read is also held against reads of other shapes, on one array: loops over all of it as in nvbandwidth's kernels, with
1 to 16 loads of 16 bytes in flight in each thread, and the sum of doubles as in BabelStream's dot, each with several grids. Reading 64 MiB
to 4 GiB tells what a launch costs besides its bytes.

    python ci/bench/stream_ceiling.py --json ci/records/nvidia-h200/stream_ceiling.json

Exits with 1 if a kernel is slower than BabelStream's figure for this GPU, if a share of the peak is missed, or if another read is
more than 1 % faster than ours. Every kernel's result is checked first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import chosen_device, write_record

from pytest_gpumem.devices.protocol import Device, Foreign, Stream
from pytest_gpumem.kernels.stream import tile_bytes
from pytest_gpumem.measuring.bound import BoundKernel, Kernels
from pytest_gpumem.measuring.conductor import Conductor
from pytest_gpumem.measuring.samplers import held
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.ranges import Ranges
from pytest_gpumem.units import GB, GiB, MiB

ELEMENTS = 2**27
TIMES = 100
SCALAR = 0.4
"""BabelStream's."""

BABELSTREAM: dict[str, dict[str, float]] = {
    "NVIDIA H100 80GB HBM3": {"copy": 2976, "mul": 2956, "add": 3023, "triad": 3014, "dot": 3032},
    "NVIDIA H200": {"copy": 4031, "mul": 4005, "add": 4348, "triad": 4355, "dot": 4339},
}
"""GB/s that BabelStream 5.0 (CUDA) printed for 2^27 doubles on one card of each kind; driver 580, CUDA 13.0, November 2026."""
BABELSTREAM_SOURCE = "BabelStream 5.0, CUDA, 2^27 doubles, one card of the kind, driver 580, CUDA 13.0, 2026-11"

PEAK_SHARES: dict[str, dict[str, float]] = {"NVIDIA H100 80GB HBM3": {"read": 0.93, "write": 0.95}}
"""Shares of the theoretical peak that read and write must reach, by device."""

LEAST_OF_READS = 0.99
"""Of the fastest read of any shape, what ours must reach."""
READ_LOADS = (1, 4, 8, 16)
"""Loads of 16 bytes that a thread of a loop has in flight."""
READ_GRIDS = ((256, 4), (256, 8), (512, 4), (1024, 2))
"""Threads of a block, and blocks an SM."""
READ_SIZES = tuple(64 * MiB << step for step in range(7))
READS = r"""
typedef unsigned long long size;

// The exclusive or of all words in four lanes: each thread reads LOADS vectors a round, the grid's threads side by side. Each warp leaves
// one vector, so that no load can be left out.
template <int LOADS, bool STREAMING>
__global__ void loop(uint4 const* a, uint4* out, size n)
{
    size const step = static_cast<size>(blockDim.x) * gridDim.x;
    size i = static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x;
    size const warp = i / 32;
    uint4 all = make_uint4(0, 0, 0, 0);
    for (; i + (LOADS - 1) * step < n; i += LOADS * step) {
        uint4 value[LOADS];
#pragma unroll
        for (int l = 0; l < LOADS; ++l) value[l] = STREAMING ? __ldcs(a + i + l * step) : a[i + l * step];
#pragma unroll
        for (int l = 0; l < LOADS; ++l) {
            all.x ^= value[l].x; all.y ^= value[l].y; all.z ^= value[l].z; all.w ^= value[l].w;
        }
    }
    for (; i < n; i += step) {
        uint4 const value = a[i];
        all.x ^= value.x; all.y ^= value.y; all.z ^= value.z; all.w ^= value.w;
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        all.x ^= __shfl_xor_sync(0xFFFFFFFFu, all.x, distance);
        all.y ^= __shfl_xor_sync(0xFFFFFFFFu, all.y, distance);
        all.z ^= __shfl_xor_sync(0xFFFFFFFFu, all.z, distance);
        all.w ^= __shfl_xor_sync(0xFFFFFFFFu, all.w, distance);
    }
    if (threadIdx.x % 32 == 0) out[warp] = all;
}

// As BabelStream's dot with one array: a grid-stride loop over doubles, and a sum over each block.
__global__ void sum_of_doubles(double const* a, double* out, size n)
{
    __shared__ double of_thread[1024];
    double total = 0;
    for (size i = static_cast<size>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += static_cast<size>(blockDim.x) * gridDim.x) {
        total += a[i];
    }
    of_thread[threadIdx.x] = total;
    for (int offset = blockDim.x / 2; offset > 0; offset /= 2) {
        __syncthreads();
        if (threadIdx.x < offset) of_thread[threadIdx.x] += of_thread[threadIdx.x + offset];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = of_thread[0];
}
"""

Work = Callable[[], None]


def by_host(device: Device, stream: Stream, works: dict[str, Work], times: int) -> dict[str, list[float]]:
    """Seconds from before each launch until its stream is idle, all works in turn, `times` times; the first time is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    bare = {name: _bare(device, stream, work) for name, work in works.items()}
    clock = device.now if device.facts.simulated else time.perf_counter
    for _ in range(times):
        for name, (launch, wait) in bare.items():
            begun = clock()
            launch()
            wait()
            seconds[name].append(clock() - begun)
    return {name: taken[1:] for name, taken in seconds.items()}


def _bare(device: Device, stream: Stream, work: Work) -> tuple[Callable[[], object], Callable[[], object]]:
    """What launches a work, and what waits for it, with as little Python around the driver's calls as can be: the clock counts it."""
    if device.facts.simulated or not isinstance(work, _Kernel):
        return work, partial(device.streams.synchronize, stream)
    from cupy.cuda import runtime

    ready: Any = device.kernels.prepared(work.launched)  # type: ignore[attr-defined]
    launch = partial(ready.call.queue, stream)
    launch()
    return launch, partial(runtime.streamSynchronize, stream.handle)


def by_events(device: Device, stream: Stream, works: dict[str, Work], times: int) -> dict[str, list[float]]:
    """Seconds between two events around each launch, all works in turn, `times` times; the first time is left out.

    The stream is held while they are queued: no launch gap lies between them. The works ran before.
    """
    start, end = device.streams.event(), device.streams.event()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(times):
        for name, work in works.items():
            with held(device, stream):
                device.streams.record(start, stream)
                work()
                device.streams.record(end, stream)
            device.streams.synchronize(stream)
            seconds[name].append(device.streams.elapsed(start, end))
    return {name: taken[1:] for name, taken in seconds.items()}


class _Kernel:
    """A kernel with its arguments: checked once, launched often."""

    def __init__(self, conductor: Conductor, arena: Arena, bound: BoundKernel, *arguments: Any) -> None:
        target = conductor.target(bound, arguments, {}, arena=arena)
        try:
            assert target.check is not None
            assert target.traffic is not None
            target.check()
            self.nbytes = target.traffic.total
        finally:
            target.close()
        buffers, values = bound.arguments(arguments, {})
        self.launched = bound.launch(buffers, values)
        self._device, self._stream = arena.device, arena.stream

    def __call__(self) -> None:
        self._device.kernels.launch(self.launched, self._stream)


def measured(device: Device, elements: int, times: int) -> dict[str, Any]:
    """All kernels: bytes, best and median seconds by host clock and by events."""
    conductor = Conductor(device, Ranges(), profiled=False)
    kernels = Kernels(device)
    found: dict[str, Any] = {"stream": [], "one_way": []}

    arena = Arena(device, seed=0)
    stream = arena.stream
    try:
        a, b, c = (arena.buffer((elements,), "f8") for _ in range(3))
        sums = arena.buffer((a.nbytes // tile_bytes("dot"),), "f8")
        works = {
            "copy": _Kernel(conductor, arena, kernels.copy, c, a),
            "mul": _Kernel(conductor, arena, kernels.mul, b, c, SCALAR),
            "add": _Kernel(conductor, arena, kernels.stream_add, c, a, b),
            "triad": _Kernel(conductor, arena, kernels.triad, a, b, c, SCALAR),
            "dot": _Kernel(conductor, arena, kernels.dot, a, b, sums),
        }

        def total() -> None:
            float(device.memory.view(sums.allocation, "f8", sums.size).sum())

        def dot_with_sum() -> None:
            works["dot"]()
            device.kernels.call(Foreign(total, reference=total), stream)

        host = by_host(device, stream, {**works, "dot with final sum": dot_with_sum}, times)
        events = by_events(device, stream, dict(works), times)
        for name, seconds in host.items():
            nbytes = works[name.partition(" ")[0]].nbytes
            found["stream"].append({"kernel": name, "bytes": nbytes, "host": _said(seconds), "events": _said(events.get(name))})
    finally:
        arena.close()

    device.memory.settle()
    arena = Arena(device, seed=0)
    try:
        a = arena.buffer(min(GiB, elements * 8), "f4")
        sums = arena.buffer((a.nbytes // tile_bytes("read"),), "f4")
        works = {"read": _Kernel(conductor, arena, kernels.read, a, sums), "write": _Kernel(conductor, arena, kernels.write, a, 1.0)}
        for name, seconds in by_events(device, arena.stream, dict(works), times).items():
            found["one_way"].append({"kernel": name, "bytes": works[name].nbytes, "events": _said(seconds)})
    finally:
        arena.close()
        conductor.close()
    return found


def reads(device: Device, nbytes: int, times: int) -> list[dict[str, Any]]:
    """Reads of other shapes, and ours, on one array of doubles: bytes, best and median seconds by events.

    Raises:
        AssertionError: one gives another result.
    """
    import cupy

    loops = {f"loop<{loads}, {kind}>": loads for loads in READ_LOADS for kind in ("false", "true")}
    module = cupy.RawModule(code=READS, options=("-std=c++17",), name_expressions=[*loops, "sum_of_doubles"])
    conductor, arena = Conductor(device, Ranges(), profiled=False), Arena(device, seed=0)
    stream, sms = arena.stream, device.facts.sm_count
    try:
        buffer = arena.buffer(nbytes, "f8")
        a = device.memory.view(buffer.allocation, "f8", buffer.size)
        sums = arena.buffer((nbytes // tile_bytes("read"),), "f8")
        works: dict[str, Work] = {"ours": _Kernel(conductor, arena, Kernels(device).read, buffer, sums)}
        words, outs = a.view("u4").reshape(-1, 4), []
        together = cupy.ReductionKernel("uint32 x", "uint32 y", "x", "a ^ b", "y = a", "0", "exclusive_or")
        expected = together(words, axis=0)
        for name, loads in loops.items():
            for threads, blocks in READ_GRIDS:
                grid = blocks * sms
                out = cupy.zeros((grid * threads // 32, 4), "u4")
                arguments = (a, out, cupy.uint64(nbytes // 16))
                works[_shape(name, loads, threads, blocks)] = _raw(module.get_function(name), grid, threads, arguments, stream)
                outs.append((out, _shape(name, loads, threads, blocks)))
        for threads, blocks in READ_GRIDS:
            total = cupy.zeros(blocks * sms, "f8")
            function = module.get_function("sum_of_doubles")
            arguments = (a, total, cupy.uint64(buffer.size))
            works[f"sum of doubles, {threads} x {blocks}"] = _raw(function, blocks * sms, threads, arguments, stream)
        for work in works.values():
            work()
        device.streams.synchronize()
        for out, name in outs:
            assert (together(out, axis=0) == expected).all(), name
        assert abs(float(total.sum()) / float(a.sum()) - 1.0) < 1e-9
        found = by_events(device, stream, works, times)
        return [{"kernel": name, "bytes": nbytes, "events": _said(seconds)} for name, seconds in found.items()]
    finally:
        arena.close()
        conductor.close()


def _shape(name: str, loads: int, threads: int, blocks: int) -> str:
    return f"{loads} x 16 bytes{', streaming' if 'true' in name else ''}, {threads} x {blocks}"


def _raw(function: Any, grid: int, threads: int, arguments: tuple[Any, ...], stream: Any) -> Work:
    def launch() -> None:
        with stream.cupy:
            function((grid,), (threads,), arguments)

    return launch


def read_sizes(device: Device, times: int) -> list[dict[str, Any]]:
    """Our read on arrays of `READ_SIZES`: bytes, best and median seconds by events."""
    conductor, found = Conductor(device, Ranges(), profiled=False), []
    for nbytes in READ_SIZES:
        arena = Arena(device, seed=0)
        try:
            a, sums = arena.buffer(nbytes, "f4"), arena.buffer((nbytes // tile_bytes("read"),), "f4")
            seconds = by_events(device, arena.stream, {"read": _Kernel(conductor, arena, Kernels(device).read, a, sums)}, times)["read"]
            found.append({"bytes": nbytes, "events": _said(seconds)})
        finally:
            arena.close()
    conductor.close()
    return found


def cost_of_a_launch(sizes: list[dict[str, Any]]) -> tuple[float, float]:
    """Seconds of a read besides its bytes, and bytes per second of the rest: a line through the two largest sizes' medians."""
    (small, fast), (large, slow) = ((one["bytes"], one["events"]["median"]) for one in sizes[-2:])
    rate = (large - small) / (slow - fast)
    return fast - small / rate, rate


def _said(seconds: list[float] | None) -> dict[str, float] | None:
    return None if seconds is None else {"min": min(seconds), "median": statistics.median(seconds)}


def lines(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Every figure with what it is compared with: GB/s, the reference in GB/s, their ratio, the least ratio, and whether it is kept."""
    device = record["device"]
    theirs = record["babelstream"]["gb_per_s"]
    found = []
    for one in record["stream"]:
        reference = theirs.get(one["kernel"]) if theirs else None
        found.append(_line(one["kernel"], one["bytes"], one["host"]["min"], reference, 1.0 if reference else None))
    shapes = record.get("reads")
    for one in record["one_way"]:
        least = PEAK_SHARES.get(device["name"], {}).get(one["kernel"]) if not device["simulated"] else None
        # The share applies to reads without writes between them, where the record has such.
        alone = shapes[0] if shapes and one["kernel"] == "read" else one
        found.append(_line(one["kernel"], alone["bytes"], alone["events"]["median"], device["peak_bandwidth"] / GB, least))
    if shapes:
        ours, *others = (one["bytes"] / one["events"]["median"] / GB for one in shapes)
        found.append(_line("read beside others", shapes[0]["bytes"], shapes[0]["events"]["median"], max(ours, *others), LEAST_OF_READS))
    return found


def _line(name: str, nbytes: int, seconds: float, reference: float | None, least: float | None) -> dict[str, Any]:
    rate = nbytes / seconds / GB
    ratio = rate / reference if reference else None
    holds = None if ratio is None or least is None else ratio >= least
    return {"kernel": name, "gb_per_s": rate, "reference": reference, "ratio": ratio, "least": least, "holds": holds}


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    device = record["device"]
    by_name = {line["kernel"]: line for line in lines(record)}
    simulated = "SIMULATED " if device["simulated"] else ""
    said = [
        f"{simulated}{device['name']}, driver {device['driver']}, {record['ended'][:10]}",
        "",
        f"{record['elements']} doubles, best of {record['times'] - 1}; BabelStream's figure: {record['babelstream']['source']}",
        "",
        f"{'kernel':<20}{'host GB/s':>11}{'events GB/s':>13}{'median':>9}{'BabelStream':>13}{'host / theirs':>15}",
    ]
    for one in record["stream"]:
        line, events = by_name[one["kernel"]], one["events"]
        rate = [one["bytes"] / events[which] / GB for which in ("min", "median")] if events else None
        said.append(
            f"{one['kernel']:<20}{line['gb_per_s']:>11.0f}"
            + (f"{rate[0]:>13.0f}{rate[1]:>9.0f}" if rate else " " * 22)
            + (f"{line['reference']:>13.0f}{line['ratio']:>15.3f}" if line["reference"] else " " * 28)
            + _mark(line)
        )
    said += ["", f"{'one way, floats':<20}{'median GB/s':>12}{'% of peak':>11}{'at least %':>12}"]
    for one in record["one_way"]:
        line = by_name[one["kernel"]]
        least = "" if line["least"] is None else f"{100 * line['least']:.0f}"
        said.append(f"{one['kernel']:<20}{line['gb_per_s']:>12.0f}{100 * line['ratio']:>11.1f}{least:>12}{_mark(line)}")
    if record.get("reads"):
        (read,) = (one for one in record["one_way"] if one["kernel"] == "read")
        rate = read["bytes"] / read["events"]["median"]
        said.append(f"{'read after a write':<20}{rate / GB:>12.0f}{100 * rate / device['peak_bandwidth']:>11.1f}")
    if shapes := record.get("reads"):
        peak = device["peak_bandwidth"]
        said += ["", f"{'reads of 1 GiB, threads x blocks an SM':<42}{'median GB/s':>12}{'% of peak':>11}"]
        for one in sorted(shapes, key=lambda one: float(one["events"]["median"])):
            rate = one["bytes"] / one["events"]["median"]
            said.append(f"{one['kernel']:<42}{rate / GB:>12.0f}{100 * rate / peak:>11.1f}")
        said.append(f"ours beside the fastest: {by_name['read beside others']['ratio']:.3f}{_mark(by_name['read beside others'])}")
        said += ["", f"{'our read':<42}{'median GB/s':>12}{'% of peak':>11}"]
        for one in record["read_sizes"]:
            rate = one["bytes"] / one["events"]["median"]
            said.append(f"{one['bytes'] // MiB:>6} MiB{'':<32}{rate / GB:>12.0f}{100 * rate / peak:>11.1f}")
        besides, rate = cost_of_a_launch(record["read_sizes"])
        said.append(f"{besides * 1e6:.2f} us besides the bytes, which pass at {rate / GB:.0f} GB/s, {100 * rate / peak:.1f} % of peak")
    return "\n".join(said)


def _mark(line: dict[str, Any]) -> str:
    return {True: "  ok", False: "  MISS", None: ""}[line["holds"]]


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or sim to try the script out (default cuda)")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="doubles in each array (default 2^27, as BabelStream was run)")
    parser.add_argument("--times", type=int, default=TIMES, help="(default 100)")
    chosen = parser.parse_args()
    if chosen.times < 2:
        parser.error(f"--times {chosen.times}: the first time is left out, so at least 2")
    if chosen.elements < 1 or chosen.elements * 8 % tile_bytes("read"):
        parser.error(f"--elements {chosen.elements}: a positive multiple of {tile_bytes('read') // 8}, so that tiles are whole")
    found = chosen_device(parser, chosen.device)
    facts = found.facts
    device = found.open()
    try:
        before = device.conditions()
        rates = measured(device, chosen.elements, chosen.times)
        if not facts.simulated:
            rates["reads"] = reads(device, GiB, min(chosen.times, 40))
            rates["read_sizes"] = read_sizes(device, min(chosen.times, 40))
        after = device.conditions()
    finally:
        device.close()
    comparable = not facts.simulated and chosen.elements == ELEMENTS and chosen.times == TIMES
    record = {
        "kind": "stream_ceiling",
        "device": {
            "name": facts.name,
            "simulated": facts.simulated,
            "driver": facts.driver,
            "cuda": facts.cuda,
            "peak_bandwidth": facts.peak_bandwidth,
            "uuid": facts.uuid,
        },
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "elements": chosen.elements,
        "times": chosen.times,
        "babelstream": {
            "source": BABELSTREAM_SOURCE if comparable and facts.name in BABELSTREAM else "none for this device and size",
            "gb_per_s": BABELSTREAM.get(facts.name) if comparable else None,
        },
        "conditions": [asdict(before), asdict(after)],
        **rates,
    }
    record["must_show"] = lines(record)
    if chosen.json:
        write_record(chosen.json, record, indent=1)
    print(table(record))
    return 1 if any(line["holds"] is False for line in record["must_show"]) else 0


if __name__ == "__main__":
    sys.exit(main())
