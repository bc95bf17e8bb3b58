"""Rules about what ran differently, with the traced times of it: kernels of other machine code, and kernels that no longer overlap."""

from __future__ import annotations

from pytest_gpumem.explain.model import BaseAndHead, Estimate, Need, Pair, Rule
from pytest_gpumem.explain.pairing import base_name, base_names
from pytest_gpumem.explain.what_ran import Divergence, compared

OF_CODE = (
    "code",
    "shared",
    "dynamic_shared",
    "local",
    "registers",
)  # fields of a step that follow from a kernel's code
RAN = Need(
    "needs a record of CUPTI of what ran on both sides",
    lambda s: (
        None not in (s.base.at_once, s.head.at_once)
        and None not in (s.base.measurement.what_ran, s.head.measurement.what_ran)
    ),
)


def _ran(sides: BaseAndHead) -> tuple[Divergence, ...]:
    return tuple(
        one
        for one in compared(sides.base.measurement.what_ran, sides.head.measurement.what_ran) or ()
        if one.what == "kernel"
    )


def lost_overlap(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """Kernels that ran at once in base run one after another."""
    was, now = sides.base.at_once, sides.head.at_once
    assert was is not None
    assert now is not None
    if was - now < threshold * sides.base.latency:
        return None
    moved = [one for one in _ran(sides) if one.field == "stream"]
    figures: dict[str, Pair] = {
        "at_once": (was, now),
        "moved": (0, sum(one.times for one in moved)),
    }
    streams = {str(one.now) for one in moved}
    head = sides.head.kernels
    longest = max((use.nanoseconds / use.launches for use, _ in head.parts), default=0.0) / 1e9
    return Estimate(
        0.0,
        figures,
        {"streams": ", ".join(sorted(streams))},
        reserve=max(0.0, head.seconds - longest),
        measured=True,
    )


def other_code(sides: BaseAndHead, threshold: float) -> Estimate | None:
    """A kernel of other code takes longer."""
    found, ran = [], _ran(sides)
    for was, now in sides.kernels.alike:
        name = base_names(now.names)
        changed = [one for one in ran if one.field in OF_CODE and base_name(one.name) == name]
        if now.seconds > was.seconds * (1 + threshold) and (changed or was.names != now.names):
            found.append((now.seconds - was.seconds, was, now, changed))
    if not found:
        return None
    more, was, now, changed = max(found, key=lambda one: one[0])
    details = {
        "kernel": base_names(now.names),
        "changed": ", ".join(one.of_field for one in changed if one.field != "code"),
    }
    if base_names(was.names) != details["kernel"]:
        details["was"] = base_names(was.names)
    return Estimate(
        0.0, {"kernel_seconds": (was.seconds, now.seconds)}, details, reserve=more, measured=True
    )


RULES = (
    Rule(
        "lost overlap",
        "time in which kernels run at once",
        0.05,
        "of base less",
        "what no other cause has",
        (RAN,),
        lost_overlap,
    ),
    Rule(
        "other code",
        "time of a kernel of other code",
        0.02,
        "longer",
        "its further time, after all others",
        (RAN,),
        other_code,
    ),
)
