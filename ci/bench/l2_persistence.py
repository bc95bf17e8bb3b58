"""Measure the gain of persisting L2: off, the default, the maximum, fitted, what `gpumem l2-sweep` finds (swept), the full grid.

settings    a kernel on a table or a region of a given size, searched as the command does; then every setting of the full grid (each step
            of L2/16 up to the maximum at five hit ratios, and off) on one placement; then what is compared again, in rounds that hold
            every setting once on a placement of their own. Gains are ratios within rounds, their intervals Student's 95 %
thrashing   a window beyond its set-aside
carriers    the window on a stream, on a graph's kernel and on each launch
placements  kernels on tables of 1 MiB to half of L2, off and with the smallest set-aside that holds the table, one and two granules
            (L2/16) more: where placements differ, and what a granule costs
resets      a kernel C after a kernel A whose lines persist: without a reset, after each, and where nothing has persisted
streams     two kernels at once, each with a window of its own, which together need twice the set-aside: hit ratio 1 against 0.5

    python ci/bench/l2_persistence.py --json ci/records/nvidia-h200/l2_persistence.json --seconds 400
    python ci/bench/l2_persistence.py --parts placements --json ci/records/nvidia-h200/l2_placements.json --seconds 110

The record is written after every case. Prints what was asked of it with ok or MISS; exits with 1 if a case failed, 6 if none was run.
"""

from __future__ import annotations

import argparse
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

from record_file import chosen_device, head, record_parser, utc_now, write_record

from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.measuring.l2_sweep import change
from pytest_gpumem.measuring.stopping import half_width
from pytest_gpumem.memory.l2 import fit_set_aside
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.l2_sweep import Change
from pytest_gpumem.records.measurement import without_exceptions
from pytest_gpumem.units import MiB

TABLES = (1, 8, 16, 24, 30, 40, 50)
REGIONS = (10, 20, 30, 40, 50, 60)
OUT = 1024
"""MiB that are streamed beside the table or the region."""
LEAN = 32
"""Blocks of the seed's launch of reset_data, which are too few to saturate memory; the kernel's own grid is 2 blocks an SM."""
THRASHING = 40
CARRIED = 8
PLACED = (1, 2, 4, 6, 8, 12, 16, 24, 30)
"""MiB of the tables of `placements`, of which those up to half of L2 are measured."""
PLACED_OUT = 512
"""MiB that are streamed beside them."""
FOREIGN = "gather"
"""A kernel of the cases' own, which the simulated device does not run."""
PLACED_KERNELS = (("reset_data", None), ("sliding_window", None), (FOREIGN, None), ("reset_data", LEAN))
"""Kernels of `placements`, each with its blocks."""
PLACED_SAMPLES = 20
"""Samples of a setting on a placement, at least."""
TEXTS_TABLES, TEXTS_SET_ASIDE = (1, 2, 3, 4, 5, 6), 3 * MiB
"""MiB of the tables, and bytes set aside, of "CUDA L2 Persistent Cache" (Lei Mao), which are placements too."""
PLACEMENTS = 16
RESETS_OUT = 128
"""MiB that are streamed beside the data of resets and of two streams."""
TOLERATED = 0.02
"""Shares by which the recommended setting may be slower than off, and than the grid's best: an interval's upper end is judged."""
WITHIN_BEST = 0.03
"""Share by which "fit" may be slower than the best set-aside."""
SHARE = 0.25
"""Settings of the grid that a sweep may measure, as a share."""
ALIKE = 0.03
"""Largest difference of the gain of a window on a graph or on a launch from the stream's."""
COMPARED = ("driver default", "maximum", "fitted", "swept", "grid's best")
PARTS = ("settings", "thrashing", "carriers", "placements", "resets", "streams")
NOTHING_RUN = 6

Record = dict[str, Any]
Case = dict[str, Any]


def whole_mib(text: str) -> tuple[int, ...]:
    """Whole numbers of MiB such as "2,32", each once: a `type` of argparse."""
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers of MiB such as 2,32, each once")
    return tuple(int(part) for part in parts)


