"""Measure what the rule of `set_aside="fit"` rests on, and what persists.

placements  kernels on tables of 1 MiB to half of L2, off and with the smallest set-aside that holds the table, one and two granules
            (L2/16) more: where placements differ, and what a granule costs
streams     two kernels at once, each with a window of its own, which together need twice the set-aside: hit ratio 1 against 0.5

    python ci/bench/l2_persistence.py --json ci/records/nvidia-h200/l2_placements.json --seconds 150
    python ci/bench/l2_persistence.py --parts streams --json ci/records/nvidia-h200/l2_windows.json

The record is written after every case. Prints what was asked of it with ok or MISS; exits with 1 if a case failed, 6 if none was run.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import chosen_device, device_of, head, record_parser, utc_now, write_record

from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.measuring.stopping import half_width
from pytest_gpumem.memory.window_request import fit_set_aside
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import without_exceptions
from pytest_gpumem.units import MiB

OUT = 1024
"""MiB that are streamed beside the tables of the seed's size."""
LEAN = 32
"""Blocks of the seed's launch of reset_data, which are too few to saturate memory; the kernel's own grid is 2 blocks an SM."""
PLACED = (1, 2, 4, 6, 8, 12, 16, 24, 30)
"""MiB of the tables of `placements`, of which those up to half of L2 are measured."""
PLACED_OUT = 512
"""MiB that are streamed beside them."""
FOREIGN = "gather"
"""A kernel of the cases' own, which the simulated device does not run."""
PLACED_KERNELS = (
    ("reset_data", None),
    ("sliding_window", None),
    (FOREIGN, None),
    ("reset_data", LEAN),
)
"""Kernels of `placements`, each with its blocks."""
PLACED_SAMPLES = 20
"""Samples of a setting on a placement, at least."""
TEXTS_TABLES, TEXTS_SET_ASIDE = (1, 2, 3, 4, 5, 6), 3 * MiB
"""MiB of the tables, and bytes set aside, of "CUDA L2 Persistent Cache" (Lei Mao), which are placements too."""
PLACEMENTS = 16
STREAMS_OUT = 128
"""MiB that are streamed beside each table of two streams."""
WITHIN_BEST = 0.03
"""Share by which "fit" may be slower than the best set-aside."""
PARTS = ("placements", "streams")
NOTHING_RUN = 6

Record = dict[str, Any]
Case = dict[str, Any]


def placements_cases(facts: DeviceFacts) -> list[Case]:
    """Kernel by kernel, the launch that needs longest last."""
    common: Case = {"placements": PLACEMENTS, "samples": PLACED_SAMPLES}
    text = {
        "kernel": "reset_data",
        "blocks": LEAN,
        "out_mib": OUT,
        "set_aside": TEXTS_SET_ASIDE,
        **common,
    }
    kernels = [
        (kernel, blocks)
        for kernel, blocks in PLACED_KERNELS
        if not (facts.simulated and kernel == FOREIGN)
    ]
    return [
        *(
            {"kernel": kernel, "blocks": blocks, "mib": mib, "out_mib": PLACED_OUT, **common}
            for kernel, blocks in kernels
            for mib in PLACED
            if mib * MiB <= facts.l2_bytes // 2
        ),
        *({**text, "mib": mib} for mib in TEXTS_TABLES),
    ]


def streams_cases(facts: DeviceFacts) -> list[Case]:
    """Two tables, each as large as what is set aside for both together."""
    return [
        {
            "kernel": "reset_data",
            "blocks": blocks,
            "mib": steps * facts.l2_step_bytes // MiB,
            "out_mib": STREAMS_OUT,
            "set_aside": steps * facts.l2_step_bytes,
        }
        for blocks in (LEAN, 2 * LEAN)
        for steps in (2, 4, 8)
    ]


def name_of(case: Case) -> str:
    """A case in words, such as "reset_data, 32 blocks, 8 MiB"."""
    grid = (
        ""
        if case["kernel"] != "reset_data"
        else f", {case['blocks']} blocks"
        if case["blocks"]
        else ", 2 blocks an SM"
    )
    return f"{case['kernel']}{grid}, {case['mib']} MiB"


