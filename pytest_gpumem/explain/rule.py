"""A rule of an explanation, and its estimate.

To add a cause: a function and its row in `rules_link` or `rules_memory`, and its sentence in `text.SENTENCES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.explain.model import BaseAndHead

Pair = tuple[float | None, float | None]
"""A figure of base and of head; None where unknown."""

GAP_SECONDS = 1.5e-6
"""Seconds that one more kernel or copy costs on a stream besides its own work: an empty kernel between two events takes 2 us."""


@dataclass(frozen=True)
class Estimate:
    """The change that a rule found, and its cost."""

    seconds: float
    """Seconds of the slow-down that it accounts for."""
    figures: Mapping[str, Pair] = field(default_factory=dict)
    """By name: bytes, hertz, seconds, counts and shares."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Codes and names, such as of a kernel."""
    open: bool = False
    """`seconds` is a lower bound: it may account for all that no other cause does."""
    reserve: float = 0.0
    """Further seconds at most, because it only lengthens waiting. They come out of the rest that all other causes leave."""


@dataclass(frozen=True)
class Need:
    """Evidence that a rule requires."""

    words: str
    """How to get it."""
    met: Callable[[BaseAndHead], bool]


@dataclass(frozen=True)
class Rule:
    """One row of the table of rules."""

    name: str
    """Code of the cause, also in JSON."""
    looks_at: str
    threshold: float
    """Second argument of `find`."""
    means: str
    """The quantity that the threshold limits."""
    estimate: str
    """How the seconds are estimated."""
    needs: tuple[Need, ...]
    find: Callable[[BaseAndHead, float], Estimate | None]
    """None below the threshold."""
