"""Names that are too long for their column stay readable, and tell tests apart."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from pytest_gpumem.reporting.columns import Columns, Line, shortened, shortened_apart, wrapped


@pytest.mark.parametrize(
    ("name", "width", "cut"),
    [
        ("test_triad", 10, "test_triad"),
        # Folders go first, from the left, then the file.
        (
            "tests/memory/test_stream.py::test_triad[64 MiB]",
            45,
            ".../memory/test_stream.py::test_triad[64 MiB]",
        ),
        (
            "tests/memory/test_stream.py::test_triad[64 MiB]",
            38,
            ".../test_stream.py::test_triad[64 MiB]",
        ),
        ("tests/memory/test_stream.py::test_triad[64 MiB]", 37, "test_triad[64 MiB]"),
        # Then words in the middle; what is in brackets stays whole.
        (
            "test_a_host_that_reads_results_in_place_gets_them",
            33,
            "test_a_host_..._place_gets_them",
        ),
        (
            "test_advice_that_is_taken_back_leaves_no_trace[taken back]",
            38,
            "test_advice_that_..._trace[taken back]",
        ),
        ("test_the_link_bounds_it[mapped, 1 x, stride 1]", 33, "test_...[mapped, 1 x, stride 1]"),
        ("  {'write_combined': True}, flagged", 33, "  {'write_...': True}, flagged"),
        # A path in brackets is no path.
        ("test_read[/data/some/folder::x]", 24, "test_.../some/folder::x]"),
        # Words that are too long are cut.
        ("test_" + "x" * 80, 16, "test...xxxxxxxxx"),
    ],
)
def test_what_is_cut(name: str, width: int, cut: str) -> None:
    assert shortened(name, width) == cut
    assert len(cut) <= width


@pytest.mark.parametrize(
    "figure", ["99.5 %", "304.8 us", "3352 GB/s", "512 MiB", "1980 MHz", "8 B"]
)
def test_a_figure_stays_with_its_unit(figure: str) -> None:
    text = f"the latency of one launch is {figure}, 3 more"
    for width in range(20, 45):
        assert any(figure in line for line in wrapped(text, width))


def test_names_of_one_list_are_cut_where_they_are_alike() -> None:
    names = [
        f"test_copy_of_a_{size}_buffer_to_the_device_and_back_again" for size in ("small", "large")
    ]
    assert len({shortened(name, 36) for name in names}) == 1
    assert shortened_apart(names, 36) == [
        "test_copy_of_a_small_..._back_again",
        "test_copy_of_a_large_..._back_again",
    ]
    names = ["test_of_the_first_kind_by_hand", "test_of_the_first_kind_by_rote"]
    assert shortened_apart(names, 24) == [shortened(name, 24) for name in names]


def test_names_that_differ_by_their_file_alone_keep_some_of_it() -> None:
    names = [f"tests/test_{file}.py::test_prefetch_pays_for_all[faulting]" for file in "ab"]
    assert len(set(shortened_apart(names, 30))) == 2
    assert all(len(name) <= 30 for name in shortened_apart(names, 30))


def test_names_that_no_cut_tells_apart_stay_short() -> None:
    names = [f"test_{'a' * 40}{letter}{'b' * 40}" for letter in "xy"]
    assert all(len(name) == 20 for name in shortened_apart(names, 20))
    assert shortened_apart(["same", "same"], 20) == ["same", "same"]


@pytest.mark.parametrize("width", [80, 20])
def test_figures_stand_below_each_other_where_characters_are_wide(width: int) -> None:
    lines = (
        Columns(
            "test",
            ["latency"],
            "",
            [
                Line("test_copy", ["1 us"]),
                Line("test_\u65e5\u672c\u8a9e\u306e\u8a66\u9a13", ["2 us"]),
            ],
        )
        .drawn(width, colour=False)
        .splitlines()
    )
    assert {cell_len(line) for line in lines} == {cell_len(lines[1])}
