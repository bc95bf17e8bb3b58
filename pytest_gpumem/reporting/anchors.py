"""Names of elements of a page, by test."""

from __future__ import annotations

import hashlib

from pytest_gpumem.records.row import Row


def anchor(row: Row) -> str:
    """The same in every report of the same test and label, of letters and figures alone: a link to it can be kept."""
    return f"t-{hashlib.sha256(row.key.encode(errors='surrogatepass')).hexdigest()[:12]}"
