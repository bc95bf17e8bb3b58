"""What an NVTX range costs where no tool listens.

    python ci/bench/range_cost.py [--repeats 41] [--json FILE]

Needs no GPU. Times loops around a range with a payload and a category and around nothing, in turn, by the process's own CPU time, so that
others on the machine do not count; beside it the same range by nvtx itself, anew and on a domain without a tool. Exits with 1 where the
median is above the limit of 0.2 us.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import write_record

from pytest_gpumem.ranges import DOMAIN, Ranges

LIMIT = 0.2e-6
"""Seconds."""
ROUNDS = 20_000
"""Ranges of one loop."""
NAME = "test_triad.launch"

Loop = Callable[[int], None]


def empty(rounds: int) -> None:
    for _ in range(rounds):
        pass


def ours(rounds: int) -> None:
    ranges = Ranges()
    for _ in range(rounds):
        with ranges.range(NAME, 3 << 20, "DRAM"):
            pass


def by_a_domain(rounds: int) -> None:
    import nvtx

    domain = nvtx.get_domain(DOMAIN)
    attributes = domain.get_event_attributes(message=NAME, category="DRAM", payload=3 << 20)
    for _ in range(rounds):
        domain.push_range(attributes)
        domain.pop_range()


def anew(rounds: int) -> None:
    import nvtx

    for _ in range(rounds):
        with nvtx.annotate(NAME, domain=DOMAIN, category="DRAM", payload=3 << 20):
            pass


LOOPS: dict[str, Loop] = {"ours": ours, "a domain of nvtx": by_a_domain, "nvtx.annotate anew": anew}


def costs(repeats: int, loops: dict[str, Loop], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of one range in every repeat, by loop; the empty loop of the same repeat is taken off."""

    def took(loop: Loop) -> float:
        begun = time.process_time()
        loop(rounds)
        return (time.process_time() - begun) / rounds

    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repeats):
        nothing = took(empty)
        for name, loop in loops.items():
            found[name].append(took(loop) - nothing)
    return found


def table(record: dict[str, Any]) -> str:
    """The record's figures as text."""
    where = f"{record['processor']}, Python {record['python']}, nvtx {record['versions']['nvtx']}, {record['ended'][:10]}"
    lines = [where, "", f"{'CPU time of one range without a tool':38}{'median':>9}{'least':>9}{'most':>9}"]
    for name, seconds in record["seconds"].items():
        ordered = (statistics.median(seconds), min(seconds), max(seconds))
        lines.append(f"{name:38}" + "".join(f"{1e9 * value:6.0f} ns" for value in ordered))
    return "\n".join(lines)


def processor() -> str:
    """The name of the host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=41, help="loops of each kind (default 41)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times to FILE")
    chosen = parser.parse_args()
    if chosen.repeats < 5:
        parser.error(f"--repeats {chosen.repeats}: a median needs at least 5")
    if any(name.startswith(("NVTX_", "NSYS_")) for name in os.environ) or Ranges().tool_attached():
        sys.exit("range_cost: a tool listens to NVTX, or a variable NVTX_* or NSYS_* is set: this is about the cost without one")
    seconds = costs(chosen.repeats, LOOPS)
    record = {
        "kind": "range_cost",
        "limit": LIMIT,
        "rounds": ROUNDS,
        "processor": processor(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("nvtx", "pytest-gpumem")},
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": seconds,
    }
    print(table(record))
    if chosen.json is not None:
        write_record(chosen.json, record, indent=1)
    return 1 if statistics.median(seconds["ours"]) > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
