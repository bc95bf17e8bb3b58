"""What needs a look, in which order, and as GitHub and GitLab show it."""

from __future__ import annotations

import re
from collections.abc import Callable
from string import Formatter

import pytest
from known_devices import H100
from msgspec.structs import replace

from pytest_gpumem.judging.finding import SENTENCES
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.difference import Difference
from pytest_gpumem.records.footprint import Site
from pytest_gpumem.records.row import Comparison, LimitResult, Row
from pytest_gpumem.reporting.columns import fitted
from pytest_gpumem.reporting.concerns import (
    MOST,
    concerns,
    ending,
    fails,
    few,
    in_brief,
    sentence,
    workflow_commands,
)
from pytest_gpumem.reporting.exports import properties
from pytest_gpumem.reporting.run import Place

Make = Callable[..., Row]


def slower(delta: float) -> Comparison:
    return Comparison(delta, 0.01, processes=3)


def test_failures_first_then_undecided_by_slow_down_and_no_new_row(make_row: Make) -> None:
    rows = [
        make_row("t.py::throttled", Outcome.UNDECIDED),
        make_row("t.py::fine"),
        make_row("t.py::new", Outcome.NEW),
        make_row("t.py::little", Outcome.UNDECIDED, comparison=slower(0.01)),
        make_row("t.py::more", Outcome.UNDECIDED, comparison=slower(0.02)),
        replace(make_row("t.py::asserts"), failed=True),
        make_row("t.py::slow", Outcome.FAIL, comparison=slower(0.03)),
    ]
    found = concerns(rows)
    assert [row.nodeid[6:] for row in found] == ["slow", "asserts", "more", "little", "throttled"]
    assert [fails(row) for row in found] == [True] * 2 + [False] * 3


def test_what_a_change_accepts_is_shown_as_no_failure(make_row: Make) -> None:
    """A reviewer sees what is accepted, by whom and why."""
    accepted = make_row(
        "t.py::t",
        Outcome.ACCEPTED,
        reason="max_regression accepted (ada: checks bounds); +8 %",
        comparison=slower(0.08),
    )
    assert (concerns([accepted]), fails(accepted)) == ([accepted], False)
    (line,) = workflow_commands([accepted], {})
    assert (
        line
        == "::warning title=gpumem%3A ACCEPTED::ACCEPTED t.py::t: max_regression accepted (ada: checks bounds); +8 %25"
    )


def test_a_sentence_says_what_else_failed_and_what_is_simulated(make_row: Make) -> None:
    assert (
        sentence(replace(make_row("t.py::t", reason="within\nits limits"), failed=True))
        == "PASS, test failed t.py::t: within its limits"
    )
    assert sentence(make_row("t.py::t", Outcome.FAIL, simulated=True)).startswith(
        "FAIL (simulated) t.py::t: "
    )


SECTORS = Difference("sectors per request", 4.0, 16.0)
GRID = Difference("kernel", (1024, 1, 1), (1152, 1, 1), "triad", "grid")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((), None),
        ((SECTORS, GRID), "sectors per request 4 → 16"),
        ((GRID,), "kernel triad: grid 1024 → 1152"),
        ((Difference("GPU page faults", 0, 1243),), "1243 GPU page faults where there were none"),
    ],
)
def test_a_failure_in_brief_has_one_reason_and_one_difference_or_none(
    make_row: Make, found: tuple[Difference, ...], said: str | None
) -> None:
    results = (
        LimitResult(
            "max_regression",
            Outcome.FAIL,
            None,
            "the duet: FAIL, +9.25 % over 11 pairs: slower; its traffic has changed",
        ),
        LimitResult("max_peak", Outcome.FAIL, None, "a peak of 80 MiB"),
    )
    row = make_row("t.py::t", Outcome.FAIL, reason="all of it")
    row = replace(row, verdict=replace(row.verdict, limits=results), differences=found)
    assert in_brief(row) == [
        "FAIL t.py::t: +9.25 % over 11 pairs: slower",
        *([f"  why: {said}"] if said else []),
    ]


