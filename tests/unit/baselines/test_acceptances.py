"""Accepted changes: their files, which of them counts for a row, and what it forgives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import naming
from committing import commit
from hypothesis import given
from hypothesis import strategies as st
from known_devices import H100
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.baselines.acceptances import (
    FOLDER,
    Acceptance,
    Acceptances,
    AcceptedChange,
    Figure,
    absolute_limits,
    acceptances,
    changes_of,
    command,
    covers,
    write,
)
from pytest_gpumem.judging.finding import with_verdict
from pytest_gpumem.outcomes import Code, Outcome, UserError
from pytest_gpumem.records import key_of
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import Comparison, LimitResult, PairedChange, Row, Verdict
from pytest_gpumem.records.what_ran import Step, what_ran

TEST = "tests/test_a.py::test_triad"
FAIL, UNDECIDED = Outcome.FAIL, Outcome.UNDECIDED


def change(figure: Figure, up_to: str | None = None, row: str = TEST) -> AcceptedChange:
    return AcceptedChange(row, figure, up_to)


def acceptance(*changes: AcceptedChange, test: str = TEST, **more: Any) -> Acceptance:
    return Acceptance(test, "checks bounds", "ada", changes or (change("time", "8.4%"),), **more)


def of(*files: Acceptance) -> Acceptances:
    return Acceptances({file.file_name: file for file in files})


# Files


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    every = acceptance(
        change("time", "12%"),
        change("memory", "96 MiB", f"{TEST}[warm]"),
        change("limit", "max_regression=900%"),
        change("limit", "max_kept=none"),
        change("renamed", "tests/test_a.py::test_old"),
        change("removed"),
        change("measured"),
        base="abc",
        gpu=H100.key,
        utc="2026-11-29T01:00:00+00:00",
    )
    assert dict(acceptances(tmp_path).files) == {}
    path = write(tmp_path, every)
    other = write(tmp_path, acceptance(test="tests/test_b.py::test_é[x/../y]"))
    (tmp_path / FOLDER / "README.md").write_text("what this is")
    read = acceptances(tmp_path)
    assert set(read.files) == {path.name, other.name}
    assert read.files[path.name] == every
    assert path.parent == other.parent == FOLDER
    assert path.name.startswith("tests-test-a-py-test-triad-")
    assert other.name.startswith("tests-test-b-py-test-x-y-")
    # A person may rename it, and write it by hand.
    (tmp_path / path).rename(tmp_path / FOLDER / "mine.json")
    assert acceptances(tmp_path).files["mine.json"] == every


@given(st.text(), st.text(min_size=1).filter(str.strip))
def test_names_are_safe_and_apart(one: str, other: str) -> None:
    names = {acceptance(test=test).file_name for test in (one, other)}
    assert len(names) == len({one, other})
    for name in names:
        assert name.replace("-", "").removesuffix(".json").isalnum()
        assert name.isascii()
        assert len(name) < 80


def text(**fields: Any) -> bytes:
    plain = {"test": TEST, "reason": "why", "who": "ada", "changes": [{"row": TEST}]}
    return json.dumps(plain | fields).encode()


def changed(**fields: Any) -> bytes:
    return text(changes=[{"row": TEST, "figure": "time", "up_to": "1%"} | fields])


def test_what_is_refused_names_file_and_field(tmp_path_factory: pytest.TempPathFactory) -> None:
    for written, words in [
        (b"{", "not JSON"),
        (text(), "$.changes[0]: Object missing required field `figure`"),
        (text(reason=" "), "$.reason: ' '; expected `str` matching"),
        (text(changes=[]), "$.changes: []; expected `array` of length >= 1"),
        (changed(figure="everything"), "$.changes[0].figure: 'everything'; "),
        (changed(up_to="0.08"), "$.changes[0].up_to: '0.08' "),
        (changed(up_to=None), "$.changes[0].up_to: time needs a value"),
        (changed(figure="removed"), "$.changes[0].up_to: removed takes no value"),
        (changed(figure="limit", up_to="max_latency=1%"), "$.changes[0].up_to: '1%' "),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with naming(written):
            (tmp_path / FOLDER).mkdir(parents=True)
            (tmp_path / FOLDER / "a.json").write_bytes(written)
            with pytest.raises(UserError) as refused:
                acceptances(tmp_path)
            line = str(refused.value)
            assert line.startswith(f"{FOLDER / 'a.json'}: {words}"), line
            assert "\n" not in line


def test_those_that_a_change_adds(tmp_path: Path) -> None:
    old = write(tmp_path, acceptance())
    commit(tmp_path)
    new = write(tmp_path, acceptance(change("time", "9%")))
    every = acceptances(tmp_path)
    assert set(every.files) == {old.name, new.name}
    assert [set(part.files) for part in every.split_at("main")] == [{old.name}, {new.name}]


# Which counts


def test_a_later_file_replaces_an_earlier_one_of_its_row_and_figure() -> None:
    earlier = acceptance(change("time", "5%"), change("memory", "96 MiB"), utc="2026-11-01")
    later = acceptance(change("time", "3%"), utc="2026-11-02")
    every = of(later, earlier)
    assert every.of(TEST, "time") == (later, change("time", "3%"))
    assert every.of(TEST, "memory") == (earlier, change("memory", "96 MiB"))
    assert every.of("tests/test_a.py::test_other", "time") is None
    assert every.of(f"{TEST}[warm]", "time") == every.of(TEST, "time")  # a row of the test


def test_a_digest_is_of_one_figure_its_size_and_its_base() -> None:
    of_time = acceptance(change("time", "5%"), base="abc", utc="2026-11-01")
    digest = of(of_time).digest(TEST, "time")
    assert digest
    assert of(of_time).digest(TEST, "memory") == of().digest(TEST, "time") == ""
    with_bytes = replace(of_time, changes=(*of_time.changes, change("memory", "1 MiB")))
    assert of(with_bytes).digest(TEST, "time") == digest
    for same in (replace(of_time, reason="other words"), replace(of_time, who="bob", utc="2027")):
        assert of(same).digest(TEST, "time") == digest
    for other in (replace(of_time, base="def"), replace(of_time, changes=(change("time", "6%"),))):
        assert of(other).digest(TEST, "time") not in ("", digest)
    # Without git, the time stands for the revision.
    bare = replace(of_time, base=None)
    assert of(bare).digest(TEST, "time") != of(replace(bare, utc="2027")).digest(TEST, "time")


def test_a_loosened_limit_is_accepted_up_to_its_new_value() -> None:
    every = of(acceptance(change("limit", "max_regression=5%"), change("limit", "max_kept=none")))
    assert every.allows(TEST, "max_regression", "5%")
    assert every.allows(TEST, "max_regression", "4%")
    assert not every.allows(TEST, "max_regression", "6%")
    assert not every.allows(TEST, "max_regression", None)
    assert every.allows(TEST, "max_kept", None)
    assert every.allows(TEST, "max_kept", "1 GiB")
    assert not every.allows(TEST, "max_latency", None)
    assert not every.allows("tests/test_b.py::test", "max_kept", None)


def test_a_removed_and_a_renamed_test() -> None:
    new = "tests/test_a.py::test_new"
    gone = acceptance(change("removed"))
    renamed = acceptance(change("renamed", TEST, new), test=new)
    assert of(gone).why_gone(f"{TEST}[warm]") == f"removed ({gone.who}: {gone.reason})"
    why = of(renamed).why_gone(f"{TEST}[warm]")
    assert why == f"renamed to {new} ({renamed.who}: {renamed.reason})"
    assert of(renamed).why_gone(new) is None
    assert of(gone, renamed).why_gone("tests/test_b.py::test") is None


# What a row asks to accept

SLOWER = LimitResult("max_regression", FAIL, Code.SLOWER)
PEAK = LimitResult("max_peak_regression", FAIL, Code.TOO_MUCH_MEMORY)
COPIES = LimitResult("max_copies", FAIL)
LATENCY = LimitResult("max_latency", FAIL)


def judged(*results: LimitResult, **limits: Any) -> Row:
    """A row with three copies and a peak of 96 bytes."""
    copies = [Step("copy", "H2D", nbytes=8)] * 3
    given: dict[str, Any] = {
        "max_regression": "1%",
        "max_peak_regression": "0 B",
        "max_copies": "base",
    }
    row = Row(
        TEST,
        Limits(**{**given, **limits}),
        Verdict(Outcome.UNDECIDED, "", Comparison(0.12, 0.01)),
        measurement(what_ran=what_ran(copies, {})),
        footprint=Footprint(96),
    )
    return with_verdict(row, results)


def test_what_a_row_asks_to_accept() -> None:
    row = judged(SLOWER, PEAK, COPIES, LATENCY)
    # The duet's figure, where there is one.
    paired = replace(row.verdict, paired=PairedChange(0.0841, 0.08, 0.09, 5))
    assert set(changes_of(replace(row, verdict=paired))) == {
        change("time", "9.5%"),  # and the limit of 1 % on top
        change("memory", "96 B"),
        change("limit", "max_copies=3"),
    }
    assert command(row).endswith(
        "--change 'memory=96 B' --change time=13.12% --change max_copies=3 --reason '...'"
    )
    other_way = judged(LimitResult("max_regression", UNDECIDED, Code.MEASURED_DIFFERENTLY))
    assert list(changes_of(other_way)) == [change("measured")]
    accepted = LimitResult("max_regression", Outcome.ACCEPTED, Code.MEASURED_DIFFERENTLY)
    assert list(changes_of(judged(accepted, LATENCY))) == []
    assert list(changes_of(replace(row, test_error=True))) == []
    doubt = judged(LimitResult("max_regression", UNDECIDED, Code.NOISY))
    assert list(changes_of(doubt)) == list(changes_of(judged(LATENCY))) == []


def test_absolute_limits_are_the_tests_own() -> None:
    assert absolute_limits(judged(COPIES, LATENCY, max_copies="2")) == ["max_copies", "max_latency"]
    assert absolute_limits(judged(COPIES, SLOWER, PEAK)) == []


A_TEST = "tests/test_a.py::test_x"


def test_a_test_covers_its_rows_and_those_of_no_other() -> None:
    for parameters in ["a", "a][b", "x[1]", "a::b", "ä"]:
        test = f"{A_TEST}[{parameters}]"
        for key in (key_of(test, ""), key_of(test, "warm"), key_of(test, "w[1]")):
            assert covers(key, key), parameters
            assert all(covers(name, key) for name in (test, A_TEST, "tests/test_a.py", "tests")), (
                parameters
            )
            assert not any(
                covers(name, key) for name in (f"{A_TEST}[b]", f"{A_TEST}y", "tests/test_", "est")
            ), parameters
        assert not covers(f"{A_TEST}[a]", key_of(f"{A_TEST}[a][b]", "")), parameters
