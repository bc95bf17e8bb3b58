"""Does `gpumem bisect` find the commit? In git projects made for it, and in simulated searches without processes.

    python ci/bench/bisect_proof.py --json ci/records/no-gpu/bisect.json               # on the simulated device: minutes for a search
    python ci/bench/bisect_proof.py --device cuda --only counted --commits 16 --json ci/records/nvidia-h200/bisect.json

A project has one test, which copies an array, and some more per cent of bytes after the commits that are planted; every other commit
changes a comment. The record is written after every search. Prints it as a table. Exits with 1 if a search names a wrong commit, names
none where one is planted in commits that can be measured, or misses the promised rate beyond doubt.

    statistics  searches over noise, without processes: how often the shipped search (`runs.bisect`) names a wrong commit
    one         one slow-down, by times alone
    counted     one slow-down, with what a launch runs
    none        no slow-down
    two         two slow-downs: the larger or the smaller one is right, and the other must be announced
    trouble     one slow-down among commits that do not build or lack the test; the search is killed and called again
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from duet_simulation import NOISES, log_ratios
from gate_simulation import interval
from limit_proof import GPUMEM, PLANTED, TEST_COPY, planted
from record_file import record_parser, utc_now, write_record

from pytest_gpumem.commands import ROUNDS
from pytest_gpumem.judging.bisection import WRONG
from pytest_gpumem.judging.paired import Judge, Paired, judge_pairs
from pytest_gpumem.records.measurement import Conditions, Measurement
from pytest_gpumem.runs.bisect import bisect_times

SHARE = 0.03  # of a planted slow-down
WORDS = 1500  # last characters of a failed command that are recorded
SIMULATED_COPY = """
from planted import MORE
from pytest_gpumem import Case

NEEDED = 40 << 20  # elements


def test_copy(gpu_benchmark):
    def case(memory):
        x, y = (memory.device((NEEDED + int(NEEDED * MORE / 100),), "f4") for _ in range(2))

        def copy():
            y.view()[:] = x.view()

        return Case(copy, reference=copy, reads=[x], writes=[y], moved=2 * 4 * NEEDED)

    gpu_benchmark.case(case)
