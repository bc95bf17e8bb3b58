"""The script that compares with peers: its draws, its rounds and budget, its workers as far as they need no GPU."""

from __future__ import annotations

import json
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peer_workers
import peers
import pytest
from triad_bench import TriadBench

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.units import KiB, MiB

ANSWERING = """
import json, sys
job = json.loads(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
if job["peer"] == "broken":
    sys.exit("nothing to say")
conditions = {"throttle_reasons": []}
case = {"way": "gpumem hot", "mib": 2, "value": 1e-6, "wall": 0.1, "samples": 5, "before": conditions, "after": conditions}
print(json.dumps({"first_use": 0.5, "cases": [case]}))
"""


def answering(job: dict[str, Any]) -> list[str]:
    return [sys.executable, "-S", "-c", ANSWERING, json.dumps(job)]


def jobs_of(*names: str) -> Any:
    return lambda number: peers.jobs_of_round(number, seed=1, peers=names, conditions=["same"], mib=[2], device="sim")


def record() -> dict[str, Any]:
    return {**peers.new_record(choose("sim").facts), "card": None}


def test_a_round_runs_every_peer_once_in_each_condition() -> None:
    jobs = peers.jobs_of_round(3, seed=1, peers=peers.PEERS, conditions=peers.CONDITIONS, mib=[2, 32], device="cuda")
    assert sorted((job["peer"], job["condition"]) for job in jobs) == sorted((p, c) for p in peers.PEERS for c in peers.CONDITIONS)
    assert jobs == peers.jobs_of_round(3, seed=1, peers=peers.PEERS, conditions=peers.CONDITIONS, mib=[2, 32], device="cuda")


def test_orders_are_drawn_anew_and_favour_nobody() -> None:
    first = dict.fromkeys(peers.PEERS, 0)
    for number in range(400):
        first[jobs_of(*peers.PEERS)(number)[0]["peer"]] += 1
    assert all(60 < count < 140 for count in first.values()), first


def test_all_peers_of_a_round_get_the_same_unrelated_allocations() -> None:
    draws = []
    for number in (1, 2):
        jobs = peers.jobs_of_round(number, seed=1, peers=peers.PEERS, conditions=peers.CONDITIONS, mib=[2], device="cuda")
        assert {tuple(job["unrelated"]) for job in jobs if job["condition"] == "same"} == {()}
        (draw,) = {tuple(job["unrelated"]) for job in jobs if job["condition"] == "random"}
        draws.append(draw)
    assert draws[0] != draws[1]


def test_unrelated_allocations_are_as_many_and_as_large_as_said() -> None:
    drawn = [peers.unrelated(1, number) for number in range(500)]
    sizes = [nbytes for draw in drawn for nbytes in draw]
    assert {len(draw) for draw in drawn} == set(range(1, 9))
    assert 0.5 * MiB - 512 <= min(sizes) < 0.6 * MiB
    assert 480 * MiB < max(sizes) <= 512 * MiB
    assert all(nbytes % 512 == 0 for nbytes in sizes)


def test_whole_rounds_are_kept_and_given_out_after_each() -> None:
    seen, held = [], record()
    peers.measure(
        held, range(1, 4), jobs_of("gpumem", "cupy"), seconds=1e9, after_round=lambda r: seen.append(len(r["runs"])), command=answering
    )
    assert seen == [2, 4, 6]
    assert [run["round"] for run in held["runs"]] == [1, 1, 2, 2, 3, 3]
    assert held["runs"][0]["first_use"] == 0.5
    assert held["runs"][0]["cases"][0]["value"] == 1e-6


def test_no_round_is_begun_that_would_end_too_late(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 10**6, 10))  # every look at the clock is 10 s later; a round takes three looks
    held = record()
    peers.measure(
        held, range(1, 20), jobs_of("gpumem"), seconds=75, after_round=lambda _: None, command=answering, now=lambda: float(next(clock))
    )
    # Begun at 10, 40: each took 20 s. The third would begin at 70 and end at 90.
    assert [run["round"] for run in held["runs"]] == [1, 2]
    assert "stopping before round 3: 70 s of 75 s are used" in capsys.readouterr().out


def test_a_failed_worker_stays_in_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    held = record()
    peers.measure(held, range(1, 3), jobs_of("broken", "gpumem"), seconds=1e9, after_round=lambda _: None, command=answering)
    failed = [run for run in held["runs"] if run["peer"] == "broken"]
    assert len(failed) == 2
    assert all("nothing to say" in run["error"] and run["cases"] == [] for run in failed)
    assert all(run["error"] is None for run in held["runs"] if run["peer"] == "gpumem")
    assert "nothing to say" in capsys.readouterr().err


