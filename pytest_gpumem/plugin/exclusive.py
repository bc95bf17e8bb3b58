"""One measuring test at a time on each GPU: workers of xdist, or two sessions, would time each other's kernels."""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from filelock import FileLock

from pytest_gpumem.records.device import DeviceFacts


def exclusive(facts: DeviceFacts) -> AbstractContextManager[object]:
    """Waits until no other process of this user holds the GPU. A device without a UUID is nobody else's: nothing is waited for.

    The lock ends with the process, however that ends.
    """
    if facts.uuid is None:
        return nullcontext()
    user = os.getuid() if hasattr(os, "getuid") else 0
    return FileLock(Path(tempfile.gettempdir()) / f"gpumem-{user}-{facts.uuid}.lock")
