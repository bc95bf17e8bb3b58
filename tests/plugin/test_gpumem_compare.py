"""`gpumem compare` beside the session that it repeats: the same verdicts and the same exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from sessions import Run, results_in, rows_in, slower

from pytest_gpumem.cli import main

SUITE = """
import pytest
from pytest_gpumem import MiB

@pytest.mark.gpumem(max_peak_regression="0 B")
def test_memory(device_buffer):
    device_buffer({memory} * MiB)

@pytest.mark.gpumem(max_regression="5%", max_kernels="base")
def test_time(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer({copied} * MiB), device_buffer({copied} * MiB))

@pytest.mark.gpumem(max_kernels="base")
def test_kernels(gpu_benchmark, device_buffer, gpu_kernels):
    a, b = device_buffer(64 * MiB), device_buffer(64 * MiB)
    gpu_benchmark({kernel}, a, b, label="{label}")
"""
BASE = {"memory": 80, "copied": 256, "kernel": "gpu_kernels.copy", "label": "copy"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"memory": 87}, 1),
        ({"memory": 79}, 0),
        ({"factor": 1.3}, 1),
        ({"factor": 1.04}, 0),
    ],
    ids=["nothing", "more memory", "less memory", "slower", "within the limit"],
)
def test_files_get_what_the_session_gives(
    pytester: pytest.Pytester,
    gpumem: Run,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    code: int,
) -> None:
    pytester.makepyfile(test_it=SUITE.format(**BASE))
    pytester.makeconftest(slower("float(os.environ.get('FACTOR', 1))"))
    for _ in range(3):
        assert gpumem("--gpumem-save").ret == 0
    assert gpumem("--benchmark-json=base.json").ret == 0
    pytester.makepyfile(test_it=SUITE.format(**BASE | change))
    monkeypatch.setenv("FACTOR", str(change.get("factor", 1)))
    assert gpumem("--benchmark-json=head.json").ret == code
    (folder,) = pytester.path.glob(".benchmarks/*/gpumem")
    done = CliRunner().invoke(main, ["compare", str(folder), "head.json", "--json", "-"])
    found = {
        row["test"]: (row["outcome"], row["reason"]) for row in json.loads(done.stdout)["rows"]
    }
    said = {
        row["key"]: (row["verdict"]["outcome"], row["verdict"]["reason"])
        for row in rows_in(pytester.path, "head.json")
    }
    assert found == said
    assert done.exit_code == code
    assert CliRunner().invoke(main, ["compare", "base.json", "head.json"]).exit_code == code


def test_a_row_that_the_session_finds_lost_is_lost(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(test_it=SUITE.format(**BASE))
    assert gpumem("--gpumem-save", "--benchmark-json=base.json").ret == 0
    pytester.makepyfile(test_it=SUITE.format(**BASE | {"label": "other"}))
    gpumem("--benchmark-json=head.json")
    done = CliRunner().invoke(main, ["compare", "base.json", "head.json", "--json", "-"])
    assert done.exit_code == 1
    lost = [
        (one["key"], one["status"]) for one in results_in(pytester.path, "head.json")["missing"]
    ]
    assert (
        [(one["test"], one["status"]) for one in json.loads(done.stdout)["missing"]]
        == lost
        == [("test_it.py::test_kernels[copy]", "lost")]
    )
