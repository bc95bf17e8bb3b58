"""How the stream kernels' speed depends on their launch shape: what the choices in `pytest_gpumem/kernels/stream.py` rest on.

copy, mul, stream_add, triad and write with 1, 2 and 4 vectors of 16 bytes a thread in blocks of 256, 512 and 1024 threads; read and dot
with 2, 4, 8 and 16 vectors in the same blocks, each of which adds up one tile. Arrays of 1 GiB of floats are allocated first and nothing
is freed before the last sample. A sample is ten launches between two events, behind one more that keeps the device busy while they are
queued; all variants take turns, in an order drawn anew for every round. Afterwards every variant's result is compared with that of the
catalogue's own kernel.

    python ci/bench/launch_shapes.py --json ci/records/nvidia-h200/launch_shapes.json

Exits with 1 if a variant computes something else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import asdict

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from held_samples import awake
from record_file import chosen_device, device_of, write_record

from pytest_gpumem.devices.protocol import Device, Launch, Stream
from pytest_gpumem.kernels.calls import ceil_div, touch
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import Access, Call, Kernel, LaunchShape
from pytest_gpumem.kernels.stream import REDUCE_THREADS, REDUCE_VECTORS, VECTOR_BYTES
from pytest_gpumem.measuring.bound import BoundKernel
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.units import GB, GiB, KiB, MiB

MAPS: dict[str, tuple[str, ...]] = {"copy": ("x",), "mul": ("x",), "stream_add": ("x", "y"), "triad": ("x", "y"), "write": ()}
"""Kernels that compute an array, with their sources. What they write is an array of its own: no number grows from launch to launch."""
REDUCES: dict[str, tuple[str, ...]] = {"read": ("x",), "dot": ("x", "y")}
"""Kernels that give one sum for each tile."""
THREADS = (256, 512, 1024)
MAP_VECTORS = (1, 2, 4)
REDUCE_TRIED = (2, 4, 8, 16)
LARGEST_TILE = max(THREADS) * max(REDUCE_TRIED) * VECTOR_BYTES
SMALLEST_TILE = min(THREADS) * min(REDUCE_TRIED) * VECTOR_BYTES
LAUNCHES = 10
ROUNDS = 4
TOLERANCE = 1e-5
"""Of sums over the largest tile that were added up in another order, relative to them; as for the kernels of the catalogue."""


@dataclass(frozen=True)
class Variant:
    """One kernel in one launch shape."""

    kernel: str
    threads: int
    vectors: int
    launch: Launch
    nbytes: int
    """Bytes that one launch must read or write."""


def map_variant(name: str, threads: int, vectors: int) -> Kernel:
    """A kernel that computes an array, with `threads` threads a block and `vectors` vectors a thread; one tile a block."""
    kernel = CATALOGUE[name]
    written = kernel.parameters[0].name

    def shape(_facts: DeviceFacts, call: Call) -> LaunchShape:
        return LaunchShape(ceil_div(call.arrays[written].nbytes, threads * vectors * VECTOR_BYTES), threads, vectors=vectors)

    return replace(kernel, shape=shape)


def reduce_variant(name: str, threads: int, vectors: int) -> Kernel:
    """`read` or `dot` with a tile of `threads` x `vectors` vectors of each source; one tile a block."""
    kernel = CATALOGUE[name]
    sources = [parameter.name for parameter in kernel.parameters[:-1]]
    tile = threads * vectors * VECTOR_BYTES

    def shape(_facts: DeviceFacts, call: Call) -> LaunchShape:
        return LaunchShape(call.arrays[sources[0]].nbytes // tile, threads)

    def accesses(call: Call) -> tuple[Access, ...]:
        tiles = call.arrays[sources[0]].nbytes // tile
        return (*(touch(source, "read", call) for source in sources), touch("sums", "write", call, elements=tiles))

    def reference(arrays: Mapping[str, Any], _scalars: Mapping[str, int | float]) -> dict[str, Any]:
        product = arrays[sources[0]].astype("f8")
        for source in sources[1:]:
            product = product * arrays[source]
        width = tile // arrays[sources[0]].dtype.itemsize
        return {"sums": product[: product.size // width * width].reshape(-1, width).sum(axis=1).astype("f4")}

    return replace(
        kernel,
        entry=f"{name}<{{dtype}}, {threads}, {vectors}>",
        shape=shape,
        accesses=accesses,
        reference=reference,
        check=None,
        loads_in_flight=vectors * len(sources),
    )


def chosen(name: str, facts: DeviceFacts, call: Call) -> tuple[int, int]:
    """Threads and vectors that the catalogue chooses on a device."""
    if name in REDUCES:
        return REDUCE_THREADS, REDUCE_VECTORS[name]
    shape = CATALOGUE[name].shape(facts, call)
    return shape.threads, shape.vectors


class Variants:
    """All variants on a device, their arrays, and what their results must be."""

    def __init__(self, device: Device, arena: Arena, nbytes: int) -> None:
        self._device = device
        self._stream = arena.stream
        self._arrays = {name: arena.buffer(nbytes, "f4") for name in ("x", "y", "out", "expected")}
        self._arrays["sums"] = arena.buffer((nbytes // SMALLEST_TILE,), "f4")
        self.chosen: dict[str, tuple[int, int]] = {}
        self.all: list[Variant] = []
        for name in (*MAPS, *REDUCES):
            vectors = MAP_VECTORS if name in MAPS else REDUCE_TRIED
            ours = self._launch(CATALOGUE[name])
            self.chosen[name] = chosen(name, device.facts, ours.call)
            tried = [(t, v) for t in THREADS for v in vectors]
            if self.chosen[name] not in tried:
                tried.append(self.chosen[name])
            self.all += [self._variant(name, *shape) for shape in tried]

    def _variant(self, name: str, threads: int, vectors: int) -> Variant:
        kernel = (map_variant if name in MAPS else reduce_variant)(name, threads, vectors)
        launch = self._launch(kernel)
        return Variant(name, threads, vectors, launch, kernel.traffic(launch.call).total)

    def _launch(self, kernel: Kernel) -> Launch:
        bound = BoundKernel(kernel, self._device, self._stream)
        sources = [self._arrays[name] for name in {**MAPS, **REDUCES}[kernel.name]]
        arguments: list[Buffer | float] = [*sources, self._arrays["sums"]] if kernel.name in REDUCES else [self._arrays["out"], *sources]
        return bound.launch(*bound.arguments(tuple(arguments), {}))  # scalars take their defaults

    def wrong(self) -> list[Variant]:
        """The variants whose result is not that of the catalogue's own kernel."""
        return [variant for name in (*MAPS, *REDUCES) for variant in (self._wrong_maps if name in MAPS else self._wrong_reduces)(name)]

    def _wrong_maps(self, name: str) -> list[Variant]:
        device, out, expected = self._device, self._arrays["out"], self._arrays["expected"]
        self._run(self._launch(CATALOGUE[name]), out)
        device.content.copy(expected.allocation, out.allocation, out.nbytes, self._stream)
        device.streams.synchronize()
        found = []
        for variant in self._of(name):
            self._run(variant.launch, out)
            if device.content.mismatch(out.view(), expected.view(), 0.0) is not None:
                found.append(variant)
        return found

    def _wrong_reduces(self, name: str) -> list[Variant]:
        expected = self._sums(self._launch(CATALOGUE[name]), REDUCE_THREADS * REDUCE_VECTORS[name] * VECTOR_BYTES)
        known = ~np.isnan(expected)
        if not known.any() or not (known.all() or self._device.facts.simulated):  # simulated memory is backed by its first bytes only
            return self._of(name)
        found = []
        for variant in self._of(name):
            sums = self._sums(variant.launch, variant.threads * variant.vectors * VECTOR_BYTES)[: len(expected)]
            shown = known[: len(sums)]
            if not len(sums) or not np.allclose(sums[shown], expected[: len(sums)][shown], rtol=TOLERANCE, atol=0.0):
                found.append(variant)
        return found

    def _sums(self, launch: Launch, tile: int) -> np.ndarray[Any, Any]:
        """The sums of a launch, added up over the largest tile in float64."""
        self._run(launch, self._arrays["sums"])
        tiles = self._arrays["x"].nbytes // tile
        sums = self._device.content.to_host(self._arrays["sums"].allocation, "f4", tiles).astype("f8")
        each = LARGEST_TILE // tile
        added: np.ndarray[Any, Any] = sums[: len(sums) // each * each].reshape(-1, each).sum(axis=1)
        return added

    def _run(self, launch: Launch, written: Buffer) -> None:
        self._device.content.poison(written.allocation, self._stream)
        self._device.kernels.launch(launch, self._stream)
        self._device.streams.synchronize()

    def _of(self, name: str) -> list[Variant]:
        return [variant for variant in self.all if variant.kernel == name]


def batches(device: Device, stream: Stream, variants: list[Variant], rounds: int, launches: int, seed: int) -> list[list[float]]:
    """Seconds of one launch in each round's batch, for every variant."""
    start, end, random = device.streams.event(), device.streams.event(), np.random.default_rng(seed)
    seconds: list[list[float]] = [[] for _ in variants]
    for _ in range(rounds):
        for i in random.permutation(len(variants)):
            launch = variants[i].launch
            device.kernels.launch(launch, stream)  # keeps the device busy until the batch is queued
            device.streams.record(start, stream)
            for _ in range(launches):
                device.kernels.launch(launch, stream)
            device.streams.record(end, stream)
            device.streams.synchronize(stream)
            seconds[i].append(device.streams.elapsed(start, end) / launches)
    return seconds


def measured(device: Device, nbytes: int, rounds: int, launches: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every variant with the seconds of its batches, and whether its result is right."""
    arena = Arena(device, seed=0)
    try:
        begun = device.now()
        variants = Variants(device, arena, nbytes)
        for variant in variants.all:
            device.kernels.compile(variant.launch)
            device.kernels.launch(variant.launch, arena.stream)
            device.streams.synchronize(arena.stream)
        say(f"{len(variants.all)} variants compiled, {device.now() - begun:.1f} s")
        triad = next(variant for variant in variants.all if variant.kernel == "triad")
        awake(device, arena.stream, lambda stream: device.kernels.launch(triad.launch, stream))
        seconds = batches(device, arena.stream, variants.all, rounds, launches, seed=0)
        wrong = variants.wrong()
        say(f"measured and checked, {device.now() - begun:.1f} s")
        return [
            {
                "kernel": variant.kernel,
                "threads": variant.threads,
                "vectors": variant.vectors,
                "bytes": variant.nbytes,
                "chosen": variants.chosen[variant.kernel] == (variant.threads, variant.vectors),
                "right": variant not in wrong,
                "seconds": taken,
            }
            for variant, taken in zip(variants.all, seconds, strict=True)
        ]
    finally:
        arena.close()


def rate(variant: dict[str, Any]) -> float:
    """Bytes a second by the median batch."""
    return float(variant["bytes"] / statistics.median(variant["seconds"]))


def choices(record: dict[str, Any]) -> list[dict[str, Any]]:
    """For each kernel the chosen variant and the best one, with their rates in bytes a second, and which share the choice loses."""
    found = []
    for name in dict.fromkeys(variant["kernel"] for variant in record["variants"]):
        own = [variant for variant in record["variants"] if variant["kernel"] == name]
        best, ours = max(own, key=rate), next(variant for variant in own if variant["chosen"])
        found.append({"kernel": name, "chosen": ours, "best": best, "loss": 1 - rate(ours) / rate(best)})
    return found


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    device = record["device"]
    simulated = "SIMULATED " if device["simulated"] else ""
    said = [
        f"{simulated}{device['name']}, driver {device['driver']}, {record['ended'][:10]}",
        "",
        f"GB/s on arrays of {record['array_bytes'] / MiB:g} MiB of floats, median of {record['rounds']} batches of {record['launches']};"
        " * chosen, ! wrong result",
    ]
    for one in choices(record):
        own = [variant for variant in record["variants"] if variant["kernel"] == one["kernel"]]
        vectors = sorted({variant["vectors"] for variant in own})
        said += ["", f"{one['kernel'] + ', vectors':<22}" + "".join(f"{v:>8} " for v in vectors).rstrip()]
        for threads in sorted({variant["threads"] for variant in own}):
            cells = {variant["vectors"]: variant for variant in own if variant["threads"] == threads}
            line = "".join(_cell(cells.get(v)) for v in vectors)
            said.append(f"{f'  {threads} threads':<22}{line}".rstrip())
        best = one["best"]
        said.append(f"  chosen {_shape(one['chosen'])}: {100 * one['loss']:.2f} % below the best, {_shape(best)}")
    return "\n".join(said)


def _cell(variant: dict[str, Any] | None) -> str:
    if variant is None:
        return " " * 9
    mark = "!" if not variant["right"] else "*" if variant["chosen"] else " "
    return f"{rate(variant) / GB:>8.0f}{mark}"


def _shape(variant: dict[str, Any]) -> str:
    text = f"{variant['threads']} x {variant['vectors']}"
    tile = variant["threads"] * variant["vectors"] * VECTOR_BYTES
    return f"{text} (tiles of {tile / KiB:g} KiB)" if variant["kernel"] in REDUCES else text


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=GiB // MiB, help="MiB of each array (default 1024)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"batches of each variant (default {ROUNDS})")
    parser.add_argument("--launches", type=int, default=LAUNCHES, help=f"launches of a batch (default {LAUNCHES})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, sim (default cuda)")
    asked = parser.parse_args()
    for name in ("mib", "rounds", "launches"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name} {getattr(asked, name)}: at least 1 is needed")
    found = chosen_device(parser, asked.device)
    facts, device = found.facts, found.open()
    try:
        before = device.conditions()
        variants = measured(device, asked.mib * MiB, asked.rounds, asked.launches, lambda said: print(said, file=sys.stderr))
        after = device.conditions()
    finally:
        device.close()
    record = {
        "kind": "launch_shapes",
        "device": device_of(facts),
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "array_bytes": asked.mib * MiB,
        "rounds": asked.rounds,
        "launches": asked.launches,
        "conditions": [asdict(before), asdict(after)],
        "variants": variants,
    }
    if asked.json:
        write_record(asked.json, record)
    print(table(record))
    return 0 if all(variant["right"] for variant in variants) else 1


if __name__ == "__main__":
    sys.exit(main())
