"""Write what cards of each model showed, which ships with the package for `gpumem card`, from the records.

    python ci/card_reference.py            # writes pytest_gpumem/doctor/cards.json
    python ci/card_reference.py --check    # exits with 1 where that file is not what the records give

A card's figures are those of `gpumem card --json` (ci/records/*/card*.json), and where it has no such record, those of the suite's rows,
which time the same kernels over the same arrays. Two ways of timing widen the spread between cards, and so the limits, and never narrow
them. Simulated cards are measured here, one for each seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import asdict

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.doctor.card import model
from pytest_gpumem.files import write_whole
from pytest_gpumem.kernels.l2_bandwidth import TILE_BYTES
from pytest_gpumem.measuring.card import examine
from pytest_gpumem.records.device import CardFigures
from pytest_gpumem.units import MiB

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "pytest_gpumem/doctor/cards.json"
SEEDS = range(1, 6)  # of simulated cards; the one of a session is another
DIGITS = 5  # significant digits of a figure
STREAMED = 512 * MiB
BYTES = {"test_read": ("dram_read", STREAMED), "test_write": ("dram_write", STREAMED), "test_copy": ("dram_copy", 2 * STREAMED)}
"""By test of the suite, the figure that it gives, and its bytes."""


class Seen(NamedTuple):
    """A figure of a card in a record."""

    name: str
    card: str
    device: dict[str, Any]
    figures: dict[str, float]
    whole: bool = False  # a record of `gpumem card`


def main() -> int:
    """Write or check the file."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    text = document(ROOT / "ci/records")
    if parser.parse_args().check:
        return int(TARGET.read_text() != text)
    write_whole(TARGET, text)
    return 0


def document(records: Path) -> str:
    """The file's text, from a folder of records."""
    models = {**measured(records), **simulated()}
    lines = [
        f"{json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(card)}" for card in cards) + "\n]" for name, cards in sorted(models.items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def measured(records: Path) -> dict[str, list[dict[str, Any]]]:
    """By model, each card on record, without its UUID."""
    found: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for path in sorted(records.glob("nvidia-*/*.json")):
        for seen in of_record(json.loads(path.read_text())):
            found[seen.name, seen.card].append(seen)
    models: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (name, _), every in sorted(found.items()):
        chosen = [seen for seen in every if seen.whole] or every
        figures = {
            field: statistics.fmean(values)
            for field in CardFigures.__struct_fields__
            if (values := [seen.figures[field] for seen in chosen if seen.figures.get(field) is not None])
        }
        if not figures:
            continue
        facts = {key: value for seen in chosen for key in ("ecc", "link") if (value := seen.device.get(key)) is not None}
        models[name].append(known(figures, facts))
    return models


def of_record(record: Any) -> Iterator[Seen]:
    """The figures in a record, if it has any."""
    if not isinstance(record, dict):
        return
    if record.get("kind") == "card":
        yield Seen(record["device"]["name"], record["device"]["uuid"], record["device"], record["figures"], whole=True)
    elif record.get("kind") == "two_workers":
        for run in record["runs"]:
            for row, measured in run["rows"].items() if run["workers"] == 0 else ():
                if (one := BYTES.get(row.rpartition("::")[2])) is not None:
                    device = record["device"] if record["device"]["uuid"] == measured["card"] else {}
                    yield Seen(record["device"]["name"], measured["card"], device, {one[0]: one[1] / measured["latency"]})
    elif record.get("kind") == "host_link" and "each_way" in record:
        device, ways = record["device"], record["each_way"]
        rates = {f: record["bytes"] / ways[way]["pinned"] for f, way in (("to_device", "host to device"), ("to_host", "device to host"))}
        yield Seen(device["name"], device["uuid"], device, rates)
    elif record.get("kind") == "between_processes":
        device = record["device"]
        for row in record.get("summary", ()):
            if row["row"].endswith("test_l2_answers_sooner_than_dram[L2]"):
                yield Seen(device["name"], device["uuid"], device, {"l2_latency": row["mean"]})
            elif row["row"].endswith("test_l2_answers_sooner_than_dram[DRAM]"):
                yield Seen(device["name"], device["uuid"], device, {"dram_latency": row["mean"]})
    elif isinstance(record.get("gpumem"), dict):
        device = record["gpumem"]["device"]
        for row in record["gpumem"]["rows"]:
            if row["measurement"] is not None:
                yield Seen(device["name"], device["uuid"], device, of_row(row, device))


def of_row(row: dict[str, Any], device: dict[str, Any]) -> dict[str, float]:
    """The figure of a row of the suite; none for most."""
    test, label, measurement = row["nodeid"].rpartition("::")[2], row["label"], row["measurement"]
    seconds = measurement["latency"]
    if row["nodeid"].startswith("tests/memory/test_stream.py") and test in BYTES:
        return {BYTES[test][0]: BYTES[test][1] / seconds}
    if test == "test_pinned_reaches_most_of_the_link":
        return {{"host to device": "to_device", "device to host": "to_host"}[label]: measurement["traffic"]["reads"] / seconds}
    if test == "test_l2_answers_sooner_than_dram":
        return {{"L2": "l2_latency", "DRAM": "dram_latency"}[label]: measurement["latency_per_access"]}
    if test == "test_l2_read_bandwidth_has_a_knee" and label == "0.25 of L2":
        nbytes = device["l2_bytes"] // 4 // TILE_BYTES * TILE_BYTES
        return {"l2_read": (64 * nbytes + 64 * nbytes // TILE_BYTES * 4) / seconds}
    return {}


def simulated() -> dict[str, list[dict[str, Any]]]:
    """By model, what simulated cards show."""
    models = {}
    for name in sorted(DATASHEETS):
        cards = []
        for seed in SEEDS:
            chosen = choose(f"sim:{name}", seed=seed)
            device = chosen.open()
            figures = examine(device, chosen.card).figures
            device.close()
            cards.append(known(asdict(figures), {"ecc": chosen.facts.ecc, "link": chosen.facts.link}))
        models[model(chosen.facts)] = cards
    return models


def known(figures: dict[str, float], facts: dict[str, Any]) -> dict[str, Any]:
    """A card as the file has it."""
    return {"figures": {field: float(f"{value:.{DIGITS}g}") for field, value in figures.items()}, **facts}


if __name__ == "__main__":
    sys.exit(main())
