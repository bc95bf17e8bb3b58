"""Was the window active, and did it keep the table in L2? What CUPTI, the driver and Nsight Compute say of launches of reset_data.

    python ci/bench/l2_proof.py --json ci/records/nvidia-h200/l2_proof.json

Three looks, each by processes of its own, and written to the record as soon as it is taken:

windows   the access-policy window of a launch, with the window on a stream, on a graph's kernel and on the launch: as CUPTI reports it
          in the kernel's record (`cuptiActivityEnableLaunchAttributes`, `pAccessPolicyWindow`), and as the driver gives it back
          (`cudaStreamGetAttribute`, `cudaGraphKernelNodeGetAttribute`; a launch cannot be asked)
counted   L2 hits and DRAM bytes of one launch, off and fitted, by ncu. The table is warm: launches and a flush go before, caches are
          left alone, and what takes several passes is counted in several runs, because a replay would find what the replay before left
traffic   DRAM bytes as `gpumem traffic` counts them for a user's test, each launch with cold caches

Needs a GPU, `cupti-python`, ncu and the permission to read counters. Exits with 1 where a proof is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from fresh_processes import one_after_another, serve
from record_file import chosen_device, write_record
from triad_bench import prepared

from pytest_gpumem.devices.opening import Chosen, choose
from pytest_gpumem.devices.protocol import WindowSpec
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.harness import Flush
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.nsight import counting, ncu
from pytest_gpumem.nsight.recording import BadReport
from pytest_gpumem.nsight.tools import NCU, NothingRecorded, counting_command, find, ncu_error
from pytest_gpumem.ranges import MEASURE, Ranges, phase
from pytest_gpumem.runs import child
from pytest_gpumem.units import MB, MiB

ROOT = Path(__file__).resolve().parents[2]
KERNEL = "reset_data"
TABLES = (8, 24)
"""MiB of the tables that are counted: 2 blocks an SM gained most at 8, by the table that was read again and again from DRAM at 24."""
OUT = 1024
LOOKED_AT = 8
"""MiB of the table whose windows are looked at, and of what is written beside it."""
CARRIERS = ("off", "stream", "graph", "launch")
WARM_UP = 3
SETTINGS: Mapping[str, dict[str, Any]] = {"off": {"set_aside": "off"}, "fitted": {}}
MORE = (ncu.L2_HIT_RATE, ncu.L2_READ_HIT, ncu.L2_READ_MISS)
WORKER_SECONDS = 45.0
LEAST = 0.02
"""By how much of what the SMs read DRAM's reads must fall to be a proof."""

Record = dict[str, Any]


# Windows


def windows(chosen: Chosen, job: dict[str, Any]) -> dict[str, Any]:
    """A worker's answer: for each carrier the window that was asked for, what the driver gives back, and what CUPTI reports."""
    device = chosen.open()
    arena = Arena(device, seed=0)
    try:
        out, table = (arena.buffer(LOOKED_AT * MiB, "i4") for _ in range(2))
        kernel = Kernels(device).reset_data
        launch = kernel.launch(*kernel.arguments((out, table), {}))
        device.kernels.launch(launch, arena.stream)
        device.streams.synchronize()
        reported = _Reported() if job["cupti"] else None
        found = {}
        for carrier in CARRIERS:
            options = {"set_aside": "off"} if carrier == "off" else {"where": carrier}
            with persisting(device, table, **options) as stream:  # type: ignore[arg-type]
                held: Sequence[WindowSpec | None] = ()
                if carrier == "graph":
                    graph = device.graphs.capture(stream.stream, partial(device.kernels.launch, launch, stream.stream), window=stream.spec)
                    held = device.graphs.windows(graph)
                    device.graphs.replay(graph, stream.stream)
                else:
                    device.kernels.launch(launch, stream.stream, window=stream.spec if carrier == "launch" else None)
                    held = () if carrier == "launch" else (device.l2.window(stream.stream),)
                device.streams.synchronize()
                found[carrier] = {
                    "asked": _plain(stream.spec),
                    "read_back": None if carrier == "launch" else [_plain(window) for window in held],
                    "cupti": None if reported is None else reported.take(),
                }
    finally:
        arena.close()
        device.close()
    return {"carriers": found, "launch_attributes": None if reported is None else reported.attributes}


