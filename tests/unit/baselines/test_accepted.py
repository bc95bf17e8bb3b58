"""Accepted changes: what a file holds, what is refused of it, and what it covers of a verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.baselines.accepted import (
    FOLDER,
    Acceptance,
    Acceptances,
    AcceptedChange,
    Scope,
    acceptances,
    awaiting,
    changes_of,
    own_limits,
    read,
    share_text,
    text,
    without_accepted,
    write,
)
from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.layout import digest
from pytest_gpumem.judging.verdict import known, with_verdict
from pytest_gpumem.outcomes import Code, Outcome, UserError
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import Comparison, LimitResult, Row, Verdict
from pytest_gpumem.records.what_ran import Step, StepKind, what_ran
from pytest_gpumem.result_files import FileError
from pytest_gpumem.units import parse_share

TEST = "tests/test_a.py::test_triad"
FAIL, UNDECIDED = Outcome.FAIL, Outcome.UNDECIDED
SLOWER = LimitResult("max_regression", FAIL, Code.SLOWER)
CREPT = LimitResult("max_regression", FAIL, Code.CREPT)
PEAK = LimitResult("max_peak_regression", FAIL, Code.TOO_MUCH_MEMORY)
KERNELS, COPIES = LimitResult("max_kernels", FAIL), LimitResult("max_copies", FAIL)
NOISY = LimitResult("max_regression", UNDECIDED, Code.NOISY)


def acceptance(*changes: AcceptedChange, test: str = TEST) -> Acceptance:
    return Acceptance(
        test, "checks bounds", "ada", changes or (AcceptedChange(TEST, Scope.TIME, "8.4%"),), "abc"
    )


def time(size: str) -> Acceptance:
    return acceptance(AcceptedChange(TEST, Scope.TIME, size))


def memory(size: str) -> Acceptance:
    return acceptance(AcceptedChange(TEST, Scope.MEMORY, size))


def kernels(limit: str, size: str) -> Acceptance:
    return acceptance(AcceptedChange(TEST, Scope.KERNELS, size, limit))


def launch(copies: int = 0) -> Measurement:
    steps = [Step(StepKind.KERNEL, "triad", code="a", grid=(4096, 1, 1), block=(256, 1, 1))] * 2
    return measurement(
        what_ran=what_ran(steps + [Step(StepKind.COPY, "H2D", nbytes=8)] * copies, {})
    )


def failing(
    *results: LimitResult,
    low: float = 0.08,
    high: float = 0.09,
    peak: int = 96,
    measured: Measurement | None = None,
    **changes: Any,
) -> Row:
    """A row that fails by these results. It is slower by 8.4 %, at least 8 %, and has a peak of 96 bytes."""
    comparison = Comparison((low + high) / 2, low, high, 0.01, 3)
    if CREPT in results:
        comparison = replace(comparison, low=0.0, since_first=0.05, since_first_low=0.04)
    ordered = tuple(sorted(results, key=lambda one: one.outcome.rank))
    verdict = Verdict(
        ordered[0].outcome, "because", comparison, code=ordered[0].code, limits=ordered
    )
    limits = Limits(
        max_regression="2%", max_peak_regression="0 B", max_kernels="base", max_copies="base"
    )
    footprint = Footprint(watched=("cuda",), peak=peak)
    return Row(
        TEST,
        limits,
        verdict,
        measured or launch(copies=3),
        footprint=footprint,
        failed=True,
        **changes,
    )


def left(row: Row, *accepted: Acceptance, **how: Any) -> Verdict:
    findings = without_accepted(row, known(row), accepted, comparison=row.verdict.comparison, **how)
    return with_verdict(row, findings).verdict


OTHERS = (LimitResult("max_latency", FAIL), LimitResult("", UNDECIDED, Code.CONDITIONS))
RESULTS = (SLOWER, CREPT, PEAK, KERNELS, COPIES, NOISY, *OTHERS)
TWO = kernels("max_kernels", "2")
ALL = (time("900%"), memory("1 TiB"), kernels("max_copies", "99"), TWO)


# Files


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    every = acceptance(
        AcceptedChange(TEST, Scope.TIME, "12%"),
        AcceptedChange(f"{TEST}[warm]", Scope.MEMORY, "96 MiB"),
        AcceptedChange(TEST, Scope.KERNELS, "3", "max_copies"),
        AcceptedChange(TEST, Scope.LIMIT, "900%", "max_regression", "5%"),
        AcceptedChange(TEST, Scope.LIMIT, "none", "max_kept"),
        AcceptedChange(TEST, Scope.REMOVED),
    )
    assert acceptances(tmp_path) == ()
    path = write(tmp_path, every)
    other = write(tmp_path, acceptance(test="tests/test_b.py::test_é[x/../y]"))
    assert set(acceptances(tmp_path)) == {every, acceptance(test="tests/test_b.py::test_é[x/../y]")}
    assert path.parent == other.parent == FOLDER
    assert path.name.startswith("tests-test-a-py-test-triad-")
    assert other.name.startswith("tests-test-b-py-test-x-y-")
    (tmp_path / FOLDER / "README.md").write_text("what this is")
    assert len(acceptances(tmp_path)) == 2


@given(st.text(), st.text(min_size=1).filter(str.strip))
def test_names_are_safe_and_apart(one: str, other: str) -> None:
    names = {acceptance(test=test).file_name for test in (one, other)}
    assert len(names) == len({one, other})
    assert all(
        name.replace("-", "").removesuffix(".json").isalnum() and name.isascii() and len(name) < 80
        for name in names
    )


def edited(**content: Any) -> bytes:
    """The text of a file, with a digest that fits."""
    plain = json.loads(text(acceptance()))["content"] | content
    return json.dumps({"schema": 1, "sha256": digest(plain), "content": plain}).encode()


def change(**fields: Any) -> bytes:
    return edited(changes=[{"row": TEST, "scope": "time", "size": "1%"} | fields])


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "$: not an object with the keys schema, sha256 and content"),
        (b'{"schema": 2, "sha256": "", "content": {}}', "$.schema: 2; this version reads 1"),
        (
            text(acceptance()).replace("8.4%", "84%").encode(),
            "$.sha256: does not fit the content, which was edited",
        ),
        (text(acceptance()).replace("ada", "bob").encode(), "$.sha256: does not fit the content"),
        (edited(reason=" "), "$.content.reason: empty"),
        (edited(who=""), "$.content.who: empty"),
        (edited(changes=[]), "$.content.changes: empty"),
        (edited(until="later"), "$.content.until: unknown"),
        (edited(test=3), "$.content.test: 3; expected `str`"),
        (change(scope="everything"), "$.content.changes[0].scope: 'everything'; "),
        (change(row=""), "$.content.changes[0].row: empty"),
        (change(size="0.08"), "$.content.changes[0].size: '0.08' "),
        (change(size="-8%"), "$.content.changes[0].size: '-8%' "),
        (change(size=None), "$.content.changes[0].size: None; the scope time takes one"),
        (
            change(limit="max_regression"),
            "$.content.changes[0].limit: 'max_regression'; the scope time has none",
        ),
        (change(old="5%"), "$.content.changes[0].old: '5%'; the scope time has none"),
        (change(scope="memory", size="96"), "$.content.changes[0].size: '96' "),
        (change(scope="removed"), "$.content.changes[0].size: '1%'; the scope removed has none"),
        (
            change(scope="kernels"),
            "$.content.changes[0].limit: None; the scope kernels takes the name of a limit",
        ),
        (
            change(scope="kernels", limit="max_latency"),
            "$.content.changes[0].limit: 'max_latency'; the scope kernels takes one of ",
        ),
        (change(scope="kernels", limit="max_copies", size="x"), "$.content.changes[0].size: 'x' "),
        (
            change(scope="limit", limit="max_speed"),
            "$.content.changes[0].limit: 'max_speed'; the scope limit takes one of ",
        ),
        (change(scope="limit", limit="max_latency"), "$.content.changes[0].size: '1%' "),
        (
            text(acceptance(test="b.py::test")).encode(),
            "its name does not fit its content; gpumem accept named it b-py-test-",
        ),
    ],
)
def test_what_is_refused_names_file_and_field(tmp_path: Path, written: bytes, words: str) -> None:
    (tmp_path / FOLDER).mkdir(parents=True)
    name = acceptance().file_name
    (tmp_path / FOLDER / name).write_bytes(written)
    with pytest.raises(UserError) as refused:
        acceptances(tmp_path)
    line = str(refused.value)
    assert line.startswith(f"{FOLDER / name}: {words}"), line
    assert "\n" not in line


def test_a_formatted_file_is_the_same_acceptance() -> None:
    own = acceptance()
    assert read(own.file_name, json.dumps(json.loads(text(own)), sort_keys=True).encode()) == own
    with pytest.raises(FileError, match="its name does not fit"):
        read("renamed.json", text(own).encode())


# What they cover


@pytest.mark.parametrize(
    ("result", "accepted", "covered"),
    [
        (SLOWER, time("8.4%"), True),
        (SLOWER, time("8%"), True),  # not beyond doubt more
        (SLOWER, time("7.9%"), False),
        (SLOWER, memory("96 B"), False),
        (CREPT, time("4%"), True),
        (CREPT, time("3.9%"), False),
        (PEAK, memory("96 B"), True),
        (PEAK, memory("95 B"), False),
        (PEAK, time("900%"), False),
        (COPIES, kernels("max_copies", "3"), True),
        (COPIES, kernels("max_copies", "2"), False),
        (COPIES, kernels("max_kernels", "9"), False),
        (KERNELS, kernels("max_kernels", "2"), True),
        (KERNELS, kernels("max_kernels", "1"), False),
        (KERNELS, kernels("max_copies", "9"), False),
        (LimitResult("max_latency", FAIL), time("900%"), False),
        (LimitResult("max_kept", FAIL, Code.TOO_MUCH_MEMORY), memory("1 TiB"), False),
        (LimitResult("", FAIL), time("900%"), False),
        (SLOWER, acceptance(AcceptedChange(TEST, Scope.LIMIT, "900%", "max_regression")), False),
        (SLOWER, acceptance(AcceptedChange(TEST, Scope.REMOVED)), False),
        (
            SLOWER,
            acceptance(AcceptedChange("tests/test_a.py::test_other", Scope.TIME, "900%")),
            False,
        ),
        (SLOWER, acceptance(AcceptedChange(f"{TEST}[warm]", Scope.TIME, "900%")), False),
        (SLOWER, acceptance(AcceptedChange("tests/test_a.py", Scope.TIME, "9%")), True),
    ],
)
def test_a_limit_is_accepted_up_to_a_size(
    result: LimitResult, accepted: Acceptance, covered: bool
) -> None:
    row = failing(result)
    verdict = left(row, accepted)
    if not covered:
        assert verdict == row.verdict
        return
    assert (verdict.outcome, verdict.code, verdict.accepted, verdict.limits) == (
        Outcome.ACCEPTED,
        result.code,
        (result.limit,),
        (),
    )
    assert verdict.reason == f"{result.limit} accepted (ada: checks bounds)"


def test_a_count_that_names_its_own_limit_is_not_accepted() -> None:
    row = failing(COPIES)
    row = replace(row, limits=replace(row.limits, max_copies="2"))
    assert left(row, kernels("max_copies", "3")).outcome is FAIL
    assert own_limits(row) == ["max_copies"]


def test_what_is_not_accepted_is_what_is_left() -> None:
    """Accepting kernels lifts no limit on the time."""
    assert left(failing(KERNELS, SLOWER), TWO).outcome is FAIL
    assert left(failing(KERNELS, SLOWER), TWO).limits == (SLOWER,)
    noisy = left(failing(KERNELS, NOISY), TWO)
    assert (noisy.outcome, noisy.code, noisy.limits, noisy.accepted) == (
        UNDECIDED,
        Code.NOISY,
        (NOISY,),
        ("max_kernels",),
    )
    assert left(failing(KERNELS, SLOWER), TWO, time("8.4%")).outcome is Outcome.ACCEPTED
    # In two steps, as in a gate.
    first = left(failing(KERNELS, SLOWER), TWO, time("8.4%"), scopes=(Scope.KERNELS,))
    assert first.limits == (SLOWER,)
    second = left(replace(failing(KERNELS), verdict=first), TWO, time("8.4%"))
    assert (second.outcome, second.accepted) == (
        Outcome.ACCEPTED,
        ("max_kernels", "max_regression"),
    )


def test_a_duet_says_how_much_slower() -> None:
    row = failing(SLOWER, low=0.2, high=0.3)
    assert left(row, time("8.4%")).outcome is FAIL
    assert left(row, time("8.4%"), low=0.08).outcome is Outcome.ACCEPTED
    assert left(failing(SLOWER), time("8.4%"), low=0.2).outcome is FAIL


def test_several_that_no_run_followed_add_up() -> None:
    row = failing(SLOWER, low=0.2, high=0.3)
    assert left(row, time("10%")).outcome is FAIL
    assert left(row, time("10%"), time("10%")).outcome is Outcome.ACCEPTED
    assert left(failing(SLOWER, low=0.22), time("10%"), time("10%")).outcome is FAIL


@pytest.mark.parametrize("outcome", [Outcome.NEW, UNDECIDED])
def test_what_does_not_fail_stays(outcome: Outcome) -> None:
    row = failing(replace(SLOWER, outcome=outcome))
    assert left(row, time("900%")) == row.verdict


NEVER = {"max_latency", ""}


@given(
    st.lists(st.sampled_from(RESULTS), min_size=1, unique=True),
    st.lists(st.sampled_from(ALL), unique=True),
)
def test_nothing_but_what_is_accepted_goes(
    results: Sequence[LimitResult], accepted: Sequence[Acceptance]
) -> None:
    row = failing(*results)
    verdict = left(row, *accepted)
    gone = [one for one in row.verdict.limits if one not in verdict.limits]
    scopes = {change.scope for one in accepted for change in one.changes}
    assert all(one.outcome is FAIL and one.limit not in NEVER for one in gone)
    if not {Scope.TIME, Scope.MEMORY, Scope.KERNELS} & scopes:
        assert gone == []
    assert (verdict.outcome is Outcome.ACCEPTED) is (bool(gone) and not verdict.limits)
    if verdict.limits:
        assert verdict.outcome is (row.verdict.outcome if not gone else verdict.limits[0].outcome)
    # What is left is not less by more acceptances.
    assert set(left(row, *ALL).limits) <= set(verdict.limits)


@given(st.floats(0, 100))
def test_the_size_holds_the_slow_down_that_it_was_made_of(slow_down: float) -> None:
    size = parse_share(share_text(slow_down))
    assert slow_down - 1e-9 <= size < slow_down + 1.01e-4


# What a run asks for


def test_what_a_row_asks_to_accept_accepts_it() -> None:
    for results in ([SLOWER], [CREPT], [PEAK], [KERNELS, COPIES], [SLOWER, PEAK, COPIES]):
        row = failing(*results)
        own = tuple(changes_of(row))
        assert len(own) == len(results)
        assert left(row, acceptance(*own)).outcome is Outcome.ACCEPTED
        assert own_limits(row) == []
    assert [change.size for change in changes_of(failing(SLOWER, PEAK, KERNELS, COPIES))] == [
        "8.5%",
        "96 B",
        "2",
        "3",
    ]
    assert list(changes_of(failing(SLOWER), 0.031)) == [AcceptedChange(TEST, Scope.TIME, "3.1%")]


def test_what_no_acceptance_covers_is_the_tests_own() -> None:
    row = failing(SLOWER, LimitResult("max_latency", FAIL), LimitResult("", FAIL), NOISY)
    assert [change.scope for change in changes_of(row)] == [Scope.TIME]
    assert own_limits(row) == ["max_latency"]
    assert list(changes_of(failing(NOISY))) == []


def test_a_row_that_is_measured_differently_is_accepted_as_it_is() -> None:
    row = failing(
        LimitResult("max_regression", UNDECIDED, Code.MEASURED_DIFFERENTLY), low=-0.3, high=-0.2
    )
    assert list(changes_of(row)) == [AcceptedChange(TEST, Scope.TIME, "0%")]


def test_a_loosened_limit_is_accepted_up_to_its_new_value() -> None:
    none = AcceptedChange(TEST, Scope.LIMIT, "none", "max_kept")
    own = acceptance(AcceptedChange(TEST, Scope.LIMIT, "10%", "max_regression", "5%"), none)
    found = Acceptances([own, time("900%")])
    assert (
        found.loosens(TEST, "max_regression", "10%")
        is found.loosens(TEST, "max_regression", "7%")
        is own
    )
    assert found.loosens(TEST, "max_regression", "900%") is None
    assert found.loosens(TEST, "max_regression", None) is None
    assert found.loosens(TEST, "max_latency", "1 s") is None
    assert found.loosens("tests/test_a.py::test_other", "max_regression", "10%") is None
    assert found.loosens(TEST, "max_kept", None) is found.loosens(TEST, "max_kept", "1 GiB") is own
    assert Acceptances([time("900%")]).loosens(TEST, "max_regression", "900%") is None


def test_a_removed_measurement() -> None:
    gone = acceptance(AcceptedChange(TEST, Scope.REMOVED))
    found = Acceptances([time("9%"), gone])
    assert found.removed(TEST) is found.removed(f"{TEST}[warm]") is gone
    assert found.removed("tests/test_a.py::test_other") is None
    assert found.of(TEST) == [time("9%")]
    assert Acceptances([gone], {(gone.digest, TEST)}).removed(TEST) is None


def test_rows_that_wait_for_a_saved_run_have_no_history() -> None:
    runs: Any = dict.fromkeys(
        (TEST, f"{TEST}[warm]", "tests/test_a.py::test_old", "tests/test_a.py::test_other"),
        ("a run",),
    )
    removed = acceptance(AcceptedChange("tests/test_a.py::test_old", Scope.REMOVED))
    looser = acceptance(
        AcceptedChange("tests/test_a.py::test_other", Scope.LIMIT, "9%", "max_regression")
    )
    own = time("9%")
    baseline = Baseline(
        runs, footprints=dict(runs), taken_over=frozenset({(own.digest, f"{TEST}[warm]")})
    )
    left = awaiting(baseline, Acceptances([own, removed, looser], baseline.taken_over))
    assert (
        set(left.rows) == set(left.footprints) == {f"{TEST}[warm]", "tests/test_a.py::test_other"}
    )
    assert (
        left.accepted(TEST)
        == "a change of it was accepted (ada: checks bounds), and no run was saved since"
    )
    assert left.accepted("tests/test_a.py::test_other") is None
