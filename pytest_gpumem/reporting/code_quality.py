"""GitLab's code-quality report: what a merge request shows beside its changes.

"Code Quality", Implement a custom tool: an array of findings, each with description, check_name, fingerprint, severity and location.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Code
from pytest_gpumem.reporting.concerns import Concern, Level, Place


def code_quality(concerns: Sequence[Concern], places: Mapping[str, Place]) -> str:
    """The report as JSON; an empty array where there is nothing to look at, without which GitLab could not tell what was resolved.

    Args:
        concerns: worst first.
        places: of tests, by node id; a test without one stands on line 1 of its file.
    """
    return json.dumps([_finding(concern, places.get(concern.row.nodeid)) for concern in concerns], indent=1) + "\n"


def _finding(concern: Concern, place: Place | None) -> dict[str, object]:
    row = concern.row
    place = place if place is not None else Place(row.nodeid.partition("::")[0], 1)
    return {
        "description": concern.sentence,
        "check_name": _check(row),
        "fingerprint": fingerprint(row),
        "severity": _severity(concern),
        "location": {"path": place.file, "lines": {"begin": place.line}},
    }


def fingerprint(row: Row) -> str:
    """What makes two findings of different runs the same: the row and its verdict, without figures, which always differ."""
    return hashlib.sha256(f"{_check(row)}\0{row.key}".encode("utf-8", "surrogatepass")).hexdigest()


def _check(row: Row) -> str:
    return f"gpumem {row.verdict.outcome.value}"


def _severity(concern: Concern) -> str:
    if concern.level is Level.FAILURE:
        return "major"
    return "minor" if concern.row.verdict.code is Code.LOOKS_SLOWER else "info"
