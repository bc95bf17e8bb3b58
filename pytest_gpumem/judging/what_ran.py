"""Whether launches ran the same steps. Words of arguments that vary are masked by `?`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pytest_gpumem.records.what_ran import WhatRan, what_ran

_MASK = "?"


def merged_record(records: Sequence[WhatRan]) -> WhatRan | None:
    """Return the record of launches that should run the same, with words of arguments masked that
    differ between them; None if they differ otherwise, or if one was not watched."""
    merged = records[0]
    for record in records[1:]:
        merged = _masked_like(merged, record, differing=True)
    # `ran_the_same` takes a mask of `merged` alone for a change, so the others get it too.
    others = [_masked_like(record, merged) for record in records]
    return merged if ran_the_same(merged, others) else None


def ran_the_same(record: WhatRan, past: Sequence[WhatRan]) -> bool:
    """Return True if a launch ran the same as all past ones. A word that a past record masks is not
    compared. A word that only `record` masks did not vary before: that is a change."""
    if not past or record.not_watched is not None:
        return False
    expected = past[0]  # with the masks of all past records
    for other in past[1:]:
        expected = _masked_like(expected, other)
    return all(_masked_like(other, expected) == expected for other in (record, *past))


def _masked_like(record: WhatRan, model: WhatRan, *, differing: bool = False) -> WhatRan:
    """Return `record` with each argument `masked` by that of `model`."""
    if record == model or len(record.order) != len(model.order) or record.not_watched:
        return record
    launch = []
    for step, partner in zip(record.launch, model.launch, strict=True):
        texts, others = step.arguments or (), partner.arguments or ()
        if not texts or len(texts) != len(others):
            launch.append(step)
            continue
        arguments = []
        for text, other in zip(texts, others, strict=True):
            arguments.append(masked(text, other, differing=differing))
        launch.append(replace(step, arguments=tuple(arguments)))
    return what_ran(launch, record.state)


def masked(text: str, other: str, *, differing: bool = False) -> str:
    """Return `text` with those words masked that `other` masks or, if `differing`, has other values
    of: "5 12" and "5 ?" give "5 ?". A text with another number of words stays whole."""
    words, others = text.split(), other.split()
    if len(words) != len(others):
        return text
    for index, word in enumerate(others):
        if word == _MASK or (differing and words[index] != word):
            words[index] = _MASK
    return " ".join(words)
