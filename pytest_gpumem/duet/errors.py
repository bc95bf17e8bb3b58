"""What stops a duet."""

from __future__ import annotations


class DuetError(Exception):
    """A duet that cannot be played as it was asked for: one line with the value and what is accepted."""
