"""The HTML page: figures, escaping, nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.difference import Difference
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits, Repeat
from pytest_gpumem.records.overlap import Overlap, Part
from pytest_gpumem.records.row import Comparison, Past, Row, Verdict
from pytest_gpumem.reporting import markdown
from pytest_gpumem.reporting.html import anchor, page
from pytest_gpumem.reporting.plots.bars import Delta, forest
from pytest_gpumem.reporting.plots.runs import turns
from pytest_gpumem.reporting.run import Run
from pytest_gpumem.units import format_time

MakeRow = Callable[..., Row]
UTC = "2026-11-21T12:00:00+00:00"
COMPARISON = Comparison(delta=0.1234, reach=0.008, processes=5)


class Read(HTMLParser):
    """Collects tags, attributes and text, and sees that every tag is closed."""

    VOID = ("meta", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data

    def named(self, name: str) -> list[str | None]:
        return [value for attribute, value in self.attributes if attribute == name]


def test_shows_every_row_with_its_figures(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [
        make_row(),
        replace(make_row("t.py::test_b", Outcome.FAIL), failed=True),
        make_row("t.py::test_c", measured=False),
    ]
    read = Read(page(Run(rows, facts, {"mode": "hot"}, utc=UTC, revision="abc123")))
    assert not read.open
    assert read.tags.count("tr") == 4
    assert read.tags.count("details") == 3
    taken = "taken 2026-11-21 12:00 UTC, revision abc123"
    for shown in (
        "268.3 us",
        "3002 GB/s",
        "89.5 %",
        "test_b",
        "2 PASS",
        "1 FAIL",
        "mode hot",
        taken,
        facts.name,
    ):
        assert shown in read.text


def test_a_pattern_and_an_interval_stand_among_the_details(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    text = Read(page(Run([make_row(sectors_per_request=8.0)], facts, {}, utc=UTC))).text
    assert "8 sectors a request (4 where coalesced)" in text
    assert "95 % interval" not in text
    text = Read(
        page(Run([make_row(accesses_per_launch=1000, sectors_per_request=4.0)], facts, {}, utc=UTC))
    ).text
    assert "268.0 ns to 268.6 ns/access" in text
    assert "sectors" not in text


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}",
    "</td></table>",
    "&lt;",
    "</title><svg/onload=alert(1)>",
    "</script><script>alert(1)</script>",
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "]]><!--",
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_whatever_names_and_files_hold_is_text(
    facts: DeviceFacts, make_row: MakeRow, hostile: str
) -> None:
    """In the table, in sections, in every kind of plot, its caption, legend and tips."""
    overlap = Overlap((Part(hostile, 1e-4), Part("kernel", 2e-4)), 3e-4, 2e-4, 2)
    rows = [
        make_row(
            f"t.py::test_a[{hostile}]",
            Outcome.FAIL,
            label=hostile,
            reason=hostile,
            comparison=COMPARISON,
            overlap=overlap,
        )
    ]
    rows += [
        make_row(f"t.py::test_{hostile}", label=f"{hostile}, {number}", accesses_per_launch=9)
        for number in (1, 2, 3)
    ]
    rows += [
        make_row("t.py::test_b", label=f"{number} MiB, {hostile}", sectors_per_request=number)
        for number in (4.0, 8.0, 16.0)
    ]
    rows += [make_row("t.py::test_b", label=f"{number} MiB, plain") for number in (4.0, 8.0, 16.0)]
    past = {
        row.key: [Past(datetime(2026, 11, 1, tzinfo=timezone.utc), 1e-4, None, hostile)]
        for row in rows
    }
    odd = replace(facts, name=hostile)
    drawn = page(Run(rows, odd, {"mode": hostile}, utc=hostile, past=past, revision=hostile))
    read = Read(drawn)
    assert not read.open
    assert read.tags.count("script") == 1
    assert "img" not in read.tags
    assert read.tags.count("table") == 1
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert all(
        target is not None and re.fullmatch(r"#[a-z][-a-z0-9]*", target)
        for target in read.named("href")
    )
    assert hostile in read.text
    # And its own script and styles are as they are in the package.
    policy = next(
        value for value in read.named("content") if value is not None and "script-src" in value
    )
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", drawn, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy
        assert not hostile.startswith("<") or hostile not in text
    assert "unsafe" not in policy


def test_nothing_comes_from_the_network_and_a_model_is_named(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    text = page(Run([make_row(simulated=True)], replace(facts, simulated=True), {}, utc=UTC))
    assert not re.search(r"https?://|<link|<script[^>]|src=|url\((?!#)|@import", text)
    assert "default-src &#39;none&#39;" in text
    assert "no GPU was measured" in text
    assert "PASS</span> sim" in text


def test_a_row_is_linked_to_its_section(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [
        make_row("t.py::test_a", label="x"),
        make_row("t.py::test_b", Outcome.FAIL, reason="slow", comparison=COMPARISON),
    ]
    read = Read(page(Run(rows, facts, {}, utc=UTC)))
    ids = read.named("id")
    for row in rows:
        assert ids.count(anchor(row.key)) == 1
        assert f"#{anchor(row.key)}" in read.named("href")
    assert anchor(rows[0].key) != anchor(rows[1].key)
    assert anchor(replace(rows[0], failed=True).key) == anchor(rows[0].key)
    assert all(
        target.removeprefix("#") in ids for target in read.named("href") if target is not None
    )
    # Needs a look, the forest of changes, and the table.
    assert read.named("href").count(f"#{anchor(rows[1].key)}") == 3


def test_a_first_run_has_no_column_of_changes(facts: DeviceFacts, make_row: MakeRow) -> None:
    assert ">change</th>" not in page(Run([make_row()], facts, {}, utc=UTC))
    assert ">change</th>" in page(Run([make_row(comparison=COMPARISON)], facts, {}, utc=UTC))


def test_what_needs_a_look_stands_first(facts: DeviceFacts, make_row: MakeRow) -> None:
    failed = [replace(make_row("t.py::test_a", label=label), failed=True) for label in ("x", "y")]
    doubtful = make_row(
        "t.py::test_b", Outcome.UNDECIDED, reason="why it is undecided", code=Code.LOOKS_SLOWER
    )
    slower = make_row("t.py::test_c", comparison=COMPARISON, reason="why it is slower")
    text = Read(
        page(Run([*failed, slower, doubtful, make_row("t.py::test_d")], facts, {}, utc=UTC))
    ).text
    head = text[: text.index("all verdicts")]
    told = (
        "something else than the verdicts on 2 measurements",
        "why it is undecided",
        "why it is slower",
    )
    places = [head.find(one) for one in told]
    assert -1 not in places
    assert places[0] == min(places)
    assert "test_d" not in head
    assert "Needs a look" not in Read(page(Run([make_row()], facts, {}, utc=UTC))).text


def test_a_test_that_fails_by_one_of_its_rows_fails_by_nothing_else(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [
        make_row("t.py::test_a", label="x"),
        make_row("t.py::test_a", Outcome.FAIL, label="y", reason="too slow"),
    ]
    rows = [replace(row, failed=True) for row in rows]
    assert "something else" not in page(Run(rows, facts, {}, utc=UTC))
    assert "something else" in page(
        Run([replace(row, test_error=True) for row in rows], facts, {}, utc=UTC)
    )
    new = replace(make_row("t.py::test_a", Outcome.NEW, reason="has no baseline"), failed=True)
    strict = page(Run([new], facts, {"strict": True}, utc=UTC))
    assert "something else" not in strict
    assert "has no baseline" in strict[: strict.index('id="results"')]


def test_a_reason_of_its_own_is_there_once(facts: DeviceFacts, make_row: MakeRow) -> None:
    text = page(
        Run(
            [make_row(code=Code.CONDITIONS, outcome=Outcome.UNDECIDED, reason="throttled")],
            facts,
            {},
            utc=UTC,
        )
    )
    assert text[: text.index('id="results"')].count("throttled") == 1


def test_plots_of_tests_of_one_name_are_told_apart(facts: DeviceFacts, make_row: MakeRow) -> None:
    rows = [make_row(f"tests/{file}.py::test_copy[{n}]") for file in ("a", "b") for n in (1, 2, 4)]
    text = Read(page(Run(rows, facts, {}, utc=UTC))).text
    assert "a.py::test_copy: bandwidth" in text
    assert "b.py::test_copy: bandwidth" in text


def test_plots_of_what_there_is(facts: DeviceFacts, make_row: MakeRow) -> None:
    empty = page(Run([make_row("t.py::test_a")], facts, {}, utc=UTC))
    assert 'id="plots"' not in empty
    assert empty.count("<figure>") == 1  # its samples
    rows = [make_row("t.py::test_sizes", label=f"{size} MiB") for size in (1, 2, 4)]
    rows += [
        make_row("t.py::test_chase", label=label, accesses_per_launch=1000)
        for label in ("L2", "DRAM")
    ]
    rows.append(make_row("t.py::test_slower", comparison=COMPARISON))
    rows.append(
        make_row(
            "t.py::test_overlap",
            overlap=Overlap((Part("a", 1e-4), Part("b", 2e-4)), 3e-4, 2e-4, 2, 8),
        )
    )
    text = Read(page(Run(rows, facts, {}, utc=UTC))).text
    for caption in (
        "changes against the baseline",
        "test_sizes: bandwidth over 1 MiB to 4 MiB",
        "latency of one access",
        "parts alone and together",
    ):
        assert caption in text
    assert "peak of DRAM" in text


def test_history_and_conditions_are_in_a_rows_section(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    row = make_row()
    first = datetime(2026, 11, 1, tzinfo=timezone.utc)
    past = {
        row.key: [
            Past(first + timedelta(days=day), 268e-6 + day * 1e-8, 1e-7, f"rev{day}")
            for day in range(3)
        ]
    }
    text = page(Run([row, make_row("t.py::test_new")], facts, {}, utc=UTC, past=past))
    assert text.count("<figcaption>history: 3 earlier runs") == 1
    assert "latency over 3 earlier runs, in us" in text
    assert "11-01 rev0 268.0 us" in text


def test_odd_figures_can_be_drawn(facts: DeviceFacts, make_row: MakeRow) -> None:
    """One sample, equal samples, a huge interval, no change at all, a change to nothing, thousands of samples, the same number twice."""
    same = replace(COMPARISON, delta=0.0, reach=0.0)
    rows = [
        make_row("t.py::a", placements=((1e-4,),), half_width=None, comparison=same),
        make_row(
            "t.py::b",
            placements=((1e-4,) * 9, (1e-4,) * 9),
            half_width=0.0,
            comparison=replace(same, delta=-1.0),
        ),
        make_row("t.py::c", placements=((1e-4, 2e-4), (9e-4, 9e-4)), half_width=4e-2),
        make_row("t.py::d", placements=(tuple(1e-4 + i * 1e-9 for i in range(5000)),)),
        *(
            make_row("t.py::e", label=f"{x} of {y}", half_width=1.0)
            for x in (0, -1, 5)
            for y in ("x", "y")
        ),
    ]
    past = {row.key: [Past(datetime(2026, 11, 1, tzinfo=timezone.utc), 1e-4, 5.0)] for row in rows}
    text = page(Run(rows, facts, {}, utc=UTC, past=past))
    assert not Read(text).open
    assert not re.search(r"[\"MLHV ](nan|inf|-?\d+e\+)", text)
    assert len(text) < 70_000


def test_a_suite_has_its_trend_its_roofline_and_the_base_of_a_change(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [
        make_row(f"t.py::test_{index}", comparison=Comparison(0.25, 0.05, processes=3))
        for index in range(3)
    ]
    day = datetime(2026, 11, 1, tzinfo=timezone.utc)
    past = {
        row.key: [Past(day, 300e-6, None, "abcdef0"), Past(day.replace(day=2), 290e-6, None)]
        for row in rows
    }
    text = page(Run(rows, facts, {}, utc=UTC, past=past))
    assert "all rows over 2 earlier runs" in text
    assert "2026-11-01 abcdef0: median +11.82 %" in text
    assert "bandwidth over the bytes of a launch" in text
    assert "most measured in DRAM 3002" in text
    # 268.3 us is 25 % more than 214.6 us.
    assert "from 214.6 us" in text
    # The change is of the mean over all processes, and the latency of the first one.
    assert rows[0].measurement is not None
    slower = Repeat(tuple(2 * median for median in rows[0].measurement.medians))
    further = replace(rows[0], measurement=replace(rows[0].measurement, further=(slower,)))
    assert f"from {format_time(268.3e-6 * math.sqrt(2) / 1.25)}" in page(
        Run([further], facts, {}, utc=UTC)
    )
    alone = page(Run(rows[:1], facts, {}, utc=UTC))
    assert "over the bytes of a launch" not in alone
    assert "earlier run" not in alone


GRID = Difference("kernel", (64, 1, 1), (8, 1, 1), "copy", "grid")


def test_the_differences_of_a_failure_are_on_the_page(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    row = replace(make_row(outcome=Outcome.FAIL), differences=(GRID,))
    assert "<dt>why</dt><dd>kernel copy: grid 64 → 8</dd>" in page(Run([row], facts, {}, utc=UTC))
    assert "why: kernel copy: grid 64 → 8" in markdown.page(Run([row], facts, {}))


def watched(peak: int) -> Footprint:
    return Footprint(peak, watched=("fixtures",))


def order_of(rows: list[Row], facts: DeviceFacts, **more: Any) -> list[str]:
    """The tests of the page's table, as it comes."""
    table = (
        page(Run(rows, facts, {}, utc=UTC, **more)).partition("<tbody>")[2].partition("</tbody>")[0]
    )
    return re.findall(r"test_(\w+)</a>", table)


