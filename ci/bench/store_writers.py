"""Writers that save runs at once into one baseline, and are killed at random moments: a folder, and an S3-compatible server on loopback.

    python ci/bench/store_writers.py [--writers 8] [--runs 200] [--out ci/records/no-gpu/store_writers.json]

Each writer saves until so many of its runs are acknowledged; `Store.save` has then returned. SIGKILL ends one of the writers again and
again, and another takes its place. At the end every acknowledged run must be there and be read, and no other file may be damaged. Needs
no GPU, and moto[server]. The script exits with 1 if a run is lost or a file is damaged.
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
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import s3_server
from msgspec.structs import replace
from record_file import utc_now, write_record

from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.storage import BaselineError, storage
from pytest_gpumem.baselines.store import Store, files
from pytest_gpumem.devices.opening import choose
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Conditions, Limits, Measurement
from pytest_gpumem.records.row import Row, Verdict

FACTS = choose("sim").facts
KEY = FACTS.key
KILLS = 100
"""Kills at each place, spread over the acknowledged runs."""
DELAY = 0.05
"""Mean seconds from an acknowledged run to the kill that follows it, so that kills come at any moment of a write."""


def row(number: int) -> Row:
    now = (Conditions(), Conditions())
    plain = Measurement("", "triad", "clean-cold", "blocked", "", (), None, None, None, 0.0, now)
    measured = replace(plain, placements=((1e-3 + number * 1e-7,),))
    verdict = Verdict(Outcome.PASS, "", simulated=True)
    return Row("test_a.py::test_triad", Limits(), verdict, measured)


def write(place: str, acknowledged: Path, runs: int) -> None:
    """Save until the file names so many runs."""
    store = Store(storage(place), FACTS)
    with acknowledged.open("a+") as file:
        file.seek(0)
        for number in range(len(file.read().split()), runs):
            saved = store.save([row(number)], "0" * 40, baseline=Baseline())
            assert saved.path is not None
            file.write(f"{saved.path.name}\n")
            file.flush()


def start(place: str, acknowledged: Path, runs: int) -> int:
    if (child := os.fork()) == 0:
        code = 99
        try:
            write(place, acknowledged, runs)
            code = 0
        finally:
            os._exit(code)
    return child


def proved(place: str, folder: Path, writers: int, runs: int, rng: random.Random) -> dict[str, Any]:
    """Run the writers on one place, killing them; what is there at the end."""
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
                raise SystemExit(f"a writer of {place} ended with {os.WEXITSTATUS(status)}")
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
        there, damaged = {path.name for path, _ in files(storage(place), KEY)}, None
    except BaselineError as error:
        there, damaged = set[str](), str(error)
    baseline = Store(storage(place), FACTS).load() if damaged is None else Baseline()
    return {
        "place": place.partition("://")[0] if "://" in place else "folder",
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
    lines += [f"{'place':8}{'acknowledged':>14}{'lost':>6}{'damaged':>9}{'kills':>7}{'seconds':>9}"]
    for one in record["places"]:
        damaged = int(one["damaged"] is not None)
        lines.append(
            f"{one['place']:8}{one['acknowledged']:>14}{one['lost']:>6}{damaged:>9}{one['kills']:>7}{one['seconds']:>9.0f}"
        )
    return "\n".join(lines)


def kept(record: Mapping[str, Any]) -> bool:
    """True if nothing is lost or damaged."""
    wanted = record["writers"] * record["runs"]
    return all(
        one["acknowledged"] == wanted and not one["lost"] and one["damaged"] is None
        for one in record["places"]
    )


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
        folder = Path(made)
        for name in ("s3", "folder", "server"):
            (folder / name).mkdir()
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        places = [
            proved(str(folder / "baseline"), folder / "folder", asked.writers, asked.runs, rng)
        ]
        import s3fs  # noqa: F401  (once, and not in each writer)

        with s3_server.running(folder / "server") as server:
            os.environ.update(server.environment)
            places.append(
                proved(
                    f"s3://{s3_server.BUCKET}/base", folder / "s3", asked.writers, asked.runs, rng
                )
            )
    record = {
        "kind": "store_writers",
        "writers": asked.writers,
        "runs": asked.runs,
        "ended": utc_now(),
        "places": places,
    }
    if asked.out is not None:
        write_record(asked.out, record, indent=1)
    print(table(record))
    return 0 if kept(record) else 1


if __name__ == "__main__":
    sys.exit(main())
