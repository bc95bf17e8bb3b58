"""The differences between what two launches ran. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.records import arguments
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan, ran_the_same
from pytest_gpumem.units import short_bytes, sizes

MOST = 12  # differences that are listed
_LONGEST = 60  # characters of a kernel's name in a sentence
_BYTES = ("shared", "dynamic_shared", "local", "nbytes")
_SHAPES = ("grid", "block", "cluster")
_WORDS = {
    "code": "machine code",
    "shared": "static shared memory",
    "dynamic_shared": "dynamic shared memory",
    "local": "local memory of a thread",
    "registers": "registers",
    "nbytes": "size",
    "source": "reads",
    "memory": "memory",
    "window": "access-policy window",
}
_COMPARED = tuple(
    name for name in Step.__struct_fields__ if name not in ("kind", "name", "arguments")
)


@dataclass(frozen=True)
class Divergence:
    """One thing that ran differently."""

    change: Literal["added", "removed", "changed"]
    what: str  # the value of a `StepKind`, "call", "state", or "order" where only the order differs
    name: str  # kernel, direction of a copy, runtime function, or part of the state; empty for what has no name
    field: str = ""  # of a change: the field of `Step`, "argument 3" or "argument 3, byte 8" or, of calls, "count"
    was: str | None = None
    """The value on the first side, in words; of what was removed, its properties."""
    now: str | None = None
    """The value on the second side, in words; of what was added, its properties."""
    times: int = 1  # steps of the launch that differ so

    @property
    def of_field(self) -> str:
        """The text of a change, without its subject: "registers 32 → 64"."""
        return f"{_WORDS.get(self.field, self.field)} {self.was} → {self.now}".strip()

    @property
    def text(self) -> str:
        """In words: "kernel triad: block 256 → 128"."""
        each = f"{self.times} × " if self.times > 1 else ""
        subject = f"{each}{self.what} {_short(self.name)}".rstrip()
        if self.what == "order":
            return "the same steps in another order"
        if self.change == "changed":
            if self.field == "code":
                # The reference that a simulated device runs has no machine code.
                return (
                    f"{self.name}: other source"
                    if self.name == "reference"
                    else f"{subject}: other machine code"
                )
            return f"{subject}: {self.of_field}"
        properties = self.now if self.change == "added" else self.was
        return f"{subject} {self.change}" + (f" ({properties})" if properties else "")


SAME = "ran the same: machine code, arguments, launches, copies and waits"


def compared(base: WhatRan | None, head: WhatRan | None) -> tuple[Divergence, ...] | None:
    """As `differences`; None if what one side ran is unknown, or if they differ in nothing that was watched and something was not."""
    if base is None or not base.order or head is None or not head.order:
        return None
    found = differences(base, head)
    return found if found or (base.digest is not None and head.digest is not None) else None


def lines(found: Sequence[Divergence]) -> list[str]:
    """A line for each difference, at most `MOST`; the last one counts the others."""
    if not found:
        return [SAME]
    left = len(found) - MOST
    shown = found if left <= 0 else found[:MOST]
    return [f"ran differently: {one.text}" for one in shown] + (
        [f"ran differently: {counted(left, 'further difference')}"] if left > 0 else []
    )


def differences(base: WhatRan, head: WhatRan) -> tuple[Divergence, ...]:
    """What head ran differently from base: steps, then calls, then state; empty if the digests are equal.

    Steps are matched in their order: kernels by name, copies by direction, the others by kind. A kernel under a new name with the same
    machine code is no difference. What was not watched on one side may be missing: see `WhatRan.not_watched`.
    """
    if ran_the_same(head, [base]):
        return ()
    found: Counter[Divergence] = Counter(_of_steps(base.launch, head.launch))
    steps = [
        Divergence(one.change, one.what, one.name, one.field, one.was, one.now, times)
        for one, times in found.items()
    ]
    if not steps and base.launch != head.launch and _unnamed(base.launch) != _unnamed(head.launch):
        steps = [Divergence("changed", "order", "")]
    return (*steps, *_of_calls(base.calls, head.calls), *_of_state(base.state, head.state))


def _of_steps(base: Sequence[Step], head: Sequence[Step]) -> Iterator[Divergence]:
    matched = SequenceMatcher(
        None, [_token(one) for one in base], [_token(one) for one in head], autojunk=False
    )
    removed, added = list[Step](), list[Step]()
    for tag, first, last, begin, end in matched.get_opcodes():
        if tag == "equal":
            for was, now in zip(base[first:last], head[begin:end], strict=True):
                yield from _of_pair(was, now)
        else:
            removed += base[first:last]
            added += head[begin:end]
    # What moved, or has another name and the same code, is on both lists.
    for was in list(removed):
        same = [
            now
            for now in added
            if _token(now) == _token(was) or (was.code is not None and now.code == was.code)
        ]
        if same:
            removed.remove(was)
            added.remove(same[0])
            yield from _of_pair(was, same[0])
    for one in removed:
        yield Divergence("removed", one.kind.value, one.name, was=_properties(one))
    for one in added:
        yield Divergence("added", one.kind.value, one.name, now=_properties(one))


def _of_pair(was: Step, now: Step) -> Iterator[Divergence]:
    for field in _COMPARED:
        before, after = getattr(was, field), getattr(now, field)
        if before != after:
            of_bytes = field in _BYTES and None not in (before, after)
            was_text, now_text = (
                sizes(before, after) if of_bytes else (_value(field, before), _value(field, after))
            )
            yield Divergence("changed", now.kind.value, now.name, field, was_text, now_text)
    if was.arguments is not None and now.arguments is not None:
        for field, before, after in _of_arguments(was.arguments, now.arguments):
            yield Divergence("changed", now.kind.value, now.name, field, before, after)


def _of_arguments(was: Sequence[str], now: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Each word of the arguments that differs: its name, and both values in words. Bytes that the base leaves out are not compared."""
    if len(was) != len(now):
        yield "number of arguments", str(len(was)), str(len(now))
        return
    for number, (before, after) in enumerate(zip(was, now, strict=True), 1):
        first, second = (
            arguments.tokens(text) for text in (before, arguments.under(after, before))
        )
        if len(first) != len(second):
            yield (
                f"size of argument {number}",
                counted(len(first), "word"),
                counted(len(second), "word"),
            )
            continue
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            if one != other:
                word = f", byte {arguments.WORD * index}" if len(first) > 1 else ""
                yield f"argument {number}{word}", arguments.in_words(one), arguments.in_words(other)


