"""What freeing memory does to the measurement that follows: the driver scrubs it in the background, which takes bandwidth.

Memory is allocated, touched and freed; a clean-cold triad on arrays of 256 MiB that stay where they are is sampled behind a held stream
before that and, against the time since the free, after it. A sample is slow if it and one beside it take more than 2 % longer than the
median before the free. The driver is taken to scrub from the free until the last slow sample has ended.

    python ci/bench/freed_memory.py --json ci/records/nvidia-h200/freed_memory.json

Prints the rate that `SCRUB_RATE` of `pytest_gpumem/devices/cuda/allocations.py` must stay below; exits with 1 if it does not.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from held_samples import HeldSamples, awake
from record_file import chosen_device, device_of, write_record

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.flush import Flush
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.units import GB, GiB, MiB

FREED_GIB = (0.25, 1.0, 4.0, 12.0, 40.0)
MOST_SHARE = 0.9
"""Share of the free memory that is allocated to be freed, at most."""
ROUNDS = 3
TRIAD_MIB = 256
BEFORE = 60
"""Samples before each free."""
SLOW = 1.02
"""Times the median before the free from which on a sample counts as slow: the triad's own samples vary by less than a tenth of that."""
WATCHED = 0.05
WATCHED_PER_GIB = 0.01
"""Seconds that are sampled after a free, and what each freed GiB adds: three times what scrubbing was seen to take."""


def trials(device: Device, gib: tuple[float, ...], rounds: int, triad_bytes: int) -> list[dict[str, Any]]:
    """Free each size in turn, `rounds` times: seconds of the samples before, and seconds since the free and of each sample after it."""
    arena = Arena(device, seed=0)
    flush = Flush(device, "clean-cold")
    stream, samples, found = arena.stream, HeldSamples(device), list[dict[str, Any]]()
    try:
        arrays = tuple(arena.buffer(triad_bytes, "f4") for _ in range(3))
        triad = Kernels(device).triad
        launch = triad.launch(*triad.arguments((*arrays, 3.0), {}))
        device.kernels.launch(launch, stream)
        awake(device, stream, flush)

        def sample() -> float:
            return samples.take(stream, flush, [lambda s: device.kernels.launch(launch, s)])[0]

        for _ in range(BEFORE):
            sample()
        for number in range(1, rounds + 1):
            for size in gib:
                nbytes = int(min(size * GiB, MOST_SHARE * device.memory.free_bytes(MemoryKind.DEVICE)))
                memory = arena.allocate(nbytes, MemoryKind.DEVICE)
                device.content.poison(memory, stream)  # touched, whole
                device.streams.synchronize()
                before = [sample() for _ in range(BEFORE)]
                called = device.now()
                arena.release(memory)
                begun = device.now()
                since, seconds = list[float](), list[float]()
                while not since or since[-1] < WATCHED + WATCHED_PER_GIB * nbytes / GiB:
                    since.append(device.now() - begun)
                    seconds.append(sample())
                found.append(
                    {"round": number, "bytes": nbytes, "free_call": begun - called, "before": before, "since": since, "after": seconds}
                )
    finally:
        flush.close()
        arena.close()
    return found


def slow(before: list[float], after: list[float]) -> list[int]:
    """Which of the samples after a free are slow, together with one beside them. One slow sample alone is an outlier."""
    limit = SLOW * statistics.median(before)
    above = [False, *(seconds > limit for seconds in after), False]
    return [i for i in range(len(after)) if above[i + 1] and (above[i] or above[i + 2])]


def effect(trial: dict[str, Any]) -> dict[str, Any]:
    """What one free did.

    `level` is the median before it, `slow` the number of slow samples, `longer` by which share their median is above the level, `ends` the
    seconds from the free to the end of the last slow sample, `rate` the freed bytes over that: a wait at a lower rate was long enough. All
    three are None where nothing was slow; `ends` and `rate` also where it was still slow when the watch ended, which `over` tells.
    """
    level, which = statistics.median(trial["before"]), slow(trial["before"], trial["after"])
    found: dict[str, Any] = {"bytes": trial["bytes"], "level": level, "slow": len(which), "longer": None, "over": True}
    found |= {"ends": None, "rate": None}
    if which:
        found["longer"] = statistics.median(trial["after"][i] for i in which) / level - 1
        found["over"] = which[-1] + 1 < len(trial["after"])
    if which and found["over"]:
        found["ends"] = trial["since"][which[-1] + 1]
        found["rate"] = trial["bytes"] / found["ends"]
    return found


