"""Check the record of what a launch runs: the changes it shows, whether processes agree, and its cost. Needs a GPU and cupti-python.

Runs the rows of `evidence_rows.py` in fresh processes, compares their digests between processes and each changed row with its base, times
the pass, and times the start of a session with and without it.

    python ci/bench/evidence.py --processes 10 --json ci/records/nvidia-h100/evidence.json

A run of the gate has three processes; bytes of arguments that differ between them are left out. So the processes are put into groups of
three, and a row agrees if each group ran the same as the first one.

Exits with 1 if a promise is broken: groups disagree in more than arguments, or in the arguments of more than a tenth of the rows; a change
does not show, a rebuild shows, a row is not watched, a pass takes more than 20 ms.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import installed, record_parser, utc_now, write_record

ROWS = Path(__file__).resolve().with_name("evidence_rows.py")
LIMIT = 0.020
"""Seconds of a pass after the first."""
GROUP = 3
"""Processes of a run."""
ARGUMENTS = 1000
"""More than any kernel has."""
PADDED = 0.1
"""Largest share of rows that groups may run with other arguments: padding of structs holds what was on the stack."""
SAME = ", same"
"""End of the label of a row that must run the same as its base."""
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-W",
    "ignore",
    "-c",
    os.devnull,
)
QUICKLY = (
    "--gpumem",
    "--gpumem-device=cuda",
    "--gpumem-budget=10 ms",
    "-o",
    "gpumem_placements=1",
    "--gpumem-processes=1",
)


def session(*arguments: str, tests: Path = ROWS, alone: bool = True) -> dict[str, Any]:
    """Run the rows in a fresh process: exit code, wall time, rows by key, and the end of the output.

    Not `alone`: it waits for no other process on the GPU. What runs does not depend on them.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [
            *PYTEST,
            *QUICKLY,
            f"--rootdir={tests.parent}",
            f"--benchmark-json={results}",
            *arguments,
            str(tests),
        ]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GPUMEM", "PYTEST_"))
        }
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROWS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        if not alone:
            environment["XDG_RUNTIME_DIR"] = folder  # has the lock of the GPU
        begun = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        wall = time.perf_counter() - begun
        rows = {}
        if results.exists() and results.stat().st_size:
            plain = json.loads(results.read_text())["gpumem"]
            rows = {
                row["key"].partition("::")[2]: row["measurement"]
                for row in plain["rows"]
                if row["measurement"] is not None
            }
            device = plain["device"]["name"]
        else:
            device = None
        return {
            "exit": done.returncode,
            "wall": wall,
            "rows": rows,
            "device": device,
            "output": (done.stdout + done.stderr)[-4000:],
        }


def digests(rows: Mapping[str, Any]) -> dict[str, str | None]:
    return {key: (one["what_ran"] or {}).get("digest") for key, one in rows.items()}


