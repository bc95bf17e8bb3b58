"""Declared traffic against counted traffic.

Declared traffic is compulsory: every distinct byte once, a lower bound of the bytes that DRAM moves. A count above it is traffic that the
kernel could avoid; a count below it shows that too much was declared.

On an H200, a correctly declared triad over 1.6 GB was counted with reads 0.003 % above and writes 3.6 % below; 20 MB of the writes were
still dirty in an L2 of 60 MiB (ci/records/nvidia-h200/nvtx_filter.json).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import (
    L2_MULTIPLES,
    DramBytes,
    Measurement,
    MovedBytes,
    NoShare,
)
from pytest_gpumem.units import format_share, short_bytes


def no_share_text(measurement: Measurement, facts: DeviceFacts) -> str | None:
    """The reason of `Measurement.no_share_of_peak` as a clause; None if the share means something."""
    return reason_text(measurement.no_share_of_peak(facts), measurement, facts)


def reason_text(reason: NoShare | None, measurement: Measurement, facts: DeviceFacts) -> str | None:
    """A reason as a clause; None for none."""
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


SHARE = 0.05
"""Largest share of the declared bytes by which a count may differ without notice.

Correct declarations were counted within 3.6 %. A forgotten array, the size of another type, or an update counted once is wrong by a
quarter or more."""


class Agreement(str, Enum):
    """How a count compares with a declaration."""

    AGREES = "agrees"  # within `SHARE`, or below by no more than L2 can hold
    WRONG = "declared too much"  # a launch moves less than was declared: bandwidth and share of the peak are overstated
    EXCESS = "moves more"  # DRAM moves more than the compulsory bytes
    UNJUDGED = "not judged"  # the caches, or a link, may account for any difference
    UNDECLARED = "not declared"  # only the count exists


@dataclass(frozen=True)
class Account:
    """A declaration and a count side by side."""

    finding: Agreement
    difference: (
        float | None
    )  # counted bytes over declared ones, less 1; None where nothing was declared
    sentence: str  # both figures and their meaning, without a full stop

    @property
    def notable(self) -> bool:
        """True if the difference is worth a note."""
        if self.finding is Agreement.UNJUDGED:
            return self.difference is not None and abs(self.difference) > SHARE
        return self.finding is not Agreement.AGREES


def account(measurement: Measurement, facts: DeviceFacts) -> Account | None:
    """The count of a measurement against its declaration; None if nothing was counted. It is judged where the bytes cross the DRAM bus
    (`Measurement.not_of_dram`): the footprint is at least four times L2, the mode is not hot, and no link is involved."""
    counted, traffic = measurement.dram_bytes, measurement.moved_bytes
    if counted is None:
        return None
    if traffic is None:
        return Account(
            Agreement.UNDECLARED,
            None,
            f"counted {short_bytes(counted.total)} by {counted.source}; nothing was declared (give `moved=`)",
        )
    difference = counted.total / traffic.total - 1 if traffic.total else None
    change = f" ({format_share(difference, sign=True)})" if difference is not None else ""
    figures = f"declared {short_bytes(traffic.total)}, counted {short_bytes(counted.total)} by {counted.source}{change}"
    if (reason := reason_text(measurement.not_of_dram(facts), measurement, facts)) is not None:
        return Account(Agreement.UNJUDGED, difference, f"{figures}; not judged: {reason}")
    if missing := _missing(measurement, traffic, counted, facts):
        return Account(
            Agreement.WRONG,
            difference,
            f"{figures}: the declaration is wrong, a launch moves {missing}; its bandwidth is overstated "
            "(unless copies or memsets move the rest: only kernels are counted)",
        )
    if difference is not None and difference > SHARE:
        return Account(
            Agreement.EXCESS,
            difference,
            f"{figures}: DRAM moves more than the compulsory bytes, {_why(traffic, counted)}",
        )
    return Account(Agreement.AGREES, difference, figures)


def _missing(
    measurement: Measurement, traffic: MovedBytes, counted: DramBytes, facts: DeviceFacts
) -> str:
    """How much less a launch moves than was declared; empty if the caches can account for it."""
    # When a launch ends, up to a whole L2 of its writes has not reached DRAM; a persisting window's bytes need not come from DRAM.
    unwritten = facts.l2_bytes
    window = measurement.window
    persisting = window.nbytes if window is not None and window.hit == "persisting" else 0
    if traffic.declared is not None:
        short = counted.total < traffic.declared * (1 - SHARE) - unwritten - persisting
        return f"at most {short_bytes(counted.total + unwritten + persisting)}" if short else ""
    parts = []
    if counted.reads < traffic.reads * (1 - SHARE) - persisting:
        parts.append(
            f"{short_bytes(counted.reads)} of the {short_bytes(traffic.reads)} declared as read"
        )
    if counted.writes < traffic.writes * (1 - SHARE) - unwritten - persisting:
        parts.append(
            f"{short_bytes(counted.writes)} of the {short_bytes(traffic.writes)} declared as written"
        )
    return " and ".join(parts)


def _why(traffic: MovedBytes, counted: DramBytes) -> str:
    """A cause of the excess, by the bytes that the SMs asked of L2."""
    if counted.l2_reads is None or counted.l2_writes is None:
        return "by sectors used in part or lines fetched again"
    asked = counted.l2_reads + counted.l2_writes
    if asked > traffic.total * (1 + SHARE):
        return f"and the SMs asked L2 for {short_bytes(asked)}: sectors used in part, or data asked for again"
    return f"though the SMs asked L2 for {short_bytes(asked)} only: lines fetched again, or written back in part"


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
