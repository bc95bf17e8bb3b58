"""Does the gate keep its promises on a real GPU? Unchanged and slower code through its own verdicts, beside the peers'.

Fresh processes measure some fifty rows each, one process at a time on each card: sessions of pytest with this plugin. Some of the rows are
twins of others, slower by a known share (`gate_validation_rows`). The verdicts follow from these raw data alone, by the shipped code
(`gate_validation_verdicts`): the first processes are the baseline, all others are heads. `gate_validation_table` draws them.

    python ci/bench/gate_validation.py --seconds 420 --json ci/records/nvidia-h200/gate_validation.json
    python ci/bench/gate_validation.py --device cuda:0 --device cuda:1 --seconds 300 --json FILE    # two cards at the same time
    python ci/bench/gate_validation.py --rows minute --works OLD --seconds 65 --raw --json FILE     # a session of a minute
    python ci/bench/gate_validation.py --judge FILE [MORE ...]    # the verdicts anew, also of the sessions of more records; without a GPU

The sessions are added to those that FILE has. How much more work makes a launch slower by a share, the twins of an earlier record tell
(`--works`; of several, the mean); without one, as much more as the share. `--raw` leaves out the verdicts, which need no GPU. `--simulated`
draws the raw data at random; no device takes part. Exits with 1 if unchanged code FAILs or nothing could be measured. Ended by SIGTERM or
Ctrl-C, it writes what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from gate_validation_collect import Stop, measured, simulated
from gate_validation_rows import SETS
from gate_validation_table import table
from gate_validation_verdicts import SEVERAL, UNCHANGED, baseline_of, judged, seen_slopes
from record_file import installed

from pytest_gpumem.devices.opening import NoDevice, choose
from pytest_gpumem.files import write_whole
from pytest_gpumem.records.schema import device_to_json

__all__ = ["table"]  # ci/renew_tables.py asks for it here

JUDGING = 25.0
"""Seconds of `--seconds` that are left for the verdicts."""
PROCESSES = 10_000


def collect(
    devices: list[str], options: argparse.Namespace, known: dict[str, float]
) -> list[dict[str, Any]]:
    """The cards' raw data, all cards at the same time; those that measured nothing are left out. `known`: as for `measured`."""
    stop = Stop(
        options.seconds - (0 if options.raw else JUDGING), options.processes, time.monotonic()
    )

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        _ended_by_signals(stop.asked),
        ThreadPoolExecutor(len(devices)) as pool,
    ):
        places = [Path(folder, str(index)) for index in range(len(devices))]
        for place in places:
            place.mkdir()
        waiting = [
            pool.submit(
                measured,
                device,
                places[i],
                options.seed + i,
                stop,
                tell,
                SETS[options.rows].rows,
                known,
            )
            for i, device in enumerate(devices)
        ]
        return [card for one in waiting if (card := one.result())["processes"]]


