"""Rules name what was planted, say nothing below their thresholds, and account for no more than was measured."""

from __future__ import annotations

import json

import pytest
from causes_evidence import KERNEL, MIB, copies, counted, measurement, pages, side, why, window
from msgspec.structs import replace

from pytest_gpumem.explain.causes import RULES, Note, share_out, slow_down
from pytest_gpumem.explain.evidence import SideFigures
from pytest_gpumem.explain.model import Estimate
from pytest_gpumem.explain.text import SENTENCES, not_looked_at, note_text, sentence, text, to_json
from pytest_gpumem.records.measurement import Conditions, MovedBytes, Repeat
from pytest_gpumem.records.row import UNEXPLAINED
from pytest_gpumem.records.uses import Activity, CopyUse, KernelUse, kernels_together
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan

LINK = MovedBytes(64 * MIB, 64 * MIB, link=True)
PINNED = CopyUse("H2D", "pinned", "device", 1, 64 * MIB, 1_210_000)
PAGEABLE = CopyUse("H2D", "pageable", "device", 1, 64 * MIB, 6_270_000)
LESS_HIT = counted(times_dram_read=1.34, l2_hit_rate=0.28)
SCATTERED = counted(sectors_per_request=8.0, used_of_load=0.5, times_l2_read=2, times_dram_read=2)
SHIFTED = counted(sectors_per_request=5.0, used_of_load=0.8, times_l2_read=1.25)
WIDER = counted(
    name="triad<double>",
    sectors_per_request=8.0,
    times_l2_read=2,
    times_l2_written=2,
    times_dram_read=2,
    times_dram_written=2,
)
LARGER = counted(
    times_l2_read=1.3, times_l2_written=1.3, times_dram_read=1.3, times_dram_written=1.3
)
SECOND = counted(name="scale<float>", nanoseconds=5 * 90_000)
SLOW_CLOCK = Conditions(sm_clock_hz=1600e6, memory_clock_hz=2619e6)
COMPUTING = counted(
    times_dram_read=0.05, times_dram_written=0.05, times_l2_read=0.05, times_l2_written=0.05
)


def ran(latency: float, *steps: Step, at_once: float = 0) -> SideFigures:
    """A side without counters, whose kernels take as long together as it does, `at_once` seconds at once."""
    each = round((latency + at_once) * 1e9 / len(steps))
    uses = [KernelUse(step.name, (64, 1, 1), (256, 1, 1), 1, each) for step in steps]
    activity = Activity(
        kernels=kernels_together(uses), at_once=round(at_once * 1e9), source="CUPTI", set_aside=0
    )
    what = WhatRan(digest=f"{steps}", steps=steps, order=tuple(range(len(steps))))
    return side(latency, None, activity=activity, what_ran=what, moved_bytes=None)


HISTOGRAM = Step(StepKind.KERNEL, "histogram", code="a", shared=1024, stream=0)
PARTS = [replace(HISTOGRAM, name=f"part_{number}", stream=number) for number in range(5)]

