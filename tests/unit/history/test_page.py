"""The page of a history: no change is missing, nothing of a name is markup, the packed values are those of the history."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from histories import CARD, DEVICE, NEWEST, change, one_slower, runs, series

from pytest_gpumem.history.data import History
from pytest_gpumem.history.page import page as drawn
from pytest_gpumem.reporting.web_page import anchor

SINCE = NEWEST - timedelta(days=30)


def page(history: History) -> str:
    return drawn(history, SINCE)


def facts(text: str) -> Any:
    return json.loads(re.findall(r'<script type="application/json" id="facts">(.*?)</script>', text, re.DOTALL)[0])


def unpacked(text: str) -> list[list[float]]:
    """The values of each line, as the page's script unpacks them."""
    found, read, lines = [], 0, facts(text)
    packed = base64.b64decode(re.findall(r'id="values">(.*?)</script>', text, re.DOTALL)[0])
    for *_, index, packing, scale in lines["lines"]:
        count = lines["sets"][index][0]
        kind: Any = {0: np.uint8, 1: np.dtype("<u2"), 2: np.dtype("<f4")}[packing]
        if packing == 0 and len(scale) == 1:
            found.append(scale * count)
            continue
        values = np.frombuffer(packed, kind, count, read)
        read += values.nbytes + -values.nbytes % 3
        if packing == 0:
            values = np.array(scale)[values]
        elif packing == 1:
            values = np.exp(scale[0] + scale[1] * values)
        found.append(values.tolist())
    return found


def table(text: str, name: str) -> list[list[str]]:
    """The texts of a table of changes."""
    section = re.findall(rf'<section id="{name}">(.*?)</section>', text, re.DOTALL)[0]
    lines = re.findall(r"<tr>(.*?)</tr>", section)[1:]
    return [[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", line)] for line in lines]


def test_a_change_of_this_month_stands_first_with_its_commits_and_levels() -> None:
    text = page(one_slower())
    assert table(text, "slower") == [
        [
            "tests/test_a.py::test_copy",
            "latency",
            "+2.50 %",
            "100.0 us -> 102.5 us",
            "001cc0de..001fc0de",
            "2026-11-13",
            DEVICE,
            "not accepted",
        ]
    ]
    assert table(text, "gains") == []
    assert f'href="#{anchor("tests/test_a.py::test_copy")}"' in text
    assert "1 test, 1 line, 40 runs, 1 change" in text


def test_all_changes_are_there_and_those_that_nobody_accepted_come_first() -> None:
    lines = [series(f"t.py::test_{index}", [1.0] * 60) for index in range(5)]
    changes = (
        change(0, 50, 1.0, 1.5, who="ann", why="needs one pass more"),
        change(1, 50, 1.0, 1.01),
        change(2, 50, 1.0, 1.2),
        change(3, 50, 1.0, 0.9),
        change(4, 10, 1.0, 2.0),  # two months ago
    )
    text = page(History(tuple(runs(60)), tuple(lines), changes))
    assert [line[0] for line in table(text, "slower")] == ["t.py::test_2", "t.py::test_1", "t.py::test_0"]
    assert table(text, "slower")[-1][-1] == "accepted by ann: needs one pass more"
    assert [line[0] for line in table(text, "gains")] == ["t.py::test_3"]
    marks = facts(text)["changes"]
    assert [(one["series"], one["accepted"], one["worse"], one["lately"]) for one in marks] == [
        (0, True, True, True),
        (1, False, True, True),
        (2, False, True, True),
        (3, False, False, True),
        (4, False, True, False),
    ]


def test_bytes_from_nothing_have_no_share() -> None:
    text = page(History(tuple(runs(40)), (series("t", [0.0] * 40, metric="kept", unit="B"),), (change(0, 30, 0.0, 4096.0),)))
    assert [line[1:4] for line in table(text, "slower")] == [["kept", "new", "0 B -> 4 KiB"]]


def test_commits_are_those_that_git_takes_and_unknown_ones_are_named() -> None:
    history = one_slower()

    def commits(before: str, last: str, at: int = 30) -> str:
        all_runs = list(history.runs)
        all_runs[28], all_runs[31] = replace(all_runs[28], revision=before), replace(all_runs[31], revision=last)
        return table(page(replace(history, runs=tuple(all_runs))), "slower")[0][4]

    assert commits("a" * 40, "b" * 40 + "-dirty") == "aaaaaaaa..bbbbbbbb-dirty"
    assert commits("", "b" * 40) == "up to bbbbbbbb"
    assert commits("a" * 40, "") == "unknown commit"
    assert commits("a" * 40, "a" * 40) == "none: aaaaaaaa before and after"


def test_values_of_every_packing_come_back() -> None:
    draw = np.random.default_rng(1)
    noisy = 1e-4 * np.exp(draw.normal(0, 0.01, 400))
    hung = noisy.copy()
    hung[7] = 10.0  # seconds: five orders of magnitude above the rest
    few = np.array([3.0, 4.0, 2**40 + 1] * 133 + [3.0])
    signed = np.concatenate([draw.normal(0, 1, 399), [0.0]])
    equal = np.full(400, 1e-4)
    equal[7] = np.nextafter(1e-4, 1)
    lines = [noisy, hung, few, np.broadcast_to(np.float64(7), 400), signed, equal]
    text = page(History(tuple(runs(400)), tuple(series(f"t{index}", values) for index, values in enumerate(lines)), ()))
    back = unpacked(text)
    assert back[0] == pytest.approx(noisy, rel=1e-6)
    assert back[1] == pytest.approx(hung, rel=1e-4)
    assert back[2] == few.tolist()
    assert back[3] == [7.0] * 400
    assert back[4] == pytest.approx(signed, rel=1e-6)
    assert back[5] == pytest.approx(equal, rel=1e-6)


def test_a_line_keeps_the_runs_that_measured_it() -> None:
    odd = np.array([1, 8, 9, 30], np.int32)
    one = replace(series("t", [1.0, 2.0, 3.0, 4.0]), runs=odd)
    lines = facts(page(History(tuple(runs(31)), (one, series("u", [1.0] * 31)), ())))
    bits = np.unpackbits(np.frombuffer(base64.b64decode(lines["sets"][lines["lines"][0][3]][1]), np.uint8))
    assert np.flatnonzero(bits).tolist() == odd.tolist()


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}",
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]><!--",
    "a\nb\x1b[31m\u202e\udcff",
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_whatever_names_hold_is_text(hostile: str) -> None:
    """As the test, the metric, the unit, the variant, the device, the commit, who and why."""
    all_runs = tuple(replace(one, device=hostile, revision=hostile) for one in runs(40))
    one = replace(series(hostile, [1.0] * 30 + [2.0] * 10, variant=hostile), metric=hostile, unit=hostile)
    text = page(History(all_runs, (one,), (change(0, 30, 1.0, 2.0, who=hostile, why=hostile),)))
    plain = page(one_slower())
    for tag in ("<script", "</script", "<img", "<table", "<!--"):
        assert text.count(tag) == plain.count(tag)
    assert not any(one in text for one in ("\x1b", "\u202e", "\udcff"))
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', text)[0])
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert "unsafe" not in policy
    text.encode()