@contextlib.contextmanager
def _ended_by_signals(asked: threading.Event) -> Iterator[None]:
    """The first signal lets the process that measures come to its end."""
    before = {
        number: signal.signal(number, lambda *_: asked.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def versions() -> dict[str, str]:
    """Of what takes part."""
    names = (
        "pytest-gpumem",
        "pytest",
        "pytest-benchmark",
        "numpy",
        "cupy-cuda13x",
        "cuda-bindings",
    )
    return {"python": platform.python_version(), **installed(*names)}


def write(path: Path | None, record: dict[str, Any]) -> None:
    """One line for each process, so that two records can be compared."""
    if path is None:
        return
    cards = [{**card, "processes": []} for card in record["cards"]]
    text = json.dumps({**record, "cards": cards}, separators=(",", ":"))
    for card in record["cards"]:
        lines = ",\n".join(
            json.dumps(process, separators=(",", ":")) for process in card["processes"]
        )
        text = text.replace('"processes":[]', f'"processes":[\n{lines}\n]', 1)
    write_whole(path, text + "\n")


def finish(path: Path | None, record: dict[str, Any], *, raw: bool = False) -> int:
    """Judge, write, print; gives the exit code."""
    write(path, record)
    if raw:
        print(
            f"{sum(len(card['processes']) for card in record['cards'])} processes; --judge adds the verdicts"
        )
        return 0
    record["verdicts"] = judged(record)
    write(path, record)
    print(table(record))
    unchanged = (
        one for one in record["verdicts"]["screens"] if one["question"] in (UNCHANGED, SEVERAL)
    )
    return 1 if any("F" in one["outcomes"] for one in unchanged) else 0


def joined(before: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """A record with the sessions of an earlier one before its own.

    Raises:
        ValueError: the sessions were measured in different ways or on different GPUs, or one of its own has no head beside its baseline.
    """
    base = sum(baseline_of(record))
    for card in record["cards"]:
        if (key := card["device"]["key"]) != (known := before["cards"][0]["device"]["key"]):
            raise ValueError(f"the record is of {known}, this session of {key}")
        if (count := len(card["processes"])) <= base:
            raise ValueError(
                f"{count} processes are no baseline of {base} and a head; nothing is added: give more --seconds"
            )
    ways = [
        {name: one[name] for name in ("kind", "simulated", "options")}
        | {"baseline": baseline_of(one)}
        for one in (before, record)
    ]
    if ways[0] != ways[1]:
        raise ValueError(f"the record is {ways[0]}, this session {ways[1]}")
    return record | {"cards": [*before["cards"], *record["cards"]]}


def main() -> int:
    """Measure or read, judge, print and record."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        action="append",
        help="as --gpumem-device; may be given several times (default cuda)",
    )
    parser.add_argument("--seconds", type=float, default=420.0, help="for everything (default 420)")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="on each card at most")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order of rows and of the modes (default 0)"
    )
    parser.add_argument(
        "--rows",
        choices=tuple(SETS),
        default="all",
        help="all, or twelve, which take a minute a session",
    )
    parser.add_argument(
        "--works",
        type=Path,
        metavar="FILE",
        action="append",
        help="a record whose twins say how latency grows with work",
    )
    parser.add_argument("--raw", action="store_true", help="no verdicts now")
    parser.add_argument(
        "--simulated", type=int, metavar="N", help="draw N processes at random instead"
    )
    parser.add_argument(
        "--judge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="add sessions and verdicts to the first record",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record, which is added to")
    options = parser.parse_args()
    if options.judge:
        path, *more = options.judge
        record = json.loads(path.read_text())
        for one in more:
            try:
                record = joined(record, json.loads(one.read_text()))
            except ValueError as refused:
                parser.error(f"--judge {one}: {refused}")
        return finish(path, record)
    of, devices = SETS[options.rows], options.device or ["cuda"]
    try:
        is_simulated = options.simulated is not None or any(
            choose(device).facts.simulated for device in devices
        )
    except NoDevice as missing:
        parser.error(str(missing))
    record = {
        "kind": "gate_validation",
        "simulated": is_simulated,
        "options": [],
        "baseline": of.baseline,
    }
    before = (
        json.loads(options.json.read_text()) if options.json and options.json.exists() else None
    )
    if before is not None:
        try:
            joined(before, record | {"cards": []})
        except ValueError as refused:
            parser.error(f"--json {options.json}: {refused}")
    begun = time.monotonic()
    if options.simulated is not None:
        record["cards"] = [
            simulated(
                device_to_json(choose("sim:h200").facts), options.seed, options.simulated, of.rows
            )
        ]
    else:
        record["cards"] = collect(
            devices,
            options,
            seen_slopes(json.loads(file.read_text()) for file in options.works or ()),
        )
        if not record["cards"]:
            print("nothing was measured", file=sys.stderr)
            return 1
    record |= {
        "versions": versions(),
        "seed": options.seed,
        "seconds": round(time.monotonic() - begun, 1),
    }
    record["ended"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if before is not None:
        try:
            record = joined(before, record)
        except ValueError as refused:
            print(f"--json {options.json}: {refused}", file=sys.stderr)
            return 1
    return finish(options.json, record, raw=options.raw)


if __name__ == "__main__":
    sys.exit(main())
