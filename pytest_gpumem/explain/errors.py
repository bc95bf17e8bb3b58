"""What keeps an explanation from being made."""

from __future__ import annotations


class ExplainError(Exception):
    """A call that cannot be carried out as it stands: one line with the value and what is accepted."""


class NothingMeasured(Exception):
    """There is nothing to explain, because a side measured nothing: one line with the cause."""
