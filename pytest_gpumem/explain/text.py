"""An explanation as text and as plain values."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from pytest_gpumem.explain.causes import UNEXPLAINED, Explanation
from pytest_gpumem.judging.finding import change
from pytest_gpumem.printable import printable
from pytest_gpumem.units import format_share, format_time

WIDTH = 120


def text(key: str, explanation: Explanation, *, width: int = WIDTH) -> str:
    """The explanation of one measurement: its slow-down, each cause with its part, and what is left.

    Args:
        key: `Row.key` of the measurement.
        explanation: of it.
        width: of a line, in characters.
    """
    key, explanation = printable(key), printable(explanation)
    lines = [f"{key}: {_slow_down(explanation)}"]
    if explanation.why_nothing is not None:
        lines.append(f"  nothing to explain: {explanation.why_nothing}")
    else:
        for part, sentence in sorted(_parts(explanation), key=lambda one: -one[0]):
            lines += _wrapped(f"  {_part(part, explanation)}  ", sentence, width)
    for note in explanation.notes:
        lines += _wrapped("  note: ", note, width)
    for missing in explanation.not_looked_at:
        lines += _wrapped("  not looked at: ", missing, width)
    return "\n".join(lines)


def _slow_down(explanation: Explanation) -> str:
    found = explanation.slow_down
    low, high = found.low / found.base, found.high / found.base
    ends = f"{change(low)} to {change(high)}, {100 * found.confidence:.0f} %"
    return f"{format_time(found.base)} → {format_time(found.head)}, {change(found.share)} ({ends})"


def _parts(explanation: Explanation) -> Iterator[tuple[float, str]]:
    for cause in explanation.causes:
        yield cause.seconds, f"{'up to this: ' if cause.up_to else ''}{cause.sentence}"
    if explanation.unexplained > 0:
        yield explanation.unexplained, UNEXPLAINED


def _part(seconds: float, explanation: Explanation) -> str:
    whole = explanation.slow_down.seconds
    return f"{format_share(seconds / whole):>7} {format_time(seconds):>9}"


def _wrapped(first: str, sentence: str, width: int) -> list[str]:
    return textwrap.wrap(sentence, max(width, len(first) + 20), initial_indent=first, subsequent_indent=" " * len(first))


def to_json(key: str, explanation: Explanation) -> dict[str, Any]:
    """The same as plain values: seconds and shares, causes in their order."""
    found = explanation.slow_down
    return {
        "key": key,
        "base_seconds": found.base,
        "head_seconds": found.head,
        "slow_down": {
            "seconds": found.seconds,
            "share": found.share,
            "low_seconds": found.low,
            "high_seconds": found.high,
            "confidence": found.confidence,
        },
        "first": explanation.first,
        "causes": [
            {
                "rule": cause.rule,
                "sentence": cause.sentence,
                "seconds": cause.seconds,
                "share": cause.share,
                "up_to": cause.up_to,
                "estimate_seconds": cause.estimate,
                "evidence": {name: {"base": was, "head": now} for name, was, now in cause.evidence},
            }
            for cause in explanation.causes
        ],
        "unexplained": {"seconds": explanation.unexplained, "share": explanation.unexplained_share},
        "nothing_to_explain": explanation.why_nothing,
        "notes": list(explanation.notes),
        "not_looked_at": list(explanation.not_looked_at),
    }