def settings_cases(tables: tuple[int, ...], regions: tuple[int, ...], out: int) -> list[Case]:
    """The longest first: what is left of the time limit is known best then."""
    lean = [{"kernel": "reset_data", "blocks": LEAN, "mib": mib, "out_mib": out} for mib in tables]
    busy = [{"kernel": "reset_data", "blocks": None, "mib": mib, "out_mib": out} for mib in tables]
    return [*lean, *busy, *({"kernel": "sliding_window", "blocks": None, "mib": mib, "out_mib": out} for mib in regions)]


def placements_cases(facts: DeviceFacts, placements: int) -> list[Case]:
    """Kernel by kernel, the launch that needs longest last."""
    common: Case = {"placements": placements, "samples": PLACED_SAMPLES}
    text = {"kernel": "reset_data", "blocks": LEAN, "out_mib": OUT, "set_aside": TEXTS_SET_ASIDE, **common}
    kernels = [(kernel, blocks) for kernel, blocks in PLACED_KERNELS if not (facts.simulated and kernel == FOREIGN)]
    return [
        *(
            {"kernel": kernel, "blocks": blocks, "mib": mib, "out_mib": PLACED_OUT, **common}
            for kernel, blocks in kernels
            for mib in PLACED
            if mib * MiB <= facts.l2_bytes // 2
        ),
        *({**text, "mib": mib} for mib in TEXTS_TABLES),
    ]


def resets_cases(facts: DeviceFacts) -> list[Case]:
    """C in normal mode over shares of L2, and under a window of its own over shares of the maximum; A's data fills 0.8 of that."""

    def mib(share: float, nbytes: int) -> int:
        return int(share * nbytes / MiB)

    l2, largest = facts.l2_bytes, facts.persisting_l2_max_bytes
    common = {"data_mib": mib(0.8, largest), "out_mib": RESETS_OUT}
    reads: list[Case] = [
        {"kernel": "l2_read", "blocks": None, "window": False, "mib": mib(share, l2)} for share in (0.25, 0.375, 0.5, 0.625, 0.75)
    ]
    plain = [{"kernel": "reset_data", "blocks": LEAN, "window": False, "mib": mib(share, l2)} for share in (0.25, 0.375, 0.5)]
    own = [{"kernel": "reset_data", "blocks": LEAN, "window": True, "mib": mib(share, largest)} for share in (0.3, 0.6, 0.8)]
    return [{**case, **common} for case in (*reads, *plain, *own)]


def streams_cases(facts: DeviceFacts) -> list[Case]:
    """Two tables, each as large as what is set aside for both together."""
    return [
        {
            "kernel": "reset_data",
            "blocks": blocks,
            "mib": steps * facts.l2_step_bytes // MiB,
            "out_mib": RESETS_OUT,
            "set_aside": steps * facts.l2_step_bytes,
        }
        for blocks in (LEAN, 2 * LEAN)
        for steps in (2, 4, 8)
    ]


def name_of(case: Case) -> str:
    """A case in words, such as "reset_data, 32 blocks, 8 MiB"."""
    grid = "" if case["kernel"] != "reset_data" else f", {case['blocks']} blocks" if case["blocks"] else ", 2 blocks an SM"
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
        self.record: Record = {"kind": "l2_persistence", "device": {}, "planned": planned, **{what: [] for what in PARTS}}

    @pytest.fixture
    def bench(self) -> Bench:
        return self

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for fixture, cases in self._cases.items():
            if fixture in metafunc.fixturenames:
                metafunc.parametrize(fixture, cases, ids=[name_of(case).replace(", ", "-").replace(" ", "_") for case in cases])

    def begin(self, device: Device) -> None:
        """Take note of the device before the first case; skip where a case as long as the longest yet would end too late."""
        self._started = time.monotonic()
        spent = self._started - self._begun
        if spent + self._longest > self._seconds:
            pytest.skip(f"{spent:.0f} s of {self._seconds:g} s are used")
        if not self.record["device"]:
            facts = device.facts
            self.record["device"] = {
                "name": facts.name,
                "simulated": facts.simulated,
                "driver": facts.driver,
                "cuda": facts.cuda,
                "uuid": facts.uuid,
                "l2_bytes": facts.l2_bytes,
                "persisting_l2_max_bytes": facts.persisting_l2_max_bytes,
                "sm_count": facts.sm_count,
                # What this process began with: nothing has set a limit yet.
                "set_aside": device.l2.set_aside(),
            }

    def add(self, what: str, case: Case, found: Record) -> None:
        """Keep what a case found, and write the record."""
        spent = time.monotonic() - self._started
        self._longest = max(self._longest, spent)
        self.record[what].append({**case, "seconds": spent, **found})
        self.record["ended"] = utc_now()
        if self._path is not None:
            write_record(self._path, in_nanoseconds(self.record))


