"""How tests are divided among shards, and Holm's procedure over the rows of all of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_devices import H100
from processes import measured

from pytest_gpumem.commands.merge import RESULTS, merged_into
from pytest_gpumem.outcomes import Code, Outcome, UserError
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Comparison, Row, Verdict
from pytest_gpumem.records.schema import document, to_plain
from pytest_gpumem.runs.shards import KEY, Ended, Shard, digest, divided, junit, merged

costs = st.dictionaries(st.text("abc", min_size=1, max_size=4), st.none() | st.floats(0.01, 100))


@given(costs, st.integers(1, 9))
def test_every_test_has_one_shard_and_known_costs_are_balanced(costs: dict[str, float | None], count: int) -> None:
    shards = divided(costs, count)
    assert shards.keys() == costs.keys()
    assert set(shards.values()) <= set(range(1, count + 1))
    assert divided(dict(reversed(costs.items())), count) == shards
    known = {name: cost for name, cost in costs.items() if cost is not None}
    loads = [sum(cost for name, cost in known.items() if shards[name] == index) for index in range(1, count + 1)]
    # No shard has more than the least one and one test.
    assert max(loads) <= min(loads) + max(known.values(), default=0.0) + 1e-9


@given(costs, costs, st.integers(1, 9))
def test_a_test_without_a_cost_stays_where_it_is(costs: dict[str, float | None], others: dict[str, float | None], count: int) -> None:
    unknown = [name for name, cost in costs.items() if cost is None]
    together = {**others, **costs}
    assert {name: divided(costs, count)[name] for name in unknown} == {name: divided(together, count)[name] for name in unknown}


def verdict(p_value: float, outcome: Outcome = Outcome.FAIL, code: Code = Code.SLOWER) -> Verdict:
    return Verdict(outcome, "because", Comparison(0.03, 0.02, 0.04, 0.01, 3, p_value=p_value), code=code)


def files(folder: Path, shards: list[dict[str, tuple[float, bool]]], size: int) -> list[Path]:
    """Results of shards: by test, the p-value of its row, and whether its shard fails it."""
    names = [name for shard in shards for name in shard]
    paths = []
    for index, shard in enumerate(shards, 1):
        rows, withheld = [], {}
        for name, (p_value, fails) in shard.items():
            found = verdict(p_value) if fails else verdict(p_value, Outcome.UNDECIDED, Code.LOOKS_SLOWER)
            rows.append(Row(name, Limits(max_regression="1%"), found, measured(1e-3), failed=fails))
            if not fails:
                withheld[name] = to_plain(verdict(p_value))
        tests = [Ended(name, "failed" if fails else "passed", 1.0, "slower" if fails else "") for name, (_, fails) in shard.items()]
        block = Shard(index, len(shards), digest(names), int(any(fails for _, fails in shard.values())), tests, size, withheld)
        value: dict[str, Any] = {
            "benchmarks": [],
            "datetime": "2026-01-01T00:00:00+00:00",
            "commit_info": {"id": "abc", "dirty": False},
            "gpumem": document(H100, rows, {"mode": "hot"}),
            KEY: msgspec.to_builtins(block),
        }
        paths.append(folder / f"shard-{index}.json")
        paths[-1].write_text(json.dumps(value))
    return paths


@pytest.mark.parametrize(
    ("p_values", "rejected"),
    [
        # Of 100 rows the first needs 0.05 / 100, the next 0.05 / 99, and so on.
        ([4e-4, 0.05 / 99, 0.05 / 98], 3),
        ([4e-4, 0.05 / 99, 0.0501 / 98], 2),
        ([0.0501 / 100, 0.05 / 98], 0),
    ],
)
def test_rows_are_judged_among_those_of_all_shards(tmp_path: Path, p_values: list[float], rejected: int) -> None:
    """Each shard alone rejects what one of 100 rows may; Holm's steps go on over all of them."""
    shards = [{f"test_{index}.py::test": (p_value, p_value <= 0.05 / 100)} for index, p_value in enumerate(p_values)]
    found = merged(files(tmp_path, shards, 100))
    failing = {row.nodeid for row in found.document.rows if row.verdict.outcome is Outcome.FAIL}
    assert failing == {f"test_{index}.py::test" for index in range(rejected)}
    assert {row.nodeid for row in found.document.rows if row.failed} == failing
    assert (found.failures, found.code) == (rejected, int(rejected > 0))
    cases = list(ElementTree.fromstring(junit(found.tests)).iter("testcase"))
    assert {case.get("classname") for case in cases if case.find("failure") is not None} == {f"test_{i}" for i in range(rejected)}


