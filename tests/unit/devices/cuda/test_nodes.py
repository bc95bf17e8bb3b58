"""NUMA nodes of the host, and where a thread runs while memory is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.runtime")

from pytest_gpumem.devices.cuda import places


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
    assert places.cpus_of(0, system) == os.sched_getaffinity(0)
    assert places.cpus_of(1, system) == {100000, 100001, 100002, 100003, 100008}
    assert places.cpus_of(2, system) == set()


def test_a_thread_runs_on_the_nearest_node_where_it_may(system: Path) -> None:
    for node, expected in ((0, 0), (1, None), (5, None), (None, None)):
        with places.on_node(node, system) as chosen:
            assert chosen == expected, node
