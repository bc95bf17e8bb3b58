"""The script that compares with peers: its draws, its rounds and budget, its workers as far as they need no GPU."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import peer_workers
import peers
import pytest
from triad_bench import TriadBench

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.units import MiB

pytestmark = pytest.mark.usefixtures("quick_processes")


QUICK_WORKER = f"""
import sys
sys.path.insert(0, {str(Path(peer_workers.__file__).parent)!r})
import peer_workers
peer_workers.TINY_PLAN_SECONDS = 0.001
peer_workers.main()
"""


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    def quick(job: dict[str, Any]) -> list[str]:
        return [sys.executable, "-c", QUICK_WORKER, json.dumps(job)]

    # Workers that spend little on what they do not record.
    monkeypatch.setattr(peers, "command", quick)
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments])
    return peers.main()


def test_the_whole_script_on_the_simulated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "peers.json"
    options = "--device simulated:h100 --peers gpumem --sizes 4096 --processes 1 --json"
    common = (*options.split(), str(file))
    assert run_script(monkeypatch, *common) == 0
    held = json.loads(file.read_text())
    ways = [
        "gpumem clean-cold",
        "gpumem dirty-cold",
        "gpumem hot",
        "gpumem hot, one placement",
    ]
    assert [case["way"] for case in held["runs"][0]["cases"]] == ways
    clean = held["runs"][0]["cases"][0]
    assert len(clean["medians"]) >= 8
    assert clean["wall"] > 0
    reported = [
        row["way"] for row in held["summary"]["rows"] if not row["way"].endswith("corrected")
    ]
    assert reported == ways
    assert capsys.readouterr().out.count("SIMULATED") == 1


# Workers


@pytest.fixture
def bench() -> Any:
    made = TriadBench(choose("sim"))
    yield made
    made.close()


def test_what_the_peers_launch_is_what_this_project_launches(
    bench: TriadBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = pytest.importorskip("cupy")
    from pytest_gpumem.kernels.kernel import COMPILE_OPTIONS, read_source

    compiled: list[dict[str, Any]] = []
    launched: list[tuple[Any, ...]] = []

    class FakeModule:
        def __init__(self, **how: Any) -> None:
            compiled.append(how)

        def get_function(self, name: str) -> Any:
            def function(
                grid: Any, block: Any, arguments: Any, *, shared_mem: int, stream: Any
            ) -> None:
                launched.append((name, grid, block, arguments, shared_mem, stream.ptr))

            return types.SimpleNamespace(kernel=function)

    monkeypatch.setattr(cupy, "RawModule", FakeModule)
    with bench.arrays(2 * MiB) as arrays:
        launch = bench.launcher(arrays)
        launch(0)
        launch(0x1000)
        buffers, values = bench.triad.arguments((*arrays, 3.0), {})
        ours = bench.triad.launch(buffers, values)
    entry = ours.kernel.expression("f4", ours.shape)
    assert compiled == [
        {
            "code": read_source("stream.cu"),
            "options": COMPILE_OPTIONS,
            "name_expressions": [entry],
        }
    ]
    expected = ours.packed_arguments()
    for name, grid, block, arguments, shared, _stream in launched:
        assert (name, grid, block, shared) == (
            entry,
            (ours.shape.blocks,),
            (ours.shape.threads,),
            0,
        )
        assert [(type(a), a) for a in arguments] == [(type(a), a) for a in expected]
    assert [stream for *_, stream in launched] == [0, 0x1000]
