"""Measure the host link, and check the harness against it: copies each way and both at once, and staged copies.

    python ci/bench/host_link.py --json ci/records/nvidia-h200/host_link.json
    python ci/bench/host_link.py --peers --json ci/records/nvidia-h200/host_link_peers.json

Pinned copies are held against the best of a bare loop of cudaMemcpyAsync in the same process, a staged copy at its best number of streams
against the bound that no overlap can beat, with the text's estimate beside it (CUDA C++ Best Practices Guide, 9.1.2). `--peers` measures
copies between two GPUs instead, with peer access and without. Every copy's result is checked.

Exits with 1 if a claim does not hold. On the simulated device no rate is claimed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import chosen_device, record_parser, utc_now, write_record

from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.conductor import Conductor, overlap_of
from pytest_gpumem.measuring.sampling import Plan
from pytest_gpumem.measuring.work import Work
from pytest_gpumem.measuring.works import Works
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.ranges import Ranges
from pytest_gpumem.units import GB, MiB

PLAN = Plan(budget=0.3)
PARTS = 4
"""Times as long the parts of a staged copy are measured: every setting is held against them."""
LOOP = 50
"""Copies of the bare loop."""
STREAMS = (1, 2, 4, 8, 16)
CHUNKS_PER_STREAM = (1, 4, 16)
ROUNDS = (50, 250)
"""Between which the time of one round of `elementwise` is told."""
LEAST_RATE = {"NVIDIA H200": 54e9, "NVIDIA H100 80GB HBM3": 54e9}
"""Bytes per second that a pinned copy of 256 MiB must reach each way, by device."""
LEAST_PEER_RATE = {"NVIDIA H200": 380e9}
WITHIN_LOOP = 0.02
STAGED = {"staged_in": "staged copy to the device", "staged": "staged copy there and back"}
"""Parts of the record, and what they are."""
WITHIN_BOUND = 0.10


class Bench:
    """State that the parts share."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.conductor = Conductor(device, Ranges(), profiled=False)
        self.kernels = Kernels(device)

    def latency(self, function: Any, *arguments: Any, arena: Arena, plan: Plan = PLAN) -> float:
        """Seconds of one run, as the harness measures it, its result checked."""
        target = self.conductor.target(function, arguments, {}, arena=arena)
        return self.conductor.measure(target, plan, arena=arena, label="", name="host_link").latency

    def loop(self, memory: Memory, *, to_device: bool) -> float:
        """Least seconds of a bare loop of asynchronous copies, each between two events, from memory of its own."""
        device, stream = self.device, memory.stream
        there, here = memory.device(self.nbytes, "u1"), memory.pinned(self.nbytes, "u1")
        if device.facts.simulated:
            pair = (there, here) if to_device else (here, there)

            def copy() -> None:
                device.content.copy(pair[0].allocation, pair[1].allocation, self.nbytes, stream)
        else:
            from cupy.cuda import runtime

            kind = runtime.memcpyHostToDevice if to_device else runtime.memcpyDeviceToHost
            addresses = (there.address, here.host_address) if to_device else (here.host_address, there.address)

            def copy() -> None:
                runtime.memcpyAsync(*addresses, self.nbytes, kind, stream.handle)

        seconds, start, end = [], device.streams.event(), device.streams.event()
        for _ in range(LOOP):
            device.streams.record(start, stream)
            copy()
            device.streams.record(end, stream)
            device.streams.synchronize(stream)
            seconds.append(device.streams.elapsed(start, end))
        return min(seconds)

    def arena(self) -> Arena:
        return Arena(self.device, seed=1)


def each_way(bench: Bench) -> dict[str, Any]:
    """Seconds of pinned, registered and pageable copies both ways, of the bare loop, and of both ways at once."""
    found: dict[str, Any] = {}
    for way, to_device in (("host to device", True), ("device to host", False)):
        row: dict[str, float] = {}
        for kind in ("pinned", "registered", "pageable"):
            arena = bench.arena()
            try:
                memory = Memory(arena)
                there, here = memory.device(bench.nbytes), getattr(memory, kind)(bench.nbytes)
                pair = (there, here) if to_device else (here, there)
                row[kind] = bench.latency(bench.kernels.memcpy, *pair, arena=arena)
                if kind == "pinned":
                    row["loop"] = bench.loop(memory, to_device=to_device)
            finally:
                arena.close()
        found[way] = row
    arena = bench.arena()
    works = Works(Memory(arena))
    try:
        memory = Memory(arena)
        up = works.copy(memory.device(bench.nbytes), memory.pinned(bench.nbytes))
        down = works.copy(memory.pinned(bench.nbytes), memory.device(bench.nbytes))
        found["both at once"] = bench.latency(works.together(up, down), arena=arena)
    finally:
        works.close()
        arena.close()
    return found


