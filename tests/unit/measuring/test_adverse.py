"""What would give a wrong number, or blame the wrong test, without any error: other streams, other placements, slow launches."""

from __future__ import annotations

from typing import Any

import pytest
from bench import Bench, check

from pytest_gpumem.devices.protocol import OutOfMemory
from pytest_gpumem.measuring.samplers import HOLD_TIMEOUT
from pytest_gpumem.measuring.target_case import Case
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.units import MiB


@pytest.mark.parametrize("sampler", ["blocked", "host"])
def test_hot_stays_hot_where_placements_take_turns(sampler: str) -> None:
    """Sixteen placements of 6 MiB do not fit in L2 at once: each must find its own data there all the same."""

    def latency(placements: int) -> float:
        bench = Bench()
        taken = bench.measure("triad", *bench.buffers(3, 2 * MiB), mode="hot", sampler=sampler, placements=placements)
        assert len(taken.placements) >= placements
        return taken.latency

    assert latency(16) == pytest.approx(latency(1), rel=0.1)


def test_slow_launches_have_fewer_placements_instead_of_a_budget_spent_many_times_over(bench: Bench) -> None:
    nodes, out = bench.memory.device(1 * MiB, "i4"), bench.memory.device((1,), "i4")
    begun = bench.device.now()
    taken = bench.measure("chase", nodes, out, 1_000_000, placements=8, budget=1.0)
    assert taken.latency > 0.1
    assert bench.device.now() - begun < 4.0
    assert len(taken.placements) >= 2
    assert f"{len(taken.placements)} of 8 placements" in taken.notes


def test_an_expired_hold_is_not_the_next_measurements_fault(bench: Bench) -> None:
    """Work that waits for the device behind a hold and then raises: its own error is the one that counts, also for the same stream."""
    x, calls = bench.memory.device(1 * MiB), 0

    def work() -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            bench.device.timeline.host += 2 * HOLD_TIMEOUT
            raise RuntimeError("the twentieth call")

    with pytest.raises(RuntimeError, match="the twentieth call"):
        bench.case(lambda memory: Case(launch=work, reference=work, reads=[x]), sampler="blocked")
    assert bench.measure("copy", *bench.buffers(2)).checked


def test_a_graph_is_captured_anew_where_memory_ran_out_between_two_moves(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = bench.buffers(2, 2 * MiB)
    old, move, moved = a.allocation, Buffer.move, list[Buffer]()

    def second_fails(buffer: Buffer) -> None:
        if moved:
            raise OutOfMemory("made to be full")
        moved.append(buffer)
        move(buffer)

    run_dry = list[Any]()
    bench.device.before("graphs.replay", lambda graph, stream: run_dry.append(graph) if moved else None)
    monkeypatch.setattr(Buffer, "move", second_fails)
    monkeypatch.setattr("pytest_gpumem.measuring.target_kernel.side_by_side", lambda *_: 0)
    before = list[Any]()
    capture = bench.device.graphs.capture

    def captured(stream: Any, body: Any, **options: Any) -> Any:
        graph = capture(stream, body, **options)
        if not moved:
            before.append(graph)
        return graph

    monkeypatch.setattr(bench.device.graphs, "capture", captured)
    taken = bench.measure("copy", a, b, mode="hot", placements=4)
    assert old.freed
    assert taken.checked
    assert before
    assert run_dry
    assert not [graph for graph in run_dry if any(graph is stale for stale in before)]


def test_a_restore_on_a_stream_of_its_own_has_ended_before_a_sample(bench: Bench) -> None:
    """Numba's kernels, say, go to the default stream, which ours do not wait for."""
    waited: list[Any] = []
    unsound, restores = list[int](), 0

    def called(foreign: Any, stream: Any) -> None:
        nonlocal restores
        if foreign.function is restore:
            restores += 1
            waited.clear()

    def restore() -> None:
        pass

    bench.device.before("streams.synchronize", lambda stream=None: waited.append(stream))
    bench.device.before("streams.hold", lambda *_: unsound.append(restores) if restores and None not in waited else None)
    bench.device.before("kernels.call", called)
    x = bench.memory.device(1 * MiB)
    taken = bench.case(lambda memory: Case(launch=lambda: None, reference=lambda: None, restore=restore, reads=[x]))
    assert taken.sampler == "blocked"
    assert restores > 10
    assert not unsound


def test_a_check_waits_for_the_device_between_its_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poison is on our stream, restore and launch may be on another that does not wait for it, and the check on a third."""
    steps: list[str] = []

    def step(name: str) -> Any:
        return lambda: steps.append(name)

    def build(memory: Memory) -> Case:
        y = memory.device(1 * MiB)
        launch = step("launch")
        return Case(launch=launch, reference=launch, restore=step("restore"), check=step("check"), writes=[y])

    bench.device.before("streams.synchronize", lambda stream=None: steps.append("wait") if stream is None else None)
    bench.device.before("content.poison", lambda *_: steps.append("poison"))
    monkeypatch.setattr(bench.device.kernels, "call", lambda foreign, stream: foreign.function())
    target = bench.conductor.case(build, arena=bench.arena)
    steps.clear()
    check(target)
    target.close()
    assert " ".join(steps).startswith("poison wait restore wait launch wait check")


class Pooled:
    """An array of a library whose pool gives out its blocks in turn."""

    nbytes = 1 * MiB

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False)}


@pytest.mark.parametrize(("blocks", "said"), [(2, True), (100, False)])
def test_placements_of_a_pools_same_blocks_are_said_to_be_no_different_ones(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, blocks: int, said: bool
) -> None:
    """A pool has the block before the last free when the next placement is built: two places in turn."""
    monkeypatch.setattr(bench.device.kernels, "call", lambda foreign, stream: foreign.function())
    work, built = bench.kernels.copy, 0
    buffers, values = work.arguments(tuple(bench.buffers(2)), {})
    copy = work.launch(buffers, values)

    def build(memory: Memory) -> Case:
        nonlocal built
        built += 1
        return Case(lambda: bench.device.kernels.launch(copy, memory.stream), reads=[Pooled(built % blocks << 21)])

    taken = bench.case(build, placements=6)
    assert built == len(taken.placements) == 6
    notes = [note for note in taken.notes if note.startswith("2 of 6 placements differ in where its own arrays lie")]
    assert len(notes) == said
    assert [note for note in taken.notes if "own arrays" in note] == notes


def test_buffers_of_the_harness_are_no_pools(bench: Bench) -> None:
    def build(memory: Memory) -> Case:
        x = memory.device(1 * MiB)
        return Case(lambda: None, reference=lambda: None, reads=[x])

    assert not [note for note in bench.case(build, placements=4).notes if "own arrays" in note]
