"""Whole sessions and gates, drawn at random, with a planted regression, a lost measurement or a looser limit: none is green without a word,
none unchanged is red.

    FIRST=25 DRAWS=300 python -m pytest tests/plugin/test_planted_faults.py -n auto

A draw is a kind of limit, where it is written, what happened to the test, how it was left out, whether there is a baseline, and how pytest
runs; of a gate also what its change accepts. The seed of a draw is its number.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ci_project import IN_ONE_PROCESS, Project, saved_project
from ci_project import SIMULATED as DEVICE
from click.testing import CliRunner
from sessions import SIMULATED, Run, gate_result, slower

from pytest_gpumem.cli import main

FIRST, DRAWS = int(os.environ.get("FIRST", "0")), int(os.environ.get("DRAWS", "25"))
"""Variables draw others than the first 25, and than a fifth as many gates."""

TIME, LATENCY, PEAK, COPIED = (
    "max_regression",
    "max_latency",
    "max_peak_regression",
    "max_copied_bytes",
)
WRITTEN = {TIME: '"20%"', LATENCY: '"25 us"', PEAK: '"0 B"', COPIED: '"base"'}
OPTIONS = {TIME: "20%", LATENCY: "25 us", PEAK: "0 B"}
ORIGINS = {
    TIME: ("marker", "call", "option", "ini"),
    LATENCY: ("marker", "call", "option", "ini"),
    PEAK: ("marker", "option", "ini"),
}
ORIGINS[COPIED] = ("marker", "call")

WORSE = "worse"
LOOSER = "worse within a looser limit"
LOOSENED = {TIME: "900%", LATENCY: "1 s", PEAK: "1 GiB", COPIED: "1 GiB"}
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
HOW = {
    "plain": (),
    "strict": ("--gpumem-strict",),
    "worker": ("-n", "1"),
    "isolated": ("--gpumem-isolate",),
}
BODY = """
import pytest
{above}
@pytest.mark.gpu
{mark}
def {name}(gpu_benchmark, device_buffer, gpu_kernels):
    {first}
    gpu_benchmark(gpu_kernels.{kernel}, device_buffer({size} << 20), device_buffer({size} << 20){call})
    {last}

@pytest.mark.gpu
@pytest.mark.gpumem(max_latency="1 s")
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
        if planted == "another test is named" or (
            planted == "deselected by the ini file" and "-k" in words
        ):  # the last -k counts
            words = ()
        return Draw(kind, draw.choice(ORIGINS[kind]), planted, draw.random() < 0.8, how, words)

    def test(self, planted: str | None) -> str:
        """The text of the test file."""
        worse = planted in (WORSE, LOOSER)
        limit = f"{self.kind}={WRITTEN[self.kind]}"
        if planted == LOOSER:
            limit = f'{self.kind}="{LOOSENED[self.kind]}"'
        return BODY.format(
            above='pytest.importorskip("no_such_library")' if planted == "import" else "",
            mark=f"@pytest.mark.gpumem({limit})" if self.origin == "marker" else "",
            call=f", {limit}" if self.origin == "call" else "",
            name="test_renamed" if planted == "renamed" else "helper" if planted == "deleted" else "test_target",
            first={"skipped": 'pytest.skip("no torch")', "early return": "return"}.get(planted or "", "pass"),
            last="device_buffer(1 << 20)" if worse and self.kind == PEAK else "pass",
            size=96 if worse and self.kind == LATENCY else 32,
            kernel="memcpy" if worse and self.kind == COPIED else "copy",
        ).replace("@pytest.mark.gpu\n", "" if planted == "unmarked" else "@pytest.mark.gpu\n", 1)  # fmt: skip

    def files(self, planted: str | None) -> dict[str, str]:
        ini = INI + {
            "deselected by the ini file": 'addopts = -k "not target"\n',
            "outside of testpaths": "testpaths = other\n",
        }.get(planted or "", "")
        if self.origin == "ini":
            ini += f"gpumem_{self.kind} = {OPTIONS[self.kind]}\n"
        conftest = {
            "deselected by a conftest": "def pytest_collection_modifyitems(config, items):\n"
            "    gone = [item for item in items if 'target' in item.nodeid]\n"
            "    config.hook.pytest_deselected(items=gone)\n    items[:] = [item for item in items if item not in gone]\n",
            "ignored by a conftest": 'collect_ignore = ["test_a.py"]\n',
        }
        worse = planted in (WORSE, LOOSER) and self.kind == TIME
        if worse:
            conftest[planted or ""] = slower("3.0 if 'target' in request.node.name else 1.0")
        return {
            "pytest.ini": ini,
            "test_a.py": self.test(planted),
            "conftest.py": conftest.get(planted or "", ""),
            "other/test_b.py": "",
        }

    def arguments(self) -> tuple[str, ...]:
        own = {
            "deselected by -k": ("-k", "other"),
            "another test is named": ("test_a.py::test_other",),
        }.get(self.planted or "", self.words)
        option = (
            (f"--gpumem-{self.kind.replace('_', '-')}={OPTIONS[self.kind]}",)
            if self.origin == "option"
            else ()
        )
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
    rows = [
        row["verdict"]["outcome"]
        for row in document["rows"]
        if row["nodeid"].endswith("::test_target")
    ]
    return rows + [
        one["status"] for one in document["missing"] if one["nodeid"].endswith("::test_target")
    ]