class _Reported:
    """Windows in CUPTI's records of kernels. Needs a context."""

    def __init__(self) -> None:
        from cupti import cupti

        self._cupti = cupti
        self._seen: list[dict[str, Any] | None] = []
        cupti.activity_register_callbacks(lambda: (8 * MiB, 0), self._completed)
        self.attributes = "collected"
        try:
            cupti.activity_enable_launch_attributes(1)
        except cupti.cuptiError as error:
            self.attributes = f"refused: {error}"
        cupti.activity_enable(cupti.ActivityKind.CONCURRENT_KERNEL)

    def _completed(self, activities: list[Any]) -> None:
        # A record's window is read while CUPTI still holds the record's buffer.
        self._seen += [_pointed_at(a.p_access_policy_window) for a in activities if KERNEL in str(getattr(a, "name", ""))]

    def take(self) -> list[dict[str, Any] | None]:
        """The window of each kernel since the last look; None for a kernel without."""
        self._cupti.activity_flush_all(1)
        seen, self._seen = self._seen, []
        return seen


def _pointed_at(address: int) -> dict[str, Any] | None:
    """The `CUaccessPolicyWindow` at an address of this process."""
    if not address:
        return None
    from cuda.bindings import driver

    window = driver.CUaccessPolicyWindow(_ptr=int(address))
    if not int(window.num_bytes):
        return None
    names = {int(number): number.name.rpartition("_")[2].lower() for number in driver.CUaccessProperty}
    return {
        "address": int(window.base_ptr),
        "nbytes": int(window.num_bytes),
        "hit_ratio": round(float(window.hitRatio), 7),
        "hit": names[int(window.hitProp)],
        "miss": names[int(window.missProp)],
    }


def _plain(window: WindowSpec | None) -> dict[str, Any] | None:
    return None if window is None else {**asdict(window), "hit": window.hit.value, "miss": window.miss.value}


def look_at_windows(device: str) -> Record:
    """Run the worker; where CUPTI ends it, once more without CUPTI, for what the driver gives back."""
    program = [sys.executable, str(Path(__file__).resolve()), "windows"]
    errors = []
    for cupti in (True, False):
        job = {"device": device, "cupti": cupti}
        jobs = one_after_another([job], lambda job: [*program, json.dumps(job)], ahead=0, timeout=WORKER_SECONDS)
        (outcome,) = list(jobs)
        if outcome.answer is not None:
            return {**outcome.answer, "errors": errors, "seconds": outcome.seconds}
        errors.append(outcome.error)
    return {"carriers": {}, "launch_attributes": None, "errors": errors, "seconds": 0.0}


# Counted


def launches(device_name: str, tables: Sequence[int], out: int) -> None:
    """The child that ncu watches: one launch in a measured range for each table and setting, the table warm."""
    device = choose(device_name).open()
    arena, flush, ranges = Arena(device, seed=0), Flush(device, "clean-cold"), Ranges()
    try:
        streamed = arena.buffer(out * MiB, "i4")
        kernel = Kernels(device).reset_data
        for mib in tables:
            table = arena.buffer(mib * MiB, "i4")
            launch = kernel.launch(*kernel.arguments((streamed, table), {}))
            for name, options in SETTINGS.items():
                with persisting(device, table, **options) as stream:
                    for _ in range(WARM_UP):
                        device.kernels.launch(launch, stream.stream)
                        flush(stream.stream)
                    device.streams.synchronize()
                    with ranges.range(phase(_named(mib, name), MEASURE)):
                        device.kernels.launch(launch, stream.stream)
                        device.streams.synchronize()
    finally:
        flush.close()
        arena.close()
        device.close()


def _named(mib: int, setting: str) -> str:
    return f"{KERNEL}_{mib}_{setting}"


def count_warm(device: str, tables: Sequence[int], out: int, echo: Callable[[str], object]) -> Record:
    """Run that child under ncu; with fewer metrics where this GPU lacks one."""
    begun = time.monotonic()
    lacking: list[str] = []
    for more in (MORE, MORE[:1], ()):
        record = _count_warm(device, tables, out, echo, more)
        if record["error"] is None or "metric" not in record["error"]:
            break
        lacking.append(record["error"])
    return {**record, "lacking": lacking, "seconds": time.monotonic() - begun}


def _count_warm(device: str, tables: Sequence[int], out: int, echo: Callable[[str], object], more: Sequence[str]) -> Record:
    launcher = [sys.executable, str(Path(__file__).resolve()), "launches", device, ",".join(map(str, tables)), str(out)]
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        log = Path(folder, "ncu.log")
        command = counting_command(find(NCU, os.environ), launcher, log, warm=True, more=more)
        try:
            finished = child.run(command, os.environ, echo)
        except (OSError, subprocess.SubprocessError) as error:
            return {"launches": [], "error": f"ncu cannot be started: {error}", "command": child.recorded(command, ROOT)}
        said = log.read_text(errors="replace") if log.exists() else ""
    record: Record = {"command": child.recorded(command, ROOT), "error": ncu_error(said) or ncu_error(finished.output)}
    try:
        kernels = ncu.kernels_in(said)
    except BadReport as error:
        kernels, record["error"] = (), str(error)
    record["launches"] = counts(kernels, tables)
    if not record["launches"] and record["error"] is None:
        record["error"] = f"ncu counted nothing (exit status {finished.exit_code}): {finished.output[-1000:]}"
    return record


