"""Managed memory: every variant of `add` with its page faults, and the spread between processes.

1. All variants in one fresh process, 64 MiB arrays: where pages were touched first, prefetches, each advice, discards, a warp for each
   page. Each is timed, then counted in an untimed pass. A small kernel and the launch overhead are read before the first count and after
   the last: the cost of CUPTI once it was used.
2. The cases of the claims in six fresh processes: the spread of their times between processes, and the counters that explain it.

    python ci/bench/managed_memory.py --json ci/records/nvidia-h200/managed_memory.json

Needs cupti-python. Takes a minute. Exits with 1 where a claim does not hold.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from fresh_processes import one_after_another, serve
from record_file import chosen_device, device_of, head, record_parser, utc_now, write_record

from pytest_gpumem.devices.opening import DeviceChoice, choose
from pytest_gpumem.devices.protocol import Device, Unsupported
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.conductor import Conductor, Passes
from pytest_gpumem.measuring.sampling import Plan
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.ranges import Ranges
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.units import GB, KiB, MiB

SIZE = 64 * MiB
SMALL = 2 * MiB
"""Bytes of the arrays whose time is compared before and after CUPTI was used: a launch so short that a cost for each would show."""
BUDGET = 0.35
"""Seconds for each measurement: with it the whole takes some two minutes on a GPU."""
PROCESSES = 6
WORKER_SECONDS = 90.0
SHOWN_GROUPS = 8

NAIVE_RATIO = 50.0
DEVICE_RATIO = 3.0
SPREAD = 0.10
CUPTI_COST = 0.03

Record = dict[str, Any]
Variant = Callable[[Memory, Kernels], tuple[Any, ...]]
"""Gives the kernel to measure with its arguments."""


# Variants


def _add(x: Callable[[Memory], Any], y: Callable[[Memory], Any]) -> Variant:
    return lambda memory, kernels: (kernels.add, x(memory), y(memory))


def _managed(**options: Any) -> Callable[[Memory], Any]:
    return lambda memory: memory.managed(SIZE, "f4", **options)


def _prefetched(**options: Any) -> Callable[[Memory], Any]:
    return lambda memory: memory.prefetched(SIZE, "f4", **options)


def _initialised(name: str) -> Variant:
    def make(memory: Memory, kernels: Kernels) -> tuple[Any, ...]:
        arrays = [memory.managed(SIZE, "f4", first_touch="none") for _ in range(2)]
        for array in arrays:
            getattr(kernels, name)(array)
        return (kernels.add, *arrays)

    return make


def _init(name: str, *scalars: float, **options: Any) -> Variant:
    return lambda memory, kernels: (getattr(kernels, name), memory.managed(SIZE, "f4", **options), *scalars)


FAULTING, PREFETCHED, DEVICE_MEMORY = "faulting", "prefetched", "device memory"
INIT, INIT_PER_PAGE = "GPU first: init", "GPU first: warp per page"
VARIANTS: dict[str, Variant] = {
    DEVICE_MEMORY: _add(lambda m: m.device(SIZE, "f4"), lambda m: m.device(SIZE, "f4")),
    FAULTING: _add(_managed(), _managed()),
    PREFETCHED: _add(_prefetched(), _prefetched()),
    INIT: _initialised("init"),
    INIT_PER_PAGE: _initialised("init_warp_per_page"),
    "read mostly, x": _add(_managed(read_mostly=True), _prefetched()),
    "read mostly, x, prefetched": _add(_prefetched(read_mostly=True), _prefetched()),
    "read mostly, y, prefetched, then written": _add(_prefetched(), _prefetched(read_mostly=True)),
    "prefers the host": _add(_managed(preferred_location="host"), _managed(preferred_location="host")),
    "prefers the device": _add(_managed(preferred_location="device"), _managed(preferred_location="device")),
    "accessed by the device": _add(_managed(accessed_by="device"), _managed(accessed_by="device")),
    "init from the host": _init("init"),
    "init from the host, discarded": _init("init", discard=True),
    **{f"init, a warp for {page // KiB} KiB": _init("init_warp_per_page", 1.0, page) for page in (4 * KiB, 64 * KiB, 2 * MiB)},
}
CLAIMED = (DEVICE_MEMORY, FAULTING, PREFETCHED, INIT_PER_PAGE)
"""Variants that all processes measure."""


def measured(device: Device, names: tuple[str, ...], budget: float, *, cost: bool) -> Record:
    """Time and count variants; with `cost`, read what short launches take before and after."""
    conductor, found = Conductor(device, Ranges(), profiled=False), list[Record]()
    before = _short(device, conductor, budget) if cost else None
    for name in names:
        arena = Arena(device, seed=0)
        try:
            function, *arguments = VARIANTS[name](Memory(arena), Kernels(device))
            target = conductor.target(function, tuple(arguments), {}, arena=arena)
            taken = conductor.measure(target, Plan(budget=budget), arena=arena, label="", name="managed", passes=Passes(pages=True))
        except Unsupported as why:
            found.append({"variant": name, "unsupported": str(why)})
            continue
        finally:
            arena.close()
        assert taken.moved_bytes is not None
        assert taken.migrations is not None
        counts = {part: _counts(getattr(taken.migrations, part)) for part in ("before", "launch")}
        found.append(
            {
                "variant": name,
                "seconds": taken.latency,
                "samples": len(taken.samples),
                "read": taken.moved_bytes.reads,
                "written": taken.moved_bytes.writes,
                **counts,
                "not_counted": taken.migrations.not_counted,
            }
        )
    conductor.close()
    after = None
    if cost:
        again = Conductor(device, Ranges(), profiled=False)
        after = _short(device, again, budget)
        again.close()
    return {"variants": found, "short": None if before is None else {"before": before, "after": after}}


def _short(device: Device, conductor: Conductor, budget: float) -> Record:
    """Seconds of a small kernel, and of an idle launch between two events."""
    arena = Arena(device, seed=0)
    try:
        x, y = (arena.buffer(SMALL, "f4") for _ in range(2))
        target = conductor.target(Kernels(device).add, (x, y), {}, arena=arena)
        taken = conductor.measure(target, Plan(budget=budget), arena=arena, label="", name="short")
        return {"kernel": taken.latency, "launch": conductor.floors().launch}
    finally:
        arena.close()


def _counts(counts: PageCounts | None) -> Record | None:
    if counts is None:
        return None
    return {**asdict(counts), "groups": [asdict(group) for group in counts.groups[:SHOWN_GROUPS]]}


# Record, claims, table


def claims(record: Record) -> list[Record]:
    """Each claim with its figure, its bound, and whether it holds; None where it could not be looked at."""
    times = {one["variant"]: one["seconds"] for one in record["variants"] if "seconds" in one}
    by_name = {one["variant"]: one for one in record["variants"]}
    device = times[DEVICE_MEMORY]
    found = [
        _claim("faulting over prefetched", times[FAULTING] / times[PREFETCHED], at_least=NAIVE_RATIO),
        _claim("prefetched over device memory", times[PREFETCHED] / device, at_most=DEVICE_RATIO),
        *(_claim(f"{name} over device memory", times[name] / device, at_most=DEVICE_RATIO) for name in (INIT, INIT_PER_PAGE)),
        _claim("GPU page faults of one prefetched launch", _faults(by_name[PREFETCHED]), at_most=0),
        _claim("GPU page faults of one faulting launch", _faults(by_name[FAULTING]), at_least=1),
        _claim("spread of prefetched between processes", spread(record["processes"], PREFETCHED), at_most=SPREAD),
    ]
    for name, what in (("kernel", "a small kernel"), ("launch", "an idle launch")):
        short = record["short"]
        change = abs(short["after"][name] / short["before"][name] - 1)
        found.append(_claim(f"change of {what} once CUPTI has counted", change, at_most=CUPTI_COST))
    return found


def _claim(what: str, value: float | None, *, at_least: float | None = None, at_most: float | None = None) -> Record:
    holds = None
    if value is not None:
        holds = bool((at_least is None or value >= at_least) and (at_most is None or value <= at_most))
    return {"what": what, "value": value, "at_least": at_least, "at_most": at_most, "holds": holds}


def _faults(variant: Record) -> int | None:
    return None if variant["launch"] is None else int(variant["launch"]["gpu_faults"])


def spread(processes: list[Record], name: str) -> float | None:
    """Standard deviation between processes over their mean; None with fewer than two."""
    seconds = [one["seconds"] for process in processes for one in process["variants"] if one["variant"] == name]
    return statistics.stdev(seconds) / statistics.fmean(seconds) if len(seconds) > 1 else None


def table(record: Record) -> str:
    """The record as text."""
    said = [head(record), ""]
    said += [
        f"y = x + y on {record['bytes'] / MiB:g} MiB arrays, clean-cold; of one launch: GPU page faults, groups, MiB moved and mapped",
        "link: GB/s while pages moved to the device, at the launch or at the prefetch before it",
        "",
        f"{'variant':<41}{'ms':>9} {'GB/s':>7}  {'faults':>6} {'groups':>6} {'to device':>9} {'to host':>7} {'mapped':>6} {'link':>5}",
    ]
    for one in record["variants"]:
        if "seconds" not in one:
            said.append(f"{one['variant']:<41} {one['unsupported']}")
            continue
        rate = (one["read"] + one["written"]) / one["seconds"] / GB
        figures = f"{one['variant']:<41}{1e3 * one['seconds']:>9.4f} {rate:>7.1f}"
        said.append(f"{figures}  {_pages(one) if one['launch'] else 'not counted: ' + str(one['not_counted'])}")
    said += ["", f"{len(record['processes'])} processes: ms of each, and their spread", ""]
    for name in CLAIMED:
        rows = [one for process in record["processes"] for one in process["variants"] if one["variant"] == name]
        times = " ".join(f"{1e3 * one['seconds']:.4g}" for one in rows)
        share = spread(record["processes"], name)
        said.append(f"{name:<26}{times}   {'-' if share is None else f'{100 * share:.2f} %'}")
        if name == FAULTING and all(one["launch"] for one in rows):
            said.append(
                f"{'  GPU faults (groups)':<26}" + " ".join(f"{o['launch']['gpu_faults']} ({o['launch']['gpu_groups']})" for o in rows)
            )
    said += ["", "claims", ""]
    for one in claims(record):
        bound = f"at least {one['at_least']:g}" if one["at_least"] is not None else f"at most {one['at_most']:g}"
        verdict = {True: "holds", False: "DOES NOT HOLD", None: "NOT LOOKED AT"}[one["holds"]]
        value = "-" if one["value"] is None else f"{one['value']:.4g}"
        said.append(f"{one['what']:<70} {value:>8}  {bound:<14} {verdict}")
    return "\n".join(line.rstrip() for line in said)


def _pages(one: Record) -> str:
    launch, before = one["launch"], one["before"]
    source = launch if launch["to_device_seconds"] else before
    link = f"{source['to_device'] / source['to_device_seconds'] / GB:.1f}" if source["to_device_seconds"] else "-"
    mapped = "-" if launch["mapped"] is None else f"{launch['mapped'] / MiB:.0f}"
    moved = f"{launch['to_device'] / MiB:>9.1f} {launch['to_host'] / MiB:>7.1f} {mapped:>6}"
    return f"{launch['gpu_faults']:>6} {launch['gpu_groups']:>6} {moved} {link:>5}"


# Processes


def work(chosen: DeviceChoice, job: Mapping[str, Any]) -> Record:
    """Do the job of a worker."""
    device = chosen.open()
    try:
        return measured(device, tuple(job["variants"]), job["budget"], cost=job["cost"])
    finally:
        device.close()


def run(device: str, budget: float, processes: int) -> Record:
    """Both parts; raises `SystemExit` with the words of a worker that failed."""
    jobs: list[Record] = [{"variants": list(VARIANTS), "budget": budget, "cost": True}]
    jobs += [{"variants": list(CLAIMED), "budget": budget, "cost": False}] * processes
    jobs = [{**job, "device": device} for job in jobs]
    answers = []

    def command(job: Record) -> list[str]:
        return [sys.executable, str(Path(__file__).resolve()), "worker", "--job", json.dumps(job)]

    for outcome in one_after_another(jobs, command, ahead=1, timeout=WORKER_SECONDS):
        if outcome.answer is None:
            raise SystemExit(f"{outcome.job}: {outcome.error}")
        answers.append(outcome.answer)
    first, *others = answers
    return {"variants": first["variants"], "short": first["short"], "processes": others}


def main() -> int:
    assert __doc__ is not None
    if sys.argv[1:2] == ["worker"]:
        job = json.loads(sys.argv[sys.argv.index("--job") + 1])
        serve(lambda: choose(job["device"]), lambda chosen: work(chosen, job))
        return 0
    parser = record_parser(__doc__)
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds for each measurement (default {BUDGET})")
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"processes of the spread (default {PROCESSES})")
    asked = parser.parse_args()
    if asked.processes < 0 or not asked.budget > 0:
        parser.error(f"--processes {asked.processes} --budget {asked.budget}: at least 0, and more than 0 s, are needed")
    facts = chosen_device(parser, asked.device).facts
    record = {
        "kind": "managed_memory",
        "device": device_of(facts),
        "bytes": SIZE,
        **run(asked.device, asked.budget, asked.processes),
        "ended": utc_now(),
    }
    if asked.json:
        write_record(asked.json, record)
    print(table(record))
    return 0 if all(claim["holds"] for claim in claims(record)) else 1


if __name__ == "__main__":
    sys.exit(main())
