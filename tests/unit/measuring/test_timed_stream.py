"""Where a callable works: its own stream, a default one, several, none; and what a measurement makes of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from bench import Bench
from cases import naming
from counted_device import CountedDevice, replaced
from verdicts_alone import judge

from pytest_gpumem.devices.protocol import Foreign, HoldExpired, Launch, Stream
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.measuring.untimed import LONG, Elsewhere, NoWork, find_stream
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.units import GiB, MiB

LEGACY, THREAD = "the legacy default stream", "this thread's default stream"


class ManyStreams(CountedDevice):
    """A device with default streams, and foreign functions that run as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.legacy, self.thread, self.private = (self.streams.create() for _ in range(3))
        self.current_of_libraries: Stream = self.private

        def called(foreign: Foreign, stream: Stream) -> None:
            self.current_of_libraries = stream
            foreign.function()

        replaced(self.streams, defaults=lambda: (self.legacy, self.thread))
        replaced(self.kernels, call=called)


class Scene:
    """A callable on a device: what it launches, and where."""

    def __init__(self) -> None:
        self.device = ManyStreams()
        self.bench = Bench(self.device)
        self.work = self.launch_of(32 * MiB)
        self.own = self.device.streams.create()
        self.floor = self.bench.harness.floors().empty
        self.bench.harness.wake()
        self.prepared: list[Stream] = []

    def launch_of(self, nbytes: int) -> Launch:
        buffers, values = self.bench.kernels.copy.arguments(
            tuple(self.bench.buffers(2, nbytes)), {}
        )
        return self.bench.kernels.copy.launch(buffers, values)

    def on(self, *streams: Stream | None, work: Launch | None = None) -> Callable[[Stream], None]:
        """A callable that launches on these streams; None stands for the current one."""

        def launch(current: Stream) -> None:
            for stream in streams:
                self.device.kernels.launch(work or self.work, stream or current)

        return launch

    def named(self, name: str | None) -> Stream | None:
        return None if name is None else self.own if name == "own" else getattr(self.device, name)

    def find(self, launch: Callable[[Stream], object]) -> tuple[Stream, str | None]:
        target = Target("it", self.device, self.own)
        replaced(target, launch=lambda _, stream: launch(stream), prepare=self.prepared.append)
        found = find_stream(target, self.floor)
        return found.stream, found.name


@pytest.fixture
def scene() -> Scene:
    return Scene()


# Asking the device


def test_work_is_found_where_it_ends(scene: Scene) -> None:
    for streams, found, name in [
        ((None,), "own", None),
        (("legacy",), "legacy", LEGACY),
        (("thread",), "thread", THREAD),
        (("legacy", "thread"), "legacy", LEGACY),  # default streams wait for each other
        ((None, "legacy"), "legacy", LEGACY),
    ]:
        assert scene.find(scene.on(*map(scene.named, streams))) == (scene.named(found), name), (
            streams
        )
        assert id(scene.own) in map(id, scene.prepared), streams


def test_work_that_no_stream_shows_is_elsewhere(scene: Scene) -> None:
    for streams, error, said in [
        (("own", "legacy"), Elsewhere, "its work is spread over several streams"),
        ((None, "thread"), Elsewhere, "its work is spread over several streams"),
        (("private",), Elsewhere, "its work runs on streams of its own"),
        ((), NoWork, "no work was seen"),
    ]:
        with naming(streams):
            with pytest.raises(Elsewhere, match=said) as raised:
                scene.find(scene.on(*map(scene.named, streams)))
            assert type(raised.value) is error


def test_what_a_library_sets_up_for_a_stream_at_its_first_work_there_is_no_waiting(
    scene: Scene,
) -> None:
    """As cuBLAS does with its workspace."""
    known = {id(scene.own)}

    def launch(current: Stream) -> None:
        if id(current) not in known:
            known.add(id(current))
            scene.device.streams.synchronize()
        scene.on(None, scene.device.legacy)(current)

    assert scene.find(launch) == (scene.device.legacy, LEGACY)


def test_work_that_waits_for_the_device_lets_the_hold_expire(scene: Scene) -> None:
    def waits(current: Stream) -> None:
        scene.device.kernels.launch(scene.work, current)
        scene.device.streams.synchronize(current)

    with pytest.raises(HoldExpired):
        scene.find(waits)
    scene.device.streams.synchronize()  # and nothing is held any more


def test_work_beside_the_timed_stream_is_elsewhere_where_it_ends_later(scene: Scene) -> None:
    short, long = scene.launch_of(1 * MiB), scene.launch_of(256 * MiB)

    def both(current: Stream, inside: Launch, beside: Launch) -> None:
        scene.device.kernels.launch(inside, current)
        scene.device.kernels.launch(beside, scene.device.private)

    with pytest.raises(Elsewhere, match="some of its work goes on beside the timed stream"):
        scene.find(lambda current: both(current, short, long))
    assert scene.find(lambda current: both(current, long, short)) == (scene.own, None)