def in_nanoseconds(record: Record) -> Record:
    """The record with its samples in whole nanoseconds, a thousandth of what a launch varies by."""

    def places(one: Record) -> Record:
        return {"grid": [[*where, whole(samples)] for *where, samples in one["grid"]]} if "grid" in one else {}

    def whole(samples: list[float]) -> list[int]:
        return [round(seconds * 1e9) for seconds in samples]

    def measured(one: Record) -> Record:
        return {"measured": [{**m, "rounds": [whole(r) for r in m["rounds"]]} for m in one["measured"]]} if "measured" in one else {}

    return {
        name: [{**one, **places(one), **measured(one)} for one in value] if isinstance(value, list) else value
        for name, value in record.items()
    }


# What a record says


def medians(one: Record, name: str) -> list[float]:
    """Seconds at a named setting, by round."""
    return [1e-9 * statistics.median(samples) for samples in one["measured"][one["named"][name]]["rounds"]]


def longer(one: Record, first: str, other: str) -> Change:
    """The share by which the first named setting is slower than the other; 0 if they are the same setting."""
    if one["named"][first] == one["named"][other]:
        return Change(0.0, 0.0, 0.0)
    return change(medians(one, first), medians(one, other))


def checks(record: Record) -> list[tuple[str, bool]]:
    """The claims that the record can judge, and whether each holds."""
    settings = record["settings"]
    said: list[tuple[str, bool]] = []
    if settings:
        worst, where = max((longer(one, "swept", "off").high, name_of(one)) for one in settings)
        said.append((f"recommended at most {TOLERATED:.0%} slower than off: {_upper(worst, where)}", worst <= TOLERATED))
        worst, where = max((longer(one, "swept", "grid's best").high, name_of(one)) for one in settings)
        said.append((f"swept within {TOLERATED:.0%} of the full grid's best: {_upper(worst, where)}", worst <= TOLERATED))
        most, of, where = max((len(one["sweep"]["points"]), one["sweep"]["grid"], name_of(one)) for one in settings)
        said.append((f"at most {SHARE:g} of the grid measured by a sweep: {most} of {of}", most <= SHARE * of))
    for one in record["thrashing"]:
        avoided = longer(one, "ratio 1, L2/2", "fitted, L2/2")
        said.append((f"the fitted ratio avoids thrashing, {name_of(one)}: {_change(avoided)} faster than ratio 1", avoided.low > 0))
    for one in record["carriers"]:
        for carrier in ("graph", "launch"):
            apart = apart_from_stream(one, carrier)
            alike = max(-apart.low, apart.high) <= ALIKE
            said.append((f"gain by a window on a {carrier} within {ALIKE:.0%} of the stream's: {_change(apart)}", alike))
    if placed := record.get("placements"):
        fits = [(one, fitted_name(record["device"], one)) for one in placed]
        worst, where = max((slower_beyond_doubt(one, name), name_of(one)) for one, name in fits)
        said.append((f"fitted never slower than off beyond its interval: {_upper(worst, where, 'lower')}", worst <= 0))
        held = [(one, name) for one, name in fits if name.startswith("+")]
        worst, where = max((of_best(one, name), name_of(one)) for one, name in held)
        said.append((f"fitted within {WITHIN_BEST:.0%} of the best of the set-asides: {100 * worst:+.2f} %, {where}", worst <= WITHIN_BEST))
    return said


