"""The limits of a row."""

from __future__ import annotations

from msgspec import field

from pytest_gpumem.records import Record


class Limits(Record, frozen=True):
    """Limits of a measurement and of the memory of a test, as written, by `limits.LIMITS`; None is
    no limit."""

    min_bandwidth: str | None = None
    max_latency: str | None = None
    max_gpu_page_faults: str | None = None
    max_migrated: str | None = None
    max_kernels: str | None = None
    max_copies: str | None = None
    max_copied_bytes: str | None = None
    max_waits: str | None = None
    max_spill: str | None = None
    min_overlap: str | None = None
    max_regression: str | None = None
    faster_than: str | None = None
    max_peak: str | None = None
    max_kept: str | None = None
    max_peak_regression: str | None = None
    origin: dict[str, str] = field(default_factory=dict)
    """Source of each limit: "marker", "--gpumem-max-regression", "gpumem_max_latency in
    pytest.ini", "call"."""
