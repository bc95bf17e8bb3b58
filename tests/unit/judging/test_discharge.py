"""Nothing that was to be judged ends without a verdict or a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from hypothesis import example, given, settings
from hypothesis import strategies as st
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.judging.expectations import (
    Ending,
    Expectation,
    Selection,
    against_base,
    discharge,
    judged,
    loosened,
    lost,
    may_be_excused,
    of_base,
    open_under_strict,
)
from pytest_gpumem.limits import AT_THE_END, LIMITS, OF_FOOTPRINT, demands_more
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import (
    ACCEPTED,
    LOST,
    NOT_RUN,
    ROW,
    UNDECIDED,
    How,
    Omission,
    Row,
    Verdict,
)
from pytest_gpumem.records.row import TEST as EXPECTED_TEST

TEST = "test_a.py::test_a"
WATCHED = Footprint(peak=1)
NAMES = st.sampled_from(sorted(LIMITS))
NO = st.just(False)
HOW = st.sampled_from(get_args(How))
ENDS = st.builds(
    Ending,
    HOW,
    st.sampled_from(["", "why"]),
    st.booleans(),
    plugin=st.sampled_from(["", "split.py"]),
    in_base=NO,
    base_too=NO,
).map(lambda ended: ended if ended.how == "left out" else ended._replace(plugin=""))
"""In a session that is no gate."""
FAILED = ("failed", "did not run")
RAN = ("passed", *FAILED)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    found = []
    for label in draw(st.lists(st.sampled_from(["", "x", "y"]), unique=True, max_size=3)):
        names = draw(st.sets(NAMES))
        lifted = draw(st.sets(st.sampled_from(sorted(names)))) if names else set()
        limits = Limits(**dict.fromkeys(names - lifted, "1"), origin=dict.fromkeys(names, "marker"))
        footprint = draw(st.sampled_from([None, WATCHED, replace(WATCHED, ended=False)]))
        taken = measurement(label=label) if draw(st.booleans()) else None
        found.append(
            Row(
                TEST,
                limits,
                Verdict(draw(st.sampled_from(list(Outcome))), ""),
                taken,
                label,
                footprint=footprint,
            )
        )
    return found


@given(st.builds(Expectation, st.just(TEST), NAMES, st.just(""), NO), rows(), ENDS)
def test_a_limit_is_judged_by_a_row_or_by_the_tests_failure_or_has_a_word(
    one: Expectation, found: list[Row], ended: Ending
) -> None:
    missing = discharge(one, found, ended)
    by_row = any(
        one.what in row.limits.origin
        and (row.footprint is not None if one.what in OF_FOOTPRINT else row.measurement is not None)
        and (one.what not in AT_THE_END or row.footprint is None or row.footprint.ended)
        for row in found
    )
    assert (missing is None) == (by_row or ended.how in FAILED)
    if missing is not None:
        assert (missing.what, missing.by_words) == (one.what, ended.by_words)
        assert missing.reason
        assert missing.status in (LOST, NOT_RUN, UNDECIDED)
        assert open_under_strict([missing]) == ([] if ended.by_words else [missing])


@given(
    st.builds(Expectation, st.just(TEST), st.just(ROW), st.sampled_from(["", "x"]), NO),
    rows(),
    ENDS,
)
def test_a_measurement_is_taken_or_has_a_word(
    one: Expectation, found: list[Row], ended: Ending
) -> None:
    missing = discharge(one, found, ended)
    measured = any(row.label == one.label and row.measurement is not None for row in found)
    assert (missing is None) == (measured and ended.how in RAN)
    if missing is not None:
        ran = ended.how in (*RAN, "skipped", "xfailed", "xpassed", "gone")
        assert missing.how == ended.how
        assert (missing.what, missing.label, missing.status) == (
            ROW,
            one.label,
            LOST if ran else NOT_RUN,
        )


@given(
    st.builds(Expectation, st.just(TEST), st.just(EXPECTED_TEST), st.just(""), st.booleans()),
    rows(),
    ENDS,
)
def test_a_test_that_measures_in_base_measures_or_fails_or_has_a_word(
    one: Expectation, found: list[Row], ended: Ending
) -> None:
    missing = discharge(one, found, ended)
    measured = any(row.measured_something for row in found)
    assert (missing is None) == (
        ended.how in FAILED or (ended.how == "passed" and (measured or not one.unmeasured))
    )


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    """What BASE selects: the test or not, and whether a mark or its module leaves it out there."""
    there = draw(st.sampled_from(["relied on", "other", "left out", "its module", "absent"]))
    return Selection(
        {TEST: Limits()} if there == "relied on" else {},
        (),
        (TEST,) if there == "other" else (),
        {"left out": (TEST,), "its module": ("test_a.py",)}.get(there, ()),
        draw(st.sampled_from([(), ("split.py",)])),
    )


WHAT = st.one_of(NAMES, st.just(ROW), st.just(EXPECTED_TEST))


# Two that chance does not always draw: a plugin of the change alone leaves out a test, and BASE's
# module leaves out a test that was measured once.
@example(
    Expectation(TEST, ROW),
    [],
    Ending("left out", "why", plugin="split.py"),
    Selection({TEST: Limits()}, ()),
)
@example(
    Expectation(TEST, ROW),
    [],
    Ending("left out", "why"),
    Selection({}, (), left_out=("test_a.py",)),
)
@settings(max_examples=100)
@given(
    st.builds(Expectation, st.just(TEST), WHAT, st.just(""), st.booleans()),
    rows(),
    ENDS,
    selections(),
)
def test_in_a_gate_what_base_selects_runs_or_is_lost(
    one: Expectation, found: list[Row], ended: Ending, base: Selection
) -> None:
    missing = discharge(one, found, against_base(ended, one, base, "main"))
    alone = discharge(one, found, ended)
    if ended.how in RAN:
        assert missing == alone
    elif base.has(TEST) and missing is not None:
        divided = ended.plugin != "" and ended.plugin in base.dividing
        assert lost([missing]) == ([missing] if missing.status != UNDECIDED and not divided else [])
        skips = ended.how in ("skipped", "xfailed", "xpassed")
        assert may_be_excused(missing) == (skips and one.what != ROW)
        assert (
            open_under_strict([missing]) == []
        ) == divided  # no word of the change's session excuses it
    elif missing is not None:
        # BASE does not run it either. Only what was measured once is missed all the same, if BASE has it and this machine leaves it out.
        doubtful = one.what == ROW and base.left_out != ()
        assert missing == alone if doubtful else missing.base_too
        assert lost([missing]) == (
            [] if missing.status == UNDECIDED else open_under_strict([missing])
        )
    assert (missing is None) <= (alone is None)


@given(NAMES, st.sampled_from(["1", "2"]), st.sampled_from(["1", "2", None]), st.booleans())
def test_a_change_is_held_to_a_limit_of_base_unless_it_demands_more_or_is_accepted(
    name: str, was: str, now: str | None, accepted: bool
) -> None:
    was, here = VALUES[name](was), None if now is None else VALUES[name](now)
    own = Limits() if here is None else marked(name, here)
    base = Selection({TEST: marked(name, was)}, ())
    found = base.stricter(TEST, own, LIMITS, "main", lambda limit, value: accepted)
    stands = not accepted and demands_more(name, was, here)
    assert getattr(found, name) == (was if stands else here)
    assert found.origin.get(name) == ("marker of main" if stands else own.origin.get(name))
    said = list(loosened(Selection({TEST: own}, ()), base))
    assert [(one.limit, one.was, one.now) for one in said] == (
        [(name, was, here)] if demands_more(name, was, here) else []
    )


def marked(name: str, value: str) -> Limits:
    """One limit of a marker."""
    return replace(Limits(origin={name: "marker"}), **{name: value})


VALUES: dict[str, Callable[[str], str]] = dict.fromkeys(LIMITS, lambda text: text) | {
    **dict.fromkeys(
        ("max_regression", "max_peak_regression", "min_overlap"), lambda text: f"{text}%"
    ),
    "faster_than": lambda text: f"{text} x other",
    "max_latency": lambda text: f"{text} s",
    "min_bandwidth": lambda text: f"{text} GB/s",
    **dict.fromkeys(
        ("max_peak", "max_kept", "max_migrated", "max_copied_bytes", "max_spill"),
        lambda text: f"{text} GiB",
    ),
}
"""By limit, a value that allows more with a larger number, or with a smaller one."""


def test_a_test_of_base_that_measures_no_more_is_noticed() -> None:
    tests = {"t.py::measures": Limits(), "t.py::never": Limits()}
    expected = of_base(Selection(tests, idle=("t.py::never",)), tests)
    assert [one.unmeasured for one in expected] == [True, False]


def test_which_of_two_limits_demands_more() -> None:
    for name, was, now, expected in [
        ("max_regression", "5%", "900%", True),
        ("max_regression", "5%", "1%", False),
        ("max_regression", "5%", "1% + 1 us", True),
        ("min_bandwidth", "85% of peak", "900 GB/s", True),
        ("max_kernels", "base", "3", True),
        ("faster_than", "2 x other", "20 x other", False),
        ("min_overlap", "80%", "10%", True),
        ("max_kept", "0 B", "0 B", False),
    ]:
        assert demands_more(name, was, now) == expected
        assert not demands_more(name, None, now)


def test_a_test_that_ran_and_measured_nothing_leaves_its_limit_open() -> None:
    hows: tuple[How, ...] = ("passed", "xfailed", "xpassed")
    for how in hows:
        for name in ("max_latency", "max_kept"):
            missing = discharge(Expectation(TEST, name), [], Ending(how))
            assert missing is not None
            assert missing.status == UNDECIDED
            assert open_under_strict([missing]) == [missing]


def test_what_a_test_keeps_is_judged_at_its_end_alone() -> None:
    limits = Limits(
        max_kept="0 B", max_peak="1 GiB", origin={"max_kept": "marker", "max_peak": "marker"}
    )
    row = Row(TEST, limits, Verdict(Outcome.PASS, ""), footprint=replace(WATCHED, ended=False))
    assert judged(row) == {"max_peak"}
    assert judged(replace(row, footprint=WATCHED)) == {"max_peak", "max_kept"}
    assert judged(replace(row, footprint=None)) == set()


def test_what_is_accepted_fails_nothing() -> None:
    assert (
        open_under_strict(
            [Omission(TEST, "", ACCEPTED, "why"), Omission(TEST, "", NOT_RUN, "why", by_words=True)]
        )
        == []
    )
