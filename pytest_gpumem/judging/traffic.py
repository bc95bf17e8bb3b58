"""Declared traffic in words: why its share of the peak means nothing, and contradictions."""

from __future__ import annotations

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import L2_MULTIPLES, Measurement, NoShare
from pytest_gpumem.units import short_bytes

SHARE = 0.05
"""Share of the declared bytes by which two declarations may differ without notice; choice."""
_CLAUSES = {
    NoShare.UNKNOWN_TRAFFIC: "its traffic is unknown (give `moved=`)",
    NoShare.LINK: "its bytes cross the host link, not the memory bus",
    NoShare.HOT: "in hot mode L2 serves what it can",
    NoShare.UNKNOWN_FOOTPRINT: "its footprint is unknown",
    NoShare.UNKNOWN_PEAK: (
        "the peak is unknown (the driver reports no memory clock or no bus width)"
    ),
}


def no_share_text(measurement: Measurement, facts: DeviceFacts) -> str | None:
    """Return the reason of `Measurement.no_share_of_peak` as a clause, or None."""
    reason = measurement.no_share_of_peak(facts)
    if reason is None:
        return None
    if reason is not NoShare.SMALL_FOOTPRINT:
        return _CLAUSES[reason]
    taken = short_bytes(measurement.footprint or 0)
    least = short_bytes(L2_MULTIPLES * facts.l2_bytes)
    return f"its footprint of {taken} is below {least}, {L2_MULTIPLES} x L2"


def two_declarations(moved: int, reads: int, writes: int) -> str | None:
    """Return a note on a case that declares its traffic twice, or None if both agree.

    `moved` counts, and `reads` and `writes` are the bytes of its arrays.
    """
    arrays = reads + writes
    if not arrays or abs(moved - arrays) <= SHARE * arrays:
        return None
    direction = "more" if moved > arrays else "less"
    return (
        f"moved= says {short_bytes(moved)}, {direction} than the {short_bytes(arrays)} of reads= "
        f"and writes= ({short_bytes(reads)} + {short_bytes(writes)}); moved= counts"
    )
