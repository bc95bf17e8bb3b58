"""Several GPUs: a worker of xdist has one of its own, and a test may have several for itself."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ssh_server
from ci_project import make_three
from msgspec import structs
from sessions import SIMULATED, results_in, rows_in, stored_in

from pytest_gpumem.baselines.storage import Storage
from pytest_gpumem.baselines.store import Store, files
from pytest_gpumem.devices import opening
from pytest_gpumem.plugin import exclusive, session
from pytest_gpumem.plugin.gpus import beginning_with, orders
from pytest_gpumem.plugin.session import WORKER_BASELINE, _unfit_worker

pytest.importorskip("xdist")

Models = Callable[..., pytest.RunResult]

TWO_GPUS = """
    import os
    from dataclasses import replace
    from pathlib import Path
    import pytest
    from msgspec import structs
    from pytest_gpumem.devices import opening
    from pytest_gpumem.plugin import exclusive, session

    simulated = opening.choose("sim")
    NAMES = {{"GPU-other": "another model"}}

    def choose(choice, asked):
        gpus = tuple(os.environ.get("CUDA_VISIBLE_DEVICES", "{visible}").split(","))
        index = int(choice.partition(":")[2] or 0)
        gpus = (gpus[index], *(gpu for gpu in gpus if gpu != gpus[index]))
        name = NAMES.get(gpus[0], simulated.facts.name)
        facts = structs.replace(simulated.facts, simulated=False, uuid=gpus[0], name=name)
        return replace(simulated, facts=facts, gpus=gpus, alike=gpus)

    session.choose = choose
    exclusive.user_runtime_path = lambda name, appauthor: Path({runtime!r}) / name
    exclusive.PATIENCE = 0.0

    @pytest.fixture
    def holders(gpu_device):
        "The GPUs whose lock a process holds, and which."
        folder = Path({runtime!r}) / "gpumem"
        return {{path.stem: path.read_text() for path in folder.glob("*.json")}}
"""
"""A conftest: GPUs that are simulated, but have UUIDs."""

WRITTEN = """
    import os
    from pathlib import Path
    import pytest

    def write(name, holders):
        with open(Path({runtime!r}) / "seen.jsonl", "a") as file:
            mine = sorted(gpu for gpu, text in holders.items() if f'"pid": {{os.getpid()}},' in text)
            worker = os.environ.get("PYTEST_XDIST_WORKER")
            file.write(__import__("json").dumps([name, worker, os.environ.get("CUDA_VISIBLE_DEVICES"), mine]) + "\\n")
"""


class Seen:
    """What each test of a session saw."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pytester = pytester
        for module, name in ((session, "choose"), (exclusive, "user_runtime_path"), (exclusive, "PATIENCE")):
            monkeypatch.setattr(module, name, getattr(module, name))  # the conftest changes them for good
        self._runtime = pytester.path / "runtime"
        self._runtime.mkdir(mode=0o700)

    def write(self, tests: str, visible: str = "GPU-a,GPU-b") -> None:
        """The conftest and the tests, which call `write(name, holders)`."""
        self._pytester.makeconftest(TWO_GPUS.format(visible=visible, runtime=str(self._runtime)))
        self._pytester.makepyfile(WRITTEN.format(runtime=str(self._runtime)) + tests)

    def run(self, *arguments: str, processes: str = "1") -> pytest.RunResult:
        device = () if "--gpumem-device" in arguments else ("--gpumem-device", "cuda")
        given = [one for one in SIMULATED if one not in ("--gpumem-device", "sim")]
        return self._pytester.runpytest_inprocess(*given, "-W", "default", *device, f"--gpumem-processes={processes}", *arguments)

    def forget(self) -> None:
        """Forget what the sessions so far saw."""
        (self._runtime / "seen.jsonl").unlink()

    def lines(self) -> list[Any]:
        """Test, worker, CUDA_VISIBLE_DEVICES, and the GPUs whose lock it holds."""
        return [tuple(json.loads(line)) for line in (self._runtime / "seen.jsonl").read_text().splitlines()]


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
    assert {row["nodeid"][-2]: row["measurement"]["taken"]["card"] for row in rows} == held


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
    assert {name: sorted({len(mine) for n, _, _, mine in seen.lines() if n == name}) for name in ("one", "two")} == {"one": [1], "two": [2]}


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
    assert {name: mine for name, _, _, mine in seen.lines()} == {"two": ["GPU-a", "GPU-c"], "peer": ["GPU-a", "GPU-c"], "one": ["GPU-c"]}


