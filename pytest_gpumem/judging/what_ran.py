"""Whether launches ran the same: their steps, with words of arguments left out that vary. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pytest_gpumem.records.what_ran import WhatRan, what_ran

_LEFT_OUT = "?"


def merged_record(records: Sequence[WhatRan]) -> WhatRan | None:
    """Return the record of launches that should run the same, without the words of arguments that
    differ between them; None if they differ otherwise, or if one was not watched."""
    merged = records[0]
    for record in records[1:]:
        merged = _masked_like(merged, record, differing=True)
    others = [_masked_like(record, merged) for record in records]
    return merged if ran_the_same(merged, others) else None


def ran_the_same(record: WhatRan, past: Sequence[WhatRan]) -> bool:
    """Return True if a launch ran the same as all past ones. Words of arguments that a past record
    leaves out are not compared. A word that only `record` leaves out counts as a change."""
    if not past or record.not_watched is not None:
        return False
    # Collect each `?` of the past, put them into every record, and compare.
    compared = past[0]
    for other in past[1:]:
        compared = _masked_like(compared, other)
    return all(_masked_like(other, compared) == compared for other in (record, *past))


def _masked_like(record: WhatRan, other: WhatRan, *, differing: bool = False) -> WhatRan:
    """`record` with each argument as `masked` by that of `other`."""
    if record == other or len(record.order) != len(other.order) or record.not_watched:
        return record
    launch = []
    for step, partner in zip(record.launch, other.launch, strict=True):
        mine, its = step.arguments or (), partner.arguments or ()
        if len(mine) == len(its) > 0:
            left = []
            for pair in zip(mine, its, strict=True):
                left.append(masked(*pair, differing=differing))
            launch.append(replace(step, arguments=tuple(left)))
        else:
            launch.append(step)
    return what_ran(launch, record.state)


def masked(first: str, second: str, *, differing: bool = False) -> str:
    """Return the first text without the words that the second leaves out or, if `differing`,
    has other values of: "5 12" and "5 ?" give "5 ?". Texts of different sizes stay whole."""
    words, others = first.split(), second.split()
    if len(words) != len(others):
        return first
    for index, other in enumerate(others):
        if other == _LEFT_OUT or (differing and words[index] != other):
            words[index] = _LEFT_OUT
    return " ".join(words)