def test_the_end_names_the_worst_five_why_and_how_to_repeat_them(make_row: Make) -> None:
    rows = [
        make_row(f"t.py::t{n}", Outcome.FAIL, reason="slow " * 30, comparison=slower(n / 100))
        for n in range(7)
    ]
    rows[6] = replace(
        rows[6],
        verdict=replace(
            rows[6].verdict, limits=(LimitResult("max_regression", Outcome.FAIL, None, "slow"),)
        ),
    )
    lines = ending(
        [make_row("t.py::fine"), *rows],
        lambda row: ["pytest", row.nodeid] if row.verdict.limits else [],
    )
    assert lines[:2] == ["FAIL t.py::t6: slow", "  repeat: pytest t.py::t6"]
    assert lines[2:] == [
        *(f"FAIL t.py::t{n}: {'slow ' * 25}..." for n in (5, 4, 3, 2)),
        "2 more fail",
    ]


def test_a_test_that_failed_is_named_once_with_its_own_error(make_row: Make) -> None:
    """Neither by the verdict of a row that passed, nor again by each of its rows."""
    errs = [
        replace(make_row("t.py::errs", label=label, reason="within"), failed=True, test_error=True)
        for label in "ab"
    ]
    beside = [
        make_row("t.py::slow", Outcome.FAIL, label="a", reason="slow"),
        replace(make_row("t.py::slow", label="b"), failed=True),
    ]
    errors = {
        "t.py::errs": "AssertionError: off by one",
        "t.py::slow": "slow",
        "t.py::other": "KeyError: 1",
    }
    assert ending([*errs, *beside], lambda _row: (), errors) == [
        "FAIL t.py::slow[a]: slow",
        "FAIL t.py::errs[b]: AssertionError: off by one",
        "FAIL t.py::other: KeyError: 1",
    ]
    assert in_brief(errs[0]) == [
        "FAIL t.py::errs[a]: its test failed by an assertion or an error of its own"
    ]


FIGURES = dict.fromkeys(
    [name for form in SENTENCES.values() for _, name, _, _ in Formatter().parse(form) if name],
    "93.4 MiB",
) | {
    "seen": "+27.7 % against 3 saved runs of 9 processes, between +26.9 % and +28.3 %, 210 samples on 6 placements",
    "limit": "max_regression 2% (marker)",
    "basis": "210 samples on 6 placements",
    "days": "2 days",
}


def test_a_reason_in_brief_has_no_number_of_samples() -> None:
    """With -v it has."""
    assert few(
        "20 us is above max_latency 1 us by 5 %, margin 1 %, 232 samples on 8 placements; so"
    ) == ("20 us is above max_latency 1 us by 5 %, margin 1 %")


@pytest.mark.parametrize("form", SENTENCES)
def test_a_reason_in_brief_is_one_sentence_of_few_words(form: str) -> None:
    """It has whole clauses: none of its figures is cut."""
    said = few(SENTENCES[form].format(**FIGURES))
    assert len([word for word in said.split() if any(map(str.isalnum, word))]) <= 25
    assert "; " not in said
    assert not said.endswith("...")


NAMES = (
    "t.py::t",
    "tests/deeply/nested/test_raster_operations.py::TestResize::test_resize_of_large_image[bicubic, 8192x8192-uint8]",
)


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("name", NAMES)
def test_the_end_fits_the_terminal_and_cuts_neither_names_nor_figures(
    make_row: Make, name: str, width: int
) -> None:
    reason = SENTENCES["slower"].format(**FIGURES)
    found = (
        Difference(
            "kernel",
            (4096, 4096, 1),
            (8192, 8192, 1),
            "resize_bicubic_kernel<unsigned char, 3>",
            "grid",
        ),
    )
    rows = [
        replace(
            make_row(f"{name[:-1]}{n}]", Outcome.FAIL, reason=reason, comparison=slower(n / 100)),
            differences=found,
        )
        for n in range(7)
    ]
    whole = ending(rows, lambda row: ["gpumem", "duet", "origin/main", "--test", row.nodeid])
    lines = [part for line in whole for part in fitted(line, width)]
    for line in lines:
        assert (
            len(line) <= width or len(line.split("'")[1 if "'" in line else 0].strip()) + 6 >= width
        )
    words = [word for line in lines for word in line.removesuffix(" \\").split()]
    assert words == [word for line in whole for word in line.split()]
    assert not [
        line
        for line in lines[:-1]
        if re.search(r"\d$", line) and re.match(r" *(%|[KM]iB|us)", lines[lines.index(line) + 1])
    ]


