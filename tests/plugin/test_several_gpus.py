"""Several GPUs: a worker of xdist has one of its own, and a test may have several for itself."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ssh_server
from sessions import SIMULATED, Run, rows_in, stored_in

from pytest_gpumem.devices import locks, opening
from pytest_gpumem.plugin import start, workers
from pytest_gpumem.plugin.workers import orders

pytest.importorskip("xdist")

TWO_GPUS = """
    import os
    from contextlib import suppress
    from dataclasses import replace
    from pathlib import Path
    import pytest
    from msgspec import structs
    from pytest_gpumem.devices import locks, opening
    from pytest_gpumem.plugin import start

    simulated = opening.choose("sim")
    NAMES = {{"GPU-other": "another model"}}

    def choose(choice):
        gpus = tuple(os.environ.get("CUDA_VISIBLE_DEVICES", "{visible}").split(","))
        index = int(choice.partition(":")[2] or 0)
        gpus = (gpus[index], *(gpu for gpu in gpus if gpu != gpus[index]))
        name = NAMES.get(gpus[0], simulated.facts.name)
        facts = structs.replace(simulated.facts, simulated=False, uuid=gpus[0], name=name)
        return replace(simulated, facts=facts, gpus=gpus, alike=gpus)

    start.choose = choose
    locks.PATIENCE = 0.0

    @pytest.fixture
    def holders(gpu_device):
        "The GPUs whose lock a process holds, and which."
        folder = Path({runtime!r}) / "gpumem"
        found = {{}}
        for path in folder.glob("*.txt"):
            with suppress(FileNotFoundError):  # its process has ended meanwhile
                found[path.stem] = path.read_text()
        return found
"""
"""A conftest: GPUs that are simulated, but have UUIDs."""

WRITTEN = """
    import os
    from pathlib import Path
    import pytest

    def write(name, holders):
        with open(Path({runtime!r}) / "seen.jsonl", "a") as file:
            mine = sorted(gpu for gpu, text in holders.items() if f"process {{os.getpid()}} " in text)
            worker = os.environ.get("PYTEST_XDIST_WORKER")
            file.write(__import__("json").dumps([name, worker, os.environ.get("CUDA_VISIBLE_DEVICES"), mine]) + "\\n")
"""


class Seen:
    """What each test of a session saw."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pytester = pytester
        for module, name in ((start, "choose"), (locks, "PATIENCE")):
            # The conftest changes them for good: no simulated GPU has a UUID.
            monkeypatch.setattr(module, name, getattr(module, name))
        self._runtime = pytester.path / "runtime"
        self._runtime.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(self._runtime))

    def write(self, tests: str, visible: str = "GPU-a,GPU-b") -> None:
        """The conftest and the tests, which call `write(name, holders)`."""
        self._pytester.makeconftest(TWO_GPUS.format(visible=visible, runtime=str(self._runtime)))
        self._pytester.makepyfile(WRITTEN.format(runtime=str(self._runtime)) + tests)

    def run(self, *arguments: str) -> pytest.RunResult:
        device = () if "--gpumem-device" in arguments else ("--gpumem-device", "cuda")
        given = [one for one in SIMULATED if one not in ("--gpumem-device", "sim")]
        return self._pytester.runpytest_inprocess(*given, "-W", "default", *device, *arguments)

    def forget(self) -> None:
        """Forget what the sessions so far saw."""
        (self._runtime / "seen.jsonl").unlink()

    def lines(self) -> list[Any]:
        """Test, worker, CUDA_VISIBLE_DEVICES, and the GPUs whose lock it holds."""
        file = self._runtime / "seen.jsonl"
        return (
            [tuple(json.loads(line)) for line in file.read_text().splitlines()]
            if file.exists()
            else []
        )


