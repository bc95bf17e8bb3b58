"""The differences between two runs of a row: in what was declared, in what one launch ran, and in the lines that take memory. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from msgspec.structs import replace

from pytest_gpumem.judging.finding import counted, window_text
from pytest_gpumem.judging.limits import STEPS
from pytest_gpumem.limits import OF_FOOTPRINT
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records import arguments
from pytest_gpumem.records.difference import (
    CPU_FAULTS,
    DECLARED,
    FURTHER,
    GPU_FAULTS,
    KEPT,
    MIGRATED,
    ORDER,
    PEAK,
    SECTORS,
    WINDOW,
    Difference,
)
from pytest_gpumem.records.footprint import Footprint, Site
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan, ran_the_same
from pytest_gpumem.units import short_bytes

MOST = 12  # differences that are kept of one row
LINES = 3  # lines that are named of the memory of a test
ALIKE = 0.5  # two lines of one function with at least this similarity (`SequenceMatcher.ratio`) count as one changed line
VARIES = 0.1  # change of page faults and migrated bytes that unchanged code may show
_MEASURED = (DECLARED, SECTORS, WINDOW, GPU_FAULTS, CPU_FAULTS, MIGRATED)
_COMPARED = tuple(
    name for name in Step.__struct_fields__ if name not in ("kind", "name", "arguments")
)


def differences(base: Measurement, head: Measurement) -> tuple[Difference, ...]:
    """What head declares and runs differently from base. What is unknown of one side is no difference."""
    found = [*_declared(base, head), *_pages(base, head)]
    windows = base.window != head.window
    if windows:
        found.append(Difference(WINDOW, _window(base), _window(head)))
    if (
        base.what_ran is not None
        and base.what_ran.order
        and head.what_ran is not None
        and head.what_ran.order
    ):
        for difference in ran_differently(base.what_ran, head.what_ran):
            # The window of the measurement says it already.
            if not (
                windows and (difference.field == "window" or difference.name == "set-aside of L2")
            ):
                found.append(difference)
    if len(found) > MOST:
        found[MOST:] = [Difference(FURTHER, now=len(found) - MOST)]
    return tuple(found)


def row_differences(row: Row, base: Measurement) -> tuple[Difference, ...]:
    """As `differences`, of a failing row: what a launch ran comes first if the row fails by its kernels, copies or waits alone."""
    assert row.measurement is not None
    found = differences(base, row.measurement)
    if row.verdict.limits and all(result.limit in STEPS for result in row.verdict.limits):
        found = tuple(sorted(found, key=lambda difference: difference.kind in _MEASURED))
    return found


def _declared(base: Measurement, head: Measurement) -> Iterator[Difference]:
    if (
        base.moved_bytes is not None
        and head.moved_bytes is not None
        and base.moved_bytes.total != head.moved_bytes.total
    ):
        yield Difference(DECLARED, base.moved_bytes.total, head.moved_bytes.total)
    was, now = base.sectors_per_request, head.sectors_per_request
    if was is not None and now is not None and was != now:
        yield Difference(SECTORS, was, now)


def _pages(base: Measurement, head: Measurement) -> Iterator[Difference]:
    was = base.migrations.launch if base.migrations is not None else None
    now = head.migrations.launch if head.migrations is not None else None
    if was is None or now is None:
        return
    counts = (
        (GPU_FAULTS, was.gpu_faults, now.gpu_faults),
        (CPU_FAULTS, was.cpu_faults, now.cpu_faults),
        (MIGRATED, was.migrated, now.migrated),
    )
    for kind, before, after in counts:
        if abs(after - before) > VARIES * before:
            yield Difference(kind, before, after)


def _window(measurement: Measurement) -> str:
    return "none" if measurement.window is None else window_text(measurement.window)


# What one launch ran


def ran_differently(base: WhatRan, head: WhatRan) -> tuple[Difference, ...]:
    """What head ran differently from base: steps, then calls, then state; empty if the digests are equal.

    Steps are matched in their order: kernels by name, copies by direction, the others by kind. A kernel under a new name with the same
    machine code is no difference. What was not watched on one side may be missing: see `WhatRan.not_watched`.
    """
    if ran_the_same(head, [base]):
        return ()
    found = Counter(_of_steps(base.launch, head.launch))
    steps = [replace(difference, times=times) for difference, times in found.items()]
    if not steps and base.launch != head.launch and _unnamed(base.launch) != _unnamed(head.launch):
        steps = [Difference(ORDER)]
    return (*steps, *_of_calls(base.calls, head.calls), *_of_state(base.state, head.state))


def _of_steps(base: Sequence[Step], head: Sequence[Step]) -> Iterator[Difference]:
    before, after = [_token(step) for step in base], [_token(step) for step in head]
    removed, added = list[Step](), list[Step]()
    for tag, first, last, begin, end in SequenceMatcher(
        None, before, after, autojunk=False
    ).get_opcodes():
        if tag == "equal":
            for was, now in zip(base[first:last], head[begin:end], strict=True):
                yield from _of_pair(was, now)
        else:
            removed += base[first:last]
            added += head[begin:end]
    # What moved, or has another name and the same code, is on both lists.
    for was in list(removed):
        for now in added:
            if _token(now) == _token(was) or (was.code is not None and now.code == was.code):
                removed.remove(was)
                added.remove(now)
                yield from _of_pair(was, now)
                break
    for step in removed:
        yield Difference(step.kind.value, was=_properties(step), name=step.name)
    for step in added:
        yield Difference(step.kind.value, now=_properties(step), name=step.name)


def _of_pair(was: Step, now: Step) -> Iterator[Difference]:
    for field in _COMPARED:
        before, after = getattr(was, field), getattr(now, field)
        if before != after:
            yield Difference(now.kind.value, before, after, now.name, field)
    if was.arguments is not None and now.arguments is not None:
        for field, one, other in _of_arguments(was.arguments, now.arguments):
            yield Difference(now.kind.value, one, other, now.name, field)


def _of_arguments(was: Sequence[str], now: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Each word of the arguments that differs: its name, and both values in words. Bytes that the base leaves out are not compared."""
    if len(was) != len(now):
        yield "number of arguments", str(len(was)), str(len(now))
        return
    for number, (before, after) in enumerate(zip(was, now, strict=True), 1):
        first, second = arguments.tokens(before), arguments.tokens(arguments.under(after, before))
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


