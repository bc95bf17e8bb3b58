"""Keep what tables are drawn from: the summary of a run, without samples.

    python ci/keep_record.py RESULTS.json ci/records/nvidia-h200/suite.json
    python ci/keep_record.py --tests test_l2_ RESULTS.json ci/records/nvidia-h200/l2.json    # only tests with this in their names
    python ci/keep_record.py PEERS.json ci/records/nvidia-h200/peers_nvbench.json

Of a run's pytest-benchmark JSON: device, revision, date, and of each row the figures, the verdict, and the median of each placement. Of a
record of `ci/bench/peers.py`: all but its runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, Struct, structs, to_builtins

from pytest_gpumem.files import write_whole
from pytest_gpumem.records.device import Conditions
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import document_from_json

ROW = ("nodeid", "label", "limits", "verdict", "failed", "extra")
MEASUREMENT = (
    "label target mode sampler half_width moved_bytes footprint floor window"
    " checked notes migrations accesses_per_launch overlap sectors_per_request requested work_seen busy"
)
"""Fields that are kept as they are."""


def kept(run: dict[str, Any], tests: str = "") -> dict[str, Any]:
    """The summary of a run of pytest, of tests with `tests` in their names; or of a record of peers.py.

    Raises:
        KeyError: it is neither.
    """
    if run.get("kind") == "peers":
        return {name: value for name, value in run.items() if name != "runs"}
    document = document_from_json(run["gpumem"])
    rows = [_summary(row) for row in document.rows if tests in row.key]
    gpumem = {
        "schema": run["gpumem"]["schema"],
        "simulated": document.device.simulated,
        "device": _short(document.device),
        "settings": {},
    }
    return {
        "datetime": run["datetime"],
        "commit_info": run["commit_info"],
        "gpumem": {**gpumem, "rows": rows},
    }


def _summary(row: Row) -> dict[str, Any]:
    fields = {name: getattr(row, name) for name in ROW}
    if row.measurement is not None:
        fields["measurement"] = _figures(row.measurement)
    summary: dict[str, Any] = _short(Row(**fields))
    return summary


def _figures(measurement: Measurement) -> Measurement:
    fields = {name: getattr(measurement, name) for name in MEASUREMENT.split()}
    fields["placements"] = tuple((float(f"{median:.9g}"),) for median in measurement.medians)
    fields["conditions"] = (Conditions(), Conditions())
    fields["sampler_reason"] = ""  # no table draws it
    return Measurement(**fields)


def _short(value: Any) -> Any:
    """A record as plain values, without fields that have their default."""
    if isinstance(value, tuple):
        return [_short(part) for part in value]
    if not isinstance(value, Struct):
        return to_builtins(value)
    plain = {}
    for field in structs.fields(value):
        part = getattr(value, field.name)
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        if part != default:
            plain[field.encode_name] = _short(part)
    return plain


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
            f"{chosen.results}: no results of pytest --gpumem --benchmark-json, and no record: {type(error).__name__} {error}"
        )
    write_whole(chosen.record, json.dumps(run, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