def test_worst_first_is_by_verdict_and_by_how_far_a_figure_is_beyond_its_limit(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    def changed(name: str, delta: float, limit: str, outcome: Outcome = Outcome.PASS) -> Row:
        return replace(
            make_row(
                f"t.py::test_{name}", outcome, comparison=Comparison(delta, delta, processes=3)
            ),
            limits=Limits(max_regression=limit),
        )

    memory = Row(
        "t.py::test_memory",
        Limits(max_peak="8 MiB"),
        Verdict(Outcome.FAIL, ""),
        footprint=watched(12 << 20),
    )
    grown = Row(
        "t.py::test_grown",
        Limits(max_peak_regression="5%"),
        Verdict(Outcome.FAIL, ""),
        footprint=watched(120),
    )
    rows = [
        make_row("t.py::test_slowest", placements=((51e-3,),)),
        changed("near", 0.01, "2%"),
        changed("nearer", 0.019, "2%"),
        changed("fail", 0.03, "2%", Outcome.FAIL),
        replace(make_row("t.py::test_asserts"), failed=True),
        changed("wide", 0.1, "50%"),
        changed("worse", 0.08, "2%", Outcome.FAIL),
        memory,
        replace(make_row("t.py::test_latency", Outcome.FAIL), limits=Limits(max_latency="260 us")),
        grown,
        replace(
            make_row("t.py::test_rate", Outcome.FAIL), limits=Limits(min_bandwidth="3100 GB/s")
        ),
        make_row("t.py::test_new", Outcome.NEW),
    ]
    order = order_of(rows, facts, footprints={"t.py::test_grown": Footprint(peak=100)})
    failing = ["memory", "grown", "worse", "rate", "latency", "fail", "asserts"]
    assert order == [*failing, "new", "nearer", "near", "wide", "slowest"]


def test_a_column_without_a_figure_is_left_out(facts: DeviceFacts, make_row: MakeRow) -> None:
    memory = Row(
        "t.py::test_memory",
        Limits(max_peak="8 MiB"),
        Verdict(Outcome.PASS, ""),
        footprint=watched(1 << 20),
    )
    alone = page(Run([memory], facts, {}, utc=UTC))
    assert re.findall(r"<th [^>]*>(.*?)</th>", alone) == ["test", "peak memory", "verdict"]
    assert "by peak memory, largest first" in alone
    both = page(Run([memory, make_row(footprint=10 << 20)], facts, {}, utc=UTC))
    assert re.findall(r"<th [^>]*>(.*?)</th>", both) == [
        "test",
        "latency",
        "bandwidth",
        "noise",
        "peak memory",
        "verdict",
    ]


def test_the_first_differences_stand_under_what_needs_a_look(
    facts: DeviceFacts, make_row: MakeRow
) -> None:
    found = (
        Difference("declared bytes", 4 << 20, 5 << 20),
        Difference("sectors per request", 4.0, 8.0),
        GRID,
        GRID,
    )
    drawn = page(
        Run([replace(make_row(outcome=Outcome.FAIL), differences=found)], facts, {}, utc=UTC)
    )
    concerns = drawn.partition('id="concerns"')[2].partition("</section>")[0]
    assert re.findall(r"why: (.*?)</div>", concerns) == [
        "declared bytes 4 MiB → 5 MiB",
        "sectors per request 4 → 8",
        "kernel copy: grid 64 → 8",
    ]


def test_every_point_of_earlier_runs_is_of_the_same_rows() -> None:
    """A row that an older run has alone, such as after an acceptance, moves no point."""
    days = [datetime(2026, 11, day, tzinfo=timezone.utc) for day in (1, 2, 3)]
    now = dict.fromkeys("abcd", 1.0)
    past = {key: [Past(day, 1.0) for day in days] for key in "abc"}
    past["c"] = past["c"][1:]
    past["d"] = [Past(days[0], 9.0), Past(days[1], 9.0)]
    found = turns(past, now)
    assert [(one.utc, one.middle, one.high, one.rows) for one in found] == [
        (day, 0.0, 0.0, 2) for day in days
    ]
    # An old run that shares too little with the newer ones is left out, rather than all of them.
    past = {
        "a": [Past(days[0], 9.0), Past(days[2], 1.0)],
        "b": [Past(days[2], 1.0)],
        "c": [Past(days[0], 9.0)],
        "d": [Past(days[0], 9.0)],
    }
    assert [(one.utc, one.rows) for one in turns(past, now)] == [(days[2], 2)]
    assert [one.rows for one in turns({"a": past["a"]}, now)] == []


def test_a_limit_far_beyond_the_changes_is_named_at_the_edge() -> None:
    near, far = (
        str(forest([Delta("a", "t", 0.01, 0.0, 0.02, "pass", margin)])) for margin in (0.03, 0.5)
    )
    assert 'class="margin"' in near
    assert "allowed 50 % &gt;" in far
    assert 'class="margin"' not in far
