"""The memory suite can fail on a GPU: a window that a graph, a launch or a part of a buffer loses turns its tests red."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("free_gpu")

SUITE = Path(__file__).parents[1] / "memory" / "test_l2_persistence.py"
LOSES = """
import pytest
from pytest_gpumem.memory import l2

@pytest.fixture(autouse=True)
def loses(request, gpu_device, monkeypatch):
    name = request.node.name
    if "[graph]" in name:
        capture = gpu_device.graphs.capture
        monkeypatch.setattr(gpu_device.graphs, "capture", lambda stream, body, window=None: capture(stream, body))
    elif "[launch]" in name:
        launch = gpu_device.kernels.launch
        monkeypatch.setattr(gpu_device.kernels, "launch", lambda work, stream, window=None: launch(work, stream))
    elif "[persisting-normal]" in name:
        monkeypatch.setattr(l2, "_offset", lambda buffer, offset: 0)
    elif "[streaming-streaming]" in name:
        monkeypatch.setattr(l2, "_window_bytes", lambda facts, buffer, window, offset: buffer.nbytes - offset)
"""
RED = [
    "on_a_launch_gains_too[graph]",
    "on_a_launch_gains_too[launch]",
    "asked_for[persisting-normal]",
    "asked_for[streaming-streaming]",
]


def test_windows_that_are_lost_turn_the_suite_red(tmp_path: Path) -> None:
    (tmp_path / "loses.py").write_text(LOSES)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--gpumem",
        "--gpumem-device=cuda",
        "-p",
        "loses",
        "-p",
        "no:cacheprovider",
        "-rA",
        str(SUITE),
    ]
    chosen = ["-k", "on_a_launch_gains_too or asked_for or sliding_window and not never_slower"]
    ran = subprocess.run(
        [*command, *chosen],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))
            ),
        },
        cwd=SUITE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    told = [
        line.split()[1].partition("::test_")[2]
        for line in ran.stdout.splitlines()
        if line.startswith("FAILED ")
    ]
    assert sorted(
        one.removeprefix("a_window_on_a_graph_or_").removeprefix(
            "the_driver_holds_the_window_that_was_"
        )
        for one in told
    ) == sorted(RED), ran.stdout
    assert "1 passed" in ran.stdout, ran.stdout