QUICK_WORKER = f"""
import sys
sys.path.insert(0, {str(Path(peer_workers.__file__).parent)!r})
import peer_workers
peer_workers.TINY_PLAN_SECONDS = 0.001
peer_workers.main()
"""


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The script, whose workers spend little on what they do not record."""
    real = peers.one_after_another

    def quick(job: dict[str, Any]) -> list[str]:
        return [sys.executable, "-c", QUICK_WORKER, json.dumps(job)]

    monkeypatch.setattr(peers, "one_after_another", lambda jobs, _command, **options: real(jobs, quick, **options))
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments])
    return peers.main()


def test_the_whole_script_on_the_simulated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "peers.json"
    common = ("--device", "sim", "--peers", "gpumem", "--sizes", "4096", "--json", str(file), "--processes", "1")
    assert run_script(monkeypatch, *common, "--condition", "same") == 0
    held = json.loads(file.read_text())
    assert [case["way"] for case in held["runs"][0]["cases"]] == [
        "gpumem clean-cold",
        "gpumem dirty-cold",
        "gpumem hot",
        "gpumem hot, one placement",
    ]
    clean = held["runs"][0]["cases"][0]
    assert len(clean["medians"]) >= 8
    assert clean["wall"] > 0
    assert held["runs"][0]["first_use"] > 0
    reported = [row["way"] for row in held["summary"]["rows"] if not row["way"].endswith("levelled")]
    assert reported == ["gpumem clean-cold", "gpumem dirty-cold", "gpumem hot", "gpumem hot, one placement"]

    assert run_script(monkeypatch, *common, "--condition", "random", "--append") == 0
    both = json.loads(file.read_text())
    assert [run["condition"] for run in both["runs"]] == ["same", "random"]
    assert both["runs"][0] == held["runs"][0]
    assert both["runs"][1]["unrelated"]
    # What was allocated before moves the arrays.
    assert both["runs"][1]["cases"][0]["addresses"] != clean["addresses"]
    assert capsys.readouterr().out.count("SIMULATED") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "sim"), "on the simulated device there is --peers gpumem only"),
        (("--device", "sim:nothing", "--peers", "gpumem"), "no simulated device 'nothing'"),
        (("--peers", "gpumem,nvbnch"), "peers are gpumem, nvbench, triton, cupy"),
        (("--peers", "gpumem,gpumem"), "each at most once"),
        (("--sizes", "2,none"), "sizes are whole numbers of MiB"),
        (("--sizes", "0"), "sizes are whole numbers of MiB"),
        (("--processes", "0"), "no positive whole number"),
        (("--device", "sim", "--peers", "gpumem", "--append"), "--append needs --json FILE"),
        (("--device", "sim", "--peers", "gpumem", "--seconds", "-1"), "no round was run"),
    ],
)
def test_a_wrong_option_is_said(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_script(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("versions", {"triton": "3.5.0"}), ("device", {"name": "another"}), ("kind", "suite")])
def test_a_record_of_something_else_is_not_added_to(
    name: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "peers.json"
    file.write_text(json.dumps({**record(), name: value}))
    with pytest.raises(SystemExit):
        run_script(monkeypatch, "--device", "sim", "--peers", "gpumem", "--json", str(file), "--append")
    assert f"holds {name}" in capsys.readouterr().err


def test_a_condition_is_measured_on_one_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "peers.json"
    file.write_text(json.dumps({**record(), "runs": [{"round": 1, "condition": "same", "card": "GPU-1", "error": None, "cases": []}]}))
    with pytest.raises(SystemExit):
        run_script(monkeypatch, "--device", "sim", "--peers", "gpumem", "--json", str(file), "--append", "--condition", "same")
    assert "another card, GPU-1" in capsys.readouterr().err


# Workers


@pytest.fixture
def bench() -> Any:
    made = TriadBench(choose("sim"), [3 * MiB], index=0)
    yield made
    made.close()


def test_what_the_peers_launch_is_what_this_project_launches(bench: TriadBench, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    from pytest_gpumem.devices.cuda.compiler import entry_for
    from pytest_gpumem.devices.cuda.launches import packed_arguments
    from pytest_gpumem.kernels import sources

    compiled: list[dict[str, Any]] = []
    launched: list[tuple[Any, ...]] = []

    class FakeModule:
        def __init__(self, **how: Any) -> None:
            compiled.append(how)

        def get_function(self, name: str) -> Any:
            def function(grid: Any, block: Any, arguments: Any, *, shared_mem: int, stream: Any) -> None:
                launched.append((name, grid, block, arguments, shared_mem, stream.ptr))

            return types.SimpleNamespace(kernel=function)

    monkeypatch.setattr(cupy, "RawModule", FakeModule)
    with bench.arrays(2 * MiB) as arrays:
        launch = bench.launcher(arrays)
        launch(0)
        launch(0x1000)
        buffers, values = bench.triad.arguments((*arrays, 3.0), {})
        ours = bench.triad.launch(buffers, values)
    entry = entry_for(ours.kernel, "f4", ours.shape)
    assert compiled == [{"code": sources.read("stream.cu"), "options": sources.COMPILE_OPTIONS, "name_expressions": [entry]}]
    expected = packed_arguments(ours)
    for name, grid, block, arguments, shared, _stream in launched:
        assert (name, grid, block, shared) == (entry, (ours.shape.blocks,), (ours.shape.threads,), 0)
        assert [(type(a), a) for a in arguments] == [(type(a), a) for a in expected]
    assert [stream for *_, stream in launched] == [0, 0x1000]


def test_arrays_are_freed_after_each_case(bench: TriadBench) -> None:
    from pytest_gpumem.devices.protocol import MemoryKind

    free = bench.device.memory.free_bytes(MemoryKind.DEVICE)
    with bench.arrays(32 * MiB) as arrays:
        assert bench.device.memory.free_bytes(MemoryKind.DEVICE) <= free - 3 * 32 * MiB
        arrays[0].move()
    assert bench.device.memory.free_bytes(MemoryKind.DEVICE) == free


class FakeNvbench(types.ModuleType):
    """As much of cuda.bench as the worker uses; writes JSON in the form of cuda-bench 0.3.0."""

    def __init__(self, *, fail: str = "") -> None:
        super().__init__("cuda.bench")
        self.fail = fail
        self.benchmarks: list[dict[str, Any]] = []
        self.arguments: list[str] = []
        self.streams: list[int] = []

    def register(self, function: Any) -> Any:
        kept: dict[str, Any] = {"function": function, "name": function.__name__}
        self.benchmarks.append(kept)
        return types.SimpleNamespace(
            add_int64_axis=lambda name, values: kept.update(axis=name, values=values),
            set_stopping_criterion=lambda name: kept.update(criterion=name),
            set_batch_target_time=lambda seconds: kept.update(batch=seconds),
        )

    def run_all_benchmarks(self, arguments: list[str]) -> None:
        self.arguments = arguments
        results = []
        for benchmark in self.benchmarks:
            states = []
            for value in benchmark["values"]:
                executed: dict[str, Any] = {}
                state = types.SimpleNamespace(get_int64=lambda name, value=value: value, exec=self._exec(executed))
                skipped = None
                try:
                    if self.fail == benchmark["name"]:
                        skipped = "device asleep"
                    else:
                        benchmark["function"](state)
                except Exception as error:  # as nvbench does
                    skipped = str(error)
                states.append(self._state(benchmark["axis"], value, executed, skipped))
            results.append({"name": benchmark["name"], "states": states})
        file = arguments[arguments.index("--json") + 1]
        Path(file).write_text(json.dumps({"benchmarks": results}))

    def _exec(self, executed: dict[str, Any]) -> Any:
        def run(launcher: Any, /, *, batched: bool) -> None:
            stream = types.SimpleNamespace(addressof=lambda: 0xABC0)
            launcher(types.SimpleNamespace(get_stream=lambda: stream))
            executed["batched"] = batched

        return run

    @staticmethod
    def _state(axis: str, value: int, executed: dict[str, Any], skipped: str | None) -> dict[str, Any]:
        def summary(tag: str, kind: str, text: str) -> dict[str, Any]:
            return {"tag": tag, "name": tag, "data": [{"name": "value", "type": kind, "value": text}]}

        summaries = []
        if executed:
            summaries += [
                summary("nv/cold/sample_size", "int64", "1874"),
                summary("nv/cold/time/gpu/mean", "float64", str(value * 1e-9)),
                summary("nv/cold/sm_clock_rate/mean", "float64", "nan"),
                summary("nv/cold/bw/item_rate", "float64", "5"),
            ]
            if executed["batched"]:
                summaries += [summary("nv/batch/sample_size", "int64", "900"), summary("nv/batch/time/gpu/mean", "float64", "2e-06")]
        return {
            "axis_values": [{"name": axis, "type": "int64", "value": str(value)}],
            "summaries": summaries,
            "is_skipped": skipped is not None,
            **({"skip_reason": skipped} if skipped else {}),
        }


@contextmanager
def nvbench_in_place(monkeypatch: pytest.MonkeyPatch, fake: FakeNvbench, launch: Any) -> Any:
    monkeypatch.setitem(sys.modules, "cuda.bench", fake)
    monkeypatch.setattr(sys.modules.get("cuda") or __import__("cuda"), "bench", fake, raising=False)
    monkeypatch.setattr(TriadBench, "launcher", lambda self, arrays: launch)
    yield


def test_nvbench_is_asked_for_its_cold_mean_with_its_own_criterion(bench: TriadBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    fake, streams = FakeNvbench(), []
    with nvbench_in_place(monkeypatch, fake, streams.append):
        first_use, cases = peer_workers.nvbench(bench, [2, 32])
    assert fake.arguments[:4] == ["-q", "--devices", "0", "--json"]
    warm_up, cold, batch = fake.benchmarks
    assert warm_up["values"] == [64]
    assert cold["values"] == batch["values"] == [2048, 32768]
    assert "criterion" not in cold
    assert "batch" not in cold
    assert [(case["way"], case["mib"]) for case in cases] == [
        ("nvbench cold", 2),
        ("nvbench batch", 2),
        ("nvbench cold", 32),
        ("nvbench batch", 32),
    ]
    assert [case["value"] for case in cases] == [2048e-9, 2e-6, 32768e-9, 2e-6]
    assert [case["samples"] for case in cases] == [1874, 900, 1874, 900]
    assert cases[0]["nvbench"] == {"nv/cold/sample_size": 1874.0, "nv/cold/time/gpu/mean": 2048e-9, "nv/cold/sm_clock_rate/mean": None}
    assert all(case["wall"] > 0 and len(case["addresses"]) == 3 for case in cases)
    assert first_use > 0
    assert streams == [0] + [0xABC0] * 5
    json.dumps(cases, allow_nan=False)


def test_what_nvbench_skips_is_an_error(bench: TriadBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    with (
        nvbench_in_place(monkeypatch, FakeNvbench(fail="cold"), lambda handle: None),
        pytest.raises(peer_workers.NvbenchSkipped, match="device asleep"),
    ):
        peer_workers.nvbench(bench, [2])


def test_an_error_inside_nvbench_is_raised_as_it_was(bench: TriadBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")

    def launch(handle: int) -> None:
        if handle:
            raise ZeroDivisionError("inside the launcher")

    with nvbench_in_place(monkeypatch, FakeNvbench(), launch), pytest.raises(ZeroDivisionError, match="inside the launcher"):
        peer_workers.nvbench(bench, [2])


def test_triton_is_asked_for_all_its_samples(bench: TriadBench, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    devices: list[int] = []

    def do_bench(function: Any, *, return_mode: str) -> list[float]:
        assert return_mode == "all"
        function()
        return [0.001, 0.002, 0.006]

    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        set_device=devices.append, current_stream=lambda: types.SimpleNamespace(cuda_stream=77), is_available=lambda: False
    )
    testing = types.ModuleType("triton.testing")
    testing.do_bench = testing.do_bench_cudagraph = do_bench  # type: ignore[attr-defined]
    package = types.ModuleType("triton")
    package.testing = testing  # type: ignore[attr-defined]
    for name, module in (("torch", torch), ("triton", package), ("triton.testing", testing)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(TriadBench, "launcher", lambda self, arrays: launched.append)
    _, cases = peer_workers.triton(bench, [2])
    assert [(case["way"], case["value"], case["samples"]) for case in cases] == [
        ("triton do_bench median", pytest.approx(2e-6), 3),
        ("triton do_bench mean", pytest.approx(3e-6), 3),
        ("triton do_bench_cudagraph", pytest.approx(3e-6), 3),
    ]
    assert devices == [0]
    assert launched == [77] * 4


def test_the_first_case_is_tiny_and_not_recorded(bench: TriadBench, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    arrays = TriadBench.arrays

    def watched(self: TriadBench, nbytes: int) -> Any:
        sizes.append(nbytes)
        return arrays(self, nbytes)

    monkeypatch.setattr(TriadBench, "arrays", watched)
    monkeypatch.setattr(peer_workers, "TINY_PLAN_SECONDS", 0.001)
    first_use, cases = peer_workers.gpumem(bench, [4096])  # few samples fill a budget
    assert sizes == [64 * KiB] + [4096 * MiB] * len(peer_workers.WAYS)
    assert {case["mib"] for case in cases} == {4096}
    assert first_use > 0
