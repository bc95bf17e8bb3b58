"""All that one report of a profiler holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pytest_gpumem.records.profile import Besides, TestProfile


@dataclass(frozen=True)
class Recording:
    """What one report tells."""

    profiles: tuple[TestProfile, ...]
    """One for each measurement and process, in the order of the session; and one without kernels for what a test did outside of the
    ranges of its labels, if it did anything there."""
    outside: Besides = field(default_factory=Besides)
    """What happened outside of all tests."""
    notes: tuple[str, ...] = ()
    """What the report leaves out, and how to record it."""
    tool: str = ""
    """What recorded it: "nsys" or "ncu"."""
    tool_version: str = ""
    """Its version, as it gives it; empty where the report does not say."""

    def parts(self) -> Iterator[Besides]:
        """Everything once: measured launches, the rest of each test, and what was outside of tests."""
        for one in self.profiles:
            yield Besides(one.kernels, one.copies, one.memsets, one.migrations)
            yield one.rest
        yield self.outside
