"""Why a measurement has no share of the device's DRAM peak, in words."""

from __future__ import annotations

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import L2_MULTIPLES, Measurement, NoShare
from pytest_gpumem.units import format_bytes


def no_share_text(measurement: Measurement, facts: DeviceFacts) -> str | None:
    """The reason of `Measurement.no_share_of_peak` as a clause; None if the share means something."""
    return reason_text(measurement.no_share_of_peak(facts), measurement, facts)


def reason_text(reason: NoShare | None, measurement: Measurement, facts: DeviceFacts) -> str | None:
    """A reason as a clause; None for none."""
    if reason is NoShare.SMALL_FOOTPRINT:
        return f"its footprint of {format_bytes(measurement.footprint or 0)} is below {L2_MULTIPLES} x L2 ({format_bytes(facts.l2_bytes)})"
    return None if reason is None else _CLAUSES[reason]


_CLAUSES = {
    NoShare.UNKNOWN_TRAFFIC: "its traffic is unknown (give `moved=`)",
    NoShare.LINK: "its bytes cross the host link, not the memory bus",
    NoShare.HOT: "in hot mode L2 serves what it can",
    NoShare.UNKNOWN_FOOTPRINT: "its footprint is unknown",
    NoShare.UNKNOWN_PEAK: "the peak is unknown (the driver reports no memory clock or no bus width)",
}
