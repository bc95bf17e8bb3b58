"""Reports of a GPU (`tests/data/nsight`), beside what the tools themselves said of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.nsight import ncu
from pytest_gpumem.nsight.nsys import read_sqlite
from pytest_gpumem.nsight.nsys_tables import Tables
from pytest_gpumem.ranges import DOMAIN, MEASURE, phase
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.uses import KernelUse

DATA = Path(__file__).resolve().parents[2] / "data" / "nsight"


def sums(kernels: Iterable[KernelUse]) -> dict[str, list[int]]:
    """Launches and nanoseconds by name, whatever the shapes."""
    launches: Counter[str] = Counter()
    nanoseconds: Counter[str] = Counter()
    for kernel in kernels:
        launches[kernel.name] += kernel.launches
        nanoseconds[kernel.name] += kernel.nanoseconds
    return {name: [launches[name], nanoseconds[name]] for name in launches}


def summary(one: TestProfile) -> dict[str, Any]:
    return {
        "name": one.name,
        "nodeid": one.nodeid,
        "label": one.label,
        "launches": one.launches,
        "nanoseconds": sum(kernel.nanoseconds for kernel in one.kernels),
        "kernels": sum(kernel.launches for kernel in one.kernels),
        "copies": [
            [copy.kind, copy.source, copy.destination, copy.count, copy.nbytes, copy.nanoseconds]
            for copy in one.copies
        ],
    }


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.sqlite")))
def test_nsys(name: str) -> None:
    expected = json.loads((DATA / f"{name}.expected.json").read_text())
    with Tables(DATA / f"{name}.sqlite") as tables:
        found = read_sqlite(tables)
    assert json.loads(json.dumps([summary(one) for one in found])) == [
        one for one in expected["profiles"] if one["launches"] is not None
    ]
    stats = expected["stats"]
    measured = sums(kernel for one in found for kernel in one.kernels)
    said = {
        kernel: figures
        for range_, _, kernel, *figures in stats["ranges"]
        if range_ == f"{DOMAIN}:{phase(name, MEASURE)}"
    }
    assert measured == said


def test_ncu() -> None:
    [wanted] = json.loads((DATA / "test_kernels.csv.expected.json").read_text())["kernels"]
    (found,) = ncu.read_csv((DATA / "test_kernels.csv").read_text())
    (kernel,) = found.kernels
    for name, value in wanted.items():
        owner = found if name in ("name", "sm_clock_hz", "memory_clock_hz", "set_aside") else kernel
        assert getattr(owner, name) == (
            value if isinstance(value, str) else pytest.approx(value, rel=1e-4)
        ), name
