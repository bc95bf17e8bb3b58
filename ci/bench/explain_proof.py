"""Does `gpumem explain` name what was planted? Eight planted regressions and four unchanged pairs, on one GPU.

    python ci/bench/explain_proof.py --json ci/records/nvidia-h200/explain_proof.json --keep tests/data/explain

Base and head are two folders with the same tests (`explain_planted.py`) and a word that tells them apart; `gpumem explain` is run on them
as a user would. Two runs, each written to the record as soon as it is over:

counted   kernels on device memory, with counters of Nsight Compute
watched   managed memory and the host link, by CUPTI in the processes themselves

Evidence is kept in small files, from which the same explanation is made without a GPU (tests/data/explain). Exits with 1 where a planted
cause is not named first in all but one, or where an unchanged pair is blamed. About 60 s and 25 s; --pairs 1 cuts each by a third, --only
picks a run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import record_parser, utc_now, write_record

from pytest_gpumem.explain import evidence
from pytest_gpumem.files import write_whole

HERE = Path(__file__).resolve().parent
COUNTED: Mapping[str, tuple[str, ...]] = {
    "test_persistence_off": ("window gone",),
    "test_set_aside_at_maximum": ("set-aside too large",),
    "test_thrashing": ("thrashing",),
    "test_stride_two": ("access pattern",),
    "test_misaligned_by_one": ("access pattern",),
    "test_more_bytes": ("more bytes",),
    "test_unchanged_triad": (),
    "test_unchanged_lookup": (),
}
WATCHED: Mapping[str, tuple[str, ...]] = {
    "test_prefetch_removed": ("page faults",),
    "test_pageable": ("pageable",),
    "test_unchanged_prefetched": (),
    "test_unchanged_copy": (),
}
"""Rules that are to be named first; none where nothing changed."""
UNEXPLAINED = "unexplained"
MISSES = 1
"""Planted causes that may be named otherwise, over all that can be named."""
SECONDS = 300.0
"""After which one run of `gpumem explain` is ended."""
Record = dict[str, Any]


def folders(place: Path) -> tuple[Path, Path]:
    """Base and head, ready to run."""
    made = []
    for side in ("base", "head"):
        folder = place / side
        folder.mkdir()
        shutil.copy(HERE / "explain_planted.py", folder / "test_planted.py")
        (folder / "side.txt").write_text(side, encoding="utf-8")
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        made.append(folder)
    return made[0], made[1]


def explain(
    place: Path, tests: Sequence[str], asked: argparse.Namespace, *, counters: bool
) -> Record:
    """One run of `gpumem explain` on both folders."""
    begun = time.monotonic()
    why, kept = place / "why.json", place / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    why.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-c",
        "from pytest_gpumem.cli import main; main()",
        "explain",
        "--base",
        "../base",
    ]
    command += [
        "--pairs",
        str(asked.pairs),
        "--json",
        str(why),
        "--keep",
        str(kept),
        *(
            ["--ncu", "--no-nsys"]
            if counters and not asked.device.startswith("sim")
            else ["--no-ncu"]
        ),
        *tests,
        "--",
    ]
    command += [
        "-p",
        "no:cacheprovider",
        "--gpumem-device",
        asked.device,
        "--gpumem-budget",
        asked.budget,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=place / "head",
            stdout=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        said, error = (
            done.stdout,
            None if done.returncode == 0 else f"exit status {done.returncode}",
        )
    except subprocess.TimeoutExpired:
        said, error = "", f"ended after {SECONDS:g} s"
    said = said.replace(f"{place}{os.sep}", "")  # of the machine that it ran on
    print(said, flush=True)
    found = json.loads(why.read_text(encoding="utf-8"))["explanations"] if why.exists() else []
    return {
        "explanations": found,
        "text": said,
        "error": error,
        "seconds": time.monotonic() - begun,
    }


def name_of(key: str) -> str:
    """ "test_planted.py::test_stride_two" is "test_stride_two"."""
    return key.rpartition("::")[2]


def judged(explanation: Record, planted: tuple[str, ...]) -> bool:
    """True if an explanation names the planted cause."""
    if not planted:
        return explanation["first"] in (None, UNEXPLAINED) and not explanation["causes"]
    return explanation["first"] in planted


def rows(explanations: Sequence[Record], planted: Mapping[str, tuple[str, ...]]) -> list[Record]:
    """One row for each case that was planted, also for those that were not measured."""
    by_name = {name_of(one["key"]): one for one in explanations}
    found = []
    for name, rules in planted.items():
        one = by_name.get(name)
        row: Record = {"name": name, "planted": list(rules), "measured": one is not None}
        if one is not None:
            row |= {
                "right": judged(one, rules),
                "first": one["first"],
                "slow_down": one["slow_down"],
                "base_seconds": one["base_seconds"],
                "head_seconds": one["head_seconds"],
                "causes": [
                    {name: cause[name] for name in ("rule", "share", "up_to", "sentence")}
                    for cause in one["causes"]
                ],
                "unexplained": one["unexplained"]["share"],
                "not_looked_at": one["not_looked_at"],
            }
        found.append(row)
    return found


def verdict(found: Sequence[Record]) -> tuple[str, bool]:
    """The result of the rows in one line, and whether it is enough."""
    planted, unchanged = (
        [row for row in found if bool(row["planted"]) is changed] for changed in (True, False)
    )
    named, quiet = (sum(bool(row.get("right")) for row in some) for some in (planted, unchanged))
    said = f"{named} of {len(planted)} planted causes named first, {quiet} of {len(unchanged)} unchanged pairs blamed on nothing"
    return said, bool(found) and named >= len(planted) - MISSES and quiet == len(unchanged)


def table(record: Record) -> str:
    """The record as text."""
    device = record["device"]
    simulated = " (simulated)" if device.get("simulated") else ""
    said = [f"{device['name']}{simulated}, driver {device['driver']}, {record['ended'][:10]}", ""]
    said.append(f"{'case':<28}{'slow-down':>11}  {'named first':<22}{'its share':>10}  planted")
    for row in record["rows"]:
        if not row["measured"]:
            said.append(f"{row['name']:<28}{'-':>11}  not measured")
            continue
        share = row["causes"][0]["share"] if row["causes"] else None
        planted = "/".join(row["planted"]) or "nothing"
        mark = "" if row["right"] else "   MISS"
        first = row["first"] or "nothing to explain"
        shown = "" if share is None else f"{100 * share:.0f} %"
        said.append(
            f"{row['name']:<28}{100 * row['slow_down']['share']:>+9.2f} %  {first:<22}{shown:>10}  {planted}{mark}"
        )
    said += ["", verdict(record["rows"])[0]]
    said += [f"{name}: {run['error']}" for name, run in record["runs"].items() if run["error"]]
    return "\n".join(said)


def keep(place: Path, kept: Path, found: Sequence[Record]) -> None:
    """Write each case's evidence into a folder of its own, with what is expected of it."""
    if not (kept / "base.json").exists():
        return
    sides = [evidence.load(str(kept / f"{name}.json")) for name in ("base", "head")]
    utc = utc_now()
    for row in found:
        key = next((key for key in sides[1].measured if name_of(key) == row["name"]), None)
        if key is None:
            continue
        folder = place / row["name"].removeprefix("test_")
        folder.mkdir(parents=True, exist_ok=True)
        for name, side in zip(("base", "head"), sides, strict=True):
            write_whole(
                folder / f"{name}.json",
                json.dumps(evidence.to_json(side, [key], utc=utc), indent=1) + "\n",
            )
        expected = {"planted": row["planted"], "first": row["first"], "right": row["right"]}
        write_whole(folder / "expected.json", json.dumps(expected, indent=1) + "\n")


