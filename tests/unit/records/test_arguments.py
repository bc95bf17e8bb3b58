"""Arguments of kernels as text: addresses and bytes that vary are left out, all other bytes are compared."""

from __future__ import annotations

import re
import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.records import arguments
from pytest_gpumem.records.arguments import Addresses, Interval
from pytest_gpumem.records.what_ran import (
    Step,
    StepKind,
    WhatRan,
    declared,
    ran_the_same,
    together,
    what_ran,
)

BASE = 0x7F3A_0000_0000
DEVICE = Interval(BASE, BASE + 4096)
STACK = Interval(0x7FFE_0000_0000, 0x7FFE_0000_1000, host=True)


def live(address: int) -> Interval | None:
    return next((one for one in (DEVICE, STACK) if one.begin <= address < one.end), None)


def text(
    layout: str, *values: Any, parameters: tuple[tuple[int, int], ...] | None = None
) -> tuple[str, ...]:
    block = struct.pack(layout, *values)
    return arguments.texts(block, parameters or ((0, len(block)),), Addresses(live).token)


def test_an_address_counts_by_its_alignment_and_everything_else_by_its_bytes() -> None:
    found = text(
        "<QqifQ",
        BASE + 512,
        1000,
        -1,
        1.0,
        BASE + 68,
        parameters=((0, 8), (8, 8), (16, 4), (20, 4), (24, 8)),
    )
    assert found == ("p256", "3e8", "ffffffff", "3f800000", "p4")


def test_a_struct_has_a_token_for_each_of_its_words() -> None:
    assert text("<QQQQQ", 7, BASE, 0, 0, 0) == ("7 p256 0*3",)
    assert "p" not in text("<iQ", 1, BASE)[0]  # it is not aligned, so no address


def test_the_end_of_an_allocation_and_plain_host_memory_are_addresses() -> None:
    assert text("<QQ", DEVICE.end, STACK.begin + 9) == ("p256 h",)
    assert text("<Q", DEVICE.end + 1) == (f"{DEVICE.end + 1:x}",)


def test_bytes_between_parameters_are_not_read() -> None:
    found = {
        text("<i4sq", 5, garbage, 9, parameters=((0, 4), (8, 8)))
        for garbage in (b"\0\0\0\0", b"\xff\xfe\xfd\xfc")
    }
    assert found == {("5", "9")}