def test_a_command_that_is_too_long_is_continued_as_a_shell_takes_it() -> None:
    lines = fitted(
        "  repeat: gpumem accept 't.py::t[a b]' --scope time --size '380 MiB' --reason '...'", 40
    )
    assert lines == [
        "  repeat: gpumem accept 't.py::t[a b]' \\",
        "    --scope time --size '380 MiB' \\",
        "    --reason '...'",
    ]


# GitHub's annotations


def test_a_failure_is_an_error_on_the_tests_line(make_row: Make) -> None:
    rows = [
        make_row("t.py::t", Outcome.FAIL, reason="slower: +3 %, margin 1 %"),
        make_row("t.py::u", Outcome.UNDECIDED, reason="maybe"),
    ]
    assert workflow_commands(rows, {"t.py::t": Place("sub/t.py", 12)}) == [
        "::error file=sub/t.py,line=12,title=gpumem%3A FAIL::FAIL t.py::t: slower: +3 %25, margin 1 %25",
        "::warning title=gpumem%3A UNDECIDED::UNDECIDED t.py::u: maybe",
    ]


def test_a_failure_stands_on_the_line_of_its_cause(make_row: Make) -> None:
    """In the folder of the test's file, which is not always that of the repository. A line elsewhere is none of its own."""
    site = Site(
        "raster/ops.py",
        38,
        "resize",
        "tile = zeros(n)",
        "CuPy",
        "device",
        at_peak=80 << 20,
        at_peak_count=1,
    )
    grown = Difference("peak memory", 64 << 20, 80 << 20, site=site)
    row = replace(
        make_row("tests/t.py::t", Outcome.FAIL, reason="a peak of 80 MiB"),
        differences=(grown, GRID),
    )
    (line,) = workflow_commands([row], {row.nodeid: Place("sub/tests/t.py", 12)})
    why = "why: +16 MiB at raster/ops.py:38 in resize: tile = zeros(n) (64 MiB before)"
    assert (
        line
        == f"::error file=sub/raster/ops.py,line=38,title=gpumem%3A FAIL::FAIL tests/t.py::t: a peak of 80 MiB; {why}"
    )
    assert (
        dict(properties(row, H100)).items()
        >= {"gpumem_why": why[5:], "gpumem_why_line": "raster/ops.py:38"}.items()
    )
    for away in ("/usr/lib/python3/cupy.py", ""):
        elsewhere = replace(row, differences=(replace(grown, site=replace(site, file=away)),))
        assert (
            "file=sub/tests/t.py,line=12,"
            in workflow_commands([elsewhere], {row.nodeid: Place("sub/tests/t.py", 12)})[0]
        )


@pytest.mark.parametrize(
    "hostile",
    [
        "a\n::error::b",
        "a\r::set-output name=x::b",
        "a%0A::error::b",
        "a\x85::stop-commands::b",
        "a\u2028b",
    ],
)
def test_nothing_in_a_name_or_path_begins_a_command_of_its_own(
    make_row: Make, hostile: str
) -> None:
    nodeid = f"t.py::t[{hostile}]"
    (line,) = workflow_commands(
        [make_row(nodeid, Outcome.FAIL, reason=hostile)],
        {nodeid: Place(f"x,line=1::{hostile}.py", 3)},
    )
    assert line.splitlines() == [line]
    # The runner takes the first "::" behind the command's properties as their end.
    properties, _, message = line.removeprefix("::error ").partition("::")
    assert [one.partition("=")[0] for one in properties.split(",")] == ["file", "line", "title"]
    assert message.startswith("FAIL t.py::t[a")
    assert "%0A" not in message


def test_no_more_than_github_shows(make_row: Make) -> None:
    rows = [make_row(f"t.py::t{n}", Outcome.FAIL) for n in range(MOST + 1)] + [
        make_row("t.py::s", Outcome.UNDECIDED)
    ]
    lines = workflow_commands(rows, {})
    assert [line.startswith("::error") for line in lines] == [True] * MOST + [False]
    assert lines[MOST - 1] == "::error title=gpumem::2 more in the summary of the run"
