"""Rows that need a look: the end of a gate, annotations and job summary of GitHub."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pytest_gpumem.files import append_whole
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.latencies import base_latency
from pytest_gpumem.limits import BASE, LIMITS, count_of
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.row import Row, did_not_run
from pytest_gpumem.reporting.differences import place_of as line_of
from pytest_gpumem.reporting.differences import why_lines
from pytest_gpumem.reporting.exports import exact_figures
from pytest_gpumem.reporting.groups import FAILING, attention
from pytest_gpumem.reporting.row_facts import verdict_text
from pytest_gpumem.reporting.run import Place
from pytest_gpumem.units import (
    QuantityError,
    Share,
    parse_growth,
    parse_margin,
    parse_rate,
    parse_time,
)

MOST = 10  # annotations of each level that GitHub shows of one step; it drops further ones silently
VARIABLE = "GITHUB_STEP_SUMMARY"  # environment variable that names the file of GitHub's job summary
CHECKOUT = "GITHUB_WORKSPACE"  # environment variable with the folder of the repository, to which paths of annotations are relative
LIMIT = 1 << 20
"""Bytes of that file; GitHub shows nothing of a larger one ("Workflow commands", step isolation
and limits)."""


def fails(row: Row) -> bool:
    """True if the row's test failed; other concerns are warnings."""
    return attention(row) == FAILING


def concerns(rows: Iterable[Row]) -> list[Row]:
    """Failures, then UNDECIDED and ACCEPTED rows; within each, the largest slow-down first. A NEW row needs no look."""
    doubtful = (Outcome.UNDECIDED, Outcome.ACCEPTED)
    found = [row for row in rows if fails(row) or row.verdict.outcome in doubtful]
    return sorted(worst_first(found), key=lambda row: not fails(row))


def worst_first(
    rows: Iterable[Row], before: Mapping[str, Footprint] = MappingProxyType({})
) -> list[Row]:
    """By verdict, then by the share by which a figure is beyond its limit. `before`: by key, the memory of rows in the baseline."""

    def rank(row: Row) -> tuple[int, int, float]:
        return attention(row), row.verdict.outcome.rank, -_beyond(row, before.get(row.key))

    return sorted(rows, key=rank)


def _beyond(row: Row, before: Footprint | None) -> float:
    """The share by which a figure is beyond its limit, the largest of the row; below 0 within all. A row without a limit comes last."""
    limits, measured, comparison, exact = (
        row.limits,
        row.measurement,
        row.verdict.comparison,
        exact_figures(row),
    )
    found = [-math.inf]
    try:
        if comparison is not None:
            margin = 0.0
            if limits.max_regression is not None and measured is not None and comparison.delta > -1:
                margin = parse_margin(limits.max_regression).over(
                    base_latency(measured, comparison)
                )
            found.append(comparison.delta - margin)
        if measured is not None and limits.max_latency is not None:
            found.append(measured.latency / parse_time(limits.max_latency) - 1)
        if measured is not None and measured.bandwidth and limits.min_bandwidth is not None:
            least = parse_rate(limits.min_bandwidth)
            found += [] if isinstance(least, Share) else [least / measured.bandwidth - 1]
        if (
            before is not None
            and before.peak
            and row.footprint is not None
            and limits.max_peak_regression is not None
        ):
            found.append(
                row.footprint.peak / before.peak
                - 1
                - parse_growth(limits.max_peak_regression).over(before.peak)
            )
        for name in LIMITS:
            stem, written = name.removeprefix("max_"), getattr(limits, name)
            count = exact.get(stem, exact.get(f"{stem}_bytes"))
            if written is not None and count is not None and written != BASE:
                most = count_of(written)
                found.append((count - most) / (most or 1))
    except QuantityError:  # in a file that somebody else wrote
        pass
    return max(found)


def sentence(row: Row) -> str:
    """Verdict, row and reason in one line."""
    return " ".join(f"{verdict_text(row)} {row.key}: {row.verdict.reason}".split())


def in_words(row: Row) -> str:
    """For an annotation, which shows a line or two: a row that fails in brief, of any other its sentence."""
    return "; ".join(line.strip() for line in in_brief(row)) if fails(row) else sentence(row)


_BASIS = re.compile(r", \d+ samples? on \d+ placements?(?=:|$)")
WORDS = 25  # of a reason in few words
EXPLAINED = 5
"""Rows whose differences are looked for, and that the end of a gate or a session names."""
CAUSE_SECONDS = 60.0  # that looking for them may take
OWN_ERROR = "its test failed by an assertion or an error of its own"


def in_brief(row: Row, error: str | None = None) -> list[str]:
    """A row that fails in two lines at most: its first reason, and its first difference. The results have all.
    `error`: the first line of the error of its test, if that is known.
    """
    by_limits = row.verdict.outcome is Outcome.FAIL or row.test_error is not True
    worst = row.verdict.limits[0].reason if row.verdict.limits else row.verdict.reason
    name = verdict_text(row) if by_limits else Outcome.FAIL.value
    lines = [f"{name} {row.key}: {few(worst) if by_limits else few(error or OWN_ERROR)}"]
    return [*lines, *(f"  why: {few(why)}" for why in why_lines(row)[:1])]


