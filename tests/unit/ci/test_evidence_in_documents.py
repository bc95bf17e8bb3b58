"""The records behind the engine's decisions are drawn by the scripts that wrote them."""

from __future__ import annotations

import importlib

import pytest
import renew_tables

KINDS = (
    "catalogue_traffic", "freed_memory", "l2_persistence", "l2_proof", "launch_shapes", "limit_proof", "managed_memory",
    "nsight_reading", "reading_noise",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_is_drawn_by_its_script(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(kind), "table", lambda run: f"drawn from {run['kind']}")
    assert renew_tables.bench_table({"kind": kind}) == f"drawn from {kind}"


def test_rows_of_a_run_are_chosen_by_their_node_id() -> None:
    record = "ci/records/nvidia-h200/suite.json"
    all_rows, of, without = (
        renew_tables.record(record, *chosen).count("PASS")
        for chosen in ((), ("of", "tests/memory/test_stream.py"), ("without", "tests/memory/test_stream.py"))
    )
    assert 0 < of < all_rows
    assert of + without == all_rows
