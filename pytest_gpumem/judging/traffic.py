"""Declared traffic in words: why its share of the peak means nothing, and declarations that contradict themselves."""

from __future__ import annotations

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import L2_MULTIPLES, Measurement, NoShare
from pytest_gpumem.units import short_bytes


def no_share_text(measurement: Measurement, facts: DeviceFacts) -> str | None:
    """The reason of `Measurement.no_share_of_peak` as a clause; None if the share means something."""
    reason = measurement.no_share_of_peak(facts)
    if reason is NoShare.SMALL_FOOTPRINT:
        least = short_bytes(L2_MULTIPLES * facts.l2_bytes)
        return f"its footprint of {short_bytes(measurement.footprint or 0)} is below {least}, {L2_MULTIPLES} x L2"
    return None if reason is None else _CLAUSES[reason]


_CLAUSES = {
    NoShare.UNKNOWN_TRAFFIC: "its traffic is unknown (give `moved=`)",
    NoShare.LINK: "its bytes cross the host link, not the memory bus",
    NoShare.HOT: "in hot mode L2 serves what it can",
    NoShare.UNKNOWN_FOOTPRINT: "its footprint is unknown",
    NoShare.UNKNOWN_PEAK: "the peak is unknown (the driver reports no memory clock or no bus width)",
}


SHARE = 0.05  # of the declared bytes, by which two declarations may differ without notice; choice


def two_declarations(moved: int, reads: int, writes: int) -> str | None:
    """A note on a case that declares its traffic twice, as `moved=`, which counts, and as arrays; None if they agree."""
    if not reads + writes or abs(moved - (reads + writes)) <= SHARE * (reads + writes):
        return None
    direction = "more" if moved > reads + writes else "less"
    return (
        f"moved= says {short_bytes(moved)}, {direction} than the {short_bytes(reads + writes)} of reads= and writes= "
        f"({short_bytes(reads)} + {short_bytes(writes)}); moved= counts"
    )


def beyond_arguments(moved: int, arguments: int) -> str | None:
    """A note on a callable that declares more than its `arguments` (bytes; 0: unknown) allow: each byte once as read and once as written.
    None if they allow it. A callable may use other memory too, hence a note and no verdict.
    """
    if not arguments or moved <= 2 * arguments:
        return None
    holds, allows = short_bytes(arguments), short_bytes(2 * arguments)
    return (
        f"moved= says {short_bytes(moved)}, but the buffers among the arguments hold {holds} and allow {allows}, "
        "each byte read once and written once: the rest is declared too much, or moved in memory that is no argument"
    )
