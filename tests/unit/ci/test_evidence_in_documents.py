"""The records behind the engine's decisions are drawn by the scripts that wrote them."""

from __future__ import annotations

import importlib

import pytest
import renew_tables


@pytest.mark.parametrize("kind", ["freed_memory", "l2_persistence", "l2_proof", "launch_shapes", "reading_noise"])
def test_a_record_is_drawn_by_its_script(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(kind), "table", lambda run: f"drawn from {run['kind']}")
    assert renew_tables.bench_table({"kind": kind}) == f"drawn from {kind}"
