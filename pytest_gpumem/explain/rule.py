"""What a rule of an explanation is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.explain.model import Sides


Pairs = tuple[tuple[str, float | None, float | None], ...]
"""Figures by name, in base and in head."""

GAP_SECONDS = 1.5e-6
"""Seconds that a kernel or copy more takes on a stream beside its own work: an empty kernel between two events reads 2 us."""


@dataclass(frozen=True)
class Found:
    """What a rule found."""

    sentence: str
    """What moved, without a full stop."""
    seconds: float
    """Seconds that it accounts for, as the rule estimates."""
    evidence: Pairs = ()
    """Figures in base and in head."""
    open: bool = False
    """The estimate is a lower bound: what no other cause accounts for may be this one's."""
    reserve: float = 0.0
    """Seconds that it may cost besides, because it makes waiting longer: anything from nothing to this, of what all others leave."""


@dataclass(frozen=True)
class Need:
    """Evidence without which a rule says nothing."""

    words: str
    """What is to be done to have it."""
    there: Callable[[Sides], bool]


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    name: str
    """Names the cause in JSON."""
    looks_at: str
    """In words."""
    threshold: float
    """Handed to `find`."""
    means: str
    """What the threshold is of, in words."""
    estimate: str
    """How the seconds come about, in words."""
    needs: tuple[Need, ...]
    find: Callable[[Sides, float], Found | None]
