"""Whole sessions, drawn at random, with a planted regression or a lost measurement: none is green without a word, none unchanged is red.

    DRAWS=300 python -m pytest tests/plugin/test_planted_faults.py -n auto         # more of them; 40 by default

A draw is a kind of limit, where it is written, what happened to the test, how it was left out, whether there is a baseline, and how pytest
runs. The seed of a draw is its number.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sessions import SIMULATED, Run

DRAWS = int(os.environ.get("DRAWS", "40"))

TIME, LATENCY, PEAK, KERNELS = "max_regression", "max_latency", "max_peak_regression", "same_kernels"
WRITTEN = {TIME: '"20%"', LATENCY: '"25 us"', PEAK: '"0 B"', KERNELS: "True"}
OPTIONS = {TIME: "20%", LATENCY: "25 us", PEAK: "0 B", KERNELS: ""}
ORIGINS = {TIME: ("marker", "call", "option", "ini"), LATENCY: ("marker", "call", "option", "ini"), PEAK: ("marker", "option", "ini")}
ORIGINS[KERNELS] = ("marker", "call")

WORSE = "worse"
LEFT_OUT = {  # by how a test is left out: True if words of the command line do it
    "deleted": False,
    "renamed": False,
    "unmarked": False,
    "skipped": False,
    "import": False,
    "early return": False,
    "deselected by the ini file": False,
    "deselected by a conftest": False,
    "ignored by a conftest": False,
    "outside of testpaths": False,
    "deselected by -k": True,
    "another test is named": True,
}
HOW = {"plain": (), "strict": ("--gpumem-strict",), "worker": ("-n", "1"), "isolated": ("--gpumem-isolate",)}
BODY = """
import pytest
{above}
@pytest.mark.gpu
{mark}
def {name}(gpu_benchmark, device_buffer, gpu_kernels):
    {first}
    gpu_benchmark(gpu_kernels.copy{grid}, device_buffer({size} << 20), device_buffer({size} << 20){call})
    {last}

