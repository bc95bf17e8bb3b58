"""Launches that ran the same: words of arguments that differ are left out, all others compared."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.judging.differences import masked, merged_record, ran_the_same
from pytest_gpumem.records.what_ran import PATTERN, Step, WhatRan, argument_text, what_ran

BLOCKS = st.integers(1, 40).flatmap(
    lambda size: st.tuples(*[st.binary(min_size=size, max_size=size)] * 2)
)


@given(BLOCKS)
def test_words_that_differ_are_left_out_and_no_others(blocks: tuple[bytes, bytes]) -> None:
    one, other = (argument_text(block, 0, lambda _: None) for block in blocks)
    assert (one == other) is (blocks[0] == blocks[1])
    common = masked(one, other, differing=True)
    assert common == masked(other, one, differing=True)
    words = [[block[at : at + 4] for at in range(0, len(block), 4)] for block in blocks]
    differing = [first != second for first, second in zip(*words, strict=True)]
    assert [word == "?" for word in common.split()] == differing
    assert masked(one, common) == masked(other, common) == common
    assert re.search(PATTERN, common)


def launch(*texts: str, code: str = "a") -> WhatRan:
    return what_ran([Step("kernel", "k", code=code, arguments=texts)], {})


def test_each_argument_is_compared() -> None:
    base = launch("device -", "100")
    assert base == launch("device -", "100")
    for other in (
        launch("device -", "103"),
        launch("managed -", "100"),
        launch("device -", "100", "0"),
        launch("device -", "100 0"),
        launch("device -", "100", code="b"),
    ):
        assert base != other
        assert not ran_the_same(other, [base])


def test_words_that_differ_between_launches_are_left_out() -> None:
    both = merged_record([launch("5", "12 9"), launch("5", "13 9"), launch("5", "12 9")])
    assert both is not None
    assert both.steps[0].arguments == ("5", "? 9")
    assert merged_record([launch("5"), launch("5", "6")]) is None
    assert merged_record([launch("5"), launch("5", code="b")]) is None
    assert merged_record([launch("5"), what_ran([Step("kernel", "k", code="a")], {})]) is None
    same = merged_record([launch("5"), launch("5")])
    assert same is not None
    assert same == launch("5")


def test_what_the_past_leaves_out_is_not_compared_and_what_only_the_new_leaves_out_is_a_change() -> (
    None
):
    past = merged_record([launch("5", "12 9"), launch("5", "13 9")])
    assert past is not None
    assert ran_the_same(launch("5", "aa 9"), [past])
    assert ran_the_same(launch("5", "aa 9"), [past, launch("5", "b 9")])
    assert not ran_the_same(launch("5", "aa 8"), [past])
    assert not ran_the_same(launch("6", "aa 9"), [past])
    assert not ran_the_same(past, [launch("5", "12 9")])
    unknown = WhatRan(not_watched="cupti-python is missing")
    assert not ran_the_same(unknown, [past])
    assert not ran_the_same(past, [unknown, past])
    assert not ran_the_same(unknown, [unknown])
    assert not ran_the_same(past, [])