PLANTED: dict[str, tuple[SideFigures, SideFigures, str, str]] = {
    # base, head, rule, words
    "persistence off": (
        side(window=window()),
        side(500e-6, (LESS_HIT,)),
        "window gone",
        "DRAM reads +34.0 % (L2 hit rate 33 → 28 %): 8 MiB no longer stay in L2, their persisting window is gone; set-aside 12 MiB → 0 B",
    ),
    "set-aside at maximum": (
        side(window=window()),
        side(900e-6, window=window(set_aside=30 * MIB)),
        "set-aside too large",
        "set-aside 12 MiB → 30 MiB: the window needs 8 MiB of it; everything else has 20 MiB of L2 where it had 38 MiB",
    ),
    "set-aside without a window": (
        side(),
        side(900e-6, activity=replace(copies(), set_aside=30 * MIB)),
        "set-aside too large",
        "no window uses it",
    ),
    "thrashing": (
        side(window=window(40 * MIB, 0.75, 30 * MIB)),
        side(460e-6, window=window(40 * MIB, 1.0, 30 * MIB)),
        "thrashing",
        "hit ratio 0.75 → 1 of 40 MiB asks for 40 MiB in a set-aside of 30 MiB",
    ),
    "hit ratio too low": (
        side(window=window()),
        side(600e-6, window=window(hit_ratio=0.39)),
        "keeps less",
        "hit ratio 1 → 0.39",
    ),
    "prefetch removed": (
        side(migrations=pages(ahead=32 * MIB)),
        side(5e-3, migrations=pages(159, 32 * MIB)),
        "page faults",
        "159 GPU page faults where there were none: the prefetch is gone",
    ),
    "pages on the host": (
        side(),
        side(5e-3, migrations=pages(159, 32 * MIB)),
        "page faults",
        "not where the kernel runs",
    ),
    "eviction": (
        side(migrations=pages(100, 10 * MIB)),
        side(5e-3, migrations=pages(900, 90 * MIB, causes={"eviction": 40 * MIB})),
        "page faults",
        "no longer fits",
    ),
    "moved by access counters": (
        side(),
        side(1e-3, migrations=pages(0, 32 * MIB, causes={"access counters": 32 * MIB})),
        "migrations",
        "by access counters",
    ),
    "mapped on the host": (
        side(migrations=pages(mapped=0)),
        side(2e-3, migrations=pages(mapped=64 * MIB)),
        "stays on the host",
        "over the link",
    ),
    "pageable": (
        side(1.22e-3, None, activity=copies(PINNED), moved_bytes=LINK),
        side(6.3e-3, None, activity=copies(PAGEABLE), moved_bytes=LINK),
        "pageable",
        "pageable instead of pinned: 64 MiB from host to device in each launch, 55.46 GB/s → 10.70 GB/s",
    ),
    "pageable, by the arguments alone": (
        side(
            1.22e-3,
            None,
            activity=copies(arguments=(("source", "pinned"),), not_counted="no CUPTI"),
            moved_bytes=LINK,
        ),
        side(
            6.3e-3,
            None,
            activity=copies(arguments=(("source", "pageable"),), not_counted="no CUPTI"),
            moved_bytes=LINK,
        ),
        "pageable",
        "pageable instead of pinned: source",
    ),
    "a copy more": (
        side(),
        side(1.6e-3, activity=copies(PINNED)),
        "more copies",
        "1 copy of pinned memory from host to device of 64",
    ),
    "a kernel more": (
        side(),
        side(490e-6, (KERNEL, SECOND)),
        "more kernels",
        "2 kernels in each launch where it was 1: scale, 90.00 us more",
    ),
    "a kernel twice": (
        side(),
        side(800e-6, (counted(launches=10, times_nanoseconds=2),)),
        "more kernels",
        "triad",
    ),
    "stride 2": (
        side(),
        side(660e-6, (SCATTERED,)),
        "access pattern",
        "sectors per load 4 → 8: stride 2; DRAM bytes +66.7 %",
    ),
    "stride 2, by the record": (
        side(kernels=None, sectors_per_request=4.0),
        side(700e-6, None, sectors_per_request=8.0),
        "access pattern",
        "sectors per request 4 → 8: stride 2",
    ),
    "misaligned": (
        side(),
        side(416e-6, (SHIFTED,)),
        "access pattern",
        "sectors per load 4 → 5: misaligned",
    ),
    "30 % more bytes": (
        side(),
        side(520e-6, (LARGER,), moved_bytes=MovedBytes(1_040_000_000, 520_000_000)),
        "more bytes",
        "+30.0 % bytes to move: declared",
    ),
    "wider elements": (
        side(moved_bytes=None),
        side(800e-6, (WIDER,), moved_bytes=None),
        "more bytes",
        "(double where it was float)",
    ),
    "out of L2": (
        side(),
        side(480e-6, (LESS_HIT,)),
        "L2 misses",
        "DRAM bytes +22.7 % (L2 hit rate 33 → 28 %)",
    ),
    "a small grid": (
        side(),
        side(1.2e-3, (counted(grid=(32, 1, 1), times_nanoseconds=3),)),
        "fewer threads",
        "grid 1056 × 256 → 32 × 256: the launch fills 3.03 % of the device's threads where it was 100 %",
    ),
    "other code": (
        ran(104e-6, HISTOGRAM),
        ran(17.3e-3, replace(HISTOGRAM, code="b", shared=0)),
        "other code",
        "histogram: static shared memory 1 KiB → 0 B, 104.0 us → 17.30 ms in the kernel",
    ),
    "other code of another name": (
        ran(104e-6, HISTOGRAM),
        ran(208e-6, replace(HISTOGRAM, code="b", name="bins")),
        "other code",
        "bins in place of histogram: other machine code, 104.0 us → 208.0 us in the kernel",
    ),
    "streams that became one": (
        ran(1e-3, *PARTS, at_once=0.9e-3),
        ran(1.9e-3, *(replace(part, stream=0) for part in PARTS)),
        "lost overlap",
        "kernels that overlapped run in turn: 4 launches moved to stream 0, 900.0 us → 0 s at once",
    ),
    "occupancy": (
        side(),
        side(500e-6, (counted(occupancy=0.45, registers=96),)),
        "occupancy",
        "occupancy 90 → 45 % (registers 32 → 96)",
    ),
    "SM clock": (
        side(kernels=(COMPUTING,), moved_bytes=None),
        side(490e-6, (COMPUTING,), moved_bytes=None, during=SLOW_CLOCK),
        "SM clock",
        "SM clock 1980 → 1600 MHz: not the code",
    ),
    "memory clock": (
        side(),
        side(
            640e-6,
            conditions=(replace(SLOW_CLOCK, sm_clock_hz=1980e6, memory_clock_hz=1593e6),) * 2,
        ),
        "memory clock",
        "memory clock 2619 → 1593 MHz",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named_first(name: str) -> None:
    base, head, rule, words = PLANTED[name]
    found = why(base, head)
    assert found.first == rule, text(name, found)
    assert words in sentence(found.causes[0])
    assert found.causes[0].share > 0.5
    # Shares sum to the slow-down.
    assert sum(cause.seconds for cause in found.causes) + found.unexplained == pytest.approx(
        found.slow_down.seconds
    )
    assert sum(cause.share for cause in found.causes) + found.unexplained_share == pytest.approx(1)
    assert all(cause.seconds >= 0 for cause in found.causes)


def test_every_rule_is_planted() -> None:
    assert (
        {rule for _, _, rule, _ in PLANTED.values()}
        == {rule.name for rule in RULES}
        == set(SENTENCES)
    )
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("name", PLANTED)
def test_a_side_against_itself_blames_nothing(name: str) -> None:
    """Also where noise makes the same code slower by more than its interval."""
    for one in PLANTED[name][:2]:
        slower = replace(
            one.measurement, placements=tuple((p[0] * 1.01,) for p in one.measurement.placements)
        )
        found = why(one, SideFigures(slower, one.facts, one.profile))
        assert found.causes == ()
        assert found.first == UNEXPLAINED


def test_the_times_are_means_over_all_processes() -> None:
    """Base's first process was 10 % slower than its two others."""
    others = (Repeat((400e-6,) * 8), Repeat((400e-6,) * 8))
    found = slow_down([measurement(440e-6, further=others)], measurement(500e-6))
    assert found.base == pytest.approx(400e-6 * 1.1 ** (1 / 3))
    assert found.head == pytest.approx(500e-6)


@pytest.mark.parametrize("name", PLANTED)
def test_without_a_slow_down_nothing_is_blamed(name: str) -> None:
    base, head, _, _ = PLANTED[name]
    same = replace(head.measurement, placements=base.measurement.placements)
    found = why(base, SideFigures(same, head.facts, head.profile))
    assert found.causes == ()
    assert found.first is None
    assert "no slow-down beyond its interval (-0.20 to +0.20 %)" in text(name, found)


def test_counters_that_vary_within_their_noise_say_nothing() -> None:
    noisy = counted(
        times_dram_read=1.02,
        times_dram_written=0.97,
        times_l2_read=1.01,
        l2_hit_rate=0.325,
        occupancy=0.88,
    )
    clocks = Conditions(sm_clock_hz=1965e6, memory_clock_hz=2619e6)
    found = why(
        side(migrations=pages(1000, 10 * MIB)),
        side(440e-6, (noisy,), migrations=pages(1100, 10 * MIB), during=clocks),
    )
    assert found.causes == ()
    assert found.unexplained_share == pytest.approx(1)


def test_what_no_rule_looks_at_is_unexplained() -> None:
    """The same bytes, sectors and shapes, and twice the time: arithmetic, bank conflicts, a wait."""
    found = why(side(), side(800e-6, (counted(times_nanoseconds=2),)))
    assert found.first == UNEXPLAINED
    assert "   100 %" in text("t", found)


def test_a_slow_down_of_two_causes_is_shared() -> None:
    both = counted(
        SCATTERED,
        times_l2_written=1.3,
        times_l2_read=1.3,
        times_dram_read=1.3,
        times_dram_written=1.3,
    )
    found = why(side(), side(860e-6, (both,), moved_bytes=MovedBytes(1_040_000_000, 520_000_000)))
    assert [cause.rule for cause in found.causes] == ["access pattern", "more bytes"]
    assert found.causes[0].share > found.causes[1].share > 0.2


def test_a_copy_and_a_kernel_more_have_their_own_times() -> None:
    copied = CopyUse("H2D", "pinned", "device", 1, 16 * MIB, 300_000)
    found = why(side(), side(792e-6, (KERNEL, SECOND), activity=copies(copied)))
    assert {cause.rule: round(cause.seconds * 1e6) for cause in found.causes} == {
        "more copies": 301,
        "more kernels": 91,
    }
    assert found.unexplained < 1e-6


def test_bytes_cost_what_the_average_byte_costs() -> None:
    base, head, _, _ = PLANTED["30 % more bytes"]
    (cause,) = why(base, head).causes
    assert cause.estimate == pytest.approx(520e-6 * (1 - 1 / 1.3), rel=1e-6)
    assert not cause.up_to


def test_bytes_of_a_kernel_that_does_not_live_on_them_cost_no_more_than_at_a_fifth_of_the_peak() -> (
    None
):
    larger = counted(
        COMPUTING,
        times_l2_read=1.3,
        times_l2_written=1.3,
        times_dram_read=1.3,
        times_dram_written=1.3,
    )
    found = why(
        side(kernels=(COMPUTING,), moved_bytes=None), side(520e-6, (larger,), moved_bytes=None)
    )
    (cause,) = found.causes
    assert cause.estimate == pytest.approx(0.3 * 60e6 / (0.2 * 3.35232e12), rel=1e-3)
    assert found.first == UNEXPLAINED


def test_what_l1_happens_to_serve_is_no_matter_of_a_kernel_that_knows_its_bytes() -> None:
    """The figures of l2_proof.json, the other way round: more asked of L2 by the same kernel on the same arrays."""
    more = counted(times_l2_read=2.03)
    assert (
        why(side(moved_bytes=None), side(500e-6, (more,), moved_bytes=None)).first == "more bytes"
    )
    assert why(side(kernel_source="1"), side(500e-6, (more,), kernel_source="1")).causes == ()


def test_a_copy_that_the_host_waits_for_may_cost_more_than_its_time() -> None:
    small = CopyUse("D2H", "device", "pageable", 1, 4, 1_000)
    (cause,) = why(side(), side(430e-6, activity=copies(small))).causes
    assert (cause.rule, cause.share, cause.up_to) == ("more copies", 1.0, True)
    assert (
        sentence(cause)
        == "1 copy of pageable memory from device to host of 4 B in each launch, before none"
    )
    (cause,) = why(
        side(), side(430e-6, activity=copies(replace(small, destination="pinned")))
    ).causes
    assert cause.share < 0.1


def test_wider_loads_of_the_same_bytes_are_no_pattern() -> None:
    """16 bytes a thread take four times the sectors a request, and fetch nothing in vain."""
    found = why(side(), side(480e-6, (counted(sectors_per_request=16.0),)))
    assert found.causes == ()


def test_what_could_not_be_looked_at_is_said_with_what_it_needs() -> None:
    bare = side(480e-6, None, activity=None, migrations=None, moved_bytes=None)
    found = why(side(kernels=None, activity=None, migrations=None, moved_bytes=None), bare)
    needs = {rule.name: [need.words for need in lacking] for rule, lacking in found.skipped}
    assert needs["page faults"] == ["needs page counts (CUPTI) on both sides"]
    assert needs["L2 misses"] == ["needs counters of ncu on both sides"]
    assert any(
        one.startswith("GPU page faults in a launch, ")
        and one.endswith(": needs page counts (CUPTI) on both sides")
        for one in not_looked_at(found)
    )
    assert found.first == UNEXPLAINED


def test_the_same_kernel_under_another_name_is_paired_by_its_place() -> None:
    found = why(side(), side(660e-6, (counted(SCATTERED, name="triad_v2<float>"),)))
    assert found.first == "access pattern"
    assert found.notes == (Note("kernels", "triad", "triad_v2"),)
    assert note_text(found.notes[0]) == "other kernels run: triad_v2 where it was triad"


@pytest.mark.parametrize(
    ("estimates", "seconds", "causes", "left"),
    [
        (
            [Estimate(3.0), Estimate(1.0)],
            2.0,
            [(1.5, True), (0.5, True)],
            0.0,
        ),  # above the slow-down: scaled
        ([Estimate(1.0)], 4.0, [(1.0, False)], 3.0),  # below it: a rest
        (
            [Estimate(1.0), Estimate(0.5, open=True), Estimate(0.0, reserve=9.0)],
            4.0,
            [(3.0, True), (1.0, False)],
            0.0,
        ),  # open: takes it
        (
            [Estimate(0.0, reserve=5.0), Estimate(3.0)],
            4.0,
            [(3.0, False), (1.0, True)],
            0.0,
        ),  # a reserve comes after all others
    ],
)
def test_estimates_share_the_slow_down(
    estimates: list[Estimate], seconds: float, causes: list[object], left: float
) -> None:
    found, rest = share_out([(RULES[0], one) for one in estimates], seconds)
    assert ([(cause.seconds, cause.up_to) for cause in found], rest) == (causes, left)


def test_an_explanation_is_plain_values_too() -> None:
    base, head, rule, _ = PLANTED["persistence off"]
    plain = json.loads(json.dumps(to_json("t", why(base, head)), allow_nan=False))
    assert plain["first"] == rule
    assert plain["causes"][0]["evidence"]["l2_hit_rate"] == {"base": 0.33, "head": 0.28}
    assert plain["slow_down"]["share"] == pytest.approx(0.25)
    assert plain["unexplained"]["share"] == 0


HALF_USED = counted(sectors_per_request=8.0, used_of_load=0.5, l1_load=5 * 1_600_000_000)
"""The same loads with twice the sectors, of which L1 keeps all that is used later."""
WITH_L1 = counted(l1_load=5 * 800_000_000, l1_store=5 * 400_000_000)


def test_sectors_that_l1_keeps_from_l2_cost_no_bytes() -> None:
    found = why(side(), side(440e-6, (HALF_USED,)))
    assert found.causes[0].rule == "access pattern"
    assert (found.causes[0].details["pattern"], found.causes[0].details["kept_by_l1"]) == (
        "stride",
        "all",
    )
    assert "stride 2; L1 keeps that from L2" in sentence(found.causes[0])
    assert found.causes[0].up_to
    both = counted(HALF_USED, times_l2_written=2, times_dram_written=2)
    assert [cause.rule for cause in why(side(), side(480e-6, (both,))).causes] == ["more bytes"]


def test_sectors_that_l1_keeps_in_part_cost_what_l2_is_asked_for() -> None:
    """`kmeans_records` of tests/data/explain: records of seven floats ask L2 for a sixth more, not for seven times as much."""
    records = counted(
        sectors_per_request=28.0, used_of_load=1 / 7, times_l2_read=7 / 6, times_dram_read=7 / 6
    )
    (cause,) = why(side(), side(440e-6, (records,))).causes
    assert cause.rule == "access pattern"
    assert "stride 7; L1 keeps a part from L2, which is asked for 16.7 % more" in sentence(cause)
    assert cause.figures["asked_of_l2"] == pytest.approx((800_000_000, 800_000_000 * 7 / 6))


def test_wider_data_in_a_worse_pattern_is_more_bytes_where_loads_were_counted() -> None:
    """`gated_residual` of tests/data/explain: half of the loads became twice as wide, in two instructions whose sectors overlap in L1."""
    changed = counted(
        WITH_L1,
        sectors_per_request=6.0,
        used_of_load=2 / 3,
        times_l2_read=4 / 3,
        times_dram_read=4 / 3,
        times_l1_load=2,
    )
    first, *rest = why(
        side(kernels=(WITH_L1,), moved_bytes=None), side(500e-6, (changed,), moved_bytes=None)
    ).causes
    assert first.rule == "more bytes"
    assert first.share > 0.9
    assert [cause.details["kept_by_l1"] for cause in rest] == ["all"]
    unknown = [replace(one, l1_load=None, l1_store=None) for one in (WITH_L1, changed)]
    (cause,) = why(
        side(kernels=(unknown[0],), moved_bytes=None), side(500e-6, (unknown[1],), moved_bytes=None)
    ).causes
    assert cause.rule == "access pattern"
    assert "asked for 33.3 % more, and whether that is more data was not counted" in sentence(cause)


def test_each_kernel_is_held_against_its_own_counterpart() -> None:
    """Profiles name the longest kernel first, so what got slower comes to another place."""
    short, long = counted(SECOND, registers=24), KERNEL
    slower = counted(
        SECOND,
        nanoseconds=5 * 500_000,
        sectors_per_request=8.0,
        used_of_load=0.5,
        times_l2_read=2,
        times_dram_read=2,
    )
    (cause,) = why(side(490e-6, (long, short)), side(900e-6, (slower, long))).causes
    assert (cause.details["kernel"], cause.details["pattern"]) == ("scale", "stride")
    assert sentence(cause).startswith("scale: sectors per load 4 → 8: stride 2")
    fewer = counted(SECOND, nanoseconds=5 * 500_000, occupancy=0.2, registers=96)
    (cause,) = why(side(490e-6, (long, short)), side(900e-6, (fewer, long))).causes
    assert cause.figures["registers"] == (24, 96)


def test_more_bytes_of_several_kernels_say_whose_they_are() -> None:
    larger = counted(SECOND, times_l2_written=2, times_dram_written=2)
    (cause,) = why(
        side(490e-6, (KERNEL, SECOND), moved_bytes=None),
        side(560e-6, (KERNEL, larger), moved_bytes=None),
    ).causes
    assert cause.rule == "more bytes"
    assert sentence(cause).endswith("; scale writes 381.5 MiB more")


def test_sectors_that_stores_fill_in_part_are_no_working_set_that_outgrew_l2() -> None:
    """`stride_two` of tests/data/explain: DRAM reads twice what the SMs read."""
    strided = counted(
        SCATTERED,
        sectors_per_store=8.0,
        used_of_store=0.5,
        times_l2_written=2,
        times_dram_written=2,
        times_dram_read=2,
    )
    causes = why(side(), side(900e-6, (strided,))).causes
    assert [cause.rule for cause in causes] == ["access pattern", "L2 misses"]
    assert causes[1].details["why"] == "partial stores"
    assert sentence(causes[1]).endswith(
        "DRAM reads 2 times what the SMs read, because sectors that stores fill in part are read first"
    )


@pytest.mark.parametrize(
    ("sectors", "used", "words"),
    [
        ((4, 5), (1.0, 0.8), "misaligned, each warp touches a sector more"),
        ((1, 2), (1.0, 0.5), "stride 2"),
        (
            (4, 32),
            (1.0, 0.125),
            "stride 8 or more, or scattered: each element has a sector of its own",
        ),
        (
            (8, 32),
            (1.0, 0.25),
            "stride 4 or more, or scattered: each element has a sector of its own",
        ),
        ((4, 4.6), (1.0, 0.87), "1.15 times the sectors for the same bytes"),
        (
            (16, 20),
            (1.0, 0.8),
            "1.25 times the sectors for the same bytes, accesses are less coalesced, threads use 100 → 80 %",
        ),
    ],
)
def test_a_pattern_is_told_by_its_sectors(
    sectors: tuple[float, float], used: tuple[float, float], words: str
) -> None:
    base, head = (
        counted(sectors_per_request=one, used_of_load=share)
        for one, share in zip(sectors, used, strict=True)
    )
    head = counted(head, times_l2_read=used[0] / used[1])
    assert words in sentence(why(side(kernels=(base,)), side(900e-6, (head,))).causes[0])


def test_words_of_a_kernel_s_name_are_no_types() -> None:
    larger = counted(LARGER, name="long_point(unsigned int)")
    found = why(
        side(kernels=(counted(name="short_point(int)"),), moved_bytes=None),
        side(520e-6, (larger,), moved_bytes=None),
    )
    assert "type" not in found.causes[0].details


def test_what_is_unexplained_is_said_to_be_in_the_kernels_or_beside_them() -> None:
    (note,) = why(side(), side(800e-6, (counted(times_nanoseconds=2),))).notes
    assert note_text(note).startswith(
        "the kernels themselves take longer at about the same bytes and accesses, 400.0 us → 800.0 us: arithmetic"
    )
    (note,) = why(side(), side(800e-6)).notes
    assert note.code == "beside the kernels"
    assert note_text(note).startswith(
        "the kernels take no longer, 400.0 us → 400.0 us: the time goes beside them"
    )
    assert why(side(kernels=None), side(800e-6, None)).notes == ()
    assert why(side(), side(500e-6, (LARGER,))).notes == ()


def test_without_counts_of_l2_sectors_cost_what_they_grew_by() -> None:
    base, head = (replace(one, l2_read=None, l2_written=None) for one in (KERNEL, SCATTERED))
    found = why(side(kernels=(base,)), side(660e-6, (head,)))
    assert found.first == "access pattern"
    assert found.causes[0].estimate == pytest.approx(660e-6 / 2)


def test_the_pattern_of_a_kernel_that_takes_next_to_no_time_is_not_worth_a_word() -> None:
    small = counted(
        name="tiny",
        nanoseconds=5 * 4_000,
        times_l2_read=1e-4,
        times_l2_written=1e-4,
        times_dram_read=1e-4,
    )
    worse = counted(small, sectors_per_request=32.0, used_of_load=0.125, times_l2_read=8)
    (cause,) = why(side(404e-6, (KERNEL, small)), side(444e-6, (HALF_USED, worse))).causes
    assert cause.details["kernel"] == "triad"


def test_another_kernel_that_became_the_longest_is_no_smaller_grid_and_no_lower_occupancy() -> None:
    small = counted(SECOND, grid=(8, 1, 1), occupancy=0.1)
    slower = counted(small, nanoseconds=5 * 600_000)
    found = why(side(490e-6, (KERNEL, small)), side(1e-3, (slower, KERNEL)))
    assert found.causes == ()
    fewer = counted(SECOND, grid=(32, 1, 1), nanoseconds=5 * 600_000)
    (cause,) = why(side(490e-6, (KERNEL, SECOND)), side(1e-3, (fewer, KERNEL))).causes
    assert (cause.details["kernel"], cause.figures["blocks"]) == ("scale", (1056, 32))
    assert cause.estimate == pytest.approx(1e-3 * 0.6 * (1 - 32 / 1056))