def _of_calls(base: Mapping[str, int], head: Mapping[str, int]) -> Iterator[Difference]:
    for name in dict.fromkeys([*base, *head]):
        was, now = base.get(name), head.get(name)
        if was != now:
            yield Difference("call", was, now, name, "count" if was and now else "")


def _of_state(base: Mapping[str, str], head: Mapping[str, str]) -> Iterator[Difference]:
    for name in dict.fromkeys([*base, *head]):
        if base.get(name) != head.get(name):
            yield Difference("state", base.get(name, "none"), head.get(name, "none"), name)


def _token(step: Step) -> tuple[str, str]:
    return step.kind.value, step.name


def _unnamed(launch: Sequence[Step]) -> list[Step]:
    return [replace(step, name="", arguments=None) for step in launch]


def _properties(step: Step) -> str:
    """What tells a step that only one side has: "64 blocks of 256", "4 MiB pinned → device"."""
    if step.kind is StepKind.KERNEL:
        return (
            f"{shape(step.grid)} blocks of {shape(step.block)}" if step.grid and step.block else ""
        )
    words = [] if step.nbytes is None else [short_bytes(step.nbytes)]
    if step.source or step.memory:
        words.append(" → ".join(filter(None, (step.source, step.memory))))
    return " ".join(words)


def shape(value: Sequence[int]) -> str:
    """Blocks or threads in x, y and z: "64", "8 × 8"."""
    used = list(value)
    while len(used) > 1 and used[-1] == 1:
        used.pop()
    return " × ".join(map(str, used))