def fitted_name(device: Record, one: Record) -> str:
    """The setting of a case of placements that `"fit"` takes: a set-aside, or under a given one the miss property."""
    if "set_aside" in one:
        return "fitted, else normal"
    facts = SimpleNamespace(
        l2_bytes=device["l2_bytes"], l2_step_bytes=device["l2_bytes"] // 16, persisting_l2_max_bytes=device["persisting_l2_max_bytes"]
    )
    set_aside = fit_set_aside(cast(DeviceFacts, facts), one["mib"] * MiB)
    return str(next(name for name, found in one["found"].items() if found["set_aside"] == set_aside))


def counting(one: Record, name: str) -> list[float]:
    """Microseconds of the placements that count at a setting: under a window without exceptions."""
    medians = [1e-3 * nanoseconds for nanoseconds in one["found"][name]["medians"]]
    return medians if name == "off" else list(without_exceptions(medians))


def slower_beyond_doubt(one: Record, name: str) -> float:
    """Share by which a setting is slower than off: the lower end of the interval of the ratios on common placements."""
    own, off = (one["found"][which]["medians"] for which in (name, "off"))
    return change(own, off).low


def of_best(one: Record, name: str) -> float:
    """Share by which a set-aside is slower than the best of its case."""
    means = {other: statistics.fmean(counting(one, other)) for other in one["found"] if other != "off"}
    return means[name] / min(means.values()) - 1


def apart_from_stream(one: Record, carrier: str) -> Change:
    """The gain by a carrier over the gain by the stream, less 1; what is off is launched as the carrier is."""
    off = medians(one, "off, graph" if carrier == "graph" else "off")
    gains = [a / b for a, b in zip(off, medians(one, carrier), strict=True)]
    streams = [a / b for a, b in zip(medians(one, "off"), medians(one, "stream"), strict=True)]
    return change(gains, streams)


def table(record: Record) -> str:
    """The record as text."""
    said = [head(record)]
    taken = sum(len(record.get(what, ())) for what in PARTS)
    if taken < record["planned"]:
        said += ["", f"{taken} of {record['planned']} cases; for the others there was no time"]
    if record["settings"]:
        said += ["", *_settings_lines(record)]
    for one in record["thrashing"]:
        said += ["", f"thrashing: {name_of(one)}, by set-aside; gain in % against off ({_latency(one, 'off')})"]
        said += [f"  {name:<17}{_gain(one, name)}" for name in one["named"] if name != "off"]
    for one in record["carriers"]:
        said += ["", f"what carries the window: {name_of(one)}, fitted; gain in % against off ({_latency(one, 'off')})"]
        said += [f"  {name:<14}{_gain(one, name, 'off, graph' if name == 'graph' else 'off')}" for name in ("stream", "graph", "launch")]
    for part, claim in (("resets", "first and second launch of C"), ("streams", "both kernels, and one alone")):
        if record.get(part):
            said += ["", f"{part}: medians in microseconds, {claim}"]
            said += [f"  {_medians_line(one)}" for one in record[part]]
    if record.get("placements"):
        said += ["", *_placements_lines(record["device"], record["placements"])]
    said += ["", *(f"{'ok  ' if holds else 'MISS'} {claim}" for claim, holds in checks(record))]
    return "\n".join(said)


def _settings_lines(record: Record) -> Iterator[str]:
    device, out = record["device"], record["settings"][0]["out_mib"]
    default, largest = (device[name] / MiB for name in ("set_aside", "persisting_l2_max_bytes"))
    yield f"gain in % against off (no set-aside, no window), 95 % interval; {out} MiB are streamed beside the table"
    yield f"driver default: {default:g} MiB set aside, no window; maximum: {largest:g} MiB, fitted hit ratio"
    yield ""
    yield f"{'':<8}{'off ms':>8}" + "".join(f"{name:>15}" for name in COMPARED) + f"  {'recommended':<19}{'points':>6}"
    group = ""
    for one in record["settings"]:
        kernel, _, size = name_of(one).rpartition(", ")
        if kernel != group:
            yield kernel
            group = kernel
        gains = "".join(f"{_gain(one, name):>15}" for name in COMPARED)
        told, swept = one["sweep"]["recommend"], one["sweep"]
        where = "off" if told["set_aside"] == "off" else f"{told['set_aside'] / MiB:g} MiB at {told['hit_ratio']:.3g}"
        off = 1e3 * statistics.fmean(medians(one, "off"))
        yield f"{size:>8}{off:>8.3f}{gains}  {where:<19}{len(swept['points']):>6}"


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
        kernel += f", {one['out_mib']} MiB streamed" + (f", {one['set_aside'] / MiB:g} MiB asked for" if "set_aside" in one else "")
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
    cells = []
    for name, found in one["found"].items():
        columns = list(zip(*found, strict=True))[:2] if isinstance(found[0], list) else [found]
        cells.append(f"{name}: {', '.join(f'{1e-3 * statistics.median(column):.1f}' for column in columns)}")
    return f"{name_of(one)}{', window' * bool(one.get('window'))}  {'; '.join(cells)}"


