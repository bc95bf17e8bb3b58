"""Sessions of all sides in one process, as `footprint_overhead.py` runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import footprint_overhead
from footprint_overhead import HOOK, SELECTION, WITHOUT

CUPY = """
class cuda:
    class MemoryHook:
        def __enter__(self): return self
        def __exit__(self, *error): return None
"""
TESTS = """
import pytest

@pytest.mark.gpumem(max_peak="1 MiB")
@pytest.mark.parametrize("name", ["a::b", "{c=[1]}"])
class TestClass:
    def test_method(self, name): pass

@pytest.mark.parametrize("number", range(20))
def test_function(number):
    if number % 2:
        pytest.skip()
"""


def test_each_side_runs_the_same_tests_in_each_round(tmp_path: Path) -> None:
    for number, place in enumerate(SELECTION[: SELECTION.index("-k")]):
        file = tmp_path / place
        if not file.suffix:
            file /= f"test_{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TESTS)
    library, results = tmp_path / "library", tmp_path / "record.json"
    library.mkdir()
    (library / "cupy.py").write_text(CUPY)
    side = "--gpumem-device=sim --gpumem-footprint=on"
    command = [sys.executable, footprint_overhead.__file__, "--tests", str(tmp_path)]
    command += ["--seconds=3", f"--measured={side}", "--json", str(results)]
    path = os.pathsep.join([str(library), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "GPUMEM_STRICT": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr  # on a simulated device no test has a row
    assert "no test has a row" in done.stdout
    record = json.loads(results.read_text())
    assert record["tests"] == 5 * 11  # "a::b" is no name that pytest takes back
    assert record["changed"] == {}
    assert set(record["sides"]) == {WITHOUT, HOOK, side}
    for cost in record["sides"].values():
        assert len(cost["overheads"]) == record["rounds"] >= 1
