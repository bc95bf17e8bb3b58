"""Keep a run's pytest-benchmark JSON as a record: compact, and each sample once.

    python ci/keep_record.py RESULTS.json ci/records/nvidia-h200/suite.json
    python ci/keep_record.py --tests test_l2_ RESULTS.json ci/records/nvidia-h100/l2.json    # only tests with this in their names

The samples of `stats.data` are left out, for the rows under `gpumem` hold them all, placement by placement; these keep eight digits, for
CUDA gives times in 32 bits. Nothing else changes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pytest_gpumem.files import write_whole


def kept(run: dict[str, Any], tests: str = "") -> dict[str, Any]:
    """A run without the samples that its rows hold too, and without tests that have no `tests` in their names.

    Raises:
        KeyError: it is no run with this plugin.
    """
    ours = {row["key"] for row in run["gpumem"]["rows"] if row["measurement"] is not None}
    benchmarks = []
    for one in (one for one in run["benchmarks"] if tests in one["fullname"]):
        stats = dict(one["stats"])
        if one["fullname"] in ours:
            stats.pop("data", None)
        benchmarks.append({**one, "stats": stats})
    document = {
        **run["gpumem"],
        "rows": [_shortened(row) for row in run["gpumem"]["rows"] if tests in row["key"]],
    }
    return {**run, "benchmarks": benchmarks, "gpumem": document}


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    measurement = row["measurement"]
    if measurement is None:
        return row
    placements = [
        [float(f"{seconds:.8g}") for seconds in samples] for samples in measurement["placements"]
    ]
    return {**row, "measurement": {**measurement, "placements": placements}}


def main() -> None:
    """Read, leave out, write."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument(
        "--tests", default="", metavar="TEXT", help="keep only tests with this in their names"
    )
    chosen = parser.parse_args()
    try:
        run = kept(json.loads(chosen.results.read_text()), chosen.tests)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(
            f"{chosen.results}: no results of pytest --gpumem --benchmark-json: {type(error).__name__} {error}"
        )
    write_whole(chosen.record, json.dumps(run, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
