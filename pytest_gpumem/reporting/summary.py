"""The end of a session in a terminal: what needs a person, one line a test, and the counts. ASCII only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec import UNSET
from rich.text import Text

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import ENOUGH, Row
from pytest_gpumem.reporting.columns import Columns, Line, narrowed, wrapped
from pytest_gpumem.reporting.footprints import totals, wait_totals
from pytest_gpumem.reporting.groups import function_of, ordered
from pytest_gpumem.reporting.row_facts import HEADINGS, OF_MEMORY, RowFacts, row_facts
from pytest_gpumem.units import format_time

MOST = 20  # lines of tests without a failure or a doubt. More tests than that are folded into a line for each kind of test.
_INTERVALS = "intervals"
_LEFT_OUT = (
    ("noise", 60),
    ("of peak", 60),
    ("bandwidth", 60),
    (_INTERVALS, 60),
    ("kept", 20),
    ("peak memory", 20),
)
"""Parts that are left out one after the other, each if names have less than so many columns."""

_Part = tuple[str, list[RowFacts]]  # a line of the table: its name and its rows


def summary(
    rows: Sequence[Row],
    facts: DeviceFacts,
    *,
    width: int,
    colour: bool,
    in_session: bool,
    saved: bool = False,
    memory: bool = False,
) -> str:
    """The table, what decides the undecided rows, and the counts; without a trailing line break.

    Rows that fail come first, then rows of tests that failed otherwise, then undecided rows, each on its own line. All other rows of a
    test share a line with the span of their figures. The table never cuts figures, and leaves out columns in a narrow terminal.
    `in_session`: pytest itself has reported the tests that failed without a measurement, and -v lists every row.
    `saved`: the session stores its rows, or a duet judges them: nobody needs to store NEW rows.
    `memory`: as `RowFacts.memory`.
    """
    rows, facts = printable(list(rows)), printable(facts)
    shown = row_facts(
        [row for row in rows if row.measured_something or not in_session], facts, memory=memory
    )
    parts = list(_parts(shown, facts))
    lines = [_drawn(parts, width, colour)] if parts else []
    folded = any(len(of) > 1 for _, of in parts)
    sentences = [
        *_sentences(shown, saved),
        counts_text(rows) + ("; -v lists every row" if folded and in_session else ""),
    ]
    return "\n".join(
        [*lines, *(line for sentence in sentences for line in wrapped(sentence, width))]
    )


def counts_text(rows: Sequence[Row]) -> str:
    """Such as "9 rows (simulated): 1 FAIL, 2 PASS (1 by the same code), 6 measured; 1 test failed without a measurement"."""
    measured = [row for row in rows if row.measured_something]
    simulated = " (simulated)" if any(row.verdict.simulated for row in rows) else ""
    counts = Counter(row.verdict.outcome for row in measured)
    outcomes = []
    for outcome in sorted(counts, key=lambda outcome: outcome.rank):
        same = sum(
            row.verdict.outcome is outcome and row.verdict.code is Code.SAME_CODE
            for row in measured
        )
        outcomes.append(
            f"{counts[outcome]} {outcome.word}" + (f" ({same} by the same code)" if same else "")
        )
    parts = [
        f"{counted(len(measured), 'row')}{simulated}{': ' if outcomes else ''}{', '.join(outcomes)}"
    ]
    if unchecked := sum(
        row.measurement is not None and not row.measurement.checked for row in measured
    ):
        parts.append(f"{counted(unchecked, 'row')} measured without a check of the result")
    if otherwise := {row.nodeid for row in measured if row.test_error is True}:
        parts.append(f"{counted(len(otherwise), 'test')} failed by an assertion or an error")
    if nothing := {row.nodeid for row in rows if not row.measured_something}:
        parts.append(f"{counted(len(nothing), 'test')} failed without a measurement")
    return "; ".join(parts)


def slowest(rows: Iterable[Row], count: int) -> Iterator[str]:
    """The rows that took longest to measure, with the time of each phase, the longest first. `count`: how many; 0 for all."""
    timed = [
        (sum(one.took.values()), row.key, one)
        for row in rows
        if (one := row.measurement) is not None and one.took is not UNSET
    ]
    timed.sort(key=lambda one: one[:2], reverse=True)
    if timed:
        yield f"slowest {counted(min(count, len(timed)) or len(timed), 'row')}, with what took the time:"
    for seconds, key, measured in timed[: count or None]:
        samples = f"{len(measured.samples)} of {format_time(measured.latency)} at {counted(len(measured.placements), 'placement')}"
        phases = (
            sorted(measured.took.items(), key=lambda phase: -phase[1])
            if measured.took is not UNSET
            else []
        )
        parts = ", ".join(
            f"{name} {format_time(one)}{f' ({samples})' if name == 'samples' else ''}"
            for name, one in phases
        )
        yield f"{format_time(seconds)} {printable(key)}: {parts}"


def _parts(shown: Sequence[RowFacts], facts: DeviceFacts) -> Iterator[_Part]:
    """The lines of the table."""
    failing = sorted(
        (one for one in shown if one.row.verdict.outcome is Outcome.FAIL), key=_change
    )[:MOST]
    doubtful = sorted((one for one in shown if one.outcome is Outcome.UNDECIDED), key=_change)[
        :MOST
    ]
    alone = {id(one) for one in (*failing, *doubtful)}
    failed, fine = list[RowFacts](), list[RowFacts]()
    for one in shown:
        if id(one) not in alone:
            (failed if one.row.failed else fine).append(one)
    yield from ((one.name, [one]) for one in failing)
    yield from _by(failed, lambda one: one.row.nodeid, shown)
    yield from ((one.name, [one]) for one in doubtful)
    of_row = {id(one.row): one for one in fine}
    kinds = [
        (kind.value, [of_row[id(row)] for row in of])
        for kind, of in ordered([one.row for one in fine], facts)
    ]
    tests = [part for _, of in kinds for part in _by(of, lambda one: function_of(one.row), shown)]
    yield from tests if len(tests) <= MOST else kinds


def _by(
    rows: Sequence[RowFacts], key: Callable[[RowFacts], str], all_rows: Sequence[RowFacts]
) -> Iterator[_Part]:
    """Rows with the same key, under the name of their test; it says so where others of its rows have a line of their own."""
    groups: dict[str, list[RowFacts]] = {}
    for one in rows:
        groups.setdefault(key(one), []).append(one)
    whole = Counter(key(one) for one in all_rows)
    for name, of in groups.items():
        if len(of) == 1:
            yield of[0].name, of
        else:
            yield of[0].function + (f" ({len(of)} others)" if len(of) < whole[name] else ""), of


def _change(one: RowFacts) -> float:
    comparison = one.row.verdict.comparison
    return -comparison.delta if comparison is not None else 0.0


def _drawn(parts: Sequence[_Part], width: int, colour: bool) -> str:
    def made(without: Sequence[str]) -> Columns:
        return Columns(
            "test", HEADINGS, "verdict", [_line(name, of, without) for name, of in parts]
        )

    drawn, _ = narrowed(_LEFT_OUT, width, made)
    return drawn.drawn(width, colour)


def _line(name: str, of: Sequence[RowFacts], without: Collection[str]) -> Line:
    first = of[0]
    if len(of) == 1:
        figures = [
            figure.short if figure.short and _INTERVALS in without else figure.text
            for figure in first.figures.values()
        ]
    else:
        figures = [_span(heading, of) for heading in HEADINGS]
    kept = [
        "" if heading in without else figure
        for heading, figure in zip(HEADINGS, figures, strict=True)
    ]
    verdicts = Counter(
        one.verdict_parts for one in sorted(of, key=lambda one: one.row.verdict.outcome.rank)
    )
    shared = first.verdict_parts[1] if len({test for _, test in verdicts}) == 1 else ""
    counts = (f"{count} {own}{'' if shared else test}" for (own, test), count in verdicts.items())
    text = first.verdict if len(of) == 1 else ", ".join(counts) + shared
    worst = min((one.outcome for one in of), key=lambda outcome: outcome.rank)
    simulated = " (sim)" if any(one.simulated for one in of) else ""
    return Line(name, kept, Text(text + simulated, style=worst.style))


def _span(heading: str, of: Sequence[RowFacts]) -> str:
    """The least and the largest figure, such as "2.471 to 4.254 ms"; empty where a measurement has none, or where figures are of two kinds.
    A row of memory alone has no times, and other rows may have no memory."""
    of = [
        one
        for one in of
        if (one.row.measurement if heading not in OF_MEMORY else one.row.footprint) is not None
    ]
    figures = [one.figures[heading] for one in of]
    values = [
        (figure.value, figure.short or figure.text)
        for figure in figures
        if figure.value is not None
    ]
    if not values or (len(values) < len(of) and heading != "noise"):
        return ""
    (_, low), (_, high) = min(values), max(values)
    if heading == "noise":
        return high
    (first, _, unit), (last, _, same) = low.partition(" "), high.partition(" ")
    if low == high:
        return low
    if ("asked" in unit) != ("asked" in same) or ("/access" in unit) != ("/access" in same):
        return ""
    return f"{first} to {last} {unit}" if unit == same else f"{low} to {high}"


def _sentences(shown: Sequence[RowFacts], saved: bool) -> Iterator[str]:
    """What decides the undecided rows, and what else a person must know. Without full stops."""
    rows = [one.row for one in shown]
    yield from remedies(row for row in rows if not (saved and row.verdict.outcome is Outcome.NEW))
    yield from since_the_baseline(rows)
    if any(one.figures[heading].text for one in shown for heading in OF_MEMORY):
        yield from totals(rows)
    yield from wait_totals(rows)


def since_the_baseline(rows: Sequence[Row]) -> Iterator[str]:
    """What changed since the baseline, and how many rows without a limit are slower."""
    for changed, count in Counter(changed for row in rows for changed in row.changed).items():
        yield f"changed since the baseline: {changed} ({count} of {len(rows)})"
    slower = [
        r
        for r in rows
        if r.verdict.comparison is not None
        and r.verdict.comparison.looks_slower
        and r.limits.max_regression is None
    ]
    if slower:
        yield f"SLOWER than the baseline, but without a max_regression: {len(slower)} of {len(rows)}"


def profiled_lines(rows: Sequence[Row]) -> list[str]:
    """Lines about a session under a profiler, in place of a table: its times are not comparable with others."""
    tests = list(dict.fromkeys(row.nodeid for row in rows if row.measurement is not None))
    lines = [
        f"profiled: {counted(len(tests), 'test')}; times under a profiler are not judged, and no table is shown"
    ]
    lines += [f"  {printable(test)}" for test in tests[:MOST]]
    lines += [f"  and {counted(len(tests) - MOST, 'further test')}"] if len(tests) > MOST else []
    return lines


_SAVE, _DUET = "pytest --gpumem --gpumem-save", "gpumem duet BASE"

OF_A_RUN: Mapping[Code, tuple[str, str]] = MappingProxyType(
    {
        Code.LOOKS_SLOWER: ("looks slower than allowed", f"to decide: {_DUET}"),
        Code.NOISY: ("is too close to its limit", f"to decide: {_DUET}"),
        Code.TOO_FEW_RUNS: ("needs {runs}", f"{_SAVE}, or at once: {_DUET}"),
        Code.MEASURED_DIFFERENTLY: (
            "is measured differently than its baseline",
            f"to compare: {_DUET}; to begin anew: gpumem accept",
        ),
        Code.NO_BASELINE: (
            "has nothing to compare with",
            f"{_SAVE} stores this state as the baseline",
        ),
    }
)
"""By the code of a verdict of a session: what holds of one such row, and what to do."""

OF_FILES: Mapping[Code, tuple[str, str]] = MappingProxyType(
    {
        Code.LOOKS_SLOWER: (
            "looks slower than allowed",
            "more runs a side, or gpumem duet, decide",
        ),
        Code.NOISY: ("is too close to its limit", "more runs a side, or gpumem duet, decide"),
        Code.TOO_FEW_RUNS: (
            "needs {runs} of the base",
            "a quoted pattern names several files, such as 'base-*.json'",
        ),
        Code.MEASURED_DIFFERENTLY: (
            "is measured differently on the two sides",
            "gpumem duet compares them",
        ),
    }
)
"""The same of a comparison of files."""


def remedies(
    rows: Iterable[Row], of: Mapping[Code, tuple[str, str]] = OF_A_RUN, *, reasons: bool = True
) -> list[str]:
    """Such as "UNDECIDED: 9 rows need 2 more runs: pytest --gpumem --gpumem-save, or at once: gpumem duet BASE". Rows whose reason is their
    own, such as the conditions of the measurement, are grouped by it, or left out without `reasons`. No full stops."""
    groups: dict[tuple[Outcome, str, str], list[Row]] = {}
    for row in rows:
        verdict = row.verdict
        if (
            verdict.outcome not in (Outcome.UNDECIDED, Outcome.ACCEPTED, Outcome.NEW)
            or row.test_error is True
        ):
            continue
        what, remedy = of.get(verdict.code, ("", "")) if verdict.code is not None else ("", "")
        if not what or (
            verdict.code is Code.NOISY and verdict.comparison is None
        ):  # a duet judges no absolute limit
            what, remedy = "", verdict.reason
        if not what and not reasons:
            continue
        runs = (
            max(1, ENOUGH - verdict.comparison.processes)
            if verdict.comparison is not None
            else ENOUGH
        )
        groups.setdefault(
            (verdict.outcome, what.format(runs=counted(runs, "more run")), remedy), []
        ).append(row)
    ordered = sorted(groups.items(), key=lambda group: group[0][0].rank)
    return [_sentence(outcome, what, remedy, found) for (outcome, what, remedy), found in ordered]


def _sentence(outcome: Outcome, what: str, remedy: str, rows: Sequence[Row]) -> str:
    count = counted(len(rows), "row")
    if not what:
        return (
            f"{outcome.value}: {count}: {remedy}"
            if len(rows) > 1
            else f"{outcome.value} {rows[0].key}: {remedy}"
        )
    return f"{outcome.value}: {count} {what if len(rows) == 1 else _plural(what)}: {remedy}"


def _plural(what: str) -> str:
    """The predicate of several rows."""
    verb, _, rest = what.partition(" ")
    rest = rest.replace("its ", "their ")
    return f"{ {'is': 'are', 'has': 'have', 'was': 'were'}.get(verb, verb.removesuffix('s')) } {rest}".replace(
        "and has", "and have"
    )
