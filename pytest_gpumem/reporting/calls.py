"""The calls of tests as text: counts, and the lines that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.records.calls import Calls, WaitLine
from pytest_gpumem.units import format_time, short_bytes

SHOWN = 5  # lines that the summary of a run names


def call_facts(calls: Calls) -> Iterator[tuple[str, str]]:
    """Terms and texts of one test."""
    if calls.not_counted is not None:
        yield "not counted", calls.not_counted
    copies = ", ".join(
        f"{copy.count} {copy.kind} {copy.source} to {copy.destination} {short_bytes(copy.nbytes)}"
        for copy in calls.copies
    )
    parts = [
        counted(calls.kernels, "kernel"),
        f"copies: {copies}" if copies else "no copy",
        counted(calls.memsets, "memset"),
    ]
    yield (
        "calls",
        ", ".join(
            [
                *parts,
                *(
                    [f"{calls.default_stream} on the legacy default stream"]
                    if calls.default_stream
                    else []
                ),
            ]
        ),
    )
    for wait in calls.waiting:
        yield (
            ("waits" if wait.sure else "may wait"),
            f"{_place(wait)}{' (allowed)' if wait.allowed else ''}",
        )
    if calls.first_use:
        yield (
            "first use",
            ", ".join(f"{count} {what}" for what, count in calls.first_use.items())
            + "; counted apart",
        )


def _place(wait: WaitLine) -> str:
    time = f", {format_time(wait.seconds)}" if wait.seconds else ""
    return f"{wait.place} {wait.count} x {wait.call} ({wait.of}{time})" + (
        f": {wait.code}" if wait.code else ""
    )


def call_totals(tests: Iterable[Calls]) -> Iterator[str]:
    """Sentences on the calls of all tests, and on the lines that wait most; none where nothing was called."""
    found = list(tests)
    if not found:
        return
    waits, lines = sum(calls.waits for calls in found), Counter[str]()
    for wait in (wait for calls in found for wait in calls.lines):
        lines[wait.place] += wait.count
    kernels, copies = sum(calls.kernels for calls in found), sum(calls.copied for calls in found)
    text = f"calls of {counted(len(found), 'test')}: {counted(kernels, 'kernel')}, {counted(copies, 'copy')} of "
    text += f"{short_bytes(sum(calls.copied_bytes for calls in found))}, the host waits {counted(waits, 'time')}"
    most = ", ".join(f"{place} {count} x" for place, count in lines.most_common(SHOWN))
    text += f" at {counted(len(lines), 'line')}: {most}" if lines else ""
    missed = sum(calls.not_counted is not None for calls in found)
    yield f"{text}; {counted(missed, 'test')} not counted, or not completely" if missed else text
