"""What a row says besides its verdict: what differs from its baseline."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.baselines.context import changes
from pytest_gpumem.records.row import Row

if TYPE_CHECKING:
    from pytest_gpumem.plugin.session import GpuSession


def in_context(row: Row, item: pytest.Item, session: GpuSession) -> Row:
    """Add the test's source to a row, and to its verdict's reason what has changed since the baseline."""
    measurement = row.measurement
    source = source_of(item)
    if measurement is None:
        return replace(row, test_source=source)
    of_its_mode = [one for one in session.history(row).accepted if one.measurement.mode == measurement.mode]
    changed = changes(measurement, session.facts, source, of_its_mode)
    verdict = row.verdict
    if changed:
        verdict = replace(verdict, reason=f"{verdict.reason}; changed since the baseline: {', '.join(changed)}")
    return replace(row, verdict=verdict, test_source=source, changed=changed)


def source_of(item: pytest.Item) -> str | None:
    """SHA-256 of the text of a test's function, decorators included, whatever its indentation; None for an item without one.

    What the function calls, closes over or is given by fixtures is not followed.
    """
    function = getattr(item, "function", None)
    if function is None:
        return None
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # made by a program
        return None
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
