"""The rows of a duet's processes: which it compares, and why others cannot be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import structs

from pytest_gpumem.judging.finding import window_text
from pytest_gpumem.judging.judge import is_failure
from pytest_gpumem.judging.regression import changed_work
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import Row, covers, selects
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.processes import ProcessRecord
from pytest_gpumem.settings import flag_of

MEASURING = ("device", "mode", "sampler", "placements", "precision", "budget", "total_budget")
"""Settings that base and head share: latencies under different ones are not comparable."""


@dataclass(frozen=True)
class RowFilter:
    """The rows that a duet compares; all rows without an argument."""

    tests: frozenset[str] | None = None
    """Node ids. Each selects as on pytest's command line, such as all parameters of a test."""
    limits: Mapping[str, Limits] | None = None
    """By row key, the limits that the duet judges. It then compares no other row."""
    old_names: Mapping[str, str] = field(default_factory=dict)
    """Of renamed tests: what they are called in base, by their names in head."""

    def selects(self, nodeid: str, key: str) -> bool:
        """Return whether a row is among them."""
        if self.limits is not None:
            return key in self.limits
        return self.tests is None or any(selects(name, nodeid) for name in self.tests)

    def missing(self, rows: Mapping[str, Row]) -> list[str]:
        """Return the requested names that select none of these rows."""
        if self.limits is not None:
            return sorted(set(self.limits).difference(rows))
        nodeids = [row.nodeid for row in rows.values()]
        missing = []
        for name in sorted(self.tests or ()):
            if not any(selects(name, nodeid) for nodeid in nodeids):
                missing.append(name)
        return missing

    def rows_of(self, process: ProcessRecord) -> dict[str, Row]:
        """Return the selected rows of a process by key; those of memory alone only by `limits`."""
        rows = {}
        for row in process.rows:
            of_time = row.measurement is not None or row.footprint is None
            if (of_time or self.limits is not None) and self.selects(row.nodeid, row.key):
                rows[row.key] = row
        return rows


def under_other_name(nodeid: str, names: Mapping[str, str]) -> str:
    """Return a node id with the other name of its test. `names`: the other ones, by name."""
    for name, other in names.items():
        if selects(name, nodeid):
            return other + nodeid[len(name) :]
    return nodeid


def under_new_names(process: ProcessRecord, old_names: Mapping[str, str]) -> ProcessRecord:
    """Return a process of base with the names that its renamed tests have in head."""
    new_names = {old: new for new, old in old_names.items()}
    rows, outcomes = [], {}
    for row in process.rows:
        rows.append(structs.replace(row, nodeid=under_other_name(row.nodeid, new_names)))
    for nodeid, outcome in process.outcomes.items():
        outcomes[under_other_name(nodeid, new_names)] = outcome
    return structs.replace(process, rows=tuple(rows), outcomes=outcomes)


def check_alike(base: ProcessRecord, head: ProcessRecord) -> None:
    """Raise `RunError` where a setting of measuring differs: names it and both values."""
    for name in MEASURING:
        if name not in base.settings or name not in head.settings:
            continue
        was, now = base.settings[name], head.settings[name]
        if was != now:
            raise RunError(
                f"base and head measure in different ways: {name} is {was!r} in base and {now!r} "
                f"in head; give {flag_of(name)} among pytest's arguments"
            )


def not_measured(key: str, row: Row | None, process: ProcessRecord) -> str | None:
    """Return why a process has nothing to compare of a row, whatever its conditions, or None.

    A test that only broke limits was measured all the same.
    """
    if process.error is not None:
        return f"crashed: {process.error}"
    why = "it measured nothing"
    if row is not None and row.measured_something:
        if not row.failed or _broke_only_limits(row.nodeid, process):
            return None
        why = "its test failed"
    elif row is not None:
        why = row.verdict.reason or why
    nodeid = test_of(key, process)
    if nodeid is None:
        return why
    outcome, words = process.outcomes[nodeid]
    if key.startswith(f"{nodeid}::"):  # its file
        return words or outcome
    return f"{outcome}, {words}" if words else outcome


def _broke_only_limits(nodeid: str, process: ProcessRecord) -> bool:
    """True if verdicts fail a test, and no assertion or error does."""
    rows = [row for row in process.rows if row.nodeid == nodeid and row.measured_something]
    if any(row.test_error is True for row in rows):
        return False
    return any(is_failure(row.verdict, strict=False) for row in rows)


def fails(key: str, row: Row | None, process: ProcessRecord) -> bool:
    """Return whether a process crashed, or the test of a row failed by more than its limits."""
    if process.error is not None:
        return True
    if row is not None:
        return row.failed and not _broke_only_limits(row.nodeid, process)
    nodeid = test_of(key, process)
    if nodeid is None or process.outcomes[nodeid][0] != "failed":
        return False
    return not _broke_only_limits(nodeid, process)


def test_of(key: str, process: ProcessRecord) -> str | None:
    """Return the test or file of a key or a name, among those that did not pass in a process."""
    for nodeid in process.outcomes:
        # A file that cannot be imported fails all tests in it.
        if covers(nodeid, key) or selects(key, nodeid):
            return nodeid
    return None


def measured_differently(base: Measurement, head: Measurement) -> str | None:
    """Return in words how head measures a row in another way, which may hide a slow-down, or None.

    More declared bytes hide none.
    """
    for name in ("mode", "sampler"):
        was, now = getattr(base, name), getattr(head, name)
        if was != now:
            return f"{name} was {was} in base and is {now} in head"
    if base.window != head.window:
        was, now = window_text(base.window), window_text(head.window)
        return f"the window was {was} in base and is {now} in head"
    if base.moved_bytes is None:
        return None
    if head.moved_bytes is None:
        return "head no longer declares its bytes"
    was, now = base.moved_bytes.total, head.moved_bytes.total
    return f"head declares {now:,} bytes, and base {was:,}" if now < was else None


def changes(base: Measurement, head: Measurement) -> list[str]:
    """Return what differs in the work of head, for the reader of a comparison."""
    texts = []
    if base.target != head.target:
        texts.append(f"it now measures {head.target}, not {base.target}")
    for name, then, now in changed_work(base, head):
        texts.append(f"its {name} has changed from {then} to {now}")
    return texts