def _gain(one: Record, name: str, off: str = "off") -> str:
    gain = longer(one, off, name)
    return f"{100 * gain.share:+.1f} +-{50 * (gain.high - gain.low):.1f}"


def _latency(one: Record, name: str) -> str:
    taken = medians(one, name)
    return f"{1e3 * statistics.fmean(taken):.3f} +-{1e3 * (half_width(taken) or 0.0):.3f} ms"


def _upper(worst: float, where: str, end: str = "upper") -> str:
    return f"{end} end {100 * worst:+.2f} %, {where}"


def _change(one: Change) -> str:
    return f"{100 * one.share:+.2f} % ({100 * one.low:+.2f} to {100 * one.high:+.2f})"


def parts(text: str) -> tuple[str, ...]:
    """Names of parts such as "settings,carriers": a `type` of argparse."""
    names = tuple(text.split(","))
    if not set(names) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r}: some of {','.join(PARTS)}")
    return names


def main() -> int:
    parser = record_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case that would end after this long")
    parser.add_argument("--tables", type=whole_mib, default=TABLES, help="MiB of the tables of reset_data (default 1,8,16,24,30,40,50)")
    parser.add_argument("--regions", type=whole_mib, default=REGIONS, help="MiB of sliding_window's regions (default 10,20,30,40,50,60)")
    parser.add_argument("--parts", type=parts, default=PARTS, help=f"what is measured, of {','.join(PARTS)} (default: all)")
    parser.add_argument("--placements", type=int, default=PLACEMENTS, help=f"placements of each case of that name (default {PLACEMENTS})")
    parser.add_argument("--out", type=int, default=OUT, help=f"MiB that are streamed (default {OUT})")
    asked = parser.parse_args()
    if asked.placements < 2:
        parser.error(f"--placements {asked.placements}: at least 2")
    if asked.out < 1:
        parser.error(f"--out {asked.out}: at least 1 MiB")
    if asked.json is not None and not asked.json.absolute().parent.is_dir():
        parser.error(f"--json {asked.json}: there is no folder {asked.json.absolute().parent}")
    facts = chosen_device(parser, asked.device).facts
    cases = {
        "thrashing_case": [{"kernel": "reset_data", "blocks": LEAN, "mib": THRASHING, "out_mib": asked.out}],
        "carriers_case": [{"kernel": "reset_data", "blocks": None, "mib": CARRIED, "out_mib": asked.out}],
        "resets_case": resets_cases(facts),
        "streams_case": streams_cases(facts),
        "placements_case": placements_cases(facts, asked.placements),
        "settings_case": settings_cases(asked.tables, asked.regions, asked.out),
    }
    cases = {fixture: found for fixture, found in cases.items() if fixture.removesuffix("_case") in asked.parts}
    bench = Bench(cases, asked.json, asked.seconds)
    tests = Path(__file__).resolve().with_name("l2_persistence_cases.py")
    chosen = [f"{tests}::test_{fixture.removesuffix('_case')}" for fixture in cases]
    here = [*chosen, "-c", os.devnull, "--rootdir", str(tests.parent)]  # no settings of this repository's own tests
    session = pytest.main([*here, "--gpumem", "--gpumem-device", asked.device, "-q", "-rs", "-p", "no:cacheprovider"], plugins=[bench])
    found = in_nanoseconds(bench.record)
    if not any(found[what] for what in PARTS):
        print("no case was run", file=sys.stderr)
        return NOTHING_RUN
    print(table(found))
    return 0 if session == pytest.ExitCode.OK else 1


if __name__ == "__main__":
    sys.exit(main())