def staged(bench: Bench, *, back: bool) -> dict[str, Any]:
    """In, kernel and (`back`) out in chunks over streams: each setting's seconds, the parts alone, bound and estimate."""
    arena = bench.arena()
    memory = Memory(arena)
    works = Works(memory)
    try:
        x, here = memory.device(bench.nbytes), memory.pinned(bench.nbytes)
        copy = bench.latency(works.copy(x, here), arena=arena)
        few, many = (bench.latency(works.kernel(bench.kernels.elementwise, x, rounds), arena=arena) for rounds in ROUNDS)
        rounds = max(1, round((copy - few) / ((many - few) / (ROUNDS[1] - ROUNDS[0])) + ROUNDS[0]))
        rows, overlap = [], None
        for streams in STREAMS:
            for each in CHUNKS_PER_STREAM:
                work: Work = works.staged(streams, bench.nbytes, chunks=streams * each, rounds=rounds, back=back)
                if overlap is None:
                    overlap = overlap_of(bench.conductor, work, replace(PLAN, budget=PARTS * PLAN.budget), arena=arena, name="host_link")
                rows.append({"streams": streams, "chunks": streams * each, "seconds": bench.latency(work, arena=arena)})
        assert overlap is not None
        parts = {part.name: part.seconds for part in overlap.parts}
        return {"rounds": rounds, "parts": parts, "in_turn": overlap.sequential, "bound": overlap.bound, "rows": rows}
    finally:
        works.close()
        arena.close()


def estimate(record: dict[str, Any], chunks: int) -> float:
    """The text's rough estimate for a number of chunks: the bound, and an n-th part of everything else."""
    return float(record["bound"] + (sum(record["parts"].values()) - record["bound"]) / chunks)


def peers(bench: Bench) -> dict[str, float]:
    """Seconds of copies between two GPUs: staged through the host, and direct, each way."""
    device, found = bench.device, {}
    for name, allowed in (("staged", False), ("direct", True)):
        arena = bench.arena()
        try:
            memory = Memory(arena)
            here, there = memory.device(bench.nbytes), memory.peer(bench.nbytes)
            with device.peer_access(allowed):
                found[f"{name}, to the other"] = bench.latency(bench.kernels.memcpy, there, here, arena=arena)
                found[f"{name}, from the other"] = bench.latency(bench.kernels.memcpy, here, there, arena=arena)
        finally:
            arena.close()
    return found