def test_long_work_is_launched_twice_where_it_fills_the_current_stream(scene: Scene) -> None:
    long, launches = scene.launch_of(8 * GiB), list[Stream]()
    for streams, found, most in (
        ((None,) * 6, scene.own, 2),
        ((scene.device.legacy,) * 6, scene.device.legacy, 6),
    ):
        launches.clear()
        launch = scene.on(*streams, work=long)

        def counted(current: Stream, launch: Callable[[Stream], None] = launch) -> None:
            launches.append(current)
            launch(current)

        begun = scene.device.now()
        assert scene.find(counted)[0] is found
        assert scene.device.now() - begun > LONG
        assert len(launches) <= most


def test_long_work_on_two_streams_is_not_taken_for_one(scene: Scene) -> None:
    long = scene.launch_of(8 * GiB)
    with pytest.raises(Elsewhere):
        scene.find(scene.on(*(None,) * 3, *(scene.device.thread,) * 6, work=long))


# Through a measurement


def take(scene: Scene, launch: Callable[[Stream], None], stream: Any = None, **plan: Any) -> Any:
    target = scene.bench.target(lambda: launch(scene.device.current_of_libraries), stream=stream)
    return scene.bench.take(target, **plan)


def test_a_callable_is_timed_where_it_launches(scene: Scene) -> None:
    own, legacy = take(scene, scene.on(None)), take(scene, scene.on(scene.device.legacy))
    assert own.sampler == legacy.sampler == "blocked"
    assert "timed on the legacy default stream, where it launches" in legacy.notes
    assert not [note for note in own.notes if note.startswith("timed on")]
    assert legacy.latency == pytest.approx(own.latency, rel=0.01)
    assert own.latency > 5 * own.floor


def test_what_no_stream_shows_is_timed_by_the_hosts_clock(scene: Scene) -> None:
    taken = take(scene, scene.on(scene.device.private))
    assert taken.sampler == "host"
    assert (
        taken.sampler_reason
        == "its work runs on streams of its own: wall-clock time, launch latency included"
    )
    assert taken.latency > take(scene, scene.on(None)).latency


def test_the_hosts_time_of_nothing_at_all_is_not_judged(scene: Scene) -> None:
    taken = take(scene, scene.on())
    assert (taken.sampler, taken.work_seen) == ("host", False)
    assert msgspec.convert(msgspec.to_builtins(taken), Measurement).work_seen is False
    assert (
        judge(taken, Limits(max_latency="1 s"), scene.device.facts, [], strict=False).outcome
        is Outcome.UNDECIDED
    )
    working = take(scene, scene.on(scene.device.private))
    assert (
        judge(working, Limits(max_latency="1 s"), scene.device.facts, [], strict=False).outcome
        is Outcome.PASS
    )


def test_work_that_the_callable_waits_for_is_seen_where_somebody_reads_what_ran(
    scene: Scene,
) -> None:
    def waited(_: Stream) -> None:
        scene.device.kernels.launch(scene.work, scene.device.private)
        scene.device.streams.synchronize(scene.device.private)

    assert take(scene, waited).work_seen is False
    assert take(scene, waited, ran=True).work_seen is msgspec.UNSET


def test_a_window_does_not_cover_what_runs_elsewhere(scene: Scene) -> None:
    (table,) = scene.bench.buffers(1)
    with (
        persisting(scene.device, table) as stream,
        pytest.raises(
            BadCall,
            match="does not launch on the persisting stream, so its window does not cover what",
        ),
    ):
        take(scene, scene.on(scene.device.legacy), stream=stream)
    with persisting(scene.device, table) as stream:
        assert take(scene, scene.on(None), stream=stream).sampler == "blocked"


def test_work_on_an_own_stream_that_is_waited_for_is_not_left_out(scene: Scene) -> None:
    """Nothing is left of it when the launch returns, so that no look at a stream sees it."""
    big, small = scene.launch_of(32 * MiB), scene.launch_of(1 * MiB)

    def waited(current: Stream) -> None:
        scene.device.kernels.launch(big, scene.device.private)
        scene.device.streams.synchronize(scene.device.private)
        scene.device.kernels.launch(small, current)

    def joined(current: Stream) -> None:
        scene.device.streams.join(scene.device.private, current)
        scene.device.kernels.launch(big, scene.device.private)
        scene.device.streams.join(current, scene.device.private)
        scene.device.kernels.launch(small, current)

    def judged(measured: Any) -> Any:
        return judge(measured, Limits(max_latency="1 s"), scene.device.facts, [], strict=False)

    alone, whole = take(scene, scene.on(None, work=big)), take(scene, waited)
    assert whole.sampler == "host"
    assert re.match(
        r"[\d.]+ us of its work run on a stream that the timed one does not wait for: wall-clock time",
        whole.sampler_reason,
    )
    assert whole.latency > alone.latency
    assert judged(whole).outcome is Outcome.PASS
    inside = take(scene, joined)
    assert inside.sampler == "blocked"
    assert inside.latency > alone.latency
    asked = take(scene, waited, sampler="blocked")
    assert asked.latency < 0.3 * alone.latency
    assert asked.outside == pytest.approx(alone.latency, rel=0.3)
    assert (judged(asked).outcome, judged(asked).code) == (Outcome.UNDECIDED, Code.CONDITIONS)
    assert (
        "of its work run on a stream that the timed stream does not wait for"
        in judged(asked).reason
    )