@given(
    st.lists(st.tuples(st.integers(2**33, 2**47), st.integers(1, 2**30)), max_size=20),
    st.lists(st.integers(0, 2**47), max_size=20),
)
def test_words_are_addresses_exactly_where_memory_is(
    memory: list[tuple[int, int]], words: list[int]
) -> None:
    allocations, end = [], 2**33
    for lowest, size in sorted(memory):
        begin = max(lowest, end)
        end = begin + size
        allocations.append(Interval(begin, end))
    asked = []

    def ask(address: int) -> Interval | None:
        asked.append(address)
        return next((one for one in allocations if one.begin <= address < one.end), None)

    known = Addresses(ask)
    inside = [one.begin + (one.end - one.begin) // 2 for one in allocations]
    for word in (*words, *inside, *words):
        expected = any(one.begin <= word <= one.end for one in allocations)
        assert (known.token(word) is not None) is expected
    assert len(asked) == len(set(asked))


BLOCKS = st.integers(1, 40).flatmap(
    lambda size: st.tuples(
        st.binary(min_size=size, max_size=size), st.binary(min_size=size, max_size=size)
    )
)


@given(BLOCKS)
def test_two_texts_are_equal_exactly_if_their_bytes_are(blocks: tuple[bytes, bytes]) -> None:
    one, other = (arguments.texts(block, ((0, len(block)),), lambda _: None)[0] for block in blocks)
    assert (one == other) is (blocks[0] == blocks[1])
    assert re.search(arguments.PATTERN, one)


@given(BLOCKS)
def test_a_mask_leaves_out_the_four_bytes_that_differ_and_no_other(
    blocks: tuple[bytes, bytes],
) -> None:
    one, other = (arguments.texts(block, ((0, len(block)),), lambda _: None)[0] for block in blocks)
    mask = arguments.masked(one, other)
    assert mask == arguments.masked(other, one)
    units = [[block[at : at + 4] for at in range(0, len(block), 4)] for block in blocks]
    assert arguments.unknown_bytes(mask) == 4 * sum(a != b for a, b in zip(*units, strict=True))
    assert arguments.under(one, mask) == arguments.under(other, mask) == mask
    assert arguments.masked(mask, one) == mask
    assert re.search(arguments.PATTERN, mask)


def test_an_address_in_one_launch_and_a_number_in_the_other_leave_out_the_word() -> None:
    assert arguments.masked("p256 5", "17 5") == "???????????????? 5"
    assert arguments.under("p16 5", "???????????????? 5") == "???????????????? 5"
    assert arguments.under("p16", "1????") == "p16"


def launch(*texts: str, code: str = "a") -> WhatRan:
    return what_ran([Step(StepKind.KERNEL, "k", code=code, arguments=texts)], {})


def test_the_digest_is_of_the_arguments_too() -> None:
    assert (
        launch("p256", "100").digest == launch("p256", "100").digest != launch("p256", "103").digest
    )
    assert not ran_the_same(launch("p256", "103"), [launch("p256", "100")])
    assert not ran_the_same(launch("p4"), [launch("p256")])
    assert not ran_the_same(launch("1"), [launch("1", "0")])
    assert not ran_the_same(launch("1", code="b"), [launch("1")])


def test_bytes_that_vary_between_launches_are_left_out_and_counted() -> None:
    both = together([launch("5", "1234"), launch("5", "1299")])
    assert both is not None
    assert (both.steps[0].arguments, both.left_out) == (("5", "????????"), 4)
    assert together([launch("5"), launch("5", "6")]) is None
    assert together([launch("5"), launch("5", code="b")]) is None
    assert together([launch("5"), what_ran([Step(StepKind.KERNEL, "k", code="a")], {})]) is None
    same = together([launch("5"), launch("5")])
    assert same is not None
    assert same.digest == launch("5").digest


def test_what_the_past_leaves_out_is_not_compared_and_what_only_the_new_leaves_out_is_a_change() -> (
    None
):
    past = together([launch("5", "900001234"), launch("5", "900001299")])
    assert past is not None
    assert ran_the_same(launch("5", "9000012aa"), [past])
    assert ran_the_same(launch("5", "9000012aa"), [past, launch("5", "900001201")])
    assert not ran_the_same(launch("5", "8000012aa"), [past])
    assert not ran_the_same(launch("6", "9000012aa"), [past])
    assert not ran_the_same(past, [launch("5", "900001234")])
    assert not ran_the_same(WhatRan(), [past])


def test_what_is_other_in_most_past_runs_varies_and_what_changed_once_does_not() -> None:
    runs = [launch("5", f"7f{number:02x}00000009") for number in range(20)]
    assert ran_the_same(launch("5", "7faa00000009"), runs)
    assert ran_the_same(launch("5", "7faa00000009"), runs[:5])
    assert not ran_the_same(launch("5", "7faa00000009"), runs[:4])
    assert not ran_the_same(launch("5", "7faa0000000a"), runs)
    assert not ran_the_same(launch("6", "7faa00000009"), runs)
    grown = [launch("100"), launch("100"), launch("103"), launch("103"), launch("106")]
    assert not any(ran_the_same(launch(size), grown) for size in ("100", "106", "109"))
    mixed = [launch("p8"), launch("p16"), launch("7f12"), launch("7f14"), launch("h")]
    assert ran_the_same(launch("1234"), mixed)
    assert not ran_the_same(
        launch("1234"), [launch("p8"), launch("p8"), launch("p16"), launch("p16"), launch("h")]
    )


def test_an_argument_that_varies_on_purpose_is_left_out_on_both_sides_alone() -> None:
    one, other = (declared(launch("5", seed), (2,)) for seed in ("1", "2"))
    assert one.steps[0].arguments == ("5", "varies")
    assert ran_the_same(one, [other])
    assert not ran_the_same(one, [launch("5", "1")])
    assert not ran_the_same(launch("5", "1"), [one])
    assert not ran_the_same(declared(launch("6", "1"), (2,)), [other])


def test_a_text_of_a_damaged_file_ends() -> None:
    assert len(arguments.tokens("0*9999 " * 100)) <= 4096
