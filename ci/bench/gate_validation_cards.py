"""Do cards of one name agree? Rows of the gate's validation by card, and unchanged code of one card against the baseline of another.

    python ci/bench/gate_validation_cards.py

From the records of ci/records that were measured as by default, without a GPU. A card's sort is told by a row that all of them have. In
later records the latency of DRAM among the controls tells it too, and verdicts go by that (`pytest_gpumem.verdicts.sorts`).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from gate_validation_collect import UNIT, unpacked
from gate_validation_verdicts import LETTERS, UNCHANGED, Data, scenarios

from pytest_gpumem.compare.pairs import compare_sides
from pytest_gpumem.verdicts.sorts import APART

RECORDS = Path(__file__).resolve().parents[1] / "records" / "nvidia-h200"
SHOWN = ("triad-256", "copy-256", "triad-32", "copy-32", "dot-32", "offset_copy-32", "permuted_copy-32", "triad-2", "chase")
TELLING = "offset_copy-32"
"""A row that every card has and that differs between sorts."""
RUNS = 20
"""Runs of a row, one process each, that another card is judged by at most."""


@dataclass(frozen=True)
class Card:
    """One card of a record."""

    name: str
    data: Data

    def seconds(self, row: str) -> float | None:
        """Mean over the processes, less the launch overhead; None where the card has no such row."""
        if row not in self.data.kinds:
            return None
        processes = self.data.processes.values()
        found = [statistics.fmean(unpacked(one["rows"][row]["m"])) - UNIT * one["overhead"] for one in processes if row in one["rows"]]
        return statistics.fmean(found)

    def same_sort(self, other: Card) -> bool:
        """Whether both cards take the same time for the row that tells."""
        mine, theirs = self.seconds(TELLING), other.seconds(TELLING)
        assert mine is not None
        assert theirs is not None
        return abs(math.log(mine / theirs)) <= math.log1p(APART / 2)


def cards() -> list[Card]:
    """All cards of records that were measured as by default."""
    found = []
    for path in sorted(RECORDS.glob("gate_validation*.json")):
        record: dict[str, Any] = json.loads(path.read_text())
        if not record["options"]:
            found += [Card(card["device"]["uuid"].split("-")[1], Data(card)) for card in record["cards"]]
    return found


def crossed(base: Card, head: Card) -> Counter[str]:
    """Verdicts on unchanged code of one card against the baseline of another, at the limits that one process is held to."""
    kinds = {row: kind for row, kind in base.data.kinds.items() if row in head.data.kinds}
    (asked,) = (one for one in scenarios(kinds) if one.name == UNCHANGED)
    # Twins have other sizes on other cards; a bimodal row is another launch in each mode.
    rows = {row: row for row in asked.rows if "+" not in row and row != "bimodal"}
    known, found = base.data.side(base.data.baseline, rows, asked.limits), Counter[str]()
    for run in head.data.runs(1)[:RUNS]:
        pairs = compare_sides(known, head.data.side(run, rows, asked.limits), None, force=False).pairs
        found.update(LETTERS[pair.row.verdict.outcome] for pair in pairs)
    return found


def lines(found: list[Card]) -> Iterator[str]:
    """The tables."""
    yield "us of a launch without its overhead, mean over the card's processes"
    yield f"{'card':<9} {'overhead':>8} " + " ".join(f"{row:>16}" for row in SHOWN)
    for card in found:
        overhead = 1e6 * UNIT * statistics.fmean(one["overhead"] for one in card.data.processes.values())
        cells = ("" if (seconds := card.seconds(row)) is None else f"{1e6 * seconds:.2f}" for row in SHOWN)
        yield f"{card.name:<9} {overhead:>8.2f} " + " ".join(f"{cell:>16}" for cell in cells)
    yield ""
    yield "unchanged code of one card against the baseline of another, one process a run"
    yield f"{'':<24} {'pairs of cards':>14} {'verdicts':>8} {'FAIL':>5} {'SUSP.':>5} {'INC.':>5} {'PASS':>5}"
    for same, what in ((True, "of the same sort"), (False, "of another sort")):
        both = [(base, head) for base in found for head in found if base is not head and base.same_sort(head) == same]
        total = sum((crossed(base, head) for base, head in both), Counter[str]())
        yield f"{what:<24} {len(both):>14} {total.total():>8} " + " ".join(f"{total[letter]:>5}" for letter in "FSIP")


def main() -> int:
    """Print."""
    print("\n".join(line.rstrip() for line in lines(cards())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