class Bench:
    """The plugin that gives the tests their cases, and keeps what they found.

    Args:
        cases: by the name of the fixture that takes them.
        path: the record; None: nowhere.
        seconds: no case begins that would end after that long.
    """

    def __init__(self, cases: dict[str, list[Case]], path: Path | None, seconds: float) -> None:
        self._cases = cases
        self._path = path
        self._seconds = seconds
        self._begun = time.monotonic()
        self._started = self._begun
        self._longest = 0.0
        planned = sum(map(len, cases.values()))
        self.record: Record = {
            "kind": "l2_persistence",
            "device": {},
            "planned": planned,
            **{what: [] for what in PARTS},
        }

    @pytest.fixture
    def bench(self) -> Bench:
        return self

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for fixture, cases in self._cases.items():
            if fixture in metafunc.fixturenames:
                metafunc.parametrize(
                    fixture,
                    cases,
                    ids=[name_of(case).replace(", ", "-").replace(" ", "_") for case in cases],
                )

    def begin(self, device: Device) -> None:
        """Take note of the device before the first case; skip where a case as long as the longest yet would end too late."""
        self._started = time.monotonic()
        spent = self._started - self._begun
        if spent + self._longest > self._seconds:
            pytest.skip(f"{spent:.0f} s of {self._seconds:g} s are used")
        if not self.record["device"]:
            facts = device.facts
            self.record["device"] = {
                **device_of(facts),
                "l2_bytes": facts.l2_bytes,
                "persisting_l2_max_bytes": facts.persisting_l2_max_bytes,
                "sm_count": facts.sm_count,
            }

    def add(self, what: str, case: Case, found: Record) -> None:
        """Keep what a case found, and write the record."""
        spent = time.monotonic() - self._started
        self._longest = max(self._longest, spent)
        self.record[what].append({**case, "seconds": spent, **found})
        self.record["ended"] = utc_now()
        if self._path is not None:
            write_record(self._path, self.record)


# What a record says


def checks(record: Record) -> list[tuple[str, bool]]:
    """The claims that the record can judge, and whether each holds."""
    said: list[tuple[str, bool]] = []
    if placed := record.get("placements"):
        fits = [(one, fitted_name(record["device"], one)) for one in placed]
        worst, where = max((slower_beyond_doubt(one, name), name_of(one)) for one, name in fits)
        said.append(
            (
                f"fitted never slower than off beyond its interval: lower end {100 * worst:+.2f} %, {where}",
                worst <= 0,
            )
        )
        held = [(one, name) for one, name in fits if name.startswith("+")]
        worst, where = max((of_best(one, name), name_of(one)) for one, name in held)
        said.append(
            (
                f"fitted within {WITHIN_BEST:.0%} of the best of the set-asides: {100 * worst:+.2f} %, {where}",
                worst <= WITHIN_BEST,
            )
        )
    return said


def fitted_name(device: Record, one: Record) -> str:
    """The setting of a case of placements that `"fit"` takes: a set-aside, or under a given one the miss property."""
    if "set_aside" in one:
        return "fitted, else normal"
    facts = SimpleNamespace(
        l2_bytes=device["l2_bytes"],
        l2_step_bytes=device["l2_bytes"] // 16,
        persisting_l2_max_bytes=device["persisting_l2_max_bytes"],
    )
    set_aside = fit_set_aside(cast(DeviceFacts, facts), one["mib"] * MiB)
    return str(
        next(name for name, found in one["found"].items() if found["set_aside"] == set_aside)
    )


def counting(one: Record, name: str) -> list[float]:
    """Microseconds of the placements that count at a setting: under a window without exceptions."""
    medians = [1e-3 * nanoseconds for nanoseconds in one["found"][name]["medians"]]
    return medians if name == "off" else list(without_exceptions(medians))


def slower_beyond_doubt(one: Record, name: str) -> float:
    """Share by which a setting is slower than off: the lower end of the interval of the ratios on common placements."""
    own, off = (one["found"][which]["medians"] for which in (name, "off"))
    logs = [math.log(with_window / without) for with_window, without in zip(own, off, strict=True)]
    return math.expm1(statistics.fmean(logs) - (half_width(logs) or 0.0))