@pytest.fixture
def seen(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(pytester, monkeypatch)


MEASURED = """
    @pytest.mark.parametrize("number", range(4))
    def test_write(gpu_benchmark, device_buffer, gpu_kernels, holders, number):
        gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)
        write(number, holders)
"""


def test_each_worker_measures_on_its_own_gpu(pytester: pytest.Pytester, seen: Seen) -> None:
    seen.write(MEASURED)
    result = seen.run("-n", "2", "--benchmark-json=out.json")
    result.assert_outcomes(passed=4)
    by_worker = {worker: (visible, mine) for _, worker, visible, mine in seen.lines()}
    assert by_worker == {"gw0": ("GPU-a,GPU-b", ["GPU-a"]), "gw1": ("GPU-b,GPU-a", ["GPU-b"])}
    result.stdout.fnmatch_lines(["gpumem: 2 workers measure on 2 GPUs"])
    assert "automatically disabled" not in result.stdout.str() + result.stderr.str()
    rows = rows_in(pytester.path)
    held = {str(name): mine[0] for name, _, _, mine in seen.lines()}
    assert {row["nodeid"][-2]: row["measurement"]["card"] for row in rows} == held


def test_more_workers_than_gpus_take_turns(seen: Seen) -> None:
    seen.write(
        """
    @pytest.mark.parametrize("number", range(6))
    def test_alone(gpu_device, holders, number):
        write(number, holders)
        busy = Path("busy-" + os.environ["CUDA_VISIBLE_DEVICES"])
        busy.touch(exist_ok=False)
        gpu_device.streams.synchronize()
        busy.unlink()
"""
    )
    result = seen.run("-n", "3")
    result.assert_outcomes(passed=6)
    assert "gpumem: waiting" not in result.stdout.str() + result.stderr.str()
    gpu_of = {worker: mine for _, worker, _, mine in seen.lines()}
    assert gpu_of == {"gw0": ["GPU-a"], "gw1": ["GPU-b"], "gw2": ["GPU-a"]}


def test_a_worker_that_replaces_a_crashed_one_has_its_gpu(seen: Seen) -> None:
    seen.write(
        """
    def test_crash(gpu_device):
        if os.environ["PYTEST_XDIST_WORKER"] == "gw1":
            os._exit(1)

    def test_after(gpu_device, holders):
        write("after", holders)
"""
    )
    seen.run("-n", "2", "--dist", "each").assert_outcomes(passed=3, failed=1)
    held = {worker: (visible, mine) for _, worker, visible, mine in seen.lines()}
    assert held == {"gw0": ("GPU-a,GPU-b", ["GPU-a"]), "gw2": ("GPU-b,GPU-a", ["GPU-b"])}


def test_a_test_has_several_gpus_for_itself(seen: Seen) -> None:
    seen.write(
        """
    @pytest.mark.gpumem(gpus=2)
    @pytest.mark.parametrize("number", range(4))
    def test_two(gpu_device, holders, number):
        write("two", holders)
        Path("busy").touch(exist_ok=False)
        gpu_device.streams.synchronize()
        Path("busy").unlink()

    @pytest.mark.parametrize("number", range(4))
    def test_one(holders, number):
        write("one", holders)

    @pytest.mark.gpumem(gpus=3)
    def test_three(gpu_device):
        pass
"""
    )
    result = seen.run("-n", "2", "-rs")
    result.assert_outcomes(passed=8, skipped=1)
    result.stdout.fnmatch_lines(["*the test needs 3 GPUs (gpus=3); this process sees 2*"])
    assert {
        name: sorted({len(mine) for n, _, _, mine in seen.lines() if n == name})
        for name in ("one", "two")
    } == {"one": [1], "two": [2]}


def test_without_workers_a_test_has_the_gpus_too(seen: Seen) -> None:
    seen.write(
        """
    @pytest.mark.gpumem(gpus=2)
    def test_two(holders):
        write("two", holders)

    def test_peer(peer_buffer, holders):
        write("peer", holders)

    def test_one(holders):
        write("one", holders)
""",
        visible="GPU-a,GPU-b,GPU-c",
    )
    seen.run("--gpumem-device", "cuda:2").assert_outcomes(passed=3)
    assert {name: mine for name, _, _, mine in seen.lines()} == {
        "two": ["GPU-a", "GPU-c"],
        "peer": ["GPU-a", "GPU-c"],
        "one": ["GPU-c"],
    }


@pytest.mark.parametrize(
    ("arguments", "visible"),
    [
        (("-n", "2", "--gpumem-device", "cuda:0"), None),
        (("--dist", "load", "--tx", "2*popen//env:CUDA_VISIBLE_DEVICES=GPU-b"), "GPU-b"),
    ],
    ids=["one device", "own choice"],
)
def test_a_choice_of_the_user_stays(
    seen: Seen, arguments: tuple[str, ...], visible: str | None
) -> None:
    seen.write(MEASURED)
    seen.run(*arguments).assert_outcomes(passed=4)
    assert {value for _, _, value, _ in seen.lines()} == {visible}


def test_the_number_of_gpus_belongs_to_the_test(pytester: pytest.Pytester, seen: Seen) -> None:
    seen.write(
        """
    def test_call(gpu_benchmark, device_buffer, gpu_kernels):
        gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0, gpus=2)
"""
    )
    result = seen.run()
    result.assert_outcomes(failed=1)
    assert "got an unexpected keyword argument 'gpus'" in result.stdout.str()
    pytester.makepyfile(
        "import pytest\n@pytest.mark.gpumem(gpus='two')\ndef test_it(gpu_device): pass"
    )
    result = seen.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        "gpus: 'two' is not understood; accepted is a whole number from 1 on" in result.stderr.str()
    )


