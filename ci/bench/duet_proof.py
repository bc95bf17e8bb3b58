"""Does `gpumem duet` decide on a real GPU what it should, in what wall time, and after being killed?

A project of its own is made twice in a temporary folder: a triad of 2, 32 and 256 MiB, base as it is, head as it is or with as many bytes
more as make it 1 per cent slower. The shipped command compares the two folders, one test at a time, as a user would. The first case is
killed with SIGKILL halfway and called again.

    python ci/bench/duet_proof.py --json ci/records/nvidia-h200/duet.json

The record holds every process: its id, start, placement medians. Exits with 1 where a verdict is wrong or the 32 MiB PASS took more than
60 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_gpumem.files import write_whole

COMMAND = (sys.executable, "-c", "from pytest_gpumem.cli import main; main()", "duet")
TEST = """
import pytest
from pytest_gpumem import MiB
from planted import MORE

@pytest.mark.parametrize("mib", [2, 32, 256])
def test_triad(gpu_benchmark, gpu_kernels, device_buffer, mib):
    nbytes = int(mib * MiB * (1 + MORE.get(mib, 0) / 100)) // 4096 * 4096
    gpu_benchmark(gpu_kernels.triad, *(device_buffer(nbytes, "f4") for _ in range(3)), 3.0)
"""
CASES = ((32, 0.0), (32, 1.0), (256, 0.0), (256, 1.0), (2, 0.0), (2, 1.0))
"""MiB of each array, per cent that head is slower. The first is the one whose wall time is promised."""
MORE_BYTES = {2: 3.2, 32: 1.3, 256: 1.02}
"""By MiB: per cent of bytes more that make the triad 1 % slower, part of whose time is that of any launch
(ci/records/nvidia-h200/gate_validation.json and gate_validation_short.json)."""
DECIDES = 32
"""MiB from which on 1 % is decided; smaller ones may stay undecided."""
WALL = 60.0
"""Seconds for the PASS of one 32 MiB kernel, process starts included."""


def project(folder: Path, slower: float) -> Path:
    """A project whose triads are so many per cent slower: 0 or 1."""
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "planted.py").write_text(f"MORE = {MORE_BYTES if slower else {}!r}\n")
    (folder / "test_triad.py").write_text(TEST)
    return folder


def call(base: Path, head: Path, mib: int, device: str, extra: tuple[str, ...], kill_after: int | None = None) -> dict[str, Any]:
    """One duet from the folder of head; killed once its journal holds so many processes, if that is wanted."""
    result, journal = head / "out.json", head / "journal"
    command = [*COMMAND, str(base), "--test", f"test_triad.py::test_triad[{mib}]", "--journal", str(journal), "--json", str(result)]
    command += ["--max-regression", "1%", *extra, "--", "--gpumem-device", device]
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=head, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "140"}
    )
    if kill_after is not None:
        while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") <= kill_after):
            time.sleep(0.05)
        process.kill()
        process.communicate()
        return {"killed_after": kill_after, "wall": time.perf_counter() - begun}
    said, _ = process.communicate()
    if not result.exists():
        raise RuntimeError(f"gpumem duet ended with {process.returncode}: {said[-3000:]}")
    document = json.loads(result.read_text())
    journal.unlink()
    result.unlink()
    return {"wall": time.perf_counter() - begun, "exit": process.returncode, "duet": kept(document)}


def kept(document: dict[str, Any]) -> dict[str, Any]:
    """A duet's result without the folders and the environment of the machine that it ran on."""
    return {name: part for name, part in document.items() if name not in ("arguments", "base", "head")}


