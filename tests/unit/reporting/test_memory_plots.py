"""The memory of tests in plots, in facts and in the totals of a run."""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec.structs import replace

from pytest_gpumem import GiB, MiB
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.footprint import Course, Footprint, MemoryUse, Phase, Site
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.footprints import footprint_facts, totals
from pytest_gpumem.reporting.html import anchor, page
from pytest_gpumem.reporting.plots.memory import (
    BytesOfTest,
    legend,
    memory_bars,
    memory_course,
    series,
)
from pytest_gpumem.reporting.row_facts import OF_MEMORY, row_facts
from pytest_gpumem.reporting.run import Run
from pytest_gpumem.reporting.summary import summary

MakeRow = Callable[..., Row]

SITE = Site(
    *("model.py", 12, "forward", "y = <a> * b", "PyTorch", "device"),
    at_peak=GiB,
    at_peak_count=2,
)
FOOTPRINT = Footprint(
    GiB + 64 * MiB,
    uses=(
        MemoryUse(
            "PyTorch",
            "device",
            peak=GiB,
            at_peak=GiB,
            kept=4096,
            reserved=2 * MiB,
            allocations=3,
            largest=512 * MiB,
        ),
        MemoryUse(
            "CUDA", "device", peak=64 * MiB, at_peak=64 * MiB, allocations=1, largest=64 * MiB
        ),
        MemoryUse("CUDA", "pinned", peak=MiB, allocations=1, largest=MiB),
    ),
    watched=("CUPTI", "PyTorch"),
    not_watched=("JAX: it is not in use",),
    seconds=2.0,
    phases=(Phase("setup", 0.0, 0.5), Phase("call", 0.5, 1.8), Phase("teardown", 1.8, 2.0)),
    timeline=(
        Course("CUDA", "device", ((0.1, 64 * MiB), (1.9, 0))),
        Course("PyTorch", "device", ((0.6, 512 * MiB), (1.0, GiB), (1.5, 4096))),
        Course("CUDA", "pinned", ((0.2, MiB),)),
    ),
    sites=(SITE,),
)


def test_a_line_for_each_library_and_kind_and_one_for_all_device_memory() -> None:
    assert [name for name, _ in series(FOOTPRINT)] == [
        "all device memory",
        "PyTorch",
        "CUDA",
        "CUDA, pinned",
    ]
    together = dict(series(FOOTPRINT))["all device memory"]
    assert max(nbytes for _, nbytes in together) == FOOTPRINT.peak
    assert together[-1] == (1.9, 4096.0)
    drawn = memory_course(FOOTPRINT)
    assert drawn.count("curve") == 4
    for phase in FOOTPRINT.phases:
        assert (f">{phase.name}<" in drawn) == (phase.end - phase.begin > 0.3)
    part = memory_course(replace(FOOTPRINT, phases=(*FOOTPRINT.phases, Phase("decode", 0.9, 1.6))))
    places = {
        name: float(re.search(rf'y="([0-9.]+)"[^>]*>{name}<', part)[1])
        for name in ("call", "decode")
    }  # type: ignore[index]
    assert places["decode"] > places["call"] + 12
    assert part.count("shade") == drawn.count("shade")
    assert legend(FOOTPRINT)[1] == ("s1", "PyTorch")
    alone = replace(FOOTPRINT, timeline=FOOTPRINT.timeline[1:])
    assert [name for name, _ in series(alone)] == ["PyTorch", "CUDA, pinned"]


def test_values_stay_until_the_next_and_to_the_end() -> None:
    drawn = memory_course(
        Footprint(MiB, seconds=1.0, timeline=(Course("CuPy", "device", ((0.25, MiB), (0.5, 0))),))
    )
    (path,) = re.findall(r'class="s0 curve" d="([^"]*)"', drawn)
    assert re.fullmatch(r"M54 (\S+)H157.5V(\S+)H261V\1H468", path)


def test_a_course_of_nothing_is_drawn() -> None:
    assert "<svg" in memory_course(Footprint(0, timeline=(Course("CuPy", "device", ((0.0, 0),)),)))


def test_bars_of_the_largest_tests() -> None:
    drawn = memory_bars(
        [BytesOfTest(f"test_{number}", f"t-{number}", number * MiB) for number in range(1, 15)]
    )
    assert drawn.count("<rect") == 10
    assert drawn.index("test_14") < drawn.index("test_5<")
    assert "test_4<" not in drawn
    assert "14 MiB" in drawn


def test_facts_name_libraries_and_what_was_not_seen() -> None:
    found = dict(footprint_facts(FOOTPRINT))
    assert found["peak memory"] == "1.062 GiB (PyTorch 1 GiB, CUDA 64 MiB)"
    assert found["peak, pinned"] == "1 MiB (CUDA pinned)"
    assert found["kept"] == "4 KiB (PyTorch)"
    assert "from the driver" not in found
    assert "from the driver" not in dict(
        footprint_facts(replace(FOOTPRINT, driver_peak=0))
    )  # all from an earlier test's pool
    assert dict(footprint_facts(replace(FOOTPRINT, driver_peak=2 * GiB)))[
        "from the driver"
    ].startswith("2 GiB at most")
    assert found["reserved"].startswith("2 MiB (PyTorch)")
    assert found["allocations"] == "5, the largest 512 MiB"
    assert found["not watched"] == "JAX: it is not in use"
    assert "kept" not in dict(footprint_facts(Footprint(0, not_watched=("CUPTI: not installed",))))


