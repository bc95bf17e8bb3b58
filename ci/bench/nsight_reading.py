"""What `gpumem read` makes of reports, beside what `nsys stats`, CUPTI and ncu say of the same runs.

    python ci/bench/nsight_reading.py --json ci/records/nvidia-h200/nsight_reading.json --keep tests/data/nsight

1. nsys records a few tests of tests/memory (a stream, managed memory that faults and that is prefetched, the host link) and small ones of
   every kind. Sums of kernels for each test and for the whole run must equal `nvtx_kern_sum` and `cuda_gpu_kern_sum` to the nanosecond,
   migrations and faults `um_total_sum` and `um_sum`. Those print bytes as MB with three decimals, half a unit of which is 500 bytes: pages
   move in multiples of 4 KiB, so an agreement within that is an agreement to the byte.
2. The same managed tests run without nsys, and CUPTI counts one launch of each (`--gpumem-count-pages`): bytes that moved during a measured
   launch must be those that the report gives it by its time.
3. ncu profiles one small test into a report, which is read by its Python module and by ncu itself: both must tell the same.

With --keep, small SQLite files of single tests are cut out of the export, with what `nsys stats` says of them beside
(`*.expected.json`), and the page of ncu: fixtures for tests without a GPU.

Needs nsys; cupti-python and ncu for the second and third part. Takes about a minute; --no-suite, --no-cupti and --no-ncu leave parts
out. Exits with 1 where two figures differ.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import device_of, write_record

from pytest_gpumem.devices.opening import NoDevice, choose
from pytest_gpumem.files import write_whole
from pytest_gpumem.nsight import ncu, nsys_tables, reading
from pytest_gpumem.nsight.nsys import read_sqlite
from pytest_gpumem.nsight.nsys_ranges import CATEGORY, NEW_DOMAIN, ranges_of
from pytest_gpumem.nsight.nsys_tables import Tables
from pytest_gpumem.nsight.recording import BadReport, Recording
from pytest_gpumem.nsight.tools import NCU, NSYS, ToolMissing, check_version, find, ncu_error, nsys_command
from pytest_gpumem.ranges import DOMAIN, MEASURE, phase
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.schema import document_from_json
from pytest_gpumem.runs import child
from pytest_gpumem.units import MiB

HERE = Path(__file__).resolve().parent
CASES = HERE / "nsight_reading_cases.py"
SUITE = (
    "tests/memory/test_stream.py::test_triad",
    "tests/memory/test_managed.py::test_prefetch_beats_faulting",
    "tests/memory/test_host_link.py::test_pinned_to_device_beats_pageable",
)
PAGES = "test_pages"
KEPT = ("test_kernels", "test_several_kernels", PAGES, "test_copies")
LARGEST = 200_000
"""Bytes of a file that is kept."""
REPORTS = ("nvtx_kern_sum", "cuda_gpu_kern_sum", "um_total_sum", "um_sum:rows=100000")
LIMIT = 150.0
"""Seconds for one child."""

Record = dict[str, Any]
Sums = dict[str, tuple[int, int]]
"""Kernel to number and nanoseconds."""


# What nsys stats prints


def tables_in(text: str) -> list[list[dict[str, str]]]:
    """The tables in the CSV of several reports, told by their headings."""
    found: list[list[dict[str, str]]] = []
    heading: list[str] = []
    for cells in csv.reader(text.splitlines()):
        plain = [cell.strip() for cell in cells]
        if len(plain) > 3 and any(re.fullmatch(r"(NVTX Range|Time \(%\)|Total HtoD.*|Virtual Address)", cell) for cell in plain):
            heading = plain
            found.append([])
        elif heading and len(plain) == len(heading):
            found[-1].append(dict(zip(heading, plain, strict=True)))
        else:
            heading = []
    return found


_UNITS = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "NS": 1.0, "US": 1e3, "MS": 1e6}


def figure(row: Mapping[str, str], part: str) -> tuple[float, float] | None:
    """A figure by a part of its heading, in bytes or nanoseconds, and half of its last decimal; None if there is no such column."""
    for name, value in row.items():
        if part in re.sub(r"\s", "", name):
            unit = re.search(r"\(([A-Za-z]+)\)", name)
            scale = _UNITS[unit[1].upper()] if unit else 1.0
            plain = value.replace(",", "") or "0"
            decimals = len(plain.partition(".")[2])
            return float(plain) * scale, 0.5 * scale * 10**-decimals if decimals else 0.0
    return None


def stats_of(text: str) -> Record:
    """What the reports say: kernels by range and over all, totals of managed memory; None for a table that is missing."""
    said: Record = {"ranges": None, "kernels": None, "pages": None, "pages_by_address": None}
    for rows in tables_in(text):
        headings = set(rows[0]) if rows else set()
        if "NVTX Range" in headings:
            said["ranges"] = [
                [row["NVTX Range"], int(row["PID"] or 0), row["Kernel Name"], int(row["Kern Inst"]), _whole(row, "TotalTime")]
                for row in rows
            ]
        elif "Instances" in headings and "Name" in headings:
            said["kernels"] = {row["Name"]: [int(row["Instances"]), _whole(row, "TotalTime")] for row in rows}
        elif any(name.startswith("Total HtoD") for name in headings):
            parts = {"to_device": "HtoD", "to_host": "DtoH", "cpu_faults": "CPUPageFaults", "gpu_faults": "GPUPageFaults"}
            said["pages"] = {name: figure(rows[0], part) for name, part in parts.items()}
        elif "Virtual Address" in headings:
            faults = {name: [figure(row, part) for row in rows] for name, part in (("cpu_faults", "CPUPage"), ("gpu_faults", "GPUPage"))}
            said["pages_by_address"] = {name: sum(one[0] for one in found if one) for name, found in faults.items()}
    return said


def _whole(row: Mapping[str, str], part: str) -> int:
    found = figure(row, part)
    if found is None:
        raise ValueError(f"nsys stats has no column {part}; its columns are {', '.join(row)}")
    return round(found[0])


# Differences


def differences(found: Recording, said: Record) -> list[Record]:
    """Every figure that both tell, where they differ; and how many were compared."""
    compared, differ = 0, []

    def hold(what: str, ours: object, theirs: object, same: bool) -> None:
        nonlocal compared
        compared += 1
        if not same:
            differ.append({"what": what, "read": ours, "nsys": theirs})

    if said["ranges"] is not None:
        theirs: dict[tuple[str, int], Sums] = defaultdict(dict)
        for name, process, kernel, count, nanoseconds in said["ranges"]:
            before = theirs[name, process].get(kernel, (0, 0))
            theirs[name, process][kernel] = (before[0] + count, before[1] + nanoseconds)
        by_test: dict[tuple[str, int], list[TestProfile]] = defaultdict(list)
        for one in found.profiles:
            by_test[one.name, one.process or 0].append(one)
        for (test, process), profiles in by_test.items():
            measured = sums(kernel for one in profiles for kernel in one.kernels)
            every = sums(kernel for one in profiles for kernel in (*one.kernels, *one.rest.kernels))
            for name, ours in ((phase(test, MEASURE), measured), (test, every)):
                its = theirs.get((f"{DOMAIN}:{name}", process), {})
                for kernel in sorted(ours.keys() | its.keys()):
                    hold(f"{name}: {kernel}", ours.get(kernel), its.get(kernel), ours.get(kernel) == its.get(kernel))
    if said["kernels"] is not None:
        ours = sums(kernel for part in found.parts() for kernel in part.kernels)
        its = {name: (one[0], one[1]) for name, one in said["kernels"].items()}
        for kernel in sorted(ours.keys() | its.keys()):
            hold(f"all: {kernel}", ours.get(kernel), its.get(kernel), ours.get(kernel) == its.get(kernel))
    pages = total_pages(found)
    if said["pages"] is not None:
        for name, one in said["pages"].items():
            if one is not None:
                hold(f"pages: {name}", pages[name], one[0], abs(pages[name] - one[0]) <= one[1])
    if said["pages_by_address"] is not None:
        for name, value in said["pages_by_address"].items():
            hold(f"pages by address: {name}", pages[name], value, pages[name] == value)
    return [{"compared": compared}, *differ]


def sums(kernels: Iterable[Any]) -> Sums:
    """Kernels by name, whatever their shapes."""
    found: Sums = {}
    for kernel in kernels:
        count, nanoseconds = found.get(kernel.name, (0, 0))
        found[kernel.name] = (count + kernel.launches, nanoseconds + kernel.nanoseconds)
    return found


def total_pages(found: Recording) -> dict[str, int]:
    """Bytes and faults of the whole recording."""
    counts = [part.migrations for part in found.parts() if part.migrations is not None]
    return {name: sum(getattr(one, name) for one in counts) for name in ("to_device", "to_host", "cpu_faults", "gpu_faults")}


# Cutting out


_RAN = (nsys_tables.KERNELS, nsys_tables.COPIES, nsys_tables.MEMSETS)
_TEXTS = {
    nsys_tables.RANGES: ("textId",),
    nsys_tables.KERNELS: ("demangledName", "shortName", "mangledName"),
    nsys_tables.CALLS: ("nameId",),
}


def cut(source: Path, target: Path, test: str) -> None:
    """Write the part of an export that is of one test: its ranges, what they hold, and the strings of both.

    Calls are kept where something ran for them, or where the thread waited. Nothing else of the export comes along, names of the machine
    and paths least of all.
    """
    with Tables(source) as tables:
        own = [one for one in ranges_of(tables) if one.place.test == test]
        waits = ", ".join(map(str, tables.strings_with("Synchronize"))) or "-1"
    if not own:
        raise ValueError(f"{source} has no range of {test}")
    thread = min(one.thread for one in own)
    process = thread & nsys_tables.PROCESS
    start, end = min(one.start for one in own if one.thread == thread), max(one.end for one in own if one.thread == thread)
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        tables_there = dict(old.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
        used: set[int] = set()

        def take(table: str, where: str) -> None:
            if table not in tables_there:
                return
            rows = old.execute(f"SELECT * FROM {table} WHERE {where}")
            names = [one[0] for one in rows.description]
            texts = [names.index(one) for one in _TEXTS.get(table, ()) if one in names]
            kept = rows.fetchall()
            if not kept:
                return
            new.execute(tables_there[table])
            new.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", kept)
            used.update(row[index] for row in kept for index in texts if row[index] is not None)

        window = f"BETWEEN {start} AND {end}"
        for table in (*_RAN, nsys_tables.GPU_FAULTS, nsys_tables.CPU_FAULTS):
            take(table, f"start {window} AND globalPid = {process}")
        ran = [
            str(row[0])
            for table in _RAN
            if table in _made(new)
            for row in new.execute(f"SELECT correlationId FROM {table} WHERE correlationId IS NOT NULL")
        ]
        same = f"globalTid & {nsys_tables.PROCESS} = {process}"
        ran_for = f"correlationId IN ({', '.join(ran) or '-1'}) OR (nameId IN ({waits}) AND globalTid = {thread})"
        take(nsys_tables.CALLS, f"start {window} AND {same} AND ({ran_for})")
        take(nsys_tables.RANGES, f"(start {window} AND globalTid = {thread}) OR (eventType IN ({CATEGORY}, {NEW_DOMAIN}) AND {same})")
        take("ENUM_CUDA_MEM_KIND", "1")
        take(nsys_tables.META, "value NOT LIKE '%/%'")
        take(nsys_tables.STRINGS, f"id IN ({', '.join(map(str, sorted(used)))})")
        new.commit()
        new.execute("VACUUM")


def _made(database: sqlite3.Connection) -> set[str]:
    return {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


# Runs


def pytest_command(*arguments: str, device: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--gpumem", "--gpumem-device", device, *arguments]


def run(command: Sequence[str]) -> str:
    """Run to the end; gives what was printed.

    Raises:
        SystemExit: no end in time.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT,
            env=dict(os.environ),
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{child.shown(command)}: no end within {LIMIT:g} s") from None
    return done.stdout + done.stderr


