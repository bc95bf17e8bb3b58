"""The records: each is evidence for something, and documents draw their tables and the figure from them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import renew_tables
import texts_table

from pytest_gpumem.records.schema import document_from_json

ROOT = Path(__file__).parents[2]


def test_no_record_is_left_that_no_page_draws() -> None:
    """`ci/records/README.md` has its table, or a page or the package gives its figures."""
    pages = "\n".join(
        path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    )
    sources = [
        path
        for folder in ("pytest_gpumem", "kernels")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cu")
    ]
    drawn = [
        block[3]
        for block in renew_tables.BLOCK.finditer(
            (ROOT / "ci" / "records" / "README.md").read_text()
        )
    ]
    everything = "\n".join([pages, *(path.read_text() for path in sources), *drawn])
    records = [
        path.relative_to(ROOT / "ci" / "records").as_posix()
        for path in sorted((ROOT / "ci" / "records").glob("*/*.json"))
    ]
    assert [one for one in records if one not in everything] == []


def test_rows_of_a_run_are_chosen_by_their_node_id() -> None:
    record, file = "ci/records/nvidia-h200/suite.json", "tests/memory/test_stream.py"
    counts = []
    for chosen in ((), ("of", file), ("without", file)):
        lines = renew_tables.record(record, *chosen).splitlines()
        counts.append(sum(line.endswith((" PASS", " measured")) for line in lines) - 1)
    assert 0 < counts[1] < counts[0]
    assert counts[1] + counts[2] == counts[0]


HEAD = subprocess.run(
    ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.strip()
BEFORE = "5d0a7948713937660180d4d014568558fbc0ec01"
STREAM, ZERO_COPY = "tests/memory/test_stream.py::test_triad", "tests/memory/test_zero_copy.py"


@pytest.mark.skipif(not HEAD, reason="needs the history of a checkout")
def test_a_record_is_evidence_by_a_clean_revision_whose_tests_passed_and_are_todays() -> None:
    rows: list[tuple[Any, dict[str, bool], list[str]]] = [
        ({"commit_info": {"id": HEAD, "dirty": False}}, {STREAM: False}, []),
        ({"taken_at": {"revision": HEAD}}, {}, []),
        ({}, {STREAM: False}, ["of no recorded revision"]),
        (
            {"taken_at": {"revision": f"{HEAD}-dirty"}},
            {},
            [f"of {HEAD[:12]} with uncommitted changes"],
        ),
        (
            {"commit_info": {"id": "0" * 40}},
            {STREAM: True},
            ["000000000000 is not in this repository's history"],
        ),
        (
            {"commit_info": {"id": HEAD}},
            {STREAM: True, "tests/memory/test_stream.py::test_dot": False},
            ["1 of 2 tests failed"],
        ),
        (
            {"commit_info": {"id": BEFORE}},
            {
                STREAM: False,
                f"{ZERO_COPY}::test_reading_once_in_place_is_no_slower_than_copying_first": False,
            },
            ["tests have changed since"],
        ),
    ]
    for run, tests, flaws in rows:
        assert renew_tables.flaws(run, tests) == flaws


@pytest.mark.skipif(not HEAD, reason="needs the history of a checkout")
def test_pages_draw_no_record_with_failed_or_changed_tests_or_without_a_clean_revision() -> None:
    found = list[tuple[str, str]]()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for block in renew_tables.BLOCK.finditer(path.read_text()):
            kind, name, which, nodeid = block[2], block[3], block[4], block[5] or ""
            if kind not in ("record", "summary", "texts"):
                continue
            drawn = (
                renew_tables.texts(name)
                if kind == "texts"
                else renew_tables.record(name, which, nodeid, short=kind == "summary")
            )
            lacks = [line for line in drawn.splitlines() if line.startswith("provisional: ")]
            found += [(path.relative_to(ROOT).as_posix(), line) for line in lacks]
    assert found == []


RECORDS = ROOT / "ci" / "records"


def provisional() -> set[str]:
    """Records with flaws, and sections of `ci/records/README.md` with a table of one."""
    found = set[str]()
    for path in RECORDS.glob("*/*.json"):
        run = json.loads(path.read_text())
        rows = (
            document_from_json(renew_tables.of_today(run["gpumem"])).rows if "gpumem" in run else ()
        )
        if renew_tables.flaws(run, {row.nodeid: row.failed for row in rows}):
            found.add(path.relative_to(RECORDS).as_posix())
    for title, text in re.findall(
        r"^## (.+)\n((?:(?!## ).*\n)*)", (RECORDS / "README.md").read_text(), re.MULTILINE
    ):
        if "\nprovisional: " in text:
            found.add("README.md#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-"))
    return found


def records_of(page: str) -> set[str]:
    """What a page names in `ci/records`, itself or by a script whose output it has; without generated tables."""
    text = renew_tables.GENERATED.sub("", page)
    scripts = [
        (ROOT / block[3]).read_text()
        for block in renew_tables.BLOCK.finditer(text)
        if block[2] == "output"
    ]
    return set(
        re.findall(r"\brecords/([\w-]+/\w+\.json|README\.md#[\w-]+)", "\n".join([text, *scripts]))
    )


@pytest.mark.skipif(not HEAD, reason="needs the history of a checkout")
def test_pages_name_no_record_with_flaws() -> None:
    flawed = provisional()
    pages = [
        (path.relative_to(ROOT).as_posix(), path.read_text())
        for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    ]
    assert {
        page: named for page, text in pages if (named := sorted(records_of(text) & flawed))
    } == {}


def test_a_page_names_records_in_links_in_words_and_by_its_scripts() -> None:
    output = "<!-- output: ci/docs_placements.py -->\n```text\n```\n"
    generated = f"<!-- generated: x -->\n[a](../ci/records/gpu/constant.json)\n{renew_tables.END}\n"
    page = f"[a](../ci/records/gpu/a.json) `ci/records/gpu/b.json` [c](../../ci/records/README.md#the-gate)\n{output}{generated}"
    assert records_of(page) == {
        "gpu/a.json",
        "gpu/b.json",
        "README.md#the-gate",
        "nvidia-h200/peers_nvbench.json",
    }


def measured(latency: float, half_width: float | None) -> Any:
    return SimpleNamespace(latency=latency, half_width=half_width)


def test_a_change_says_its_interval_and_where_it_shows_nothing() -> None:
    for base, other, said in [
        ((1.0, 0.001), (1.046, 0.001), "+4.6 %"),
        ((1.0, 0.001), (0.86, 0.05), "-14 ± 5 %"),
        ((1.0, 0.04), (1.01, 0.04), "+1 ± 6 %?"),
        ((1.0, 0.001), (1.0, 0.001), "+0.0 %?"),
        ((1.0, None), (1.33, None), "+33.0 %*"),
        ((1.0, 0.001), (2.04, 0.001), "2.04 times"),
        ((1.0, 0.1), (3.0, 0.3), "3 ± 0.42 times"),
        ((206.0, 12.0), (1.0, 0.01), "1/206 ± 6 %"),
    ]:
        assert texts_table.change(measured(*base), measured(*other)) == said, (base, other, said)


def test_the_texts_figures_are_all_in_the_suites_record() -> None:
    drawn = renew_tables.texts("ci/records/nvidia-h200/suite.json")
    assert "not in this record" not in drawn
    assert len(drawn.splitlines()) > 70