"""


# Statistics


SPREADS = (0.0012, 0.0053, 0.015)
"""Standard deviation between processes: of 32 MiB and of 2 MiB on an H200 (docs/explanation/judging.md); half of the planted slow-down."""
CHANGES: Mapping[str, tuple[tuple[float, float], ...]] = {
    "none": (),
    "one": ((0.3, SHARE),),
    "two equal": ((0.2, SHARE), (0.7, SHARE)),
    "two": ((0.2, SHARE / 2), (0.7, SHARE)),
}
"""Slow-downs: about where on the line, and by what share."""
LINE = 64


class _Drawn:
    """Commits whose processes are drawn: each duet has noise of its own."""

    def __init__(
        self, slower: Sequence[float], noise: str, spread: float, rng: np.random.Generator
    ) -> None:
        self._slower = slower
        self._noise, self._spread, self._rng = noise, spread, rng
        self._drawn: dict[tuple[int, int, str], list[float]] = {}
        self.pairs = 0

    def look(self, _index: int) -> Measurement:
        return _UNWATCHED

    def time(self, base: int, head: int, judge: Judge, name: str) -> Paired:
        change = math.expm1(self._slower[head] - self._slower[base])
        values = self._drawn.setdefault((base, head, name), [])
        fresh = not values
        if fresh:
            values += log_ratios(self._rng, self._noise, self._spread, change)
        for count in range(1, ROUNDS + 1):
            found = judge({"": values[:count]}, {"": 0.01}, ())[""]
            if found.outcome is not None:
                break
        self.pairs += count if fresh else 0
        return found


_UNWATCHED = Measurement(
    label="", target="", mode="", sampler="host", sampler_reason="", placements=((1.0,),), half_width=None,
    moved_bytes=None, footprint=None, floor=0.0, conditions=(Conditions(), Conditions()), overhead=0.0,
)  # fmt: skip


def drawn_searches(job: tuple[str, float, str, int, int]) -> tuple[Counter[str], list[int]]:
    """The ends of searches, and their pairs; the job is noise, spread, case, seed, count."""
    noise, spread, case, seed, count = job
    rng = np.random.default_rng(
        [seed, *(ord(letter) for letter in noise + case), int(spread * 1e6)]
    )
    ends: Counter[str] = Counter()
    pairs = []
    for _ in range(count):
        places = {
            1 + int(min(0.999, max(0.0, place + rng.uniform(-0.19, 0.19))) * LINE): share
            for place, share in CHANGES[case]
        }
        slower = [
            sum(math.log1p(share) for place, share in places.items() if index >= place)
            for index in range(LINE + 1)
        ]
        commits = _Drawn(slower, noise, spread, rng)
        found = bisect_times(
            LINE,
            commits.time(0, LINE, judge_pairs, ""),
            commits.look,
            commits.time,
            lambda *_: None,
        )
        name = (
            "nothing"
            if found.nothing
            else "undecided"
            if found.commit is None
            else "right"
            if found.commit in places
            else "wrong"
        )
        ends[name] += 1
        pairs.append(commits.pairs)
    return ends, pairs


def statistics(count: int, workers: int) -> Iterator[dict[str, Any]]:
    """An entry for each noise, spread and case."""
    part = 50
    cases = [(noise, spread, case) for case in CHANGES for spread in SPREADS for noise in NOISES]
    with ProcessPoolExecutor(workers) as pool:
        jobs = [(*case, seed, part) for case in cases for seed in range(math.ceil(count / part))]
        results = pool.map(drawn_searches, jobs)
        for noise, spread, case in cases:
            ends: Counter[str] = Counter()
            pairs: list[int] = []
            for _ in range(math.ceil(count / part)):
                more, further = next(results)
                ends += more
                pairs += further
            median = sorted(pairs)[len(pairs) // 2]
            yield {
                "noise": noise,
                "spread": spread,
                "case": case,
                "ends": dict(ends),
                "pairs": median,
            }


# Searches


class Project:
    """A git project whose commits plant slow-downs, in a temporary folder."""

    def __init__(
        self,
        folder: Path,
        commits: int,
        more: Mapping[int, float],
        broken: Mapping[int, str],
        *,
        simulated: bool,
    ) -> None:
        """`more`: per cent of bytes by the commit that adds them. `broken`: text of planted.py, or "" for no test, by commit."""
        self.folder = folder / "project"
        self.folder.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")
        self.ids: list[str] = []
        test = (SIMULATED_COPY if simulated else TEST_COPY).lstrip("\n")
        (self.folder / "pytest.ini").write_text("[pytest]\n")
        for index in range(commits + 1):
            share = sum(per_cent for place, per_cent in more.items() if index >= place)
            (self.folder / "planted.py").write_text(
                f"{broken.get(index) or planted(share)}# commit {index}\n"
            )
            (self.folder / "test_copy.py").write_text(
                "def test_other():\n    pass\n" if broken.get(index) == "" else test
            )
            self.git("add", "-A")
            self.git("commit", "-qm", f"commit {index}")
            self.ids.append(self.git("rev-parse", "HEAD").strip())

    def git(self, *words: str) -> str:
        command = [
            "git",
            "-c",
            "user.name=somebody",
            "-c",
            "user.email=somebody@example.org",
            "-c",
            "commit.gpgsign=false",
            *words,
        ]
        return subprocess.run(
            command, cwd=self.folder, check=True, capture_output=True, text=True
        ).stdout


def search(
    folder: Path,
    options: argparse.Namespace,
    *,
    more: Mapping[int, float],
    broken: Mapping[int, str],
    evidence: bool,
    kills: int,
) -> dict[str, Any]:
    """Make a project, search it, and note what was found."""
    project = Project(
        folder, options.commits, more, broken, simulated=options.device.startswith("sim")
    )
    journal, out = folder / "journal", folder / "out.json"
    arguments = [
        f"--gpumem-device={options.device}",
        f"--gpumem-budget={options.budget}",
        "-p",
        "no:cacheprovider",
        *options.pytest_arguments,
    ]
    arguments += [] if evidence else ["--gpumem-no-what-ran"]
    command = [
        *GPUMEM,
        "bisect",
        "--good",
        project.ids[0],
        PLANTED,
        "--journal",
        str(journal),
        "--json",
        str(out),
        "--",
        *arguments,
    ]
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GPUMEM_", "PYTEST_", "GIT_", "GITHUB_"))
    }
    environment = {**kept, "TMPDIR": str(folder)}
    begun = time.monotonic()
    killed = 0
    with (folder / "output").open("w+") as output:
        while True:
            process = subprocess.Popen(
                command,
                cwd=project.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                # After a third of the processes that a search of 64 commits takes, and after two thirds.
                while process.poll() is None and not (
                    killed < kills and _lines(journal) > 20 * (killed + 1)
                ):
                    if time.monotonic() - begun > options.timeout:
                        raise TimeoutError
                    time.sleep(0.1)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, TimeoutError):
                    raise
                return {
                    "planted": dict(more),
                    "error": f"no end within {options.timeout:g} s",
                    "words": _last(output),
                }
            if process.poll() is None:
                process.kill()
                process.wait()
                killed += 1
                continue
            break
        seconds = time.monotonic() - begun
        entry: dict[str, Any] = {
            "commits": options.commits,
            "planted": dict(more),
            "evidence": evidence,
            "killed": killed,
            "exit": process.returncode,
        }
        entry |= {"seconds": round(seconds, 1)}
        if not out.exists():
            return {**entry, "error": "no results", "words": _last(output)}
    document = json.loads(out.read_text())
    found = document["found"]
    trees = project.git("worktree", "list").count("\n") - 1
    return entry | {
        "device": document["device"],
        "simulated": document["simulated"],
        "found": None if found is None else project.ids.index(found["commit"]),
        "change": None if found is None else found["paired"],
        "share": None if found is None else found["share"],
        "another": None if found is None else found["another"] is not None,
        "left": [project.ids.index(one) for one in document["left"]],
        "whole": document["whole"],
        "steps": len(document["steps"]),
        "same_code": sum(step["same_as"] is not None for step in document["steps"]),
        "skipped": sorted(
            project.ids.index(step["commit"])
            for step in document["steps"]
            if step["skipped"] is not None
        ),
        "duets": document["duets"],
        "processes": document["processes"],
        "resumed": document["resumed"],
        "explained": document["explanation"] is not None,
        "left_behind": trees + len([*folder.glob("gpumem-duet-*")]),
    }


def _lines(folder: Path) -> int:
    return (
        sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))
        if folder.exists()
        else 0
    )


def _last(output: Any) -> str:
    output.seek(0)
    return str(output.read()[-WORDS:])


def searches(part: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One search of a part; the seed draws the commits."""
    rng = random.Random(f"{part} {seed}")
    first, second = sorted(rng.sample(range(1, options.commits + 1), 2))
    more: dict[int, float] = {}
    broken: dict[int, str] = {}
    if part == "two":
        more = {first: 100 * SHARE, second: 200 * SHARE}
    elif part != "none":
        more = {rng.randrange(1, options.commits + 1): 100 * SHARE}
    if part == "trouble":
        place = next(iter(more))
        # Not the ends, nor the two commits that the change lies between.
        others = [index for index in range(1, options.commits) if index not in (place - 1, place)]
        middle = options.commits // 2
        chosen = {
            *rng.sample(others, len(others) // 3),
            *(index for index in (middle, middle + 1) if index in others),
        }
        broken = {
            index: rng.choice(("", "raise ImportError('does not build')\n")) for index in chosen
        }
    entry = search(
        folder,
        options,
        more=more,
        broken=broken,
        evidence=part in ("counted", "trouble"),
        kills=2 * (part == "trouble"),
    )
    return {"seed": seed, **entry}


# The record


def wrong(record: Mapping[str, Any]) -> list[str]:
    """A sentence for each broken promise."""
    found = []
    for part, entries in record["parts"].items():
        for entry in entries:
            if part == "statistics":
                count = sum(entry["ends"].values())
                if interval(entry["ends"].get("wrong", 0), count)[0] > WRONG:
                    found.append(
                        f"{entry['case']}, {entry['noise']}, {entry['spread']}: {entry['ends'].get('wrong', 0)} of {count} wrong"
                    )
                continue
            places = [int(place) for place in entry["planted"]]
            name = f"{part}, seed {entry['seed']}"
            if "error" in entry:
                found.append(f"{name}: {entry['error']}")
            elif (entry["found"] not in places) if places else entry["exit"] != 1:
                found.append(f"{name}: found {entry['found']}, planted {places or 'none'}")
            elif entry["left_behind"] or (part == "two" and not entry["another"]):
                found.append(
                    f"{name}: {'leaves worktrees' if entry['left_behind'] else 'the other one is not announced'}"
                )
    return found


def table(record: Mapping[str, Any]) -> str:
    """The record as text."""
    lines = []
    if rows := record["parts"].get("statistics"):
        lines += _statistics(rows)
    parts = {part: entries for part, entries in record["parts"].items() if part != "statistics"}
    if parts:
        device = next(
            (
                entry["device"]
                for entries in parts.values()
                for entry in entries
                if "device" in entry
            ),
            None,
        )
        if device is not None:
            driver = f", driver {device['driver']}" if device["driver"] else ""
            lines += [
                f"{'SIMULATED ' if record['simulated'] else ''}{device['name']}{driver}, {record['ended'][:10]}",
                "",
            ]
        names = f"{'change':>10}{'duets':>7}{'processes':>11}{'skipped':>9}{'seconds':>9}"
        lines.append(f"{'search':<9}{'commits':>8} {'planted':<10}{'found':>6}{names}")
    for part, entries in parts.items():
        for entry in entries:
            places = ", ".join(str(place) for place in entry["planted"]) or "none"
            if "error" in entry:
                lines.append(f"{part:<9}{entry.get('commits', ''):>8} {places:<10}{entry['error']}")
                continue
            change = "" if entry["change"] is None else f"{100 * entry['change']['change']:+.2f} %"
            lines.append(
                f"{part:<9}{entry['commits']:>8} {places:<10}{'none' if entry['found'] is None else entry['found']:>6}{change:>10}"
                f"{entry['duets']:>7}{entry['processes']:>11}{len(entry['skipped']):>9}{entry['seconds']:>9.0f}"
            )
    broken = wrong(record)
    return "\n".join(
        [
            *lines,
            "",
            f"not as promised: {len(broken) or 'none'}",
            *(f"MISS  {sentence}" for sentence in broken),
        ]
    )


def _statistics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cases: dict[tuple[str, float], dict[str, Counter[str]]] = {}
    pairs = {}
    for row in rows:
        cases.setdefault((row["noise"], row["spread"]), {})[row["case"]] = Counter(row["ends"])
        if row["case"] == "one":
            pairs[row["noise"], row["spread"]] = row["pairs"]
    lines = [
        f"SIMULATED, no GPU and no processes: searches of {LINE} commits",
        f"one, two equal: slow-downs of {100 * SHARE:g} %; two: of {50 * SHARE:g} and {100 * SHARE:g} %",
        "shares of searches that end right, in %: nothing to find, or one of the commits; most of the others name no commit",
        "spread: standard deviation between processes; pairs: of processes of a search for one slow-down, median",
        "",
        f"{'noise':<14}{'spread %':>9}"
        + "".join(f"{case:>11}" for case in CHANGES)
        + f"{'pairs':>8}{'wrong':>8}",
    ]
    for (noise, spread), ends in cases.items():
        shares = [
            100 * found["nothing" if case == "none" else "right"] / max(1, found.total())
            for case in CHANGES
            for found in (ends.get(case, Counter()),)
        ]
        wrong_ones = sum(found["wrong"] for found in ends.values())
        text = "".join(f"{share:>11.1f}" for share in shares)
        lines.append(
            f"{noise:<14}{100 * spread:>9.2f}{text}{pairs.get((noise, spread), 0):>8}{wrong_ones:>8}"
        )
    every: Counter[str] = sum(
        (found for ends in cases.values() for found in ends.values()), Counter()
    )
    low, high = (100 * end for end in interval(every["wrong"], every.total()))
    return [
        *lines,
        f"wrong: {every['wrong']} of {every.total()} searches, {low:.3f} to {high:.3f} %",
        "",
    ]


PARTS = ("statistics", "one", "counted", "none", "two", "trouble")


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, print and record."""
    assert __doc__
    parser = record_parser(__doc__, device="sim")
    parser.add_argument(
        "--budget", default="100ms", help="as --gpumem-budget (default: %(default)s)"
    )
    parser.add_argument(
        "--commits", type=int, default=LINE, help="of each project (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"of {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="searches of each part (default: 0)"
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=200,
        help="simulated searches of each case (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="processes that draw (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800.0, help="seconds of one search (default: %(default)s)"
    )
    parser.add_argument(
        "pytest_arguments",
        nargs="*",
        metavar="PYTEST_ARGUMENT",
        help="after --, for every process that measures",
    )
    options = parser.parse_args(arguments)
    if options.commits < 4 or min(options.trials, options.workers) < 1:
        parser.error(
            f"--commits {options.commits}, --trials {options.trials}, --workers {options.workers}: at least 4, 1 and 1"
        )
    record: dict[str, Any] = {
        "kind": "bisect_proof",
        "simulated": options.device.startswith("sim"),
        "budget": options.budget,
        "parts": {},
    }
    if options.json is not None and options.json.exists():
        record = json.loads(options.json.read_text())

    def note(part: str, entry: dict[str, Any]) -> None:
        record["parts"].setdefault(part, []).append(entry)
        record["ended"] = utc_now()
        if options.json is not None:
            write_record(options.json, record, indent=1)
        print(f"{part}: {json.dumps(entry)[:300]}", file=sys.stderr, flush=True)

    for part in options.only:
        if part == "statistics":
            record["parts"].pop(part, None)
            for entry in statistics(options.trials, options.workers):
                note(part, entry)
            continue
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                note(part, searches(part, seed, options, Path(folder).resolve()))
    print(table(record))
    return 1 if wrong(record) else 0


if __name__ == "__main__":
    sys.exit(main())