def stats(nsys: Path, file: Path) -> Record:
    """What `nsys stats` says of an export.

    nsys makes a table only once there is something to put into it, and its reports of managed memory say nothing where one is missing.
    The totals are then summed over those that are there.
    """
    options = [part for one in REPORTS for part in ("--report", one)]
    said = stats_of(run([str(nsys), "stats", "--format", "csv", *options, "--output", "-", str(file)]))
    said["pages_by"] = "um_total_sum" if said["pages"] is not None else "sums over the export"
    if said["pages"] is None:
        said["pages"] = {name: (float(value), 0.0) for name, value in summed(file).items()}
    return said


def summed(file: Path) -> dict[str, int]:
    """The sums of `um_total_sum`, a table that is missing as an empty one."""
    with closing(sqlite3.connect(file)) as database:
        there = _made(database)

        def one(figure: str, table: str, where: str = "1") -> int:
            if table not in there:
                return 0
            return int(database.execute(f"SELECT COALESCE({figure}, 0) FROM {table} WHERE {where}").fetchone()[0])

        return {
            "to_device": one("SUM(bytes)", nsys_tables.COPIES, "copyKind = 11"),
            "to_host": one("SUM(bytes)", nsys_tables.COPIES, "copyKind = 12"),
            "cpu_faults": one("COUNT(*)", nsys_tables.CPU_FAULTS),
            "gpu_faults": one("SUM(numberOfPageFaults)", nsys_tables.GPU_FAULTS),
        }