def test_each_gpu_comes_first_in_turn() -> None:
    for gpus, visible, expected in [
        (
            ("GPU-a", "GPU-b", "GPU-c"),
            "2,0,1",
            ["GPU-a,GPU-b,GPU-c", "GPU-b,GPU-a,GPU-c", "GPU-c,GPU-a,GPU-b"],
        ),
        (("GPU-a", "GPU-other", "GPU-b"), None, ["GPU-a,GPU-other,GPU-b", "GPU-b,GPU-a,GPU-other"]),
        (("GPU-a",), None, ["GPU-a"]),
        (("GPU-a", "GPU-b"), "GPU-a,GPU-b", ["GPU-a,GPU-b", "GPU-b,GPU-a"]),
        # CUDA shows one MIG instance to a process, whatever the variable lists.
        (("MIG-1",), "MIG-1, MIG-2,MIG-1", ["MIG-1", "MIG-2"]),
        (("MIG-1",), "MIG-GPU-a/1/0,MIG-GPU-a/2/0", ["MIG-GPU-a/1/0", "MIG-GPU-a/2/0"]),
        (("MIG-1",), None, ["MIG-1"]),
        ((), None, []),
    ]:
        assert orders(gpus, [gpu for gpu in gpus if gpu != "GPU-other"], visible) == expected