def wrong(record: dict[str, Any]) -> list[str]:
    """What is not as it should be, in sentences."""
    said = []
    for case in record["cases"]:
        expected = "FAIL" if case["slower"] else "PASS"
        (verdict,) = case["duet"]["verdicts"]
        if verdict["outcome"] != expected and not (case["mib"] < DECIDES and verdict["outcome"] == "INCONCLUSIVE"):
            said.append(f"{case['mib']} MiB, {case['slower']:+g} %: {verdict['outcome']}, not {expected}: {verdict['sentence']}")
    first = record["cases"][0]
    if first["wall"] > WALL:
        said.append(f"{first['mib']} MiB: the PASS took {first['wall']:.1f} s, more than {WALL:g} s")
    resumed = record["resumed"]
    if resumed["duet"]["resumed"] < record["killed"]["killed_after"]:
        said.append(f"after the kill {resumed['duet']['resumed']} processes were taken from the journal")
    return said


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    simulated = "SIMULATED " if record["simulated"] else ""
    lines = [f"{simulated}{record['device']['name']}, driver {record['device']['driver']}, {record['ended'][:10]}", ""]
    lines.append(
        f"{'arrays':>8}{'slower':>12}{'verdict':>14}{'change %':>11}{'from':>8}{'to':>8}{'pairs':>7}{'wall s':>8}{'s a process':>13}"
    )
    for case in record["cases"]:
        (verdict,) = case["duet"]["verdicts"]
        paired, processes = verdict["paired"], case["duet"]["processes"]
        each = sum(process["seconds"] for process in processes) / len(processes)
        figures = "-".rjust(11 + 8 + 8 + 7)
        if paired is not None:
            change, low, high = (100 * paired[name] for name in ("change", "low", "high"))
            figures = f"{change:>+11.3f}{low:>+8.3f}{high:>+8.3f}{paired['pairs']:>7}"
        what = f"{case['mib']:>4} MiB{case['slower']:>+10.1f} %{verdict['outcome'] or 'none':>14}"
        lines.append(f"{what}{figures}{case['wall']:>8.1f}{each:>13.2f}")
    resumed, killed = record["resumed"]["duet"], record["killed"]["killed_after"]
    taken = f"{resumed['resumed']} of {len(resumed['processes'])} taken from the journal, {resumed['verdicts'][0]['outcome']}"
    lines += ["", f"killed after {killed} processes and called again: {taken}"]
    lines += [f"WRONG {sentence}" for sentence in wrong(record)] or ["every verdict is as it should be"]
    return "\n".join(lines)


def main() -> int:
    """Run, print and record."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="as --gpumem-device (default cuda)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--rounds-max", type=int, help="of every duet (default: the command's own)")
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first so many cases only")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this long")
    options = parser.parse_args()
    if not 1 <= options.cases <= len(CASES):
        parser.error(f"--cases {options.cases}: there are 1 to {len(CASES)}")
    extra = () if options.rounds_max is None else ("--rounds-max", str(options.rounds_max))
    cases: list[dict[str, Any]] = []
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        base = project(Path(name, "base"), 0.0)
        heads = {slower: project(Path(name, f"head{slower:g}"), slower) for slower in sorted({slower for _, slower in CASES})}
        for mib, slower in CASES[: options.cases]:
            if cases and time.perf_counter() - begun > options.seconds:
                print(f"stopping before {mib} MiB, {slower:+g} %: {options.seconds:g} s are used", file=sys.stderr)
                break
            found = call(base, heads[slower], mib, options.device, extra)
            cases.append({"mib": mib, "slower": slower, **found})
            print(
                f"{mib} MiB, {slower:+g} %: {found['duet']['verdicts'][0]['sentence']} ({found['wall']:.1f} s)", file=sys.stderr, flush=True
            )
        killed = call(base, heads[0.0], CASES[0][0], options.device, extra, kill_after=9)
        resumed = call(base, heads[0.0], CASES[0][0], options.device, extra)
    record = {
        "kind": "duet_proof",
        "simulated": cases[0]["duet"]["simulated"],
        "device": cases[0]["duet"]["device"],
        "cases": cases,
        "killed": killed,
        "resumed": resumed,
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if options.json:
        write_whole(options.json, json.dumps(record, separators=(",", ":")) + "\n")
    print(table(record))
    return 1 if wrong(record) else 0


if __name__ == "__main__":
    sys.exit(main())