def test_nothing_comes_from_the_network() -> None:
    assert not re.search(r"https?://|<link|src=|url\((?!#)|@import", page(one_slower()))


def test_an_empty_history_and_one_of_one_run() -> None:
    text = page(History((), (), ()))
    assert "0 tests, 0 lines, 0 runs, 0 changes" in text
    assert text.count("<p>None.</p>") == 2
    text = page(History(tuple(runs(1)), (series("t", [1e-4]),), ()))
    assert "1 test, 1 line, 1 run, 0 changes" in text
    assert unpacked(text) == [[1e-4]]


def test_simulated_runs_are_named_and_stand_apart_from_those_of_the_card() -> None:
    other = f"simulated-{CARD}"
    both = (*runs(2), *runs(2, card=other, simulated=True))
    lines = (series("t", [1.0, 1.0]), replace(series("t", [2.0, 2.0], card=other), runs=np.array([2, 3], np.int32)))
    text = page(History(both, lines, ()))
    assert f"No GPU was measured in the runs of {DEVICE} (simulated)." in text
    assert facts(text)["cards"] == [DEVICE, f"{DEVICE} (simulated)"]
    assert "No GPU was measured" not in page(one_slower())


def test_cards_of_one_name_are_told_apart() -> None:
    other = CARD.replace("80GiB", "40GiB")
    both = (*runs(2), *runs(2, card=other))
    lines = (series("t", [1.0, 1.0]), replace(series("t", [2.0, 2.0], card=other), runs=np.array([2, 3], np.int32)))
    assert facts(page(History(both, lines, ())))["cards"] == [CARD, other]
