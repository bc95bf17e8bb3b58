"""The HTML page: figures, escaping, nothing from the network."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.reporting.html import page

MakeRow = Callable[..., Row]
UTC = "2026-11-21T12:00:00+00:00"


class Read(HTMLParser):
    """Collects tags and text, and sees that every tag is closed."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_shows_every_row_with_its_figures(facts: DeviceFacts, make_row: MakeRow) -> None:
    read = Read(page([make_row(), replace(make_row("t.py::test_b", Outcome.FAIL), failed=True)], facts, {"mode": "hot"}, utc=UTC))
    assert not read.open
    assert read.tags.count("tr") == 3
    for shown in ("268.3 us", "3002 GB/s", "89.5 %", "test_b", "1 PASS", "1 FAIL", "mode hot", UTC, facts.name):
        assert shown in read.text


def test_a_pattern_and_an_interval_stand_among_the_details(facts: DeviceFacts, make_row: MakeRow) -> None:
    text = Read(page([make_row(sectors_per_request=8.0)], facts, {}, utc=UTC)).text
    assert "8 sectors a request (4 where coalesced)" in text
    assert "95 % interval" not in text
    text = Read(page([make_row(accesses_per_launch=1000, sectors_per_request=4.0)], facts, {}, utc=UTC)).text
    assert "268.0 ns to 268.6 ns/access" in text
    assert "sectors" not in text


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "</td></table>", "&lt;"])
def test_names_labels_and_reasons_are_escaped(facts: DeviceFacts, make_row: MakeRow, hostile: str) -> None:
    row = make_row(f"t.py::test_a[{hostile}]", Outcome.FAIL, label=hostile)
    row = replace(row, verdict=replace(row.verdict, reason=hostile))
    read = Read(page([row], facts, {"mode": hostile}, utc=UTC))
    assert not read.open
    assert "script" not in read.tags
    assert "img" not in read.tags
    assert read.tags.count("table") == 1
    assert hostile in read.text


def test_nothing_comes_from_the_network_and_a_model_is_named(facts: DeviceFacts, make_row: MakeRow) -> None:
    text = page([make_row(simulated=True)], replace(facts, simulated=True), {}, utc=UTC)
    assert not re.search(r"https?://|<link|<script|src=", text)
    assert "no GPU was measured" in text
    assert "PASS, simulated" in text
