"""The records: each is evidence for something, and documents draw their tables and the figure from them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keep_record
import peers_records
import pytest
import renew_tables
import texts_table
from peers_summary import NVBENCH, OURS

from pytest_gpumem.records.schema import document_from_json

ROOT = Path(__file__).parents[3]
RECORD = {(OURS, 2): [6e-6, 6.1e-6, 6.05e-6], (NVBENCH, 2): [6.6e-6, 6.7e-6, 6.8e-6]}


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


def test_a_record_that_is_not_there_yet_is_said_to_be_missing() -> None:
    text = renew_tables.renewed(
        "<!-- record: ci/records/no-such/peers.json -->\n```text\nold\n```\n"
    )
    assert "not recorded yet: ci/records/no-such/peers.json" in text


HEAD = subprocess.run(
    ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.strip()
BEFORE = "5d0a7948713937660180d4d014568558fbc0ec01"
STREAM, ZERO_COPY = "tests/memory/test_stream.py::test_triad", "tests/memory/test_zero_copy.py"
SEEDS = "tests/memory/test_l2_seeds.py"


@pytest.mark.skipif(not HEAD, reason="needs the history of a checkout")
@pytest.mark.parametrize(
    ("run", "tests", "flaws"),
    [
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
    ],
)
def test_a_record_is_evidence_by_a_clean_revision_whose_tests_passed_and_are_todays(
    run: dict[str, Any], tests: dict[str, bool], flaws: list[str]
) -> None:
    assert renew_tables.flaws(run, tests) == flaws


@pytest.mark.skipif(not HEAD, reason="needs the history of a checkout")
@pytest.mark.parametrize(
    ("path", "was", "is_now", "flaws"),
    [
        (
            "tests/memory/test_l2_seeds.py",
            "LEAN_GRID = 32",
            "LEAN_GRID = 64",
            ["tests have changed since"],
        ),
        (
            "tests/memory/test_l2_seeds.py",
            "with_grid(LEAN_GRID)\n",
            "with_grid(2 * LEAN_GRID)\n",
            ["tests have changed since"],
        ),
        (
            "tests/memory/test_l2_seeds.py",
            "hit_ratio=1.0, allow_thrash=True) as",
            "hit_ratio=0.9) as",
            ["tests have changed since"],
        ),
        ("tests/memory/conftest.py", "min(1 * GiB", "min(2 * GiB", ["tests have changed since"]),
        ("tests/memory/test_l2_seeds.py", "REGIONS = (10,", "REGIONS = (5,", []),
    ],
    ids=[
        "constant",
        "fixture",
        "function of a fixture",
        "fixture of conftest.py",
        "another test's constant",
    ],
)
def test_a_test_has_changed_if_what_it_reaches_has(
    monkeypatch: pytest.MonkeyPatch, path: str, was: str, is_now: str, flaws: list[str]
) -> None:
    git = renew_tables._git

    def before(*words: str) -> str | None:
        text = git(*words)
        return text.replace(was, is_now) if text and words[-1] == f"{HEAD}:{path}" else text

    monkeypatch.setattr(renew_tables, "_git", before)
    for kept in (renew_tables._definitions, renew_tables._source):
        kept.cache_clear()
    assert was in (ROOT / path).read_text()
    assert (
        renew_tables.flaws(
            {"commit_info": {"id": HEAD}}, {f"{SEEDS}::test_reset_data_at_the_texts_sizes": False}
        )
        == flaws
    )
    for kept in (renew_tables._definitions, renew_tables._source):
        kept.cache_clear()


@pytest.mark.skipif(not HEAD, reason="needs the history of a checkout")
def test_a_commit_that_only_this_clone_holds_is_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebase leaves such a commit behind: its objects are there, but no clone of the branch gets them."""

    def git(*words: str, **env: str) -> str:
        of_git = {**os.environ, **env}
        return subprocess.run(
            ["git", *words], cwd=ROOT, env=of_git, capture_output=True, text=True, check=True
        ).stdout.strip()

    author = {
        f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    objects = str((ROOT / git("rev-parse", "--git-path", "objects")).resolve())
    elsewhere = {"GIT_OBJECT_DIRECTORY": str(tmp_path), "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects}
    left = git("commit-tree", "-m", "left", "-p", HEAD, f"{HEAD}^{{tree}}", **author, **elsewhere)
    monkeypatch.setenv("GIT_ALTERNATE_OBJECT_DIRECTORIES", str(tmp_path))

    assert renew_tables.flaws({"taken_at": {"revision": left}}) == [
        f"{left[:12]} is not in this repository's history"
    ]


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


@pytest.mark.parametrize(
    ("base", "other", "said"),
    [
        ((1.0, 0.001), (1.046, 0.001), "+4.6 %"),
        ((1.0, 0.001), (0.86, 0.05), "-14 ± 5 %"),
        ((1.0, 0.04), (1.01, 0.04), "+1 ± 6 %?"),
        ((1.0, 0.001), (1.0, 0.001), "+0.0 %?"),
        ((1.0, None), (1.33, None), "+33.0 %*"),
        ((1.0, 0.001), (2.04, 0.001), "2.04 times"),
        ((1.0, 0.1), (3.0, 0.3), "3 ± 0.42 times"),
        ((206.0, 12.0), (1.0, 0.01), "1/206 ± 6 %"),
    ],
)
def test_a_change_says_its_interval_and_where_it_shows_nothing(
    base: Any, other: Any, said: str
) -> None:
    assert texts_table.change(measured(*base), measured(*other)) == said


def test_two_windows_show_every_setting_of_the_record_with_its_interval() -> None:
    medians = {"off": (100.0, 0.0), "1": (100.0, 2.5), "0.5": (140.0, 25.0), "fit": (90.0, 0.0)}
    found = {
        name: {"median": median, "half_width": half} for name, (median, half) in medians.items()
    }
    cases = [
        {"blocks": blocks, "set_aside": 2**20 * 16 // share, "found": found}
        for blocks in (32, 64)
        for share in (8, 4, 2)
    ]
    _, _, *drawn = texts_table.of_two_windows(cases, 2**20 * 16)
    assert [line.partition(" of L2")[0].strip() for line in drawn] == [
        f"{n} blocks, 1/{share}" for n in (32, 64) for share in (8, 4, 2)
    ]
    assert drawn[0].endswith("     +0 ± 2 %?    +40 ± 25 %       -10.0 %")


def test_the_texts_figures_are_all_in_the_suites_record() -> None:
    drawn = renew_tables.texts("ci/records/nvidia-h200/suite.json")
    assert "not in this record" not in drawn
    assert len(drawn.splitlines()) > 70


def test_the_figure_is_the_same_for_the_same_record_and_names_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    import plot_peers

    (tmp_path / "peers.json").write_text(json.dumps(keep_record.kept(peers_records.record(RECORD))))
    drawn = []
    for name in ("one.svg", "other.svg"):
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "plot_peers.py",
                str(tmp_path / "peers.json"),
                "--svg",
                str(tmp_path / "images" / name),
            ],
        )
        assert plot_peers.main() == 0
        drawn.append((tmp_path / "images" / name).read_text())
    assert drawn[0] == drawn[1]
    for shown in (OURS, NVBENCH, "NVIDIA H200", "2 MiB", "wall time"):
        assert shown in drawn[0]
    assert "gpumem hot" not in drawn[0]


def test_another_record_is_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    import plot_peers

    (tmp_path / "other.json").write_text('{"kind": "host_link"}')
    monkeypatch.setattr(
        sys,
        "argv",
        ["plot_peers.py", str(tmp_path / "other.json"), "--svg", str(tmp_path / "x.svg")],
    )
    with pytest.raises(SystemExit):
        plot_peers.main()
    assert "no record of ci/bench/peers.py" in capsys.readouterr().err
