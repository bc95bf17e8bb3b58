"""What a count says of a declaration."""

from __future__ import annotations

from typing import Any

import pytest
from known_devices import H100
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.judging.traffic import Agreement, account, beyond_arguments, two_declarations
from pytest_gpumem.records.measurement import DramBytes, Measurement, MovedBytes, Window
from pytest_gpumem.units import MB, MiB

L2 = H100.l2_bytes  # 50 MiB


def measured(
    moved_bytes: MovedBytes | None,
    reads: int,
    writes: int,
    l2: tuple[int | None, int | None] = (None, None),
    **changes: Any,
) -> Measurement:
    counted = DramBytes(reads, writes, l2[0], l2[1], 5, "ncu")
    return measurement(
        **{"moved_bytes": moved_bytes, "footprint": 768 * MiB, "dram_bytes": counted, **changes}
    )


def find(*args: Any, **changes: Any) -> Agreement:
    said = account(measured(*args, **changes), H100)
    assert said is not None
    return said.finding


TRIAD = MovedBytes(512 * MiB, 256 * MiB)


def test_nothing_counted_says_nothing() -> None:
    assert account(measured(TRIAD, 1, 1, dram_bytes=None), H100) is None


def test_the_triad_of_an_h200_agrees() -> None:
    # ci/records/nvidia-h200/nvtx_filter.json: arrays of 512 MiB, L2 of 60 MiB.
    taken = measured(MovedBytes(1024 * MiB, 512 * MiB), 1073762048, 517492480, footprint=1536 * MiB)
    said = account(taken, replace(H100, l2_bytes=60 * MiB))
    assert said is not None
    assert said.finding is Agreement.AGREES
    assert not said.notable
    assert said.sentence == "declared 1.5 GiB, counted 1.482 GiB by ncu (-1.20 %)"


def test_reads_short_of_the_declared_ones_are_a_wrong_declaration() -> None:
    assert find(TRIAD, 512 * MiB * 96 // 100, 256 * MiB) is Agreement.AGREES
    said = account(measured(TRIAD, 256 * MiB, 256 * MiB), H100)
    assert said is not None
    assert said.finding is Agreement.WRONG
    assert said.notable
    assert "declared 768 MiB, counted 512 MiB by ncu (-33.3 %)" in said.sentence
    assert "256 MiB of the 512 MiB declared as read" in said.sentence
    assert "written" not in said.sentence


def test_up_to_a_whole_l2_of_writes_may_be_missing() -> None:
    assert find(TRIAD, 512 * MiB, 256 * MiB * 95 // 100 - L2 + MiB) is Agreement.AGREES
    assert find(TRIAD, 512 * MiB, 256 * MiB * 95 // 100 - L2 - MiB) is Agreement.WRONG


def test_bytes_declared_as_moved_are_judged_by_their_sum() -> None:
    moved = MovedBytes(0, 0, declared=768 * MiB)
    assert find(moved, 256 * MiB, 768 * MiB * 95 // 100 - L2 - 256 * MiB + MiB) is Agreement.AGREES
    assert find(moved, 256 * MiB, 768 * MiB * 95 // 100 - L2 - 256 * MiB - MiB) is Agreement.WRONG
    assert find(moved, 700 * MiB, 68 * MiB) is Agreement.AGREES


def test_what_a_persisting_window_holds_need_not_come_from_dram() -> None:
    window = Window(nbytes=40 * MiB, hit_ratio=1.0, set_aside=40 * MiB)
    reads = 512 * MiB * 95 // 100 - 39 * MiB
    writes = 256 * MiB * 95 // 100 - L2 - 39 * MiB
    for counted in ((reads, 256 * MiB), (512 * MiB, writes)):
        assert find(TRIAD, *counted) is Agreement.WRONG
        assert find(TRIAD, *counted, window=window) is Agreement.AGREES
    assert find(TRIAD, reads - 2 * MiB, 256 * MiB, window=window) is Agreement.WRONG
    assert find(TRIAD, 512 * MiB, writes - 2 * MiB, window=window) is Agreement.WRONG


def test_more_than_the_compulsory_bytes_is_excess_and_says_where() -> None:
    assert find(TRIAD, 512 * MiB * 105 // 100, 256 * MiB) is Agreement.AGREES
    strided = account(measured(TRIAD, 1024 * MiB, 256 * MiB, (1024 * MiB, 256 * MiB)), H100)
    again = account(measured(TRIAD, 1024 * MiB, 256 * MiB, (512 * MiB, 256 * MiB)), H100)
    unknown = account(measured(TRIAD, 1024 * MiB, 256 * MiB), H100)
    for said in (strided, again, unknown):
        assert said is not None
        assert said.finding is Agreement.EXCESS
        assert said.difference == pytest.approx(2 / 3)
        assert "(+66.7 %): DRAM moves more than the compulsory bytes" in said.sentence
    assert "sectors used in part, or data asked for again" in str(strided)
    assert "lines fetched again" in str(again)
    assert "asked L2" not in str(unknown)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"footprint": 4 * L2 - 1}, "4 x L2"),
        ({"mode": "hot"}, "hot"),
        ({"moved_bytes": MovedBytes(768 * MiB, 768 * MiB, link=True)}, "link"),
        ({"footprint": None}, "footprint is unknown"),
    ],
)
def test_where_caches_or_a_link_account_for_it_nothing_is_judged(
    changes: dict[str, Any], reason: str
) -> None:
    said = account(measured(**{"moved_bytes": TRIAD, "reads": 0, "writes": 0, **changes}), H100)
    assert said is not None
    assert said.finding is Agreement.UNJUDGED
    assert said.notable
    assert reason in said.sentence
    close = account(
        measured(**{"moved_bytes": TRIAD, "reads": 512 * MiB, "writes": 256 * MiB, **changes}), H100
    )
    assert close is not None
    assert not close.notable


def test_a_count_is_judged_without_a_known_peak() -> None:
    said = account(measured(TRIAD, 0, 0), replace(H100, dram_peak=0.0))
    assert said is not None
    assert said.finding is Agreement.WRONG


def test_four_times_l2_is_judged() -> None:
    assert find(TRIAD, 0, 0, footprint=4 * L2) is Agreement.WRONG


def test_without_a_declaration_there_is_the_count() -> None:
    said = account(measured(None, 2 * MB, MB), H100)
    assert said is not None
    assert said.finding is Agreement.UNDECLARED
    assert said.difference is None
    assert "counted 2.861 MiB by ncu" in said.sentence
    assert "moved=" in said.sentence


def test_two_declarations_of_a_case() -> None:
    assert two_declarations(300, 200, 100) is None
    assert two_declarations(300, 0, 0) is None
    assert two_declarations(310, 200, 100) is None
    more, less = (
        two_declarations(400 * MB, 200 * MB, 100 * MB),
        two_declarations(100 * MB, 200 * MB, 100 * MB),
    )
    assert (
        more
        == "moved= says 381.5 MiB, more than the 286.1 MiB of reads= and writes= (190.7 MiB + 95.37 MiB); moved= counts"
    )
    assert less is not None
    assert "less than" in less


def test_more_than_the_arguments_allow() -> None:
    assert beyond_arguments(200, 100) is None
    assert beyond_arguments(10**9, 0) is None
    said = beyond_arguments(201 * MB, 100 * MB)
    assert said is not None
    assert "moved= says 191.7 MiB" in said
    assert "hold 95.37 MiB and allow 190.7 MiB" in said
