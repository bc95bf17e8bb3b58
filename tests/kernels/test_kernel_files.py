"""The CUDA sources: each is used, and a missing one is named."""

from __future__ import annotations

import pytest
from installing import ROOT

from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import read_source

STEMS = (
    "stream l2_persistence l2_bandwidth unified_memory access_pattern transpose latency transfers"
)
NAMES = {f"{stem}.cu" for stem in STEMS.split()}


def test_every_source_is_used_and_every_used_one_is_there() -> None:
    assert {k.source for k in CATALOGUE.values() if k.source} == NAMES
    assert {p.name for p in (ROOT / "kernels").glob("*.cu")} == NAMES


def test_sources_need_no_header() -> None:
    for name in NAMES:
        assert "#include" not in read_source(name)


def test_a_missing_source_says_where_it_looked_and_what_there_is() -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"no kernel source 'strem\.cu' in .*; there are access_pattern\.cu, .*unified_memory\.cu",
    ):
        read_source("strem.cu")
