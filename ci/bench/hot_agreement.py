"""Do hot times agree with `triton.testing.do_bench_cudagraph` where both have the same arrays?

Between processes they need not: each knows other memory, and short hot kernels take a different time on each. Here one process allocates
the triad's arrays many times, at random distances, and times every placement both ways, in a drawn order: by `do_bench_cudagraph`, and hot
on that placement alone. The paired difference has Student's 95 % interval over placements.

`do_bench_cudagraph` means over ten replays of a graph, the first of which brings the graph to the GPU; the median of the replays stands
beside the mean. It also puts its events around the replay, which starts while the host still launches it; a hot measurement puts them into
the graph. So the triad, and a launch that finds nothing to do, are timed in graphs of several lengths, both ways.

    python ci/bench/hot_agreement.py --json ci/records/nvidia-h200/hot_agreement.json

Exits with 1 if hot differs from the median of their replays by more than 1 % in the mean.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import write_record
from triad_bench import SCALAR, TriadBench, cuda_index, prepared
from whole_mib import whole_mib

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.opening import NoDevice
from pytest_gpumem.devices.protocol import Launch
from pytest_gpumem.measuring.controls import idle_launch
from pytest_gpumem.measuring.sampling import Plan
from pytest_gpumem.measuring.stopping import half_width
from pytest_gpumem.units import KiB, MiB

PLACEMENTS = 24
MIB = (2, 32)
LIMIT = 0.01
"""Largest difference."""
HOT = Plan(mode="hot", placements=1, budget=0.1)
LARGEST_GAP = 64 * MiB
LENGTHS = (20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
"""Launches of a graph."""
REPLAYS = 10
ESTIMATING = 6
"""Calls of `do_bench_cudagraph` before it captures: one to warm up, five to estimate how many it captures."""

Pair = tuple[float, float, float]
"""Ours, their mean, and the median of their replays."""


def measured(bench: TriadBench, mib: int, placements: int, seed: int) -> tuple[list[Pair], list[int], list[list[float]]]:
    """Seconds of every placement, both ways; the launches in each of their graphs; and the seconds of each of their replays."""
    import torch
    import triton.testing as testing

    torch.cuda.set_device(bench.index)
    random = np.random.default_rng([seed, mib])
    pairs, launches, replayed = [], [], []
    for number in range(placements + 1):
        gaps = [bench.device.memory.allocate(int(random.integers(1, LARGEST_GAP // KiB)) * KiB, MemoryKind.DEVICE) for _ in range(2)]
        with bench.arrays(mib * MiB) as arrays:
            launch = bench.launcher(arrays)

            def theirs(launch: Any = launch) -> list[float]:
                calls = 0

                def function() -> None:
                    nonlocal calls
                    calls += 1
                    launch(torch.cuda.current_stream().cuda_stream)

                replays = testing.do_bench_cudagraph(function, return_mode="all")
                launches.append(calls - ESTIMATING)
                return [float(milliseconds) * 1e-3 for milliseconds in replays]

            def ours(arrays: Any = arrays) -> list[float]:
                return [bench.measure(arrays, HOT)[0].latency]

            taken = {way: way() for way in ((ours, theirs) if random.integers(2) else (theirs, ours))}
        for gap in gaps:
            bench.device.memory.free(gap)
        if number:  # the first compiles and loads
            pairs.append((taken[ours][0], statistics.fmean(taken[theirs]), statistics.median(taken[theirs])))
            replayed.append(taken[theirs])
    return pairs, launches[1:], replayed


def by_length(bench: TriadBench, mib: int) -> dict[str, dict[str, float]]:
    """Seconds of a launch, the median over replays, by what is launched and the number of launches in a graph.

    Once between events in the graph, once between events around its replay on an idle stream.
    """
    device, stream = bench.device, bench.arena.stream
    start, end, before, after = (device.streams.event() for _ in range(4))
    found: dict[str, dict[str, float]] = {}
    with bench.arrays(mib * MiB) as arrays:
        buffers, values = bench.triad.arguments((*arrays, SCALAR), {})
        launches = {
            f"triad, {mib} MiB": bench.triad.launch(buffers, values),
            "nothing to do": idle_launch(device.facts, arrays[0].allocation),
        }
        for name, launch in launches.items():
            device.kernels.launch(launch, stream)  # compiles, which no capture allows
            device.streams.synchronize(stream)
            inside, around = found[f"{name}, events inside"], found[f"{name}, around"] = {}, {}
            for length in LENGTHS:

                def body(launch: Launch = launch, length: int = length) -> None:
                    device.streams.record(start, stream)
                    for _ in range(length):
                        device.kernels.launch(launch, stream)
                    device.streams.record(end, stream)

                graph = device.graphs.capture(stream, body)
                taken = []
                for _ in range(REPLAYS + 1):
                    device.streams.record(before, stream)
                    device.graphs.replay(graph, stream)
                    device.streams.record(after, stream)
                    device.streams.synchronize(stream)
                    taken.append((device.streams.elapsed(start, end) / length, device.streams.elapsed(before, after) / length))
                inside[str(length)], around[str(length)] = (statistics.median(own) for own in zip(*taken[1:], strict=True))
    return found


def summary(pairs: list[Pair]) -> dict[str, float]:
    """Ours less theirs over theirs with its interval, by the mean and the median of their replays; the deviations between placements."""
    ours, means, medians = np.array(pairs).T
    found = {"ours": float(ours.mean()), "between_placements_ours": float(ours.std(ddof=1) / ours.mean())}
    for name, theirs in (("mean", means), ("median", medians)):
        differences = (ours / theirs - 1).tolist()
        middle, reach = statistics.fmean(differences), half_width(differences) or 0.0
        found |= {
            name: float(theirs.mean()),
            f"less_{name}": middle,
            f"less_{name}_low": middle - reach,
            f"less_{name}_high": middle + reach,
            f"between_placements_{name}": float(theirs.std(ddof=1) / theirs.mean()),
        }
    return found


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    device = record["device"]
    said = [
        f"{device['name']}, driver {device['driver']}, {record['ended'][:10]}",
        "",
        f"{'arrays':<9}{'way':<28}{'us':>9}{'launches':>10}{'between placements %':>22}  hot less this, % (95 % interval)",
    ]
    for mib, pairs in record["pairs"].items():
        one, launches = summary([(hot, mean, median) for hot, mean, median in pairs]), statistics.median(record["launches"][mib])
        said.append(f"{mib + ' MiB':<9}{'hot':<28}{one['ours'] * 1e6:>9.3f}{'':>10}{100 * one['between_placements_ours']:>22.2f}")
        for name in ("mean", "median"):
            value, between = one[name] * 1e6, 100 * one[f"between_placements_{name}"]
            low, middle, high = (100 * one[f"less_{name}{end}"] for end in ("_low", "", "_high"))
            way = f"do_bench_cudagraph, {name}"
            said.append(f"{'':<9}{way:<28}{value:>9.3f}{launches:>10.0f}{between:>22.2f}  {middle:+.3f} ({low:+.3f} to {high:+.3f})")
    said += ["", f"{'launches in a graph; us':<31}" + "".join(f"{length:>8}" for length in LENGTHS)]
    for name, lengths in record["lengths"].items():
        said.append(f"{name:<31}" + "".join(f"{seconds * 1e6:>8.3f}" for seconds in lengths.values()))
    return "\n".join(said)


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placements", type=int, default=PLACEMENTS, help=f"at least 3 (default {PLACEMENTS})")
    parser.add_argument("--sizes", type=whole_mib, default=MIB, help="MiB of each array (default 2,32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N (default cuda)")
    parser.add_argument("--seed", type=int, default=1, help="of the distances and orders (default 1)")
    options = parser.parse_args()
    if options.placements < 3:
        parser.error(f"--placements {options.placements}: an interval needs at least 3")
    try:
        chosen = prepared(options.device)
    except (NoDevice, ValueError) as reason:
        parser.error(f"--device {options.device}: {reason}")
    if chosen.facts.simulated:
        parser.error(f"--device {options.device}: Triton needs a GPU")
    bench = TriadBench(chosen, [], index=cuda_index(options.device))
    try:
        taken = {str(mib): measured(bench, mib, options.placements, options.seed) for mib in options.sizes}
        lengths = by_length(bench, min(options.sizes))
    finally:
        bench.close()
    record = {
        "kind": "hot_agreement",
        "device": {"name": chosen.facts.name, "driver": chosen.facts.driver, "simulated": False},
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "pairs": {mib: pairs for mib, (pairs, *_) in taken.items()},
        "launches": {mib: launches for mib, (_, launches, _) in taken.items()},
        "replays": {mib: replays for mib, (*_, replays) in taken.items()},
        "lengths": lengths,
        "summary": {mib: summary(pairs) for mib, (pairs, *_) in taken.items()},
    }
    if options.json:
        write_record(options.json, record, indent=1)
    print(table(record))
    return 0 if all(abs(summary(own)["less_median"]) <= LIMIT for own, *_ in taken.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
