"""Evidence as a file: written, read back, explained from, and refused where it is none; calls of `gpumem explain`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from causes_evidence import KERNEL, measurement, profile, window
from click.testing import CliRunner, Result
from known_devices import H100
from msgspec import structs

from pytest_gpumem.cli import main
from pytest_gpumem.commands import explain
from pytest_gpumem.commands.explain import explanations
from pytest_gpumem.explain.evidence import SideEvidence, load, to_json, together
from pytest_gpumem.explain.text import sentence
from pytest_gpumem.outcomes import Outcome, UserError
from pytest_gpumem.records.footprint import Footprint, Site
from pytest_gpumem.records.measurement import Conditions, Limits
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.records.uses import Activity

KEY = "test_it.py::test_it"
UTC = "2026-11-21T10:00:00+00:00"


def side(latency: float = 400e-6, name: str = "base", **changed: Any) -> SideEvidence:
    return SideEvidence(
        name, H100, {KEY: measurement(latency, **changed)}, {KEY: (KEY, "")}, {KEY: profile()}
    )


def written(one: SideEvidence, file: Path, **changed: Any) -> str:
    file.write_text(json.dumps({**to_json(one, [KEY], utc=UTC), **changed}), encoding="utf-8")
    return str(file)


def called(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def test_evidence_comes_back_whole(tmp_path: Path) -> None:
    before = side(window=window())
    after = load(written(before, tmp_path / "base.json"))
    kept = after.measured[KEY]
    assert structs.replace(kept, provenance=None) == before.measured[KEY]
    assert after.profiles == before.profiles
    assert after.facts == H100


def test_what_only_one_side_measured_is_told(tmp_path: Path) -> None:
    both = replace(
        side(),
        measured={KEY: measurement(), "gone": measurement()},
        tests={KEY: (KEY, ""), "gone": ("gone", "")},
    )
    (tmp_path / "base.json").write_text(json.dumps(to_json(both, [KEY, "gone"], utc=UTC)))
    files = [str(tmp_path / "base.json"), written(side(name="head"), tmp_path / "head.json")]
    done = called(*files, "--json", str(tmp_path / "why.json"))
    assert done.exit_code == 0, done.output
    assert "note: only base measured gone" in done.output
    assert json.loads((tmp_path / "why.json").read_text())["notes"] == ["only base measured gone"]


def test_results_without_counters_are_evidence_too(tmp_path: Path) -> None:
    plain = to_json(side(), [KEY], utc=UTC)
    del plain["profiles"]
    (tmp_path / "base.json").write_text(json.dumps(plain))
    found = explanations(load(str(tmp_path / "base.json")), side(600e-6))[KEY]
    assert any(
        need.words == "needs counters of ncu on both sides"
        for _, needs in found.skipped
        for need in needs
    )


def test_a_throttled_row_is_evidence_because_that_may_be_the_cause(tmp_path: Path) -> None:
    slow = Conditions(sm_clock_hz=1600e6, throttle_reasons=("sw_power_cap",))
    base = side(moved_bytes=None, conditions=(Conditions(sm_clock_hz=1980e6),) * 2)
    base = replace(base, profiles={})
    head = replace(
        base,
        measured={KEY: measurement(490e-6, moved_bytes=None, conditions=(slow, slow), during=slow)},
    )
    head = load(written(head, tmp_path / "head.json"))
    found = explanations(base, head)[KEY]
    assert sentence(found.causes[0]) == "SM clock 1980 → 1600 MHz (sw_power_cap): not the code"


def test_processes_become_one_measurement() -> None:
    verdict = Verdict(Outcome.PASS, "")
    seen = Activity(kernels=(KERNEL,), source="CUPTI")
    rows = [
        Row(KEY, Limits(), verdict, measurement(400e-6, activity=seen)),
        Row(KEY, Limits(), verdict, measurement(500e-6, sampler="host", activity=None)),
        Row(
            KEY,
            Limits(),
            verdict,
            measurement(410e-6, activity=Activity(not_counted="nothing was delivered")),
        ),
    ]
    whole = together(rows)
    assert whole.latency == pytest.approx(410e-6)
    assert [one.medians[0] for one in whole.further] == [400e-6]  # another sampler is another clock
    assert whole.activity == seen


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"profiles": {"schema": 99, "profiles": []}},
            "$.profiles.schema: 99; this version reads 1",
        ),
        ({"profiles": 3}, "$.profiles.profiles: missing"),
        ({"gpumem": {"schema": 1}}, "$.gpumem"),
    ],
)
def test_what_is_no_evidence_is_refused_in_one_line(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    file = written(side(), tmp_path / "base.json", **changed)
    with pytest.raises(UserError) as refused:
        load(file)
    assert str(refused.value).startswith(file)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_sides_of_different_devices_explain_nothing() -> None:
    other = replace(side(), facts=structs.replace(H100, name="NVIDIA A100"))
    with pytest.raises(
        UserError, match=r"NVIDIA-A100.*results of different devices explain nothing"
    ):
        explanations(other, side())


def test_sides_without_a_common_measurement_are_refused() -> None:
    with pytest.raises(UserError, match="no measurement in common"):
        explanations(replace(side(), measured={"other": measurement()}), side())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["test_it.py::test_it"], "without --base two files are expected, BASE.json HEAD.json"),
        (["--pairs", "5", "a.json", "b.json"], "--pairs, --ncu and --nsys need --base"),
        (["--no-ncu", "a.json", "b.json"], "--pairs, --ncu and --nsys need --base"),
        (["nowhere.json", "base.json"], "nowhere.json: no such file, folder or pattern"),
        (["--base", "no-such-revision", KEY], "BASE no-such-revision is no revision"),
        (["--base", "HEAD", KEY, "--", "--benchmark-json=x.json"], "--benchmark-json"),
        (["--json", "nowhere/why.json", "a.json", "b.json"], "there is no folder"),
    ],
)
def test_a_call_that_cannot_be_carried_out_is_refused_in_one_line(
    arguments: list[str], words: str
) -> None:
    done = called(*arguments)
    assert done.exit_code == 4
    assert words in done.output
    assert "Traceback" not in done.output


def test_memory_is_explained_by_the_lines_that_grew_also_of_a_test_that_measures_no_time(
    tmp_path: Path,
) -> None:
    line = Site(
        "model.py", 12, "forward", "y = a * b", "PyTorch", "device", at_peak=64, at_peak_count=1
    )
    taken = Footprint(64, sites=(line,))
    key = "test_it.py::test_memory"
    base = replace(
        side(), tests={KEY: (KEY, ""), key: (key, "")}, footprints={key: taken, KEY: Footprint(7)}
    )
    more = structs.replace(taken, peak=256, sites=(structs.replace(line, line=14, at_peak=256),))
    head = replace(base, name="head", footprints={key: more, KEY: Footprint(7)})
    files = [str(tmp_path / "base.json"), str(tmp_path / "head.json")]
    for one, file in zip((base, head), files, strict=True):
        Path(file).write_text(json.dumps(to_json(one, [KEY, key], utc=UTC)))
    done = called(*files, "--json", str(tmp_path / "why.json"))
    assert done.exit_code == 0, done.output
    lines = [
        "peak memory 64 B -> 256 B (+192 B)",
        "  +192 B  model.py:14 in forward: y = a * b  (64 B before)",
    ]
    assert json.loads((tmp_path / "why.json").read_text())["memory"] == [
        {"key": key, "changes": lines}
    ]
    assert "\n  ".join([key, *lines]) in done.output


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Calls that would have measured; each gives two sides that a missing tool left a note on."""
    monkeypatch.chdir(tmp_path)
    calls: list[Any] = []
    side = SideEvidence(
        "base", H100, {"a": measurement()}, {"a": ("a", "")}, notes=("ncu was not found",)
    )

    def stand_in(*given: Any) -> tuple[SideEvidence, SideEvidence]:
        calls.append(given)
        return side, replace(side, name="head", notes=("ncu was not found", "nsys wrote no report"))

    monkeypatch.setattr(explain, "_measured", stand_in)
    return calls


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--keep", "file/deep"], r"--keep: file/deep: there is no folder .*file"),
        (
            ["--ncu"],
            r"--ncu: GPUMEM_NCU='no-ncu' is no program; accepted is the path of Nsight Compute's command line, ncu",
        ),
        (["--nsys"], r"--nsys: GPUMEM_NSYS='no-nsys' is no program"),
    ],
)
def test_what_would_fail_after_measuring_is_refused_before(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("GPUMEM_NCU", "no-ncu")
    monkeypatch.setenv("GPUMEM_NSYS", "no-nsys")
    Path("file").touch()
    done = called("--base", "main", *arguments, "test_a.py::test_a")
    assert done.exit_code == 4
    assert measured == []
    (line,) = done.stderr.splitlines()
    assert re.search(said, line), line


def test_a_note_on_both_sides_is_said_once(measured: list[Any]) -> None:
    done = called("--base", "main", "--keep", "new/deep", "test_a.py::test_a")
    assert done.exit_code == 0, done.output
    assert len(measured) == 1
    assert done.stdout.count("ncu was not found") == 1
    assert "note: base and head: ncu was not found" in done.stdout
    assert "note: head: nsys wrote no report" in done.stdout
    assert sorted(path.name for path in Path("new/deep").iterdir()) == ["base.json", "head.json"]