def test_a_row_that_fails_among_all_shards_is_so_in_every_output(tmp_path: Path) -> None:
    path, other = files(tmp_path, [{"test_0.py::test": (4e-4, False)}, {"test_1.py::test": (0.5, False)}], 2)
    value = json.loads(path.read_text())
    value["benchmarks"] = [{"fullname": "test_0.py::test"}, {"fullname": "test_0.py::test_host"}]
    value[KEY]["tests"][0]["properties"] = [("gpumem_verdict", "UNDECIDED"), ("own", "1")]
    path.write_text(json.dumps(value))
    found = merged([path, other])
    assert dict(found.tests[0].properties)["gpumem_verdict"] == found.document.rows[0].verdict.outcome.value == "FAIL"
    assert dict(found.tests[0].properties)["own"] == "1"
    assert found.value["benchmarks"] == [{"fullname": "test_0.py::test_host"}]


def test_a_fail_that_is_no_slow_down_makes_room_for_none(tmp_path: Path) -> None:
    """A test that fails by another limit, or because it is faster, is no rejected slow-down."""
    found = merged(files(tmp_path, [{"test_0.py::test": (0.9, True)}, {"test_1.py::test": (0.0501 / 100, False)}], 100))
    assert [row.verdict.outcome for row in found.document.rows] == [Outcome.FAIL, Outcome.UNDECIDED]


def test_what_pytest_benchmark_wrote_is_merged_as_it_is(tmp_path: Path) -> None:
    """It writes NaN, as of a test's extra_info."""
    (path,) = files(tmp_path, [{"test_0.py::test": (0.5, False)}], 1)
    path.write_text(json.dumps({**json.loads(path.read_text()), "benchmarks": [{"extra_info": {"x": math.nan}}]}))
    merged_into(tmp_path / "out", [str(path)])
    assert "NaN" in (tmp_path / "out" / RESULTS).read_text()


def test_shards_of_other_code_or_another_card(tmp_path: Path) -> None:
    shards = [{f"test_{index}.py::test": (0.5, False)} for index in range(2)]
    paths = files(tmp_path, shards, 2)
    assert merged(paths).code == 0
    for change, words in (
        ({"commit_info": {"id": "def", "dirty": False}}, "revision"),
        ({"gpumem": document(msgspec.structs.replace(H100, name="NVIDIA B200"), [], {"mode": "hot"})}, "GPU"),
        ({KEY: {"index": 2}}, "missing required field"),
        ({KEY: "no"}, "of no shard"),
    ):
        other = tmp_path / "other.json"
        other.write_text(json.dumps({**json.loads(paths[1].read_text()), **change}))
        with pytest.raises(UserError, match=words):
            merged([paths[0], other])


def test_names_and_texts_of_tests_in_junit() -> None:
    tests = [
        Ended("tests/a/test_b.py::TestC::test_d[x::[y]]", "error", 1.5, "line\nmore \x00", properties=[("gpumem", "{}")]),
        Ended("test_e.py::test_f", "skipped", 0.0, "why"),
        Ended("test_e.py::test_g"),
    ]
    suite = ElementTree.fromstring(junit(tests)).find("testsuite")
    assert suite is not None
    assert [suite.get(name) for name in ("tests", "errors", "failures", "skipped")] == ["2", "1", "0", "1"]
    first, second = suite
    assert (first.get("classname"), first.get("name"), first.get("time")) == ("tests.a.test_b.TestC", "test_d[x::[y]]", "1.500")
    error = first.find("error")
    assert error is not None
    assert (error.get("message"), error.text) == ("line", "line\nmore ?")
    assert second.find("skipped") is not None
