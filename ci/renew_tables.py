"""Draw the tables in Markdown files anew, from recorded runs and from scripts.

    python ci/renew_tables.py README.md docs/*.md

A marker stands on a line of its own before a ```text block, which is replaced:

    <!-- record: FILE -->               the device, the day and the table of a run, from pytest-benchmark JSON below the repository, or
                                        from the record of a script of ci/bench; a line that says so where there is none yet
    <!-- record: FILE of NODEID -->     only the rows of a run whose node id begins so, or
    <!-- record: FILE without NODEID -->    all others
    <!-- summary: FILE -->              the end of that session: a line for each test, or for each kind of test
    <!-- output: FILE -->               what a script of this repository prints
    <!-- session: NAME -->              a session of ci/docs_sessions.py
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import document_from_json
from pytest_gpumem.reporting.summary import summary
from pytest_gpumem.reporting.table import table

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
KINDS = "record|summary|output|session"
BLOCK = re.compile(rf"(<!-- ({KINDS}): (\S+)(?: (of|without) (\S+))? -->\n```text\n).*?^```$", re.DOTALL | re.MULTILINE)


def record(name: str, which: str | None = None, nodeid: str = "", *, short: bool = False) -> str:
    """The device, the day and the table of a recorded run; of the rows whose node id begins with `nodeid`, or ("without") of the others.

    `short`: the summary of these rows in place of their table.
    """
    if not (ROOT / name).exists():
        return f"not recorded yet: {name}"
    run = json.loads((ROOT / name).read_text())
    if "kind" in run:
        return bench_table(run)
    document = document_from_json(of_today(run["gpumem"]))
    device = document.device
    head = f"{device.name}, driver {device.driver}, {run['datetime'][:10]}"
    rows = [_without_limits(row) for row in document.rows if which is None or row.nodeid.startswith(nodeid) == (which == "of")]
    drawn = (
        summary(rows, device, width=WIDTH, colour=False, in_session=True)
        if short
        else table(rows, device, width=WIDTH, colour=False, notes=False)
    )
    return f"{head}\n\n{drawn}"


NAMES = {"traffic": "moved_bytes", "counted": "dram_bytes", "max_syncs": "max_waits", "syncs": "waits", "no_evidence": "no_what_ran"}
OF_A_COMPARISON = {"delta": "change", "low": "change_low", "high": "change_high"}
"""Keys of older records, and what they are called now."""


def of_today(value: Any, names: Mapping[str, str] = NAMES) -> Any:
    """The values of a record with the keys of today."""
    if isinstance(value, list):
        return [of_today(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {names.get(key, key): of_today(one, OF_A_COMPARISON if key == "comparison" else NAMES) for key, one in value.items()}


def _without_limits(row: Row) -> Row:
    """The row; MEASURED if it has no limit, which older records call PASS."""
    judged = row.verdict.outcome is not Outcome.PASS or any(getattr(row.limits, name) is not None for name in LIMITS)
    return row if judged else replace(row, verdict=replace(row.verdict, outcome=Outcome.MEASURED))


def bench_table(run: dict[str, Any]) -> str:
    """The table of a record that a script of ci/bench wrote."""
    # These scripts are no package; the folder goes on the path only where one of their records is drawn.
    sys.path.insert(0, str(ROOT / "ci" / "bench"))
    module = importlib.import_module(run["kind"])
    return str(module.table(run))


def output(name: str, *_: str | None) -> str:
    """The output of a script."""
    return subprocess.run([sys.executable, ROOT / name], capture_output=True, text=True, check=True).stdout.rstrip()


def session(name: str, *_: str | None) -> str:
    """A session on the simulated device."""
    return subprocess.run(
        [sys.executable, ROOT / "ci" / "docs_sessions.py", name], capture_output=True, text=True, check=True
    ).stdout.rstrip()


def renewed(text: str) -> str:
    """Markdown with every marked block drawn anew."""
    draw: dict[str, Callable[..., str]] = {"record": record, "summary": partial(record, short=True), "output": output, "session": session}
    return BLOCK.sub(lambda block: f"{block[1]}{draw[block[2]](block[3], block[4], block[5])}\n```", text)


def main() -> int:
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(renewed(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