def counts(kernels: Sequence[ncu.CountedKernel], tables: Sequence[int]) -> list[Record]:
    """The counted launches of each table and setting."""
    found = []
    for mib in tables:
        for setting in SETTINGS:
            for kernel in kernels:
                if phase(_named(mib, setting), MEASURE) in kernel.ranges and KERNEL in kernel.use.name:
                    found.append(
                        {
                            "mib": mib,
                            "setting": setting,
                            "dram_reads": kernel.use.dram_read,
                            "dram_writes": kernel.use.dram_written,
                            "l2_reads": kernel.use.l2_read,
                            "l2_writes": kernel.use.l2_written,
                            "read_hit_share": kernel.use.l2_read_hit_rate,
                            "hit_share": kernel.use.l2_hit_rate,
                            "seconds": kernel.use.nanoseconds / 1e9,
                        }
                    )
    return found


def test_lookup(gpu_benchmark: Any, device_buffer: Any, persisting_stream: Any, gpu_kernels: Any) -> None:
    """A user's test of a table that is to stay in L2."""
    out, table = device_buffer(1024 * MiB, "i4"), device_buffer(24 * MiB, "i4")
    with persisting_stream(table, set_aside="off") as stream:
        gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="off")
    with persisting_stream(table) as stream:
        gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="fitted")


def count_as_a_user(device: str, echo: Callable[[str], object]) -> Record:
    """What `gpumem traffic` counts for `test_lookup`."""
    begun = time.monotonic()
    case = Path(__file__).resolve()
    arguments = [str(case), "-c", os.devnull, "--rootdir", str(case.parent), "-p", "no:cacheprovider", "--gpumem-device", device]
    day = datetime.now(timezone.utc).date().isoformat()
    try:
        found = counting.count(arguments, [], os.environ, echo, day=day)
    except (counting.CallError, NothingRecorded) as error:
        return {"rows": {}, "error": str(error), "seconds": time.monotonic() - begun}
    rows = {row.label: structs.asdict(m.counted) for row in found.rows if (m := row.measurement) is not None and m.counted is not None}
    return {"rows": rows, "error": None, "command": child.recorded(found.command, ROOT), "seconds": time.monotonic() - begun}


# What a record says


def seen_by(one: Record, carriers: Mapping[str, Record]) -> list[str]:
    """Who reports the window that was asked for, or that there is none: "CUPTI", "the driver".

    That CUPTI reports none says something only where it reports one elsewhere.
    """
    speaks = any(any(other["cupti"] or []) for other in carriers.values())
    said = {"CUPTI": one["cupti"] if speaks else None, "the driver": one["read_back"]}
    return [who for who, windows in said.items() if windows and all(window == one["asked"] for window in windows)]


def checks(record: Record) -> list[tuple[str, bool]]:
    """What was to be proved, each with whether it is."""
    said = []
    carriers = record.get("windows", {}).get("carriers", {})
    for carrier, one in carriers.items():
        who = seen_by(one, carriers)
        what = "no window with the set-aside off" if carrier == "off" else f"the window on a {carrier} is the one asked for"
        said.append((f"{what}: {' and '.join(who) or 'nobody'} says so", bool(who)))
    counted = record.get("counted", {}).get("launches", [])
    for mib in dict.fromkeys(one["mib"] for one in counted):
        off, fitted = (next((one for one in counted if (one["mib"], one["setting"]) == (mib, name)), None) for name in SETTINGS)
        if off is None or fitted is None:
            continue
        reads = off["l2_reads"] or off["dram_reads"]
        fallen = (off["dram_reads"] - fitted["dram_reads"]) / reads
        said.append((f"{mib} MiB: DRAM reads fall by {100 * fallen:.1f} % of what the SMs read", fallen >= LEAST))
        for name, what in (("read_hit_share", "what the SMs read"), ("hit_share", "what anybody asked of it")):
            if off[name] is not None and fitted[name] is not None:
                risen = fitted[name] - off[name]
                said.append((f"{mib} MiB: L2 had {100 * risen:+.1f} points more of {what}", risen > 0))
    rows = record.get("traffic", {}).get("rows", {})
    if set(SETTINGS) <= set(rows):
        off, fitted = (rows[name] for name in SETTINGS)
        fallen = (off["reads"] - fitted["reads"]) / (off["l2_reads"] or off["reads"])
        said.append((f"gpumem traffic: DRAM reads fall by {100 * fallen:.1f} % of what the SMs read", fallen >= LEAST))
    return said