@pytest.mark.parametrize(
    ("arguments", "visible"),
    [
        (("-n", "2", "--gpumem-device", "cuda:0"), None),
        (("--dist", "load", "--tx", "popen//env:CUDA_VISIBLE_DEVICES=GPU-b", "--tx", "popen//env:CUDA_VISIBLE_DEVICES=GPU-b"), "GPU-b"),
    ],
    ids=["one device", "own choice"],
)
def test_a_choice_of_the_user_stays(seen: Seen, arguments: tuple[str, ...], visible: str | None) -> None:
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
    assert "has no parameter 'gpus'" in result.stdout.str()
    pytester.makepyfile("import pytest\n@pytest.mark.gpumem(gpus='two')\ndef test_it(gpu_device): pass")
    result = seen.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "gpus: 'two' is not understood; accepted is a whole number from 1 on" in result.stderr.str()


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        (("GPU-a", "GPU-b", "GPU-c"), "2,0,1", ["GPU-a,GPU-b,GPU-c", "GPU-b,GPU-a,GPU-c", "GPU-c,GPU-a,GPU-b"]),
        (("GPU-a", "GPU-other", "GPU-b"), None, ["GPU-a,GPU-other,GPU-b", "GPU-b,GPU-a,GPU-other"]),
        (("GPU-a",), None, ["GPU-a"]),
        (("GPU-a", "GPU-b"), "GPU-a,GPU-b", ["GPU-a,GPU-b", "GPU-b,GPU-a"]),
        # CUDA shows one MIG instance to a process, whatever the variable lists.
        (("MIG-1",), "MIG-1, MIG-2,MIG-1", ["MIG-1", "MIG-2"]),
        (("MIG-1",), "MIG-GPU-a/1/0,MIG-GPU-a/2/0", ["MIG-GPU-a/1/0", "MIG-GPU-a/2/0"]),
        (("MIG-1",), None, ["MIG-1"]),
        ((), None, []),
    ],
    ids=["indices", "another model", "one", "UUIDs", "MIG", "older names of MIG", "MIG without a list", "simulated"],
)
def test_each_gpu_comes_first_in_turn(gpus: tuple[str, ...], visible: str | None, expected: list[str]) -> None:
    assert orders(gpus, [gpu for gpu in gpus if gpu != "GPU-other"], visible) == expected


def test_a_worker_whose_gpu_is_of_another_model_has_rows_of_its_own(pytester: pytest.Pytester, seen: Seen) -> None:
    """Such as a MIG instance of another profile: CUDA shows one instance to a process, so that the controller does not know the others."""
    seen.write(MEASURED)
    workers = ("--dist", "load", "--tx", "popen//env:CUDA_VISIBLE_DEVICES=GPU-other", "--tx", "popen//env:CUDA_VISIBLE_DEVICES=GPU-a")
    seen.run(*workers, "--benchmark-json=out.json").assert_outcomes(passed=4)
    rows = rows_in(pytester.path)
    names = {row.get("device", {}).get("name") for row in rows}
    assert names <= {None, "another model"}
    assert "another model" in names


H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
EACH = ("--dist", "each", "--tx", "popen", "--tx", "popen//env:GPUMEM_DEVICE=sim:h200")
COPY = """
    import pytest

    @pytest.mark.parametrize("number", range(2))
    def test_copy(gpu_benchmark, device_buffer, gpu_kernels, number):
        gpu_benchmark(gpu_kernels.copy, device_buffer(64 << 20), device_buffer(64 << 20))
"""