def recorded(nsys: Path, folder: Path, tests: Sequence[str], device: str) -> Path:
    """Record tests and export; gives the SQLite file."""
    report, file = folder / "run.nsys-rep", folder / "run.sqlite"
    said = run(nsys_command(nsys, pytest_command(*tests, device=device), report, name=None, managed=True))
    if not report.is_file():
        raise SystemExit(f"nsys wrote no report: {said.strip()[-2000:]}")
    said = run([str(nsys), "export", "--type", "sqlite", "--force-overwrite=true", "--output", str(file), str(report)])
    if not file.is_file():
        raise SystemExit(f"nsys export wrote nothing: {said.strip()[-2000:]}")
    return file


def kept(nsys: Path, source: Path, folder: Path, version: str) -> list[Record]:
    """Cut the small tests out of an export, each with what `nsys stats` says of it."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for test in KEPT:
        with tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary, f"{test}.sqlite")
            try:
                cut(source, file, test)
            except (ValueError, BadReport) as error:
                files.append({"file": None, "test": test, "error": str(error)})
                continue
            said, size = stats(nsys, file), file.stat().st_size
            error = None
            if said["kernels"] is None:
                error = "nsys stats said nothing of it"
            elif size > LARGEST:
                error = f"{size} bytes, more than {LARGEST}"
            if error is None:
                with Tables(file) as tables:
                    found = read_sqlite(tables)
                (folder / file.name).write_bytes(file.read_bytes())
                expected = {"from": f"nsys stats {version}", "stats": said, "profiles": [summary(one) for one in found.profiles]}
                write_whole(folder / f"{test}.expected.json", json.dumps(expected, indent=1) + "\n")
            files.append({"file": file.name, "test": test, "bytes": size, "error": error})
    return files


def summary(one: TestProfile) -> Record:
    """A profile in the few figures that a record holds."""
    return {
        "name": one.name,
        "nodeid": one.nodeid,
        "label": one.label,
        "launches": one.launches,
        "nanoseconds": _total(one, "nanoseconds") or 0,
        "kernels": _total(one, "launches") or 0,
        "copies": [[copy.kind, copy.source, copy.destination, copy.count, copy.nbytes, copy.nanoseconds] for copy in one.copies],
        "pages": None if one.migrations is None else _page_figures(one.migrations),
    }


def _page_figures(counts: PageCounts) -> Record:
    names = ("to_device", "to_host", "cpu_faults", "gpu_faults", "gpu_groups")
    return {**{name: getattr(counts, name) for name in names}, "causes": counts.causes}


def counted_by_cupti(device: str, tests: Sequence[str]) -> Record:
    """By `Row.key`, what CUPTI counts of one launch, without nsys; or why nothing was counted."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        said = run(pytest_command(*tests, "--gpumem-count-pages", "--gpumem-budget", "0.2 s", f"--benchmark-json={results}", device=device))
        try:
            rows = document_from_json(json.loads(results.read_text())["gpumem"]).rows
        except (OSError, ValueError, KeyError) as error:
            return {"error": f"no results ({error}): {said.strip()[-600:]}"}
    found: Record = {}
    for row in rows:
        if row.measurement is not None and row.measurement.migrations is not None:
            counts = row.measurement.migrations
            launch = None if counts.launch is None else _page_figures(counts.launch)
            found[row.key] = {"launch": launch, "not_counted": counts.not_counted}
    return found


