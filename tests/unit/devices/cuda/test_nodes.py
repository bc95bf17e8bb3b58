"""NUMA nodes of the host, and where a thread runs while memory is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.runtime")

from pytest_gpumem.devices.cuda import places
from pytest_gpumem.devices.protocol import Unsupported


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two nodes: the CPUs that this thread may run on, and none of them."""
    mine = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    for node, cpus in ((0, mine), (1, "100000-100003,100008")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    (tmp_path / "node2").mkdir()  # its list cannot be read
    return tmp_path


def test_cpus_are_read_from_lists(system: Path) -> None:
    found = places.nodes(system)
    assert found == {
        0: frozenset(os.sched_getaffinity(0)),
        1: frozenset([100000, 100001, 100002, 100003, 100008]),
    }


def test_a_node_that_was_asked_for_must_be_there(system: Path) -> None:
    with (
        pytest.raises(Unsupported, match=r"numa=5: the host has no such NUMA node; it has: 0, 1$"),
        places.on_node(5, 0, system),
    ):
        pass
    with (
        pytest.raises(Unsupported, match="numa=1: none of the CPUs of that NUMA node"),
        places.on_node(1, 0, system),
    ):
        pass