@pytest.fixture
def models(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Models:
    """Runs sessions whose controller has a simulated H100."""
    monkeypatch.setenv("GPUMEM_DEVICE", "sim:h100")
    given = [one for one in SIMULATED if one not in ("--gpumem-device", "sim")]
    return lambda *arguments: pytester.runpytest_inprocess(*given, "-W", "default", "--gpumem-processes=1", *arguments)


def stored(pytester: pytest.Pytester) -> dict[str, int]:
    """By the folder of a GPU in the baseline, the rows of its newest run."""
    place = Storage(pytester.path / "baseline")
    runs = {key: max((content for _, content in files(place, key)), key=lambda content: content.sequence) for key in place.devices()}
    return {key: len(run.rows) for key, run in runs.items()}


def test_each_worker_compares_with_the_baseline_of_its_own_card_and_fails_there_alone(pytester: pytest.Pytester, models: Models) -> None:
    pytester.makepyfile(COPY)
    place = "--gpumem-baseline=baseline"
    saved = models(*EACH, place, "--gpumem-save")
    saved.assert_outcomes(passed=4)
    for file in [*pytester.path.glob("baseline/*/gpumem/*.json")]:
        make_three(file)
    keys = {name: opening.choose(f"sim:{name}").facts.key for name in ("h100", "h200")}
    assert stored(pytester) == {keys["h100"]: 2, keys["h200"]: 2}
    for key in keys.values():
        saved.stdout.fnmatch_lines([f"--gpumem-save: 2 of 2 rows stored in */baseline/{key}/*"])
    saved.stdout.fnmatch_lines([f"*gpumem: {H100}, {H200} (simulated)*", f"*test_copy on {H100} *", f"*test_copy on {H200} *"])
    compared = models(*EACH, place, "--gpumem-max-regression=5%", "--benchmark-json=out.json", "--gpumem-report=page.html", "-v")
    compared.assert_outcomes(passed=4)
    run = results_in(pytester.path)
    assert run["device"]["key"] == keys["h100"]
    by_card: dict[str, list[dict[str, Any]]] = {}
    for row in run["rows"]:
        by_card.setdefault(row.get("device", run["device"])["key"], []).append(row)
    assert {key: len(rows) for key, rows in by_card.items()} == dict.fromkeys(keys.values(), 2)
    # An H200 is a third faster than an H100: compared with the other's baseline, it would be far off.
    for rows in by_card.values():
        assert {row["verdict"]["outcome"] for row in rows} == {"PASS"}
        assert all(row["verdict"]["comparison"]["runs"] == 3 and abs(row["verdict"]["comparison"]["delta"]) < 0.02 for row in rows)
    latency = {key: rows[0]["measurement"]["latency"] for key, rows in by_card.items()}
    assert latency[keys["h200"]] < 0.8 * latency[keys["h100"]]
    # The peak is that of the card, and its name tells the rows apart.
    compared.stdout.fnmatch_lines([f"*{H100}*", f"*{H200}*"])
    page = (pytester.path / "page.html").read_text()
    assert f"on {H100}" in page
    assert f"on {H200}" in page
    # A slow-down on one card fails there; the other rows are stored.
    slower = """
    import pytest

    @pytest.mark.parametrize("number", range(2))
    def test_copy(gpu_benchmark, gpu_device, device_buffer, gpu_kernels, number):
        nbytes = (75 if gpu_device.facts.name == "NVIDIA H200" and number == 1 else 64) << 20
        gpu_benchmark(gpu_kernels.copy, device_buffer(nbytes), device_buffer(nbytes))
"""
    pytester.makepyfile(slower)
    result = models(*EACH, place, "--gpumem-max-regression=5%", "--gpumem-save", "--benchmark-json=out.json")
    result.assert_outcomes(passed=3, failed=1)
    run = results_in(pytester.path)
    failed = [(row["nodeid"], row["device"]["name"]) for row in run["rows"] if row["failed"]]
    assert [(nodeid[-3:], name) for nodeid, name in failed] == [("[1]", H200)]
    assert run["missing"] == []
    assert stored(pytester) == {keys["h100"]: 2, keys["h200"]: 1}


def test_a_test_that_another_card_measured_is_not_lost(pytester: pytest.Pytester, models: Models) -> None:
    pytester.makepyfile(COPY)
    place = "--gpumem-baseline=baseline"
    models(place, "--gpumem-save").assert_outcomes(passed=2)
    on_h200 = ("--dist", "load", "--tx", "popen//env:GPUMEM_DEVICE=sim:h200")
    models(*on_h200, place, "--benchmark-json=out.json").assert_outcomes(passed=2)
    run = results_in(pytester.path)
    assert run["missing"] == []
    assert {row["verdict"]["outcome"] for row in run["rows"]} == {"PASS"}
    assert {row["device"]["name"] for row in run["rows"]} == {H200}


def test_workers_on_another_machine_have_its_cards_baseline(pytester: pytest.Pytester, models: Models, other_machine: str) -> None:
    pytester.makepyfile(COPY)
    there = f"{other_machine}//chdir={pytester.path}//env:GPUMEM_DEVICE=sim:h200"
    workers = ("--dist", "load", "--tx", there, "--gpumem-baseline=baseline")
    models(*workers, "--gpumem-save").assert_outcomes(passed=2)
    assert stored(pytester) == {opening.choose("sim:h200").facts.key: 2}
    models(*workers, "--gpumem-max-regression=5%", "--benchmark-json=out.json").assert_outcomes(passed=2)
    assert {row["verdict"]["comparison"]["runs"] for row in rows_in(pytester.path)} == {1}


def test_undecided_rows_are_measured_again_on_their_gpus(pytester: pytest.Pytester, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    seen.write(
        """
    @pytest.mark.parametrize("number", range(2))
    def test_copy(gpu_benchmark, device_buffer, gpu_kernels, holders, number):
        write(number, holders)
        limit = os.environ.get("LIMIT", "2%")
        gpu_benchmark(gpu_kernels.copy, device_buffer(32 << 20), device_buffer(32 << 20), max_regression=limit)
"""
    )
    seen.run("--gpumem-save").assert_outcomes(passed=2)
    make_three(stored_in(pytester.path)[0])
    seen.forget()
    monkeypatch.setenv("LIMIT", "0.8%")
    seen.run("-n", "2", "--gpumem-no-evidence", processes="auto").assert_outcomes(passed=2)
    on = {name: [mine for one, _, _, mine in seen.lines() if one == name] for name in (0, 1)}
    assert sorted(found[0] for found in on.values()) == [["GPU-a"], ["GPU-b"]]
    assert all(len(found) > 1 and found.count(found[0]) == len(found) for found in on.values())


def test_a_row_is_measured_again_on_its_gpu() -> None:
    simulated = opening.choose("sim")
    chosen = replace(simulated, facts=structs.replace(simulated.facts, uuid="GPU-a"), gpus=("GPU-a", "GPU-b"), alike=("GPU-a", "GPU-b"))
    assert beginning_with("GPU-b", chosen) == "GPU-b,GPU-a"
    assert [beginning_with(gpu, chosen) for gpu in ("GPU-a", "GPU-c", None)] == [None] * 3


@pytest.fixture
def other_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker's specification for pytest-xdist: a machine that ssh reaches, which is this one."""
    pytest.importorskip("asyncssh", reason="asyncssh is of the extra dev")
    if shutil.which("ssh") is None:
        pytest.skip("no ssh")
    with ssh_server.running(tmp_path_factory.mktemp("ssh"), {"THERE": "yes"}) as arguments:
        yield f"ssh={arguments}//python={sys.executable}"


def test_workers_on_another_machine_take_turns_on_its_gpus(pytester: pytest.Pytester, seen: Seen, other_machine: str) -> None:
    """Three workers of a machine with two GPUs, and one of this machine: the rows are those of a session without workers."""
    seen.write(MEASURED)
    seen.run("--benchmark-json=one.json").assert_outcomes(passed=4)
    seen.forget()
    there = f"3*{other_machine}//chdir={pytester.path}"
    result = seen.run("--dist", "each", "--tx", there, "--tx", "popen", "--benchmark-json=out.json")
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


def test_workers_on_another_machine_compare_with_the_baseline(pytester: pytest.Pytester, seen: Seen, other_machine: str) -> None:
    seen.write(MEASURED)
    seen.run("--gpumem-save").assert_outcomes(passed=4)
    workers = ("--dist", "load", "--tx", f"2*{other_machine}//chdir={pytester.path}")
    seen.run(*workers, "--gpumem-max-regression=50%", "--benchmark-json=out.json").assert_outcomes(passed=4)
    rows = rows_in(pytester.path)
    assert {row["verdict"]["comparison"]["processes"] for row in rows} == {1}


def test_a_worker_without_the_folder_of_the_baseline_runs_nothing(tmp_path: Path) -> None:
    facts = opening.choose("sim").facts

    def unfit(folder: Path, *, exists: bool) -> str | None:
        given = {"place": str(folder), "offline": False, "exists": exists}
        gpu: Any = SimpleNamespace(facts=facts, store=Store(folder, facts))
        config: Any = SimpleNamespace(workerinput={WORKER_BASELINE: given})
        return _unfit_worker(config, gpu)

    assert "is a folder of the machine that started this worker" in str(unfit(tmp_path / "none", exists=True))
    assert unfit(tmp_path / "none", exists=False) is None
    assert unfit(tmp_path, exists=True) is None