def against_cupti(found: Recording, counted: Record) -> list[Record]:
    """Bytes of one launch as the report gives them by time, beside CUPTI's count of one launch."""
    compared = []
    for one in found.profiles:
        other = counted.get(one.key)
        if other is None or other["launch"] is None or one.migrations is None or not one.launches:
            continue
        figures = {way: (getattr(one.migrations, way) / one.launches, other["launch"][way]) for way in ("to_device", "to_host")}
        compared.append(
            {
                "test": one.key,
                **{way: {"read": ours, "cupti": theirs} for way, (ours, theirs) in figures.items()},
                "gpu_faults": {"read": one.migrations.gpu_faults / one.launches, "cupti": other["launch"]["gpu_faults"]},
                # How many faults there are is a race, and differs between launches; whether there are any does not.
                "holds": all(ours == theirs for ours, theirs in figures.values())
                and bool(one.migrations.gpu_faults) == bool(other["launch"]["gpu_faults"]),
            }
        )
    return compared


def counted_by_ncu(device: str, keep: Path | None) -> Record:
    """Profile one test, read the report by the module and by ncu, and compare."""
    try:
        program = find(NCU, os.environ)
        version = check_version(NCU, program, os.environ)
    except ToolMissing as error:
        return {"error": str(error)}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "run.ncu-rep")
        more = (ncu.REGISTERS, *ncu.SHARED, ncu.SET_ASIDE)
        for metrics in ((*ncu.PROFILE_METRICS, *more), ncu.PROFILE_METRICS):
            command = [str(program), "--clock-control", "none", "--target-processes", "all", "--nvtx"]
            command += ["--nvtx-include", f"{DOMAIN}@{phase('test_kernels', MEASURE)}/", "--metrics", ",".join(metrics)]
            said = run([*command, "-f", "-o", str(report), *pytest_command(f"{CASES}::test_kernels", device=device)])
            if report.is_file():
                break
        else:
            return {"error": ncu_error(said) or f"ncu wrote no report: {said.strip()[-600:]}"}
        page = run([str(program), "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"])
        by_module = _by_module(program, report)
        try:
            printed = ncu.read_csv(page)
            either = reading.read(report, os.environ)
        except BadReport as error:
            return {"error": str(error), "page": page[:2000]}
    if keep is not None:
        kernels = by_module.get("kernels") or [_kernel(one) for one in printed.profiles]
        expected = {"from": f"ncu {version}", "kernels": kernels}
        write_whole(keep / "test_kernels.csv", page)
        write_whole(keep / "test_kernels.csv.expected.json", json.dumps(expected, indent=1) + "\n")
    (one,) = printed.profiles
    same = "kernels" not in by_module or _close(by_module["kernels"][0], _kernel(one))
    return {
        "version": version,
        "module": "kernels" in by_module,
        "module_error": by_module.get("error"),
        "asked": list(metrics),
        "profile": _kernel(one),
        "declared": {"read": 2 * 64 * MiB, "written": 64 * MiB},
        "notes": list(either.notes),
        "holds": same,
    }


