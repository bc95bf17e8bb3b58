"""Draw the power of the gate's screen from the records of ci/bench/gate_validation.py: what share of its runs flags a slow-down.

    python ci/plot_power.py ci/records/nvidia-h200/gate_validation*.json --svg docs/images/gate-power.svg

Curves are of runs of unchanged code (`gate_validation_power`). Points are of twins, which are slower, those of one plan together; hollow
ones are of twins that are not as slow as planned. Records that did not measure as by default are left out, and named. The background is
transparent and the ink a middle grey, so that the figure can be read on light and on dark pages.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))  # also where PYTHONSAFEPATH is set

from gate_validation_power import CURVES, Curve, Twins, curve, twins
from gate_validation_rows import Asked
from gate_validation_summary import POWER
from plot_peers import COLOURS, INK
from plot_peers import STYLE as OF_ALL

from pytest_gpumem.units import parse_share

STYLE = {**OF_ALL, "svg.hashsalt": "gate-power"}
LOOKS = dict(zip(CURVES, zip(COLOURS, "osD^", (9, 5, 6, 6), strict=False), strict=True))
"""Colour, marker and its size of each curve; of the two of 256 MiB points lie on each other."""
LEGEND = 0.9
"""Height of the legend in inches."""
HEIGHT = 5.0
FARTHEST = {"1%": 2.2, "10%": 15.0}
"""By limit: where its panel ends, in per cent."""
STEPS = 440
"""Places at which a curve is drawn; its own steps are finer."""


def figure(records: Sequence[dict[str, Any]], curves: Mapping[tuple[str, Asked], Curve]) -> Any:
    """The figure of some records and their curves, to be drawn and saved in `STYLE`."""
    drawn, panels = plt.subplots(1, len(FARTHEST), figsize=(9.0, HEIGHT), sharey=True, width_ratios=(1.5, 1), squeeze=False)
    for panel, limit in zip(panels.flat, FARTHEST, strict=True):
        _axes(panel, limit)
        for size, asked in CURVES:
            if asked.limit == limit:
                _draw(panel, (size, asked), curves[size, asked], list(twins(records, size, asked)))
    simulated = "SIMULATED " if any(record["simulated"] for record in records) else ""
    names = sorted({card["device"]["name"] for record in records for card in record["cards"]})
    panels.flat[0].set_ylabel(f"flagged, % of runs; {simulated}{', '.join(names)}")
    drawn.legend(loc="lower center", frameon=False)
    drawn.tight_layout(rect=(0, LEGEND / HEIGHT, 1, 1))
    return drawn


def _axes(panel: Any, limit: str) -> None:
    delta = 100 * parse_share(limit)
    panel.set_title(f"limit (max_regression) {limit}")
    panel.set_xlabel("slow-down, %")
    panel.set_xlim(0, FARTHEST[limit])
    panel.set_ylim(-2, 104)
    panel.grid(axis="y", alpha=0.3)
    panel.patch.set_alpha(0)
    panel.axhline(100 * POWER, color=INK, linewidth=0.8, linestyle="--")
    panel.text(0.01 * FARTHEST[limit], 100 * POWER - 1.5, f"{POWER:.0%}", va="top")
    for at, name in ((delta / 2, "margin"), (delta, "limit")):
        panel.axvline(at, color=INK, linewidth=0.8, linestyle=":" if name == "margin" else "--")
        panel.text(at - 0.01 * FARTHEST[limit], 50, name, rotation=90, ha="right", va="center")


def _draw(panel: Any, what: tuple[str, Asked], found: Curve, points: Sequence[Twins]) -> None:
    colour, marker, markersize = LOOKS[what]
    at = [FARTHEST[what[1].limit] * step / STEPS for step in range(STEPS + 1)]
    panel.plot(at, [100 * found.at(slower / 100) for slower in at], color=colour)
    panel.plot([], [], color=colour, marker=marker, markersize=markersize, label=_label(*what, found))
    for one in points:
        low, high = one.bounds()
        panel.errorbar(
            [100 * one.mean],
            [100 * one.share],
            xerr=[[100 * (one.mean - min(one.slower))], [100 * (max(one.slower) - one.mean)]],
            yerr=[[100 * (one.share - low)], [100 * (high - one.share)]],
            color=colour,
            marker=marker,
            markersize=markersize,
            markerfacecolor=colour if one.as_planned else "none",
            capsize=2,
            linewidth=1,
        )


def _label(size: str, asked: Asked, found: Curve) -> str:
    """ "32 MiB, runs of 6 processes, limit 1%: 99% are flagged from a slow-down of 1.16 % on (849 runs)"."""
    runs = f"runs of {asked.processes} {'process' if asked.processes == 1 else 'processes'}"
    reached = found.reaches(POWER)
    told = f"from a slow-down of {100 * reached:.2f} % on" if math.isfinite(reached) else "by no slow-down"
    return f"{size}, {runs}, limit {asked.limit}: {POWER:.0%} are flagged {told} ({len(found.needed)} runs)"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("--svg", type=Path, required=True, metavar="FILE")
    chosen = parser.parse_args()
    records = []
    for path in chosen.records:
        record = json.loads(path.read_text())
        if record.get("kind") != "gate_validation":
            parser.error(f"{path} is no record of ci/bench/gate_validation.py")
        if record["options"]:
            print(f"{path} is left out: it measured with {' '.join(record['options'])}", file=sys.stderr)
        else:
            records.append(record)
    if not records:
        parser.error("no record among them measured as by default")
    curves = {(size, asked): curve(records, size, asked) for size, asked in CURVES}
    for what, found in curves.items():
        print(f"{_label(*what, found)}; of code slower by the limit {found.passing} would be a PASS")
    chosen.svg.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        # No date in the file and no random names: the same records give the same bytes.
        figure(records, curves).savefig(chosen.svg, transparent=True, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