def of_best(one: Record, name: str) -> float:
    """Share by which a set-aside is slower than the best of its case."""
    means = {
        other: statistics.fmean(counting(one, other)) for other in one["found"] if other != "off"
    }
    return means[name] / min(means.values()) - 1


def table(record: Record) -> str:
    """The record as text."""
    said = [head(record)]
    taken = sum(len(record.get(what, ())) for what in PARTS)
    if taken < record["planned"]:
        said += ["", f"{taken} of {record['planned']} cases; for the others there was no time"]
    if record.get("streams"):
        said += ["", "streams: medians in microseconds, both kernels, and one alone"]
        said += [f"  {_medians_line(one)}" for one in record["streams"]]
    if record.get("placements"):
        said += ["", *_placements_lines(record["device"], record["placements"])]
    said += ["", *(f"{'ok  ' if holds else 'MISS'} {claim}" for claim, holds in checks(record))]
    return "\n".join(said)


def _placements_lines(device: Record, cases: list[Record]) -> Iterator[str]:
    first = cases[0]
    yield f"microseconds, mean over {first['placements']} placements, and their standard deviation in %; exceptions (-2: two) do not count"
    yield 'set-aside: the least number of granules that holds the table (+0), one more (+1), two more (+2); * what "fit" takes'
    yield ""
    group, names = "", list[str]()
    for one in cases:
        if names != (names := list(one["found"])):
            yield f"{'':<8}{'granules':>9}" + "".join(f"{name:>20}" for name in names)
        kernel, _, size = name_of(one).rpartition(", ")
        kernel += f", {one['out_mib']} MiB streamed" + (
            f", {one['set_aside'] / MiB:g} MiB asked for" if "set_aside" in one else ""
        )
        if kernel != group:
            yield kernel
            group = kernel
        fitted = fitted_name(device, one)
        cells = "".join(f"{_cell(one, name, '*' * (name == fitted)):>20}" for name in names)
        yield f"{size:>8}{one['granules']:>9}{cells}".rstrip()


def _cell(one: Record, name: str, mark: str) -> str:
    us = counting(one, name)
    left = f" {len(us) - one['placements']}" if len(us) < one["placements"] else "   "
    return f"{mark}{statistics.fmean(us):.1f} {100 * statistics.stdev(us) / statistics.fmean(us):>5.2f}{left}"


def _medians_line(one: Record) -> str:
    cells = [f"{name}: {1e-3 * found['median']:.1f}" for name, found in one["found"].items()]
    return f"{name_of(one)}  {'; '.join(cells)}"


def main() -> int:
    parser = record_parser(__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no case that would end after this long",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default: all)"
    )
    asked = parser.parse_args()
    if asked.json is not None and not asked.json.absolute().parent.is_dir():
        parser.error(f"--json {asked.json}: there is no folder {asked.json.absolute().parent}")
    facts = chosen_device(parser, asked.device).facts
    cases = {}
    if "streams" in asked.parts:
        cases["streams_case"] = streams_cases(facts)
    if "placements" in asked.parts:
        cases["placements_case"] = placements_cases(facts)
    bench = Bench(cases, asked.json, asked.seconds)
    tests = Path(__file__).resolve().with_name("l2_persistence_cases.py")
    chosen = [f"{tests}::test_{fixture.removesuffix('_case')}" for fixture in cases]
    # No settings of this repository's own tests.
    options = (
        f"-c {os.devnull} --rootdir {tests.parent} --gpumem -q -rs -p no:cacheprovider".split()
    )
    session = pytest.main([*chosen, *options, "--gpumem-device", asked.device], plugins=[bench])
    found = bench.record
    if not any(found[what] for what in PARTS):
        print("no case was run", file=sys.stderr)
        return NOTHING_RUN
    print(table(found))
    return 0 if session == pytest.ExitCode.OK else 1


if __name__ == "__main__":
    sys.exit(main())