@pytest.mark.parametrize("seed", range(FIRST, DRAWS))
def test_a_planted_fault_is_never_green_in_silence(
    pytester: pytest.Pytester, session: Run, seed: int
) -> None:
    draw = Draw.of(seed)
    own = "--gpumem-processes=1 --gpumem-footprint=on -o gpumem_placements=2 -p no:randomly"
    quick = (*SIMULATED, *own.split())
    if draw.saved:
        if draw.kind not in BASELINES:
            write(pytester.path, Draw(draw.kind, "marker", None, False, "plain", ()).files(None))
            assert session(*quick, "--gpumem-save", "--gpumem-processes=3").ret == 0
            found = pytester.path.glob(".benchmarks/*/gpumem/*")
            BASELINES[draw.kind] = {
                str(path.relative_to(pytester.path)): path.read_bytes() for path in found
            }
        for name, content in BASELINES[draw.kind].items():
            (pytester.path / name).parent.mkdir(parents=True, exist_ok=True)
            (pytester.path / name).write_bytes(content)
    write(pytester.path, draw.files(draw.planted))
    result = session(*quick, *draw.arguments(), "--benchmark-json=out.json")
    path, strict = pytester.path / "out.json", draw.how == "strict"
    document: dict[str, Any] = {"rows": [], "missing": []}
    if path.exists() and path.stat().st_size:
        document = json.loads(path.read_text())["gpumem"]
    said = target(document)
    if draw.planted is None:
        assert "FAIL" not in said, draw
        assert result.ret == (1 if strict and set(said) - {"PASS", "MEASURED"} else 0), draw
    elif draw.planted == WORSE:
        assert said, draw
        assert set(said).isdisjoint({"PASS", "MEASURED"}), draw
        assert result.ret == (1 if draw.certain() or strict else 0), draw
    elif draw.saved or draw.planted == "early return":
        # Whoever left the test out: without a baseline, nobody knows of a test that is not there.
        words = LEFT_OUT[draw.planted] or (
            draw.planted == "unmarked" and draw.words == ("-m", "gpu")
        )
        assert said or draw.planted == "unmarked", draw
        if strict and draw.planted != "unmarked":
            assert (result.ret == 0) == words or result.ret == pytest.ExitCode.NO_TESTS_COLLECTED, (
                draw
            )


# Gates