@pytest.mark.gpu
def test_other(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(16 << 20), device_buffer(16 << 20))
"""
INI = "[pytest]\nmarkers = gpu\n"


@dataclass(frozen=True)
class Draw:
    """One session."""

    kind: str  # name of the limit
    origin: str  # where it is written
    planted: str | None  # `WORSE`, a key of `LEFT_OUT`, or None: nothing changed
    saved: bool  # there is a baseline
    how: str  # key of `HOW`
    words: tuple[str, ...]  # of the command line, that select all tests

    @staticmethod
    def of(seed: int) -> Draw:
        draw = random.Random(seed)
        kind = draw.choice(list(WRITTEN))
        planted = draw.choice([None, WORSE, WORSE, *LEFT_OUT])
        how = draw.choices(list(HOW), weights=(10, 10, 1, 1))[0]
        words = draw.choice([(), (), ("-m", "gpu"), ("-k", "test_")])
        if planted == "another test is named" or (planted == "deselected by the ini file" and "-k" in words):  # the last -k counts
            words = ()
        return Draw(kind, draw.choice(ORIGINS[kind]), planted, draw.random() < 0.8, how, words)

    def test(self, planted: str | None) -> str:
        """The text of the test file."""
        worse = planted == WORSE
        limit = f"{self.kind}={WRITTEN[self.kind]}"
        return BODY.format(
            above='pytest.importorskip("no_such_library")' if planted == "import" else "",
            mark=f"@pytest.mark.gpumem({limit})" if self.origin == "marker" else "",
            call=f", {limit}" if self.origin == "call" else "",
            name="test_renamed" if planted == "renamed" else "helper" if planted == "deleted" else "test_target",
            first={"skipped": 'pytest.skip("no torch")', "early return": "return"}.get(planted or "", "pass"),
            last="device_buffer(1 << 20)" if worse and self.kind == PEAK else "pass",
            size=96 if worse and self.kind in (TIME, LATENCY) else 32,
            grid=".with_grid(64)" if worse and self.kind == KERNELS else "",
        ).replace("@pytest.mark.gpu\n", "" if planted == "unmarked" else "@pytest.mark.gpu\n", 1)  # fmt: skip

    def files(self, planted: str | None) -> dict[str, str]:
        ini = INI + {"deselected by the ini file": 'addopts = -k "not target"\n', "outside of testpaths": "testpaths = other\n"}.get(
            planted or "", ""
        )
        if self.origin == "ini":
            ini += f"gpumem_{self.kind} = {OPTIONS[self.kind]}\n"
        conftest = {
            "deselected by a conftest": "def pytest_collection_modifyitems(config, items):\n"
            "    gone = [item for item in items if 'target' in item.nodeid]\n"
            "    config.hook.pytest_deselected(items=gone)\n    items[:] = [item for item in items if item not in gone]\n",
            "ignored by a conftest": 'collect_ignore = ["test_a.py"]\n',
        }
        return {"pytest.ini": ini, "test_a.py": self.test(planted), "conftest.py": conftest.get(planted or "", ""), "other/test_b.py": ""}

    def arguments(self) -> tuple[str, ...]:
        own = {"deselected by -k": ("-k", "other"), "another test is named": ("test_a.py::test_other",)}.get(self.planted or "", self.words)
        option = (f"--gpumem-{self.kind.replace('_', '-')}={OPTIONS[self.kind]}",) if self.origin == "option" else ()
        return (*HOW[self.how], *option, *own)

    def certain(self) -> bool:
        """True if a session sees for certain what is planted: a limit of its own, or a baseline to compare with."""
        return self.saved or self.kind == LATENCY


BASELINES: dict[str, dict[str, bytes]] = {}
"""By kind of limit, the files of a baseline."""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def target(document: dict[str, Any]) -> list[str]:
    """What is said of the test: the outcome of its row, and the status of what was not judged."""
    rows = [row["verdict"]["outcome"] for row in document["rows"] if row["nodeid"].endswith("::test_target")]
    return rows + [one["status"] for one in document["missing"] if one["nodeid"].endswith("::test_target")]


@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_planted_fault_is_never_green_in_silence(pytester: pytest.Pytester, session: Run, seed: int) -> None:
    draw = Draw.of(seed)
    quick = (*SIMULATED, "--gpumem-processes=1", "-o", "gpumem_placements=2", "-p", "no:randomly", "--gpumem-footprint=on")
    if draw.saved:
        if draw.kind not in BASELINES:
            write(pytester.path, Draw(draw.kind, "marker", None, False, "plain", ()).files(None))
            assert session(*quick, "--gpumem-save").ret == 0
            found = pytester.path.glob(".benchmarks/*/gpumem/*")
            BASELINES[draw.kind] = {str(path.relative_to(pytester.path)): path.read_bytes() for path in found}
        for name, content in BASELINES[draw.kind].items():
            (pytester.path / name).parent.mkdir(parents=True, exist_ok=True)
            (pytester.path / name).write_bytes(content)
    write(pytester.path, draw.files(draw.planted))
    result = session(*quick, *draw.arguments(), "--benchmark-json=out.json")
    path, strict = pytester.path / "out.json", draw.how == "strict"
    said = target(json.loads(path.read_text())["gpumem"]) if path.exists() and path.stat().st_size else []
    if draw.planted is None:
        assert "FAIL" not in said, draw
        assert result.ret == (1 if strict and set(said) - {"PASS", "MEASURED"} else 0), draw
    elif draw.planted == WORSE:
        assert said, draw
        assert set(said).isdisjoint({"PASS", "MEASURED"}), draw
        assert result.ret == (1 if draw.certain() or strict else 0), draw
    elif draw.saved or draw.planted == "early return":
        # Whoever left the test out: without a baseline, nobody knows of a test that is not there.
        words = LEFT_OUT[draw.planted] or (draw.planted == "unmarked" and draw.words == ("-m", "gpu"))
        assert said or draw.planted == "unmarked", draw
        if strict and draw.planted != "unmarked":
            assert (result.ret == 0) == words or result.ret == pytest.ExitCode.NO_TESTS_COLLECTED, draw