def _of_calls(base: Mapping[str, int], head: Mapping[str, int]) -> Iterator[Divergence]:
    for name in dict.fromkeys([*base, *head]):
        was, now = base.get(name, 0), head.get(name, 0)
        if was != now:
            change: Literal["added", "removed", "changed"] = (
                "added" if not was else "removed" if not now else "changed"
            )
            field = "count" if change == "changed" else ""
            yield Divergence(
                change, "call", name, field, str(was) if was else None, str(now) if now else None
            )


def _of_state(base: Mapping[str, str], head: Mapping[str, str]) -> Iterator[Divergence]:
    for name in dict.fromkeys([*base, *head]):
        if base.get(name) != head.get(name):
            yield Divergence(
                "changed", "state", name, "", base.get(name, "none"), head.get(name, "none")
            )


def _token(step: Step) -> tuple[str, str]:
    return step.kind.value, step.name


def _unnamed(launch: Sequence[Step]) -> list[object]:
    return [(step.kind, *(getattr(step, field) for field in _COMPARED)) for step in launch]


def _properties(step: Step) -> str:
    if step.kind is StepKind.KERNEL:
        return (
            f"{_value('grid', step.grid)} blocks of {_value('block', step.block)}"
            if step.grid and step.block
            else ""
        )
    ways = " → ".join(one for one in (step.source, step.memory) if one)
    return " ".join(
        one for one in ("" if step.nbytes is None else short_bytes(step.nbytes), ways) if one
    )


def _value(field: str, value: Any) -> str:
    if value is None:
        return "unknown" if field != "window" and field != "cluster" else "none"
    if field in _SHAPES:
        x, y, z = value
        return str(x) if (y, z) == (1, 1) else f"{x} × {y}" if z == 1 else f"{x} × {y} × {z}"
    return short_bytes(value) if field in _BYTES else str(value)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
