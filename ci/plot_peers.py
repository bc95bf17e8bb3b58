"""Draw the records of ci/bench/peers.py: spread between processes and wall time of one case, by way of measuring and size of the arrays.

    python ci/plot_peers.py ci/records/*/peers_nvbench.json --svg docs/images/peers.svg

One row of panels for each record: the spread, with its 95 % chi-square interval, and the wall time.
The background is transparent and the ink a middle grey, so that the figure can be read on light and on dark pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

sys.path.insert(
    0, str(Path(__file__).resolve().parent / "bench")
)  # also where PYTHONSAFEPATH is set

import peers_summary
from peers_summary import CORRECTED, HOT, Row

INK = "#808080"
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#999933")
"""Okabe and Ito's, without black and yellow, which vanish on dark or light pages, and one more."""
LEGEND = 0.6
"""Height of the legend in inches."""
IN_THE_TABLE = (
    "nvbench batch",
    "triton do_bench mean",
    "torch Timer",
    peers_summary.HOT_ONCE,
    *peers_summary.STREAM_WAYS,
)
SHOWN = tuple(
    way for way in peers_summary.WAYS if way not in IN_THE_TABLE and not way.endswith(CORRECTED)
)
"""Ways that users of a peer gate on; the others are in the table alone."""


STYLE: dict[Any, Any] = {
    "svg.hashsalt": "peers",
    "svg.fonttype": "none",
    "font.size": 9,
    **{f"{what}.color": INK for what in ("text", "xtick", "ytick", "grid")},
    **{f"axes.{what}": INK for what in ("edgecolor", "labelcolor", "titlecolor")},
}


def figure(records: list[dict[str, Any]]) -> Any:
    """The figure of some records, to be drawn and saved in `STYLE`."""
    shown = [
        [row for row in peers_summary.kept_rows(record["summary"]) if row.way in SHOWN]
        for record in records
    ]
    drawn, panels = plt.subplots(
        len(records), 2, figsize=(7.2, 3.2 * len(records) + LEGEND), squeeze=False
    )
    for line, record, rows in zip(panels, records, shown, strict=True):
        _spread(line[0], rows)
        line[0].set_title("spread between processes, %")
        _wall(line[1], rows)
        line[1].set_title("wall time of one case, s")
        simulated = "SIMULATED " if record["device"]["simulated"] else ""
        line[0].set_ylabel(simulated + record["device"]["name"])
    handles = {
        label: handle
        for panel in panels.flat
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(handles.values(), handles.keys(), loc="lower center", ncols=3, frameon=False)
    drawn.tight_layout(rect=(0, LEGEND / (3.2 * len(records) + LEGEND), 1, 1))
    return drawn


def _spread(panel: Any, rows: list[Row]) -> None:
    sizes = _axes(panel, rows)
    for place, way, own in _by_way(rows):
        at = [
            sizes.index(row.mib) + place
            for row in own
            if row.spread is not None and row.spread.value > 0
        ]
        found = [row.spread for row in own if row.spread is not None and row.spread.value > 0]
        below = [100 * (s.value - s.low) for s in found]
        above = [100 * (s.high - s.value) for s in found]
        panel.errorbar(
            at, [100 * s.value for s in found], yerr=[below, above], capsize=2, **_style(way)
        )


def _wall(panel: Any, rows: list[Row]) -> None:
    sizes = _axes(panel, rows)
    for place, way, own in _by_way(rows):
        panel.plot(
            [sizes.index(row.mib) + place for row in own], [row.wall for row in own], **_style(way)
        )


def _axes(panel: Any, rows: list[Row]) -> list[int]:
    sizes = sorted({row.mib for row in rows})
    panel.set_yscale("log")
    panel.set_xticks(range(len(sizes)), [f"{size} MiB" for size in sizes])
    panel.set_xlim(-0.5, max(len(sizes), 1) - 0.5)
    panel.grid(axis="y", alpha=0.3)
    panel.patch.set_alpha(0)
    return sizes


def _by_way(rows: list[Row]) -> list[tuple[float, str, list[Row]]]:
    """The place of each way beside its size, and its rows."""
    ways = [way for way in SHOWN if any(row.way == way for row in rows)]
    return [
        (0.6 * ((i + 0.5) / len(ways) - 0.5), way, [row for row in rows if row.way == way])
        for i, way in enumerate(ways)
    ]


def _style(way: str) -> dict[str, Any]:
    marker = "o" if way.startswith("gpumem") else "s"
    hot = way in (HOT, peers_summary.CUDAGRAPH)
    return {
        "label": way,
        "color": COLOURS[SHOWN.index(way)],
        "marker": marker,
        "markersize": 5,
        "linestyle": "none",
        "markerfacecolor": "none" if hot else COLOURS[SHOWN.index(way)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("--svg", type=Path, required=True, metavar="FILE")
    chosen = parser.parse_args()
    records = []
    for path in chosen.records:
        record = json.loads(path.read_text())
        if record.get("kind") != "peers":
            parser.error(f"{path} is no record of ci/bench/peers.py")
        records.append(record)
    chosen.svg.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        # No date in the file and no random names: the same records give the same bytes.
        figure(records).savefig(chosen.svg, transparent=True, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