def errors(record: Record) -> list[str]:
    """Why a look failed, or had to be taken otherwise."""
    found = [f"windows: {error}" for error in record.get("windows", {}).get("errors", [])]
    return found + [f"{look}: {record[look]['error']}" for look in ("counted", "traffic") if record.get(look, {}).get("error")]


def table(record: Record) -> str:
    """The record as text."""
    device = record["device"]
    said = [f"{device['name']}, driver {device['driver']}, {record['ended'][:10]}"]
    if carriers := record.get("windows", {}).get("carriers"):
        said += ["", f"{'the window on':<16}{'asked for':<44}{'CUPTI':<12}{'the driver':<12}".rstrip()]
        for carrier, one in carriers.items():
            asked = one["asked"]
            words = (
                "none"
                if asked is None
                else f"{asked['nbytes'] / MiB:g} MiB, {asked['hit']} at {asked['hit_ratio']:g}, else {asked['miss']}"
            )
            who = [_report(one[key], asked) for key in ("cupti", "read_back")]
            said.append(f"{carrier:<16}{words:<44}{who[0]:<12}{who[1]:<12}".rstrip())
    if counted := record.get("counted", {}).get("launches"):
        said += ["", f"one launch of {KERNEL}, 2 blocks an SM, {record['out_mib']} MiB written; the table warm; ncu"]
        said.append(
            f"{'table':<10}{'setting':<10}{'SMs read MB':>12}{'of it L2 had':>14}{'L2 hit rate':>13}{'DRAM reads MB':>15}{'writes MB':>11}"
        )
        for one in counted:
            shares = [_share(one[name]) for name in ("read_hit_share", "hit_share")]
            asked = "-" if one["l2_reads"] is None else f"{one['l2_reads'] / MB:.0f}"
            figures = f"{asked:>12}{shares[0]:>14}{shares[1]:>13}{one['dram_reads'] / MB:>15.1f}{one['dram_writes'] / MB:>11.0f}"
            said.append(f"{one['mib']} MiB".ljust(10) + f"{one['setting']:<10}{figures}")
    if rows := record.get("traffic", {}).get("rows"):
        said += ["", "gpumem traffic, table of 24 MiB, caches emptied before every launch"]
        said += [f"{name:<10}DRAM {one['reads'] / MB:.1f} MB read, {one['writes'] / MB:.0f} MB written" for name, one in rows.items()]
    said += ["", *(f"{'ok  ' if holds else 'MISS'} {claim}" for claim, holds in checks(record)), *errors(record)]
    return "\n".join(said)


def _report(windows: list[Any] | None, asked: Any) -> str:
    if windows is None or not windows:
        return "-"
    return "the same" if all(window == asked for window in windows) else "none" if not any(windows) else "another"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def main() -> int:
    assert __doc__ is not None
    if sys.argv[1:2] == ["windows"]:
        job = json.loads(sys.argv[2])
        serve(lambda: prepared(job["device"]), lambda chosen: windows(chosen, job))
        return 1  # it was never let go
    if sys.argv[1:2] == ["launches"]:
        launches(sys.argv[2], [int(mib) for mib in sys.argv[3].split(",")], int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N (default cuda)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no look after this long")
    asked = parser.parse_args()
    if asked.json is not None and not asked.json.absolute().parent.is_dir():
        parser.error(f"--json {asked.json}: there is no folder {asked.json.absolute().parent}")
    facts = chosen_device(parser, asked.device).facts
    if facts.simulated:
        parser.error(f"--device {asked.device}: the simulated device has no counters, and no driver that holds a window")
    record: Record = {
        "kind": "l2_proof",
        "device": {"name": facts.name, "simulated": False, "driver": facts.driver, "cuda": facts.cuda, "uuid": facts.uuid},
        "out_mib": OUT,
    }
    looks: dict[str, Callable[[], Record]] = {
        "windows": lambda: look_at_windows(asked.device),
        "counted": lambda: count_warm(asked.device, TABLES, OUT, lambda line: print(line, file=sys.stderr)),
        "traffic": lambda: count_as_a_user(asked.device, lambda line: print(line, file=sys.stderr)),
    }
    begun = time.monotonic()
    for name, look in looks.items():
        if (spent := time.monotonic() - begun) > asked.seconds:
            print(f"{name} is left out: {spent:.0f} s of {asked.seconds:g} s are used", file=sys.stderr)
            continue
        try:
            record[name] = look()
        except NothingRecorded as error:
            record[name] = {"error": str(error)}
        record["ended"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        if asked.json is not None:
            write_record(asked.json, record, indent=1)
    print(table(record))
    proved = checks(record)
    return 0 if proved and all(holds for _, holds in proved) and not errors(record) else 1


if __name__ == "__main__":
    sys.exit(main())
