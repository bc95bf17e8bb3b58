"""The base of all records."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plain data: frozen, and strict when it is read from JSON."""
