"""The differences between runs of a row: in what was declared, and in what a launch ran. Pure.

Words of a launch's arguments that vary in unchanged code are masked by `?`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from pytest_gpumem.judging.finding import window_text
from pytest_gpumem.limits import STEPS
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import (
    CPU_FAULTS,
    DECLARED,
    FURTHER,
    GPU_FAULTS,
    MIGRATED,
    ORDER,
    SECTORS,
    WINDOW,
    Difference,
    Row,
)
from pytest_gpumem.records.what_ran import WORD, Step, WhatRan, what_ran
from pytest_gpumem.units import short_bytes

MOST = 12  # differences that are kept of a row
VARIES = 0.1  # change of page faults and migrated bytes that unchanged code may show
_MEASURED = (DECLARED, SECTORS, WINDOW, GPU_FAULTS, CPU_FAULTS, MIGRATED)
_NOT_COMPARED = ("kind", "name", "arguments")  # fields of a step
_MASK = "?"


def differences(base: Measurement, head: Measurement) -> tuple[Difference, ...]:
    """Return what head declares and runs differently; what is unknown is no difference."""
    changed = list(_measured(base, head))
    other_window = base.window != head.window
    if other_window:
        changed.append(Difference(WINDOW, window_text(base.window), window_text(head.window)))
    before, after = base.what_ran, head.what_ran
    if before is not None and before.order and after is not None and after.order:
        for difference in ran_differently(before, after):
            of_window = difference.field == "window" or difference.name == "set-aside of L2"
            if not (other_window and of_window):  # the measurement's window says it already
                changed.append(difference)
    further = len(changed) - MOST
    if further > 0:
        changed = [*changed[:MOST], Difference(FURTHER, now=further)]
    return tuple(changed)


def row_differences(row: Row, base: Measurement) -> tuple[Difference, ...]:
    """Return `differences` of a failing row. What ran comes first if only limits on it fail."""
    assert row.measurement is not None
    changed = differences(base, row.measurement)
    failing = {result.limit for result in row.verdict.limits}
    if failing and failing.issubset(STEPS):
        return tuple(sorted(changed, key=lambda difference: difference.kind in _MEASURED))
    return changed


def _measured(base: Measurement, head: Measurement) -> Iterator[Difference]:
    if base.moved_bytes is not None and head.moved_bytes is not None:
        was, now = base.moved_bytes.total, head.moved_bytes.total
        if was != now:
            yield Difference(DECLARED, was, now)
    before, after = base.sectors_per_request, head.sectors_per_request
    if before is not None and after is not None and before != after:
        yield Difference(SECTORS, before, after)
    if base.pages is None or head.pages is None:
        return
    for kind, was, now in (
        (GPU_FAULTS, base.pages.gpu_faults, head.pages.gpu_faults),
        (CPU_FAULTS, base.pages.cpu_faults, head.pages.cpu_faults),
        (MIGRATED, base.pages.migrated, head.pages.migrated),
    ):
        if abs(now - was) > VARIES * was:
            yield Difference(kind, was, now)


def measured_differently(base: Measurement, head: Measurement) -> str | None:
    """Return in words how head measures a row in another way, which may hide a slow-down, or None.

    A launch that moves more bytes is none: it does more work, and its time says by how much.
    `differences` has the values of windows and bytes.
    """
    for name in ("mode", "sampler"):
        was, now = getattr(base, name), getattr(head, name)
        if was != now:
            return f"{name} was {was} in base and is {now} in head"
    if base.window != head.window:
        return "head has another access-policy window"
    if base.moved_bytes is None:
        return None
    if head.moved_bytes is None:
        return "head declares no bytes"
    if head.moved_bytes.total < base.moved_bytes.total:
        return "head declares fewer bytes"
    return None


# Whether launches ran the same


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


# What a launch ran differently


def ran_differently(base: WhatRan, head: WhatRan) -> tuple[Difference, ...]:
    """Return what head ran differently: steps, matched by kind and name, then state."""
    if ran_the_same(head, [base]):
        return ()
    changed = []
    for difference, times in Counter(_of_steps(base.launch, head.launch)).items():
        changed.append(replace(difference, times=times))
    if not changed and list(map(_key, base.launch)) != list(map(_key, head.launch)):
        changed.append(Difference(ORDER))
    for name in dict.fromkeys([*base.state, *head.state]):
        was, now = base.state.get(name, "none"), head.state.get(name, "none")
        if was != now:
            changed.append(Difference("state", was, now, name))
    return tuple(changed)


def _of_steps(base: Sequence[Step], head: Sequence[Step]) -> Iterator[Difference]:
    matched: dict[tuple[str, str], tuple[list[Step], list[Step]]] = {}
    for side, steps in enumerate((base, head)):
        for step in steps:
            matched.setdefault(_key(step), ([], []))[side].append(step)
    for before, after in matched.values():
        for was, now in zip(before, after, strict=False):
            yield from _of_pair(was, now)
        for step in before[len(after) :]:
            yield Difference(step.kind, was=_properties(step), name=step.name)
        for step in after[len(before) :]:
            yield Difference(step.kind, now=_properties(step), name=step.name)


def _of_pair(was: Step, now: Step) -> Iterator[Difference]:
    for field in Step.__struct_fields__:
        before, after = getattr(was, field), getattr(now, field)
        if field == "code" and (before is None or after is None):
            continue  # it was not watched
        if field not in _NOT_COMPARED and before != after:
            yield Difference(now.kind, before, after, now.name, field)
    if was.arguments is not None and now.arguments is not None:
        for place, old, new in _of_arguments(was.arguments, now.arguments):
            yield Difference(now.kind, old, new, now.name, place)


def _of_arguments(was: Sequence[str], now: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name and both values of what differs: an argument, or a word of one of several."""
    if len(was) != len(now):
        yield "number of arguments", str(len(was)), str(len(now))
        return
    for number, (before, after) in enumerate(zip(was, now, strict=True), 1):
        # What base masks is not compared.
        old, new = before.split(), masked(after, before).split()
        scalar = len(old) <= 2  # a number or a pointer: up to 8 bytes
        if old != new and (scalar or len(old) != len(new)):
            yield f"argument {number}", _argument_words(old), _argument_words(new)
            continue
        for index, (word, other) in enumerate(zip(old, new, strict=True)):
            if word != other:
                place = f"argument {number}, byte {WORD * index}"
                yield place, _argument_words([word]), _argument_words([other])


def _argument_words(words: Sequence[str]) -> str:
    """Return words of an argument, the lowest first, as a decimal number or a kind of memory."""
    if all(set(word) <= set("0123456789abcdef") for word in words):
        return str(int("".join(word.zfill(2 * WORD) for word in reversed(words)), 16))
    return " ".join(word for word in words if word != "-")


def _key(step: Step) -> tuple[str, str]:
    return step.kind, step.name


def _properties(step: Step) -> str:
    """Return "64 blocks of 256" or "4 MiB pinned → device" of a step that a side alone has."""
    if step.kind == "kernel":
        if not step.grid or not step.block:
            return ""
        return f"{shape(step.grid)} blocks of {shape(step.block)}"
    words = []
    if step.nbytes is not None:
        words.append(short_bytes(step.nbytes))
    words.append(" → ".join(place for place in (step.source, step.memory) if place))
    return " ".join(words).strip()


def shape(value: Sequence[int]) -> str:
    """Return blocks or threads in x, y and z: "64", "8 × 8"."""
    used = list(value)
    while len(used) > 1 and used[-1] == 1:
        used.pop()
    return " × ".join(str(count) for count in used)