def disagreeing(sessions: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Watched rows of the first session that groups of `GROUP` sessions do not run the same, by key: whether in arguments alone."""
    from pytest_gpumem.records.schema import from_plain
    from pytest_gpumem.records.what_ran import WhatRan, declared, ran_the_same, together

    found = {}
    for key, digest in digests(sessions[0]["rows"]).items():
        if digest is None:
            continue
        every = [
            from_plain(one["rows"][key]["what_ran"], WhatRan)
            for one in sessions
            if key in one["rows"]
        ]
        groups = [every[at : at + GROUP] for at in range(0, len(every) - GROUP + 1, GROUP)] or [
            every
        ]
        first, *others = (together(group) for group in groups)
        if (
            len(every) < len(sessions)
            or first is None
            or not all(one is not None and ran_the_same(one, [first]) for one in others)
        ):
            found[key] = (
                len(every) == len(sessions)
                and len({declared(one, range(1, ARGUMENTS)).digest for one in every}) == 1
            )
    return found


def changes(rows: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By key, each row of a test that has a base: whether its digest is the base's, and the differences in words."""
    from pytest_gpumem.explain.what_ran import compared
    from pytest_gpumem.records.schema import from_plain
    from pytest_gpumem.records.what_ran import WhatRan

    found = {}
    for key, one in rows.items():
        base = rows.get(f"{key[: key.rindex('[')]}[base]") if "[" in key else None
        if base is None or one is base or not one["what_ran"] or not base["what_ran"]:
            continue
        was, now = (from_plain(each["what_ran"], WhatRan) for each in (base, one))
        ran = compared(was, now)
        found[key] = {
            "same": was.digest is not None and was.digest == now.digest,
            "wanted_same": one["label"].endswith(SAME),
            "differences": None if ran is None else [difference.text for difference in ran],
        }
    return found


COST = """
import json, time
from pytest_gpumem.devices.opening import choose
chosen = choose("cuda")
start = time.perf_counter()
chosen.follow()
followed = time.perf_counter() - start
device = chosen.open()
from pytest_gpumem.measuring import conductor as conducting
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.sampling import Plan
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.ranges import Ranges

times, find = [], conducting.find_what_ran

def timed(*arguments, **keywords):
    start = time.perf_counter()
    try:
        return find(*arguments, **keywords)
    finally:
        times.append(time.perf_counter() - start)

conducting.find_what_ran = timed
conductor = conducting.Conductor(device, Ranges(), profiled=False)
arena = Arena(device, seed=0)
memory, kernels, plan = Memory(arena), Kernels(device), Plan(budget=0.02, placements=2)
floors, rows = [], []
for number in range(12):
    x, y = memory.device(4 << 20, "f4"), memory.device(4 << 20, "f4")
    floors.append([conductor.floors().empty, conductor.floors().launch])
    target = conductor.target(kernels.copy, (y, x), {}, arena=arena)
    passes = conducting.Passes(ran=number > 1)
    found = conductor.measure(target, plan, arena=arena, label=str(number), name="cost", passes=passes)
    rows.append([found.latency, found.overhead, None if found.what_ran is None else found.what_ran.digest])
print("COST " + json.dumps({"follow": followed, "passes": times, "floors": floors, "rows": rows}))
"""


def cost() -> dict[str, Any]:
    """Seconds of each pass in one process, of following modules, and the launch floors before and after the first pass."""
    done = subprocess.run(
        [sys.executable, "-c", COST], capture_output=True, text=True, errors="replace", check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("COST ")), None)
    return (
        json.loads(line.removeprefix("COST "))
        if line
        else {"error": (done.stdout + done.stderr)[-3000:]}
    )