def test_a_worker_whose_gpu_is_of_another_model_ends_the_session(
    pytester: pytest.Pytester, seen: Seen
) -> None:
    """Such as a MIG instance of another profile: CUDA shows one instance to a process, so that the controller does not know the others."""
    seen.write(MEASURED)
    workers = ["--dist", "load"]
    for gpu in ("GPU-other", "GPU-a"):
        workers += ["--tx", f"popen//env:CUDA_VISIBLE_DEVICES={gpu}"]
    result = seen.run(*workers, "--gpumem-save", "--benchmark-json=out.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = (line for line in result.errlines if "ERROR" in line)
    assert line.startswith("ERROR: gpumem: worker gw0: its device is another model (")
    assert line.endswith("; run each model of GPU in a session of its own")
    result.assert_outcomes()
    assert seen.lines() == []
    assert stored_in(pytester.path) == []


@pytest.fixture
def by_variable(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs sessions whose device is that of a variable, which a worker may have another value of: a simulated H100."""
    monkeypatch.setenv("GPUMEM_DEVICE", "sim:h100")
    pytester.makepyfile("def test_it(gpu_device): pass")
    given = [one for one in SIMULATED if one not in ("--gpumem-device", "sim")]
    return lambda *arguments: pytester.runpytest_inprocess(*given, "--dist", "load", *arguments)


def test_a_worker_of_another_machine_and_model_ends_the_session(
    pytester: pytest.Pytester, by_variable: Run, other_machine: str
) -> None:
    result = by_variable(
        "--tx",
        "popen",
        "--tx",
        f"{other_machine}//chdir={pytester.path}//env:GPUMEM_DEVICE=sim:h200",
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    line = r"^ERROR: gpumem: worker gw1 \(.*127.0.0.1.*\): its device is NVIDIA H200 \(.*the session's is NVIDIA H100"
    assert re.search(line, result.stderr.str(), re.MULTILINE)


def test_a_worker_that_cannot_start_ends_the_session(by_variable: Run) -> None:
    """xdist alone says nothing of a usage error in a worker."""
    result = by_variable("--tx", "popen", "--tx", "popen//env:GPUMEM_DEVICE=sim:nothing")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = (line for line in result.errlines if "ERROR" in line)
    assert line.startswith("ERROR: gpumem: worker gw1: device 'sim:nothing' (GPUMEM_DEVICE): ")


@pytest.fixture
def other_machine(tmp_path_factory: pytest.TempPathFactory, programs: Path) -> Iterator[str]:
    """A worker's specification for pytest-xdist: a machine that ssh reaches, which is this one."""
    pytest.importorskip("asyncssh", reason="asyncssh is of the extra dev")
    if shutil.which("ssh") is None:
        pytest.skip("no ssh")
    with ssh_server.running(tmp_path_factory.mktemp("ssh"), {"THERE": "yes"}) as arguments:
        yield f"ssh={arguments}//python={programs / 'python'}"


def test_workers_on_another_machine_take_turns_on_its_gpus(
    pytester: pytest.Pytester, seen: Seen, other_machine: str
) -> None:
    """Three workers of a machine with two GPUs, and one of this machine: the rows are those of a session without workers,
    which they are compared with."""
    seen.write(MEASURED)
    seen.run("--gpumem-save", "--benchmark-json=one.json").assert_outcomes(passed=4)
    seen.forget()
    there = f"3*{other_machine}//chdir={pytester.path}"
    workers = ("--dist", "each", "--tx", there, "--tx", "popen")
    result = seen.run(*workers, "--gpumem-max-regression=50%", "--benchmark-json=out.json")
    result.assert_outcomes(passed=16)
    by_worker = {worker: (visible, mine) for _, worker, visible, mine in seen.lines()}
    assert by_worker == {
        "gw0": ("GPU-a,GPU-b", ["GPU-a"]),
        "gw1": ("GPU-b,GPU-a", ["GPU-b"]),
        "gw2": ("GPU-a,GPU-b", ["GPU-a"]),
        "gw3": ("GPU-a,GPU-b", ["GPU-a"]),
    }
    one, out = (rows_in(pytester.path, name) for name in ("one.json", "out.json"))
    assert sorted(row["nodeid"] for row in one) == sorted(row["nodeid"] for row in out)
    assert {row["verdict"]["comparison"]["processes"] for row in out} == {1}


def test_the_recipe_for_another_machine_leaves_nothing_in_the_project(
    pytester: pytest.Pytester, seen: Seen, other_machine: str, tmp_path: Path
) -> None:
    """docs/how-to/running.md: xdist copies pytest itself, and the project, into the folder of `chdir`."""
    seen.write(MEASURED)
    (there := tmp_path / "there").mkdir()
    workers = (
        "--dist",
        "load",
        "--tx",
        f"2*{other_machine}//chdir={there}",
        f"--rsyncdir={pytester.path}",
    )
    seen.run(*workers, "--benchmark-json=out.json", str(pytester.path)).assert_outcomes(passed=4)
    assert len(rows_in(pytester.path)) == 4
    assert {path.name for path in there.iterdir()} >= {"_pytest", pytester.path.name}
    assert not (pytester.path / "_pytest").exists()


def test_a_worker_without_the_folder_of_the_baseline_is_refused(tmp_path: Path) -> None:
    facts = opening.choose("sim").facts

    def check(folder: Path, *, exists: bool) -> None:
        given = {
            "key": facts.key,
            "name": facts.name,
            "baseline": str(folder),
            "exists": exists,
        }
        config: Any = SimpleNamespace(workerinput={"gpumem": given})
        workers.check_worker(config, facts, folder)

    with pytest.raises(
        pytest.UsageError, match="is a folder of the machine that started this worker"
    ):
        check(tmp_path / "none", exists=True)
    check(tmp_path / "none", exists=False)
    check(tmp_path, exists=True)