def limit(effects: list[dict[str, Any]]) -> float | None:
    """Bytes a second that `SCRUB_RATE` must stay below: the least over sizes of the median over the frees of a size.

    The median, because two outliers in a row long after one of the frees are not its doing. A free after which nothing was slow sets no
    limit, one that was not over sets 0. None if no size has a limit.
    """
    rates: dict[int, list[float]] = {}
    for one in effects:
        rate = one["rate"] if one["rate"] is not None else math.inf if one["over"] else 0.0
        rates.setdefault(one["bytes"], []).append(rate)
    least = min(statistics.median_low(own) for own in rates.values())
    return None if math.isinf(least) else least


def holds(record: dict[str, Any]) -> bool | None:
    """Whether the package's constant is below the limit; None where there is no limit or no constant, as on the simulated device."""
    least = limit([effect(trial) for trial in record["trials"]])
    return None if least is None or record["scrub_rate"] is None else bool(record["scrub_rate"] < least)


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    device, effects = record["device"], [effect(trial) for trial in record["trials"]]
    simulated = "SIMULATED " if device["simulated"] else ""
    said = [
        f"{simulated}{device['name']}, driver {device['driver']}, {record['ended'][:10]}",
        "",
        f"clean-cold triad of 3 x {record['triad_bytes'] / MiB:g} MiB after a cudaFree; one figure for each of {record['rounds']} frees",
        "",
        f"{'freed':>9}  {'slow samples':<16}{'longer by %':<20}{'until ms':<24}{'GB/s':<18}".rstrip(),
    ]
    for nbytes in dict.fromkeys(one["bytes"] for one in effects):
        own = [one for one in effects if one["bytes"] == nbytes]
        until = ", ".join("-" if not one["slow"] else "not over" if not one["over"] else f"{one['ends'] * 1e3:.1f}" for one in own)
        longer = ", ".join("-" if one["longer"] is None else f"{100 * one['longer']:.1f}" for one in own)
        rate = ", ".join("-" if one["rate"] is None else f"{one['rate'] / GB:.0f}" for one in own)
        counts = ", ".join(str(one["slow"]) for one in own)
        said.append(f"{nbytes / GiB:>5.2f} GiB  {counts:<16}{longer:<20}{until:<24}{rate}".rstrip())
    least = limit(effects)
    if least is None:
        said += ["", "no sample was slow after a free: no limit for SCRUB_RATE"]
    else:
        said += ["", f"SCRUB_RATE must be below {least / GB:.0f} GB/s"]
    if record["scrub_rate"] is not None:
        verdict = {True: ", which holds", False: ", which DOES NOT HOLD", None: ""}[holds(record)]
        said[-1] += f"; it is {record['scrub_rate'] / GB:.0f} GB/s{verdict}"
    return "\n".join(said)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"frees of each size (default {ROUNDS})")
    parser.add_argument("--gib", type=_sizes, default=FREED_GIB, help="GiB to free, such as 0.25,4 (default 0.25,1,4,12,40)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, sim (default cuda)")
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error(f"--rounds {asked.rounds}: at least 1 is needed")
    chosen = chosen_device(parser, asked.device)
    facts, rate = chosen.facts, None
    if not facts.simulated:
        from pytest_gpumem.devices.cuda.allocations import SCRUB_RATE as rate  # noqa: N811  (imports CuPy, which need not be there)
    device = chosen.open()
    try:
        before = device.conditions()
        found = trials(device, asked.gib, asked.rounds, TRIAD_MIB * MiB)
        after = device.conditions()
    finally:
        device.close()
    record = {
        "kind": "freed_memory",
        "device": device_of(facts),
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "triad_bytes": TRIAD_MIB * MiB,
        "rounds": asked.rounds,
        "scrub_rate": rate,
        "conditions": [asdict(before), asdict(after)],
        "trials": [
            {name: [round(seconds, 8) for seconds in value] if isinstance(value, list) else value for name, value in trial.items()}
            for trial in found
        ],
    }
    if asked.json:
        write_record(asked.json, record)
    print(table(record))
    return 1 if holds(record) is False else 0


def _sizes(text: str) -> tuple[float, ...]:
    try:
        sizes = tuple(float(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(0 < size < 1e6 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes in GiB such as 0.25,4")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