def few(reason: str) -> str:
    """The first sentence of a reason in at most `WORDS` words: without clauses before its colon, or at its end, that do not fit."""
    text = _BASIS.sub("", reason.removeprefix("the duet: FAIL, ").partition("; ")[0])
    seen, colon, said = text.partition(": ")
    clauses = seen.split(", ") if colon else [text]
    while _words(text) > WORDS and len(clauses) > 1:
        clauses.pop()
        text = f"{', '.join(clauses)}: {said}"
    clauses = re.split(r"(?<=[,:]) ", text)
    while _words(" ".join(clauses)) > WORDS and len(clauses) > 1:
        clauses.pop()
    text = " ".join(clauses).rstrip(",:")
    return text if _words(text) <= WORDS else " ".join([*text.split()[:WORDS], "..."])


def _words(text: str) -> int:
    """Without signs, such as "%" and "→"."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def ending(
    rows: Iterable[Row],
    repeat: Callable[[Row], Sequence[str]],
    errors: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """The last lines of a gate or a session that fails: each row that fails, why, and how to repeat it. `fitted` makes them fit.
    `repeat`: the words of the command that measures a row again.
    `errors`: the first line of the error of tests that failed, by node id; tests without a row are among them.
    """
    rows = printable(list(rows))
    lines, of_rows = list[str](), {row.nodeid for row in rows}
    own = {row.nodeid for row in rows if row.verdict.outcome is Outcome.FAIL}
    # A row that passes beside one that fails its test is not named, and a test that failed by an error is named once.
    failing = [row for row in concerns(rows) if fails(row) and not did_not_run(row)]
    failing = [
        row for row in failing if row.verdict.outcome is Outcome.FAIL or row.nodeid not in own
    ]
    failing = list(
        {row.nodeid if row.test_error is True else row.key: row for row in failing}.values()
    )
    for row in failing[:EXPLAINED]:
        lines += in_brief(row, errors.get(row.nodeid))
        if words := repeat(row):
            lines.append(f"  repeat: {shlex.join(words)}")
    if (left := len(failing) - EXPLAINED) > 0:
        lines.append(f"{left} more {'fails' if left == 1 else 'fail'}")
    otherwise = [(nodeid, error) for nodeid, error in errors.items() if nodeid not in of_rows]
    lines += [
        f"{Outcome.FAIL.value} {nodeid}: {few(error)}"
        for nodeid, error in printable(otherwise[:EXPLAINED])
    ]
    if (left := len(otherwise) - EXPLAINED) > 0:
        lines.append(f"{counted(left, 'more test')} failed; pytest's summary names them")
    return lines


def workflow_commands(rows: Iterable[Row], places: Mapping[str, Place]) -> list[str]:
    """GitHub's annotations: a line for each concern, worst first; a test without a place, by node id, is annotated on no line.
    Where there are more than GitHub shows, the last line of a level counts the rest.
    """
    lines, found = [], concerns(rows)
    for level, failing in (("error", True), ("warning", False)):
        of_level = [row for row in found if fails(row) is failing]
        shown = of_level if len(of_level) <= MOST else of_level[: MOST - 1]
        for row in shown:
            place = _place(row, places.get(row.nodeid))
            where = f"file={_property(place.file)},line={place.line}," if place is not None else ""
            lines.append(
                f"::{level} {where}title={_property(f'gpumem: {verdict_text(row)}')}::{_message(in_words(row))}"
            )
        if left := len(of_level) - len(shown):
            lines.append(f"::{level} title=gpumem::{left} more in the summary of the run")
    return lines


def place_of(root: Path, file: str, line: int) -> Place:
    """The place of a test within the repository, if GitHub says which folder that is.
    `file`: relative to `root`.
    `line`: from 1 on.
    """
    whole, checkout = Path(os.path.normpath(root / file)), os.environ.get(CHECKOUT)
    if checkout and whole.is_relative_to(checkout):
        return Place(whole.relative_to(checkout).as_posix(), line)
    return Place(Path(file).as_posix(), line)


def _place(row: Row, test: Place | None) -> Place | None:
    """Where a row's annotation stands: on the line of its first difference, or on its test, which is at `test` if that is known."""
    own = row.nodeid.partition("::")[0]
    if (
        test is None
        or not fails(row)
        or (line := line_of(row)) is None
        or not test.file.endswith(own)
    ):
        return test
    return Place(
        f"{test.file.removesuffix(own)}{line[0]}", line[1]
    )  # both are relative to the same folder


def _message(text: str) -> str:
    """Text that ends no command and begins none, escaped as in GitHub's toolkit (actions/toolkit, core/src/command.ts)."""
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def summarise(text: str, environment: Mapping[str, str]) -> str | None:
    """Append Markdown to GitHub's job summary, if there is one. Gives why it was not written: a run does not fail by it; else None."""
    if not (name := environment.get(VARIABLE)):
        return None
    path, text = Path(name), f"{text}\n"
    try:
        before = path.stat().st_size if path.exists() else 0
        if before + len(text.encode()) > LIMIT:
            return f"{VARIABLE}: {path} is nearly full, nothing is added"
        append_whole(path, text)
    except OSError as error:
        return f"{VARIABLE}: cannot write {path}: {error.strerror or error}"
    return None
