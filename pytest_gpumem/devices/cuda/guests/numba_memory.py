"""Numba's memory: the driver reports its allocations. Numba frees late, several at a time.

Source: numba.cuda, Deallocation Behavior.
"""

from __future__ import annotations

import sys

from pytest_gpumem.devices.footprints import Source


class NumbaMemory(Source):
    """Frees what Numba has put off."""

    name = "Numba"
    method = "CUPTI"

    def ready(self) -> bool:
        return "numba.cuda" in sys.modules

    def settle(self) -> None:
        context = sys.modules["numba.cuda"].current_context()
        for holder in (context, context.memory_manager):
            if (pending := getattr(holder, "deallocations", None)) is not None:
                pending.clear()
