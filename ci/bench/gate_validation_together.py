"""What all records of the gate's validation on GPUs show together.

    python ci/bench/gate_validation_together.py

A slow-down counts where its twin turned out to be as slow as it was meant to be; every verdict about unchanged code counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from gate_validation_summary import ALARMS, interval, tallies, targets, together
from gate_validation_tables import MET
from gate_validation_verdicts import UNCHANGED

RECORDS = Path(__file__).resolve().parents[1] / "records"


def lines(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Of the records together, those that measured in one way at a time."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        ways.setdefault(" ".join(record["options"]) or "measured as by default", []).append(record)
    for way, ones in sorted(ways.items(), key=lambda one: -len(one[1])):
        yield from _of(ones, way)
        if len(ways) > 1:
            yield ""
    if len(ways) > 1:
        yield from _alarms(records, "all of them, unchanged code")


def _of(records: Sequence[dict[str, Any]], way: str) -> Iterator[str]:
    cards = {card["device"]["uuid"] for record in records for card in record["cards"]}
    processes = sum(len(card["processes"]) for record in records for card in record["cards"])
    names = sorted({card["device"]["name"] for record in records for card in record["cards"]})
    days = sorted({record["ended"][:10] for record in records})
    said = f"{days[0]} to {days[-1]}" if len(days) > 1 else days[0]
    many = "record" if len(records) == 1 else "records"
    yield f"{len(records)} {many} of {', '.join(names)}, {way}: {processes} processes on {len(cards)} cards, {said}"
    for target in targets(*records):
        yield f"{MET[target.met]:<8} {target.sentence}"
    yield from _alarms(records, "unchanged code")


def _alarms(records: Sequence[dict[str, Any]], what: str) -> Iterator[str]:
    every = together(tally for record in records for (name, _), tally in tallies(record["verdicts"]).items() if name == UNCHANGED)
    low, high = interval(every.caught, every.count)
    share, fails, doubts = every.caught / every.count, every.letters["F"], every.letters["S"]
    bounds = f"95 % interval {100 * low:.3f} to {100 * high:.3f} %; promised {100 * ALARMS:g} %"
    yield f"{what}: {fails} FAIL and {doubts} SUSPECT of {every.count} verdicts, {100 * share:.3f} % ({bounds})"


def main() -> int:
    """Print."""
    found = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*/gate_validation*.json"))]
    print("\n".join(lines([record for record in found if not record["simulated"]])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