def claims(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Each claim with its figure, its limit and whether it holds; None where none is made on this device."""
    device, nbytes, found = record["device"], record["bytes"], list[dict[str, Any]]()

    def claim(name: str, figure: float, limit: float | None, holds: bool | None, unit: str) -> None:
        found.append({"claim": name, "figure": figure, "limit": limit, "holds": holds, "unit": unit})

    real = not device["simulated"]
    if "each_way" in record:
        least = LEAST_RATE.get(device["name"]) if real and nbytes >= 256 * MiB else None
        for way in ("host to device", "device to host"):
            row = record["each_way"][way]
            rate = nbytes / row["pinned"]
            claim(f"pinned, {way}", rate / GB, None if least is None else least / GB, None if least is None else rate >= least, "GB/s")
            over = row["pinned"] / row["loop"] - 1
            claim(f"pinned, {way}, over the best of a bare loop", over, WITHIN_LOOP, abs(over) <= WITHIN_LOOP if real else None, "share")
    for name, what in STAGED.items():
        if name not in record:
            continue
        part = record[name]
        best = min(row["seconds"] for row in part["rows"])
        over = best / part["bound"] - 1
        claim(f"{what} at its best, over the bound", over, WITHIN_BOUND, over <= WITHIN_BOUND if real else None, "share")
        if name == "staged":
            # No overlap beats the link: what both copies take at once, with no kernel beside them, is a bound that was measured.
            over = best / record["each_way"]["both at once"] - 1
            claim(f"{what} at its best, over both copies at once", over, WITHIN_BOUND, over <= WITHIN_BOUND if real else None, "share")
    if "peers" in record:
        least = LEAST_PEER_RATE.get(device["name"]) if real else None
        for name, seconds in record["peers"].items():
            limit = least if name.startswith("direct") else None
            rate = nbytes / seconds
            claim(f"peer copy, {name}", rate / GB, None if limit is None else limit / GB, None if limit is None else rate >= limit, "GB/s")
    return found


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    device, nbytes = record["device"], record["bytes"]
    simulated = "SIMULATED " if device["simulated"] else ""
    said = [f"{simulated}{device['name']}, {device['link']}, driver {device['driver']}, {record['ended'][:10]}", ""]
    if "each_way" in record:
        said += [f"{f'copies of {nbytes // MiB} MiB, GB/s':<28}{'pinned':>9}{'bare loop':>11}{'registered':>12}{'pageable':>10}"]
        for way in ("host to device", "device to host"):
            row = record["each_way"][way]
            rates = [nbytes / row[name] / GB for name in ("pinned", "loop", "registered", "pageable")]
            said.append(f"{way:<28}{rates[0]:>9.1f}{rates[1]:>11.1f}{rates[2]:>12.1f}{rates[3]:>10.1f}")
        said += [f"{'both at once, total':<28}{2 * nbytes / record['each_way']['both at once'] / GB:>9.1f}", ""]
    for name, what in STAGED.items():
        if name not in record:
            continue
        part = record[name]
        alone = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in part["parts"].items())
        said += [
            f"{what} of {nbytes // MiB} MiB: alone {alone};",
            f"in turn {part['in_turn'] * 1e3:.3f} ms, bound {part['bound'] * 1e3:.3f} ms",
            f"{'streams':>9}{'chunks':>8}{'ms':>9}{'estimate':>10}{'over bound':>12}{'hidden':>9}",
        ]
        for row in part["rows"]:
            hidden = (part["in_turn"] - row["seconds"]) / (part["in_turn"] - part["bound"])
            over = row["seconds"] / part["bound"] - 1
            guess = estimate(part, row["chunks"])
            cells = f"{row['seconds'] * 1e3:>9.3f}{guess * 1e3:>10.3f}{100 * over:>10.1f} %{100 * hidden:>7.0f} %"
            said.append(f"{row['streams']:>9}{row['chunks']:>8}{cells}")
        said.append("")
    for one in claims(record):
        scale, unit = (100, " %") if one["unit"] == "share" else (1, f" {one['unit']}".rstrip())
        limit = "" if one["limit"] is None else f" (limit {one['limit'] * scale:.4g}{unit})"
        verdict = {None: "not claimed", True: "holds", False: "MISSED"}[one["holds"]]
        said.append(f"{one['claim']}: {one['figure'] * scale:.4g}{unit}{limit}: {verdict}")
    return "\n".join(line.rstrip() for line in said)


def main() -> int:
    parser = record_parser(__doc__)
    parser.add_argument("--mib", type=int, help="MiB of a copy (default 256; 1024 between GPUs)")
    parser.add_argument("--peers", action="store_true", help="measure copies between two GPUs, and nothing else")
    chosen = parser.parse_args()
    nbytes = (chosen.mib if chosen.mib is not None else 1024 if chosen.peers else 256) * MiB
    if nbytes <= 0:
        parser.error(f"--mib {chosen.mib}: at least 1 is needed")
    opened = chosen_device(parser, chosen.device)
    began, device, facts = time.monotonic(), opened.open(), opened.facts
    bench = Bench(device, nbytes)
    told = {"name": facts.name, "simulated": facts.simulated, "driver": facts.driver, "uuid": facts.uuid, "link": facts.link}
    record: dict[str, Any] = {"kind": "host_link", "device": told, "bytes": nbytes}
    parts: dict[str, Callable[[], Any]] = {"peers": lambda: peers(bench)}
    if not chosen.peers:
        parts = {
            "each_way": lambda: each_way(bench),
            "staged_in": lambda: staged(bench, back=False),
            "staged": lambda: staged(bench, back=True),
        }
    try:
        for name, part in parts.items():
            record[name] = part()
            record["seconds"] = time.monotonic() - began
            record["ended"] = utc_now()
            record["claims"] = claims(record)
            if chosen.json:
                write_record(chosen.json, record)
    finally:
        bench.conductor.close()
        device.close()
    print(table(record))
    return 1 if any(one["holds"] is False for one in record["claims"]) else 0


if __name__ == "__main__":
    sys.exit(main())