def starts(times: int) -> dict[str, list[float]]:
    """Wall times of sessions with one row, with and without the record of what ran, in turns."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(times):
        for name, arguments in (("with", ()), ("without", ("--gpumem-no-what-ran",))):
            found[name].append(session("-k", "test_catalogue", *arguments)["wall"])
    return found


def table(record: Mapping[str, Any]) -> str:
    """The record as text."""
    rows, unwatched, disagree = (
        len(record["rows"]),
        len(record["not_watched"]),
        len(record["disagree"]),
    )
    spent, equal = record["pass_seconds"], record["equal"]
    lines = [
        f"{record['device']}, {record['ended'][:10]}: {rows} rows in {record['processes']} processes each",
        f"the same in each group of three processes: {rows - unwatched - disagree} rows, {equal} with equal digests in all processes;",
        f"different: {disagree}; not watched: {unwatched}",
        f"a row's passes: {1e3 * spent['median']:.1f} ms, the first row's {1e3 * spent['first']:.1f} ms",
        "",
        f"{'change':<28}digest",
    ]
    for one in sorted(record["changes"].items(), key=lambda one: one[1]["same"]):
        name, change = one[0].rpartition("[")[2].rstrip("]"), one[1]
        lines.append(
            f"{name.removesuffix(SAME):<28}{'the same' if change['same'] else 'another: ' + (change['differences'] or ['?'])[0]}"
        )
    return "\n".join(line if len(line) <= 100 else f"{line[:99]}…" for line in lines)


def main() -> int:
    parser = record_parser(__doc__, device=None)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument(
        "--at-once",
        type=int,
        default=5,
        help="processes that run side by side; the first one fills the compilers' caches",
    )
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="for the processes; then fewer of them"
    )
    parser.add_argument(
        "--starts", type=int, default=3, help="sessions of each kind whose start is timed"
    )
    options = parser.parse_args()
    begun = time.perf_counter()
    sessions = [first := session()]
    if not first["rows"]:
        sys.exit(f"evidence: no rows (pytest ended with {first['exit']}):\n{first['output']}")
    with ThreadPoolExecutor(options.at_once) as pool:

        def further(number: int) -> dict[str, Any] | None:
            return (
                session(alone=False)
                if time.perf_counter() - begun + first["wall"] < options.seconds
                else None
            )

        sessions += [
            one for one in pool.map(further, range(1, options.processes)) if one is not None
        ]
    every = [digests(one["rows"]) for one in sessions]
    padded = disagreeing(sessions)
    disagree = {key: sorted({str(one.get(key)) for one in every}) for key in padded}
    equal = sum(
        digest is not None and {one.get(key) for one in every} == {digest}
        for key, digest in every[0].items()
    )
    unwatched = {
        key: (one["what_ran"] or {}).get("not_watched")
        for key, one in first["rows"].items()
        if not every[0][key]
    }
    changed, passes, started = changes(first["rows"]), cost(), starts(options.starts)
    later = passes.get("passes", [])[1:]
    record = {
        "kind": "evidence",
        "device": first["device"],
        "processes": len(sessions),
        "rows": {
            key: one["what_ran"]
            and {"digest": one["what_ran"]["digest"], "steps": len(one["what_ran"]["order"])}
            for key, one in first["rows"].items()
        },
        "equal": equal,
        "disagree": disagree,
        "disagreeing_records": {
            key: [one["rows"].get(key, {}).get("what_ran") for one in sessions[:3]]
            for key in disagree
        },
        "not_watched": unwatched,
        "changes": changed,
        "cost": passes,
        "pass_seconds": {
            "first": passes.get("passes", [None])[0],
            "median": statistics.median(later) if later else None,
            "most": max(later, default=None),
        },
        "session_seconds": started,
        "start_seconds": min(started["with"]) - min(started["without"]),
        "exits": [one["exit"] for one in sessions],
        "versions": installed(
            "cupti-python", "cupy-cuda13x", "torch", "triton", "numba", "cuda-core"
        ),
        "python": platform.python_version(),
        "seconds": time.perf_counter() - begun,
        "ended": utc_now(),
    }
    broken = [
        f"{key}: groups of three processes disagree: {', '.join(seen)}"
        for key, seen in disagree.items()
        if not padded[key]
    ]
    if len(disagree) > PADDED * len(every[0]):
        broken.append(f"{len(disagree)} of {len(every[0])} rows disagree in arguments")
    broken += [f"{key}: not watched: {why}" for key, why in unwatched.items()]
    broken += [
        f"{key}: {'other' if one['wanted_same'] else 'the same'} digest: {one['differences']}"
        for key, one in changed.items()
        if one["same"] is not one["wanted_same"]
    ]
    if later and statistics.median(later) > LIMIT:
        broken.append(
            f"a pass takes {1e3 * statistics.median(later):.1f} ms, more than {1e3 * LIMIT:.0f} ms"
        )
    if "error" in passes:
        broken.append(f"the cost was not measured: {passes['error']}")
    if len(sessions) < options.processes:
        broken.append(
            f"only {len(sessions)} of {options.processes} processes in {options.seconds:.0f} s"
        )
    if any(one["exit"] for one in sessions):
        broken.append(f"a session failed: {next(one['output'] for one in sessions if one['exit'])}")
    record["broken"] = broken
    print(table(record))
    print(f"a session's start: {record['start_seconds']:.2f} s; {record['seconds']:.0f} s in all")
    for line in broken:
        print(f"BROKEN: {line}")
    if options.json:
        write_record(options.json, record, indent=1)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