# Lines that take memory


def fails_by_memory(row: Row) -> bool:
    """True if a row fails by its memory."""
    return any(
        result.limit in OF_FOOTPRINT and result.outcome is Outcome.FAIL
        for result in row.verdict.limits
    )


def memory_differences(base: Footprint | None, head: Footprint) -> tuple[Difference, ...]:
    """The lines that take more of a test's memory than in base; where none does, the lines that take most of it.
    `base`: None if it is unknown.
    """
    if base is not None and base.sites:
        grown = [
            *grown_lines(base.sites, head.sites, PEAK),
            *grown_lines(base.sites, head.sites, KEPT),
        ]
        if grown:
            return tuple(grown)
    kind = PEAK if any(site.at_peak for site in head.sites) else KEPT
    taking = [
        Difference(kind, now=bytes_of(site, kind), site=site)
        for site in head.sites
        if bytes_of(site, kind)
    ]
    taking.sort(key=lambda difference: -_growth(difference))
    return tuple(taking[:LINES])


def grown_lines(base: Sequence[Site], head: Sequence[Site], kind: str) -> list[Difference]:
    """The lines that grew most, the largest growth first. Arguments as of `line_differences`."""
    return [
        difference for difference in line_differences(base, head, kind) if _growth(difference) > 0
    ][:LINES]


def line_differences(base: Sequence[Site], head: Sequence[Site], kind: str) -> list[Difference]:
    """The lines whose bytes changed, the largest growth first. Lines are the same if file, function, text, library and kind of memory are:
    a line that only moved is the same. Two other lines of one function with similar text count as one changed line.
    `kind`: `PEAK` or `KEPT`.
    """
    before, after = _by_line(base), _by_line(head)
    gone = [key for key in before if key not in after]
    found = []
    for key, sites in after.items():
        old = key if key in before else _alike(key, gone)
        if old in gone:
            gone.remove(old)
        text = old[1] if old is not None and old != key else ""
        site = max(sites, key=lambda site: bytes_of(site, kind))
        found.append(
            Difference(
                kind,
                0 if old is None else _total(before[old], kind),
                _total(sites, kind),
                text,
                site=site,
            )
        )
    for key in gone:
        site = max(before[key], key=lambda site: bytes_of(site, kind))
        found.append(Difference(kind, _total(before[key], kind), 0, site=site))
    changed = [difference for difference in found if _growth(difference)]
    return sorted(changed, key=lambda difference: -_growth(difference))


def bytes_of(site: Site, kind: str) -> int:
    """Bytes of a line at the peak, or at the end. `kind`: `PEAK` or `KEPT`."""
    return site.at_peak if kind == PEAK else site.kept


def _total(sites: Iterable[Site], kind: str) -> int:
    return sum(bytes_of(site, kind) for site in sites)


def _growth(difference: Difference) -> int:
    assert isinstance(difference.now, int)
    assert difference.was is None or isinstance(difference.was, int)
    return difference.now - (difference.was or 0)


_Line = tuple[str, str, str, str, str]


def _by_line(sites: Iterable[Site]) -> dict[_Line, list[Site]]:
    found: dict[_Line, list[Site]] = {}
    for site in sites:
        # A line whose text cannot be read is told by its number.
        key = (site.file, site.code or str(site.line), site.function, site.library, site.kind)
        found.setdefault(key, []).append(site)
    return found


def _alike(line: _Line, others: Iterable[_Line]) -> _Line | None:
    """The line of the same function whose text is most like that of `line`; None if none is."""
    best, most = None, ALIKE
    for other in others:
        if other[0] == line[0] and other[2:] == line[2:]:
            similarity = SequenceMatcher(None, other[1], line[1], autojunk=False).ratio()
            if similarity >= most and (best is None or similarity > most):
                best, most = other, similarity
    return best
