"""Writers that save runs at once into one baseline, and are killed at random moments.

    python ci/bench/store_writers.py [--writers 8] [--runs 200] [--out ci/records/no-gpu/store_writers.json]

Each writer saves until so many of its runs are acknowledged; `Store.save` has then returned. SIGKILL ends one of the writers again and
again, and another takes its place. At the end every acknowledged run must be there and be read, and no other file may be damaged. Needs
no GPU. The script exits with 1 if a run is lost or a file is damaged.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from msgspec.structs import replace
from record_file import utc_now, write_record

from pytest_gpumem.baselines.references import Baseline
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.devices.opening import choose
from pytest_gpumem.outcomes import Outcome, UserError
from pytest_gpumem.records.device import Conditions
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row, Verdict

FACTS = choose("sim").facts
KILLS = 100
"""Kills, spread over the acknowledged runs."""
DELAY = 0.05
"""Mean seconds from an acknowledged run to the kill that follows it, so that kills come at any moment of a write."""


def row(number: int) -> Row:
    now = (Conditions(), Conditions())
    plain = Measurement("", "triad", "clean-cold", "blocked", "", (), None, None, None, 0.0, now)
    measured = replace(plain, placements=((1e-3 + number * 1e-7,),))
    verdict = Verdict(Outcome.PASS, "", simulated=True)
    return Row("test_a.py::test_triad", Limits(), verdict, measured)


def write(place: Path, acknowledged: Path, runs: int) -> None:
    """Save until the file names so many runs."""
    store = Store(place, FACTS)
    with acknowledged.open("a+") as file:
        file.seek(0)
        for number in range(len(file.read().split()), runs):
            saved = store.save([row(number)], "0" * 40, baseline=Baseline(FACTS))
            assert saved.path is not None
            file.write(f"{saved.path.name}\n")
            file.flush()


def start(place: Path, acknowledged: Path, runs: int) -> int:
    if (child := os.fork()) == 0:
        code = 99
        try:
            write(place, acknowledged, runs)
            code = 0
        finally:
            os._exit(code)
    return child


def proved(folder: Path, writers: int, runs: int, rng: random.Random) -> dict[str, Any]:
    """Run the writers, killing them; what is there at the end."""
    place = folder / "baseline"
    lists = [folder / f"acknowledged-{number}" for number in range(writers)]
    running = {start(place, path, runs): path for path in lists}
    begun = time.monotonic()
    moments = sorted(rng.sample(range(writers * runs), min(KILLS, writers * runs // 4)))
    kills = 0
    while running:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            path = running.pop(ended)
            if os.WIFSIGNALED(status):
                running[start(place, path, runs)] = path
            elif os.WEXITSTATUS(status):
                raise SystemExit(f"a writer ended with {os.WEXITSTATUS(status)}")
        elif (
            kills < len(moments)
            and sum(path.read_text().count("\n") for path in lists if path.exists())
            > moments[kills]
        ):
            time.sleep(rng.expovariate(1 / DELAY))
            os.kill(rng.choice(list(running)), signal.SIGKILL)
            kills += 1
        else:
            time.sleep(0.005)
    seconds = time.monotonic() - begun
    told = {name for path in lists for name in path.read_text().split()}
    try:
        there, damaged = {path.name for path, _ in Store(place, FACTS).files()}, None
    except UserError as error:
        there, damaged = set[str](), str(error)
    baseline = Store(place, FACTS).load() if damaged is None else Baseline(FACTS)
    return {
        "seconds": round(seconds, 1),
        "kills": kills,
        "acknowledged": len(told),
        "lost": len(told - there),
        "written before a kill": len(there - told),
        "damaged": damaged,
        "processes": baseline.processes,
    }


def table(record: Mapping[str, Any]) -> str:
    """The record as text."""
    lines = [
        f"{record['writers']} writers, {record['runs']} runs each, killed at random moments; no GPU, {record['ended'][:10]}"
    ]
    lines += [f"{'acknowledged':>12}{'lost':>6}{'damaged':>9}{'kills':>7}{'seconds':>9}"]
    damaged = int(record["damaged"] is not None)
    lines += [
        f"{record['acknowledged']:>12}{record['lost']:>6}{damaged:>9}{record['kills']:>7}{record['seconds']:>9.0f}"
    ]
    return "\n".join(lines)


def kept(record: Mapping[str, Any]) -> bool:
    """True if nothing is lost or damaged."""
    wanted = record["writers"] * record["runs"]
    return record["acknowledged"] == wanted and not record["lost"] and record["damaged"] is None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    rng = random.Random(20_261)
    with tempfile.TemporaryDirectory(prefix="gpumem-writers-") as made:
        proof = proved(Path(made), asked.writers, asked.runs, rng)
    record = {
        "kind": "store_writers",
        "writers": asked.writers,
        "runs": asked.runs,
        "ended": utc_now(),
        **proof,
    }
    if asked.out is not None:
        write_record(asked.out, record, indent=1)
    print(table(record))
    return 0 if kept(record) else 1


if __name__ == "__main__":
    sys.exit(main())