def test_totals_name_the_tests_that_take_and_keep_most(make_row: MakeRow) -> None:
    rows = [
        replace(make_row(f"a.py::test_{number}"), footprint=Footprint(number * MiB))
        for number in range(5)
    ]
    rows.append(replace(make_row("a.py::test_keeps"), footprint=FOOTPRINT))
    rows.append(
        replace(
            make_row("a.py::test_part", label="part"), footprint=replace(FOOTPRINT, peak=9 * GiB)
        )
    )
    rows.append(replace(make_row("a.py::test_pool"), footprint=Footprint(0, driver_peak=3 * GiB)))
    most, kept, needed = totals(rows)
    assert (
        most
        == "most memory: 1.062 GiB by a.py::test_keeps, 4 MiB by a.py::test_4, 3 MiB by a.py::test_3"
    )
    assert kept == "kept (1 test of 7): 4 KiB by a.py::test_keeps"
    assert needed.startswith("free memory that the tests need: 3 GiB")
    assert totals([make_row()]) == []


def test_columns_are_of_rows_that_are_limited_or_keep_memory(
    make_row: MakeRow, facts: DeviceFacts
) -> None:
    def shown(row: Row) -> list[str]:
        (one,) = row_facts([row], facts)
        return [one.figures[heading].text for heading in OF_MEMORY]

    small = Footprint(4 * MiB, watched=("fixtures",))
    leaks = replace(small, uses=(MemoryUse("CuPy", "device", peak=MiB, kept=4096),))
    timed = make_row("a.py::test_it")
    assert shown(replace(timed, footprint=small)) == ["", ""]
    assert shown(replace(timed, footprint=leaks)) == ["", "4 KiB"]
    assert shown(replace(timed, footprint=replace(leaks, ended=False))) == ["", ""]
    assert shown(replace(timed, footprint=small, limits=Limits(max_peak="1 GiB"))) == ["4 MiB", ""]
    assert shown(replace(timed, footprint=small, limits=Limits(max_kept="0 B"))) == ["", "0 B"]
    assert shown(replace(timed, footprint=leaks, measurement=None)) == ["4 MiB", "4 KiB"]
    drawn = summary(
        [timed, replace(timed, nodeid="a.py::test_leaks", footprint=leaks)],
        facts,
        width=120,
        colour=False,
        in_session=True,
    )
    assert re.search(r"test_leaks +268.3 us .* 4 KiB +PASS", drawn)
    assert "kept (1 test of 1): 4 KiB by a.py::test_leaks" in drawn
    for asked in (False, True):
        drawn = summary(
            [replace(timed, footprint=small)],
            facts,
            width=120,
            colour=False,
            in_session=True,
            memory=asked,
        )
        assert ("4 MiB" in drawn) == ("memory" in drawn) == asked


def test_the_page_has_the_plot_the_lines_and_the_totals(
    make_row: MakeRow, facts: DeviceFacts
) -> None:
    row = replace(make_row("a.py::test_it", measured=False), footprint=FOOTPRINT)
    text = page(
        Run([row, make_row("a.py::test_other")], facts, {}, utc="2026-11-21T12:00:00+00:00")
    )
    assert "most memory in use at once" in text
    assert "memory kept after the test" in text
    assert "memory in use over the test, at most 1.062 GiB" in text
    assert "model.py:12 in forward: y = &lt;a&gt; * b" in text
    assert text.count(f'href="#{anchor(row.key)}"') >= 3


def test_the_page_has_the_memory_of_the_baseline_where_it_differs(
    make_row: MakeRow, facts: DeviceFacts
) -> None:
    base_site = replace(SITE, at_peak=GiB // 2, code="y = a")
    was = replace(
        FOOTPRINT,
        uses=(replace(FOOTPRINT.uses[0], kept=0),),
        peak=GiB // 2,
        sites=(base_site,),
        timeline=(),
    )
    grown = replace(make_row("a.py::test_grown", measured=False), footprint=FOOTPRINT)
    same = replace(make_row("a.py::test_same", measured=False), footprint=FOOTPRINT)
    new = replace(make_row("a.py::test_new", measured=False), footprint=FOOTPRINT)
    text = page(
        Run(
            [grown, same, new],
            facts,
            {},
            utc="2026-11-21T12:00:00+00:00",
            footprints={grown.key: was, same.key: FOOTPRINT},
        )
    )
    assert (
        text.count("<small>from 512 MiB</small>") == text.count("<small>from 0 B</small>") == 1
    )  # in the table
    assert text.count("1.062 GiB, was 512 MiB") == text.count("4 KiB, was 0 B") == 1  # in the plots
    assert text.count("The mark is the baseline.") == 2
    assert (
        "<dt>since the baseline</dt><dd>peak memory 512 MiB -&gt; 1.062 GiB (+576 MiB)</dd>" in text
    )
    assert "+512 MiB  model.py:12 in forward: y = &lt;a&gt; * b" in text
    assert text.count("<dt>since the baseline</dt>") == 2
    assert "was" not in memory_bars([BytesOfTest("test", "t", MiB, MiB)])