def main() -> int:
    parser = record_parser(__doc__)
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="where the evidence is written, a folder for each case",
    )
    parser.add_argument(
        "--only", action="append", choices=("counted", "watched"), help="this run alone"
    )
    parser.add_argument("--pairs", type=int, default=2, help="processes of each side (default 2)")
    parser.add_argument("--budget", default="300 ms", help="of each measurement (default 300 ms)")
    asked = parser.parse_args()
    for folder in [asked.json.absolute().parent] if asked.json else []:
        if not folder.is_dir():
            parser.error(f"--json {asked.json}: there is no folder {folder}")
    record: Record = {
        "kind": "explain_proof",
        "device": None,
        "pairs": asked.pairs,
        "budget": asked.budget,
        "rows": [],
        "runs": {},
    }
    with tempfile.TemporaryDirectory(prefix="gpumem-explain-") as temporary:
        place = Path(temporary)
        folders(place)
        for name, cases in (("counted", COUNTED), ("watched", WATCHED)):
            if asked.only and name not in asked.only:
                continue
            done = explain(
                place,
                [f"test_planted.py::{one}" for one in cases],
                asked,
                counters=name != "watched",
            )
            found = rows(done.pop("explanations"), cases)
            record["rows"] += found
            record["runs"][name] = done
            if (place / "kept" / "head.json").exists():
                facts = evidence.load(str(place / "kept" / "head.json")).facts
                record["device"] = {
                    "name": facts.name,
                    "simulated": facts.simulated,
                    "driver": facts.driver,
                    "cuda": facts.cuda,
                    "uuid": facts.uuid,
                }
            record["ended"] = utc_now()
            if asked.keep is not None:
                keep(asked.keep, place / "kept", found)
            if asked.json is not None:
                write_record(asked.json, record, indent=1)
    if record["device"] is None:
        print("nothing was measured", file=sys.stderr)
        return 1
    print(table(record))
    return (
        0
        if verdict(record["rows"])[1] and not any(run["error"] for run in record["runs"].values())
        else 1
    )


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "140")
    sys.exit(main())