def _by_module(program: Path, report: Path) -> Record:
    """What the module `ncu_report` tells of a report, in a process of its own, which it may take with it; or the error."""
    code = (
        "import json, sys; from pathlib import Path; sys.path.insert(0, sys.argv[3]); import nsight_reading as own\n"
        "module = own.ncu.module(Path(sys.argv[1]))\n"
        "found = None if module is None else own.ncu.read_report(module, Path(sys.argv[2]))\n"
        "print(json.dumps(found and [own._kernel(one) for one in found.profiles]))"
    )
    command = [sys.executable, "-c", code, str(program), str(report), str(Path(__file__).resolve().parent)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        # The last line of a traceback is the error; those before it are paths of this machine.
        return {"error": f"ended with {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2][-300:]}"}
    kernels = json.loads(done.stdout.strip().splitlines()[-1])
    return {"error": "there is none"} if kernels is None else {"kernels": kernels}


def _kernel(one: TestProfile) -> Record:
    """What ncu counted of a test, over all its kernels."""
    return {
        "name": one.name,
        "launches": _total(one, "launches") or 0,
        "nanoseconds": _total(one, "nanoseconds") or 0,
        **{name: _total(one, name) for name in ("dram_read", "dram_written", "l2_read", "l2_written")},
        "l2_hit_rate": _mean(one, "l2_hit_rate", "l2_read", "l2_written"),
        "l2_read_hit_rate": _mean(one, "l2_read_hit_rate", "l2_read"),
        "sectors_per_request": _mean(one, "sectors_per_request", "l2_read"),
        "sectors_per_store": _mean(one, "sectors_per_store", "l2_written"),
        "occupancy": _mean(one, "occupancy", "nanoseconds"),
        "sm_clock_hz": one.sm_clock_hz,
        "memory_clock_hz": one.memory_clock_hz,
        "set_aside": one.set_aside,
    }


def _total(one: TestProfile, name: str) -> int | None:
    """A figure's sum over the kernels; None unless it is known of each."""
    figures = [getattr(kernel, name) for kernel in one.kernels]
    return None if not figures or None in figures else sum(figures)


def _mean(one: TestProfile, name: str, *weights: str) -> float | None:
    """A rate's mean over the kernels that it is known of, weighted by the sum of other figures, by time where one of them is unknown."""
    known = [(getattr(kernel, name), kernel) for kernel in one.kernels if getattr(kernel, name) is not None]
    by = [[getattr(kernel, weight) for weight in weights] for _, kernel in known]
    sums = [kernel.nanoseconds for _, kernel in known] if any(None in row for row in by) or not sum(map(sum, by)) else [*map(sum, by)]
    return sum(value * weight for (value, _), weight in zip(known, sums, strict=True)) / sum(sums) if sum(sums) else None


def _close(one: Record, other: Record) -> bool:
    """Whether two readings agree to what a page in base units prints: three and more decimals."""
    for name, value in one.items():
        its = other[name]
        if isinstance(value, float) and isinstance(its, (int, float)):
            if abs(value - its) > 1e-4 * max(abs(value), 1e-3):
                return False
        elif isinstance(value, int) and isinstance(its, int) and not isinstance(value, bool):
            if abs(value - its) > 1e-6 * max(abs(value), 1) + 1:
                return False
        elif value != its:
            return False
    return True


# Record and table


def table(record: Record) -> str:
    """The record as text."""
    device = record["device"]
    lines = [f"{device['name']}, driver {device['driver']}, {record['ended'][:10]}; nsys {record['nsys']}", ""]
    total = record["totals"]
    lines.append(f"{record['profiles']} measurements, {total['kernels']} kernels in {total['nanoseconds']} ns, and of managed memory:")
    pages = total["pages"]
    lines.append(
        f"{pages['to_device']} bytes to the device, {pages['to_host']} to the host, {pages['gpu_faults']} GPU and "
        f"{pages['cpu_faults']} CPU page faults"
    )
    lines += ["", f"{record['compared']} figures compared with nsys stats, {len(record['differences'])} differ"]
    lines += [f"  {one['what']}: read {one['read']}, nsys {one['nsys']}" for one in record["differences"][:20]]
    if record["cupti"] is not None:
        lines += ["", f"{'one launch, by CUPTI and by its time in the report':<52}{'to device':>12}{'to host':>10}  faults"]
        for one in record["cupti"]["compared"]:
            name = one["test"].rpartition("::")[2]
            cells = f"{one['to_device']['cupti']:>12}{one['to_host']['cupti']:>10}  {one['gpu_faults']['cupti']}"
            lines.append(f"  {name + ', CUPTI':<50}{cells}")
            cells = f"{one['to_device']['read']:>12.0f}{one['to_host']['read']:>10.0f}  {one['gpu_faults']['read']:g}"
            lines.append(f"  {name + ', report':<50}{cells}")
        if record["cupti"]["error"]:
            lines.append(f"  {record['cupti']['error']}")
    if record["ncu"] is not None:
        lines.append("")
        if "error" in record["ncu"]:
            lines.append(f"ncu: {record['ncu']['error']}")
        else:
            one = record["ncu"]["profile"]
            how = "its module and its CSV agree" if record["ncu"]["module"] else f"its CSV; the module: {record['ncu'].get('module_error')}"
            lines.append(f"ncu {record['ncu']['version']}, {how}: triad on 64 MiB, one of {one['launches']} launches")
            lines.append(
                f"  DRAM {one['dram_read'] / one['launches'] / 1e6:.2f} MB read, {one['dram_written'] / one['launches'] / 1e6:.2f} MB "
                f"written (declared {record['ncu']['declared']['read'] / 1e6:.2f}, {record['ncu']['declared']['written'] / 1e6:.2f})"
            )
            parts = [
                f"{what} {100 * one[key]:.1f} %" for what, key in (("L2 hit rate", "l2_hit_rate"), ("occupancy", "occupancy")) if one[key]
            ]
            parts += [f"{one['sectors_per_request']:.3g} sectors per load"] if one["sectors_per_request"] else []
            parts += [f"SM clock {one['sm_clock_hz'] / 1e6:.0f} MHz"] if one["sm_clock_hz"] else []
            lines.append(f"  {', '.join(parts)}")
    for one in record["kept"] or ():
        lines.append(f"kept {one['file']}, {one['bytes']} bytes" if not one["error"] else f"NOT kept {one['test']}: {one['error']}")
    return "\n".join(lines)


def holds(record: Record) -> bool:
    """Whether everything that was looked at agrees, and the first part was looked at at all."""
    fine = record["compared"] > 0 and not record["differences"]
    if record["cupti"] is not None:
        fine = fine and bool(record["cupti"]["compared"]) and all(one["holds"] for one in record["cupti"]["compared"])
    if record["ncu"] is not None:
        fine = fine and record["ncu"].get("holds", False)
    return fine and not any(one["error"] for one in record["kept"] or ())


def parts_of(arguments: argparse.Namespace) -> Iterator[str]:
    yield str(CASES)
    if arguments.suite:
        yield from SUITE


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where fixtures are written")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N (default cuda)")
    for part in ("suite", "cupti", "ncu"):
        parser.add_argument(f"--no-{part}", dest=part, action="store_false", help=f"leave the part of {part} out")
    asked = parser.parse_args(arguments)
    try:
        facts = choose(asked.device).facts
        nsys = find(NSYS, os.environ)
        version = check_version(NSYS, nsys, os.environ)
    except (NoDevice, ValueError, ToolMissing) as reason:
        parser.error(str(reason))
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        file = recorded(nsys, Path(folder), tuple(parts_of(asked)), asked.device)
        with Tables(file) as tables:
            found = read_sqlite(tables)
        said = stats(nsys, file)
        fixtures = None if asked.keep is None else kept(nsys, file, asked.keep, version)
    compared, *differ = differences(found, said)
    by_cupti = None
    if asked.cupti:
        counted = counted_by_cupti(asked.device, [f"{CASES}::{PAGES}", *([SUITE[1]] if asked.suite else [])])
        by_cupti = {"compared": against_cupti(found, counted), "counted": counted, "error": counted.get("error")}
    record = {
        "kind": "nsight_reading",
        "device": device_of(facts),
        "nsys": version,
        "profiles": len(found.profiles),
        "notes": list(found.notes),
        "totals": {
            "kernels": sum(count for count, _ in sums(k for part in found.parts() for k in part.kernels).values()),
            "nanoseconds": sum(time for _, time in sums(k for part in found.parts() for k in part.kernels).values()),
            "pages": total_pages(found),
        },
        "tests": [summary(one) for one in found.profiles],
        **compared,
        "differences": differ,
        "pages_by": said["pages_by"],
        "missing": [name for name, value in said.items() if value is None],
        "cupti": by_cupti,
        "ncu": counted_by_ncu(asked.device, asked.keep) if asked.ncu else None,
        "kept": fixtures,
        "seconds": round(time.monotonic() - begun, 1),
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if asked.json:
        write_record(asked.json, record, indent=1)
    print(table(record))
    return 0 if holds(record) else 1


if __name__ == "__main__":
    sys.exit(main())
