"""The history in formats of other programs, as their own readers read them."""

from __future__ import annotations

import csv as csv_reader
import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from histories import CARD, DEVICE, NEWEST, change, one_slower, runs, series

from pytest_gpumem.files import write_whole
from pytest_gpumem.history.data import History
from pytest_gpumem.history.exports import COLUMNS, bmf, csv, openmetrics, parquet
from pytest_gpumem.outcomes import UserError

HOSTILE = '=1+1,"x"\\\n\x1b{}'


def two_cards() -> History:
    """A test of two figures on one card, another on a simulated one, with an accepted change and a hostile name."""
    other = f"simulated-{CARD}"
    all_runs = (*runs(3), *runs(2, card=other, simulated=True))
    lines = (
        series("t.py::test_a", [1e-4, 1e-4, 2e-4], variant="DRAM 700 ns"),
        series("t.py::test_a", [4096.0, 4096.0, 8192.0], metric="copied bytes", unit="B"),
        replace(series(HOSTILE, [3.0, 4.0], metric="kernels", unit="", card=other), runs=np.array([3, 4], np.int32)),
        series("t.py::test_a", [0.5, 0.25, 1e12], metric="traffic", unit="B"),
    )
    changes = (change(0, 2, 1e-4, 2e-4, who="ann", why="fused"), change(1, 2, 4096, 8192))
    return History(all_runs, lines, changes)


def test_csv_has_a_line_for_each_value_and_its_changes(tmp_path: Path) -> None:
    file = tmp_path / "history.csv"
    write_whole(file, csv(two_cards()))
    lines = list(csv_reader.DictReader(io.StringIO(file.read_text())))
    assert len(lines) == 3 + 3 + 2 + 3
    assert tuple(lines[0]) == COLUMNS
    assert lines[2] == {
        "test": "t.py::test_a",
        "metric": "latency",
        "unit": "s",
        "card": CARD,
        "variant": "DRAM 700 ns",
        "device": DEVICE,
        "simulated": "False",
        "time": NEWEST.isoformat(timespec="seconds"),
        "revision": f"0002{'c0de' * 9}",
        "accepted": "False",
        "value": "0.0002",
        "change": "1",
        "change_accepted": "True",
    }
    assert [(line["change"], line["change_accepted"]) for line in lines[:6]] == [
        ("", ""),
        ("", ""),
        ("1", "True"),
        ("", ""),
        ("", ""),
        ("1", "False"),
    ]
    assert lines[6]["test"] == '\'=1+1,"x"\\\\n\\x1b{}'  # no formula, no line break
    assert [line["simulated"] for line in lines[6:8]] == ["True", "True"]


def test_parquet_has_the_lines_of_csv(monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pytest.importorskip("pyarrow.parquet").read_table(pyarrow.BufferReader(bytes(parquet(two_cards()))))
    assert tuple(table.column_names) == COLUMNS
    lines = table.to_pylist()
    same = list(csv_reader.DictReader(io.StringIO(b"".join(csv(two_cards())).decode())))
    for line, other in zip(lines, same, strict=True):
        assert line.pop("time").isoformat(timespec="seconds") == other.pop("time")
        assert line.pop("test").removeprefix("'") == other.pop("test").removeprefix("'")
        assert {name: "" if value is None else str(value) for name, value in line.items() if name != "change"} == {
            name: value for name, value in other.items() if name != "change"
        }
    assert [line["change"] for line in lines[:6]] == [None, None, pytest.approx(1.0)] * 2
    assert len(parquet(History((), (), ()))) > 0
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pyarrow; pip install 'pytest-gpumem\[parquet\]'"):
        parquet(two_cards())


@pytest.mark.parametrize("history", [History((), (), ()), one_slower(), two_cards()])
def test_openmetrics_is_read_by_the_client_of_prometheus(history: History) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    families = {one.name: one for one in parser.text_string_to_metric_families(openmetrics(history))}
    samples = [sample for one in families.values() if one.name != "gpumem_newest_run_timestamp_seconds" for sample in one.samples]
    assert len(samples) == len(history.series)
    for one in history.series:
        (found,) = (sample for sample in samples if sample.labels["metric"] == one.metric)
        assert found.value == one.values[-1]
        assert (found.labels["card"], found.labels["variant"]) == (one.card, one.variant or "")
    if history.runs:
        assert families["gpumem_seconds"].unit == "seconds"
        newest = {sample.labels["card"]: sample.value for sample in families["gpumem_newest_run_timestamp_seconds"].samples}
        assert newest[CARD] == NEWEST.timestamp()


def test_labels_of_openmetrics_are_escaped() -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    names = {sample.labels.get("test") for one in parser.text_string_to_metric_families(openmetrics(two_cards())) for sample in one.samples}
    assert '=1+1,"x"\\\\n\\x1b{}' in names


def test_bencher_gets_the_last_values_by_card_and_variant() -> None:
    found = json.loads(bmf(two_cards()))
    assert found[f"t.py::test_a @ {CARD}, DRAM 700 ns"] == {"latency": {"value": pytest.approx(2e5)}}  # ns
    assert found[f"t.py::test_a @ {CARD}"] == {"copied bytes": {"value": 8192.0}, "traffic": {"value": 1e12}}
