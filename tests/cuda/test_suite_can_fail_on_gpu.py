"""The memory suite can fail on a GPU: a window that a graph, a launch or a part of a buffer loses turns its tests red.

So does the loss of what the simulated device does not show: what windows gain, set-asides that nothing uses, resets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("free_gpu")

SUITE = Path(__file__).parents[1] / "memory"
PLUGIN = """
import pytest
from pytest_gpumem.memory import l2

@pytest.fixture(autouse=True)
def loses(request, gpu_device, monkeypatch):
    put = monkeypatch.setattr  # what is missing is what these tests are about
    requested = l2.window_request
    {}
"""
WINDOWS = PLUGIN.format("""
    name = request.node.name
    if "[graph]" in name:
        capture = gpu_device.streams.capture
        put(gpu_device.streams, "capture", lambda stream, body, window=None: capture(stream, body))
    elif "[launch]" in name:
        launch = gpu_device.kernels.launch
        put(gpu_device.kernels, "launch", lambda work, stream, window=None: launch(work, stream))
    elif "[persisting-normal]" in name:
        put(l2, "window_request", lambda *a, **kw: {**requested(*a, **kw), "offset": 0})
    elif "[streaming-streaming]" in name:
        put(l2, "window_request", lambda *a, **kw: {**requested(*a, **kw), "nbytes": a[1].nbytes // 2})
""")
RED = [
    "on_a_launch_gains_too[graph]",
    "on_a_launch_gains_too[launch]",
    "asked_for[persisting-normal]",
    "asked_for[streaming-streaming]",
]


def failed_and_said(tmp_path: Path, plugin: str, *arguments: str) -> tuple[list[str], str]:
    """The tests of the suite that fail on the GPU with a plugin, and the output."""
    (tmp_path / "loses.py").write_text(plugin)
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
        *arguments,
    ]
    ran = subprocess.run(
        command,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))
            ),
        },
        cwd=SUITE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    failed = [
        line.partition("::test_")[2].partition(" - ")[0]
        for line in ran.stdout.splitlines()
        if line.startswith("FAILED ")
    ]
    return failed, ran.stdout


def test_windows_that_are_lost_turn_the_suite_red(tmp_path: Path) -> None:
    chosen = "on_a_launch_gains_too or asked_for or sliding_window and not never_slower"
    failed, output = failed_and_said(
        tmp_path, WINDOWS, str(SUITE / "test_l2_persistence.py"), "-k", chosen
    )
    prefixes = ("a_window_on_a_graph_or_", "the_driver_holds_the_window_that_was_")
    assert sorted(
        name.removeprefix(prefixes[0]).removeprefix(prefixes[1]) for name in failed
    ) == sorted(RED), output
    assert "1 passed" in output, output


LOST = {
    "windows": (
        'put(gpu_device.l2, "set_window", lambda stream, window: None)',
        [
            "lookup_table_stays_in_l2",
            "lookup_table_stays_in_l2_of_a_busy_gpu",
            "sliding_window",
            "persisting_data_serves_two_kernels",
        ],
    ),
    "a set-aside": (
        'request = gpu_device.l2.request_set_aside; put(gpu_device.l2, "request_set_aside", lambda n: request(0) or n)',
        ["a_set_aside_that_nothing_uses_slows_a_saturated_kernel"],
    ),
    "the fit of hit ratios": (
        'put(l2, "fit_hit_ratio", lambda set_aside, nbytes: 1.0)',
        ["a_fitted_hit_ratio_avoids_thrashing"],
    ),
    "resets": (
        'put(l2.PersistingStream, "reset", lambda self, by="context": None)',
        [f"a_reset_gives_the_next_kernel_all_of_l2[by the {way}]" for way in ("window", "context")],
    ),
}
"""What is taken out of this package, and the tests that turn red. They skip on the simulated device."""


@pytest.mark.parametrize("lost", LOST)
def test_what_only_a_gpu_shows_turns_the_suite_red(tmp_path: Path, lost: str) -> None:
    taken_out, red = LOST[lost]
    plugin = PLUGIN.format(taken_out)
    modules = [SUITE / "test_l2_persistence.py", SUITE / "test_l2_seeds.py"]
    ids = [
        f"{module}::test_{name}"
        for module in modules
        for name in red
        if f"def test_{name.partition('[')[0]}(" in module.read_text()
    ]
    assert len(ids) == len(red)
    failed, output = failed_and_said(tmp_path, plugin, *ids)
    assert sorted(failed) == sorted(red), output