@dataclass(frozen=True)
class GateDraw:
    """One gate of a change, by its screen alone."""

    draw: Draw
    accepts: str  # what its change accepts: nothing, what is planted, less than that, something else, or it is not counted

    @staticmethod
    def of(seed: int) -> GateDraw:
        draw = random.Random(f"gate {seed}")
        kind = draw.choice(list(WRITTEN))
        origin = draw.choice([one for one in ORIGINS[kind] if one in ("marker", "call")])
        left_out = [
            one for one in LEFT_OUT if one != "outside of testpaths"
        ]  # a gate names its tests
        left = [draw.choice(left_out), draw.choice(left_out)]
        planted = draw.choice([None, WORSE, WORSE, WORSE, LOOSER, LOOSER, *left])
        words = (
            ()
            if planted == "another test is named"
            else draw.choice([(), ("-m", "gpu"), ("-k", "test_")])
        )
        if planted == "deselected by the ini file" and "-k" in words:
            words = ()
        accepts = draw.choice(["nothing", "it", "it", "less", "another scope", "uncounted"])
        return GateDraw(Draw(kind, origin, planted, True, "plain", words), accepts)

    @property
    def folder(self) -> str:
        return f"{self.draw.kind}_{self.draw.origin}"

    def words(self) -> list[str]:
        own = {"deselected by -k": ("-k", "other")}.get(self.draw.planted or "", self.draw.words)
        test = "/test_a.py::test_other" if self.draw.planted == "another test is named" else ""
        return [f"{self.folder}{test}", *own]

    def write(self, project: Project) -> None:
        """Write the change."""
        for name, text in self.draw.files(self.draw.planted).items():
            if name == "pytest.ini":
                project.write(name, in_gate(text))
            else:
                project.write(f"{self.folder}/{name}", text)

    def fault(self) -> bool:
        """True if the change does something that a gate is to find."""
        planted, words = self.draw.planted, self.draw.words
        return (
            planted is not None
            and not LEFT_OUT.get(planted, False)
            and (planted != "unmarked" or words == ("-m", "gpu"))
        )

    def nothing_left(self) -> bool:
        """True if no test is left that the gate selects."""
        return self.draw.planted in ("import", "ignored by a conftest")

    def acceptance(self) -> list[str]:
        """Arguments of `gpumem accept`; empty for what the last gate found."""
        kind, less = self.draw.kind, self.accepts == "less"
        if self.accepts == "another scope":
            return ["--change", "time=900%" if kind == PEAK else "memory=1 GiB"]
        if self.draw.planted == LOOSER:
            limit = WRITTEN[kind].strip(chr(34)) if less else LOOSENED[kind]
            return ["--change", f"{kind}={limit}"]
        if self.draw.planted in LEFT_OUT:
            return ["--change", "time=900%" if less else "removed"]
        if kind == COPIED:
            return ["--change", "time=900%"] if less else []
        if kind == PEAK:
            return ["--change", "memory=64 MiB" if less else "memory=1 GiB"]
        return ["--change", "time=10%" if less else "time=900%"]

    def accepted(self) -> bool:
        """True if what is planted is accepted. An absolute limit that is broken is not: to accept it is to accept a looser one."""
        return self.accepts == "it" and not (
            self.draw.planted == WORSE and self.draw.kind == LATENCY
        )


GATE_INI = IN_ONE_PROCESS[:-1] + " --import-mode=importlib\n"


def in_gate(ini: str) -> str:
    """The ini file of a session for a gate; it has one line of `addopts`."""
    own = 'addopts = -k "not target"\n'
    return ini.replace(own, "").replace(
        "[pytest]\n", GATE_INI[:-1] + (' -k "not target"\n' if own in ini else "\n")
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Project:
    """A project with a folder for each kind of limit and each place where it is written."""
    files = {"pytest.ini": in_gate(INI)}
    for kind, origins in ORIGINS.items():
        for origin in ("marker", "call"):
            if origin in origins:
                files[f"{kind}_{origin}/test_a.py"] = Draw(
                    kind, origin, None, True, "plain", ()
                ).test(None)
    return saved_project(tmp_path_factory.mktemp("saved"), programs, files)


@pytest.mark.parametrize("seed", range(FIRST // 5, DRAWS // 5))
def test_a_gate_is_green_of_what_is_accepted_or_unchanged_alone(
    saved: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    one = GateDraw.of(seed)
    project = saved.copied(tmp_path)
    for name, value in {"GPUMEM_BASELINE": ".gpumem-baseline", **DEVICE}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(project.folder)

    def gate() -> tuple[int, str, str]:
        counted = [] if one.accepts == "uncounted" else ["--accept-from-change"]
        done = CliRunner().invoke(main, ["gate", *counted, "origin/main", "--", *one.words()])
        result = gate_result(done.stdout).removeprefix("gpumem gate: ")
        word = result.split()[0].rstrip(":")
        if word == "green" and "accepted" in result:
            word = "ACCEPTED"
        return done.exit_code, word, done.output

    one.write(project)
    if one.accepts != "nothing" and one.fault():
        arguments = one.acceptance()
        if not arguments:
            assert gate()[0] == 1, one
        test = f"{one.folder}/test_a.py" + ("" if one.nothing_left() else "::test_target")
        done = CliRunner().invoke(main, ["accept", "--reason", "checks bounds", test, *arguments])
        assert done.exit_code == 0, done.output
    code, result, text = gate()
    if not one.fault():
        assert (code, result) == (0, "green"), f"{one}\n{text}"
    elif one.accepted():
        expected = (6, "no") if one.nothing_left() else (0, "ACCEPTED")
        assert (code, result) == expected, f"{one}\n{text}"
    else:
        assert (code, result) == (1, "red"), f"{one}\n{text}"
