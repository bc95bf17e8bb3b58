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

from pytest_gpumem.devices.protocol import Foreign, HoldExpired, Launch, NotCounted, Stream
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.measuring.untimed import WatchedLaunch, find_stream
from pytest_gpumem.memory.l2 import persisting
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.units import GiB, MiB

LEGACY = "the legacy default stream"


class ManyStreams(CountedDevice):
    """A device with default streams, which wait for each other, and foreign functions that run as
    they are."""

    def __init__(self) -> None:
        super().__init__()
        self.legacy, self.thread, self.private = (self.streams.create() for _ in range(3))
        self.current_of_libraries: Stream = self.private

        launch, join = self.kernels.launch, self.streams.join

        def launched(what: Launch, stream: Stream, **window: Any) -> None:
            defaults = self.legacy, self.thread
            if stream not in defaults:
                launch(what, stream, **window)
                return
            other = defaults[1 - defaults.index(stream)]
            join(stream, other)
            launch(what, stream, **window)
            join(other, stream)

        def called(foreign: Foreign, stream: Stream) -> None:
            self.current_of_libraries = stream
            foreign.function()

        replaced(self.streams, defaults=lambda: (self.legacy, self.thread))
        replaced(self.kernels, call=called, launch=launched)


class Scene:
    """A callable on a device: what it launches, and where."""

    def __init__(self) -> None:
        self.device = ManyStreams()
        self.bench = Bench(self.device)
        self.work = self.launch_of(32 * MiB)
        self.own = self.device.streams.create()
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

    def find(self, launch: Callable[[Stream], object]) -> WatchedLaunch:
        target = Target("it", self.bench.arena)
        target.stream = self.own
        replaced(target, launch=lambda _, stream: launch(stream), prepare=self.prepared.append)
        return find_stream(target, self.bench.harness.idle, 1e-3)


@pytest.fixture
def scene() -> Scene:
    return Scene()


# Asking the device


def test_work_is_found_where_it_ends(scene: Scene) -> None:
    for streams, found in [
        ((None,), "own"),
        (("legacy",), "legacy"),
        (("thread",), "thread"),
        (("legacy", "thread"), "legacy"),
        ((None, "legacy"), "legacy"),
        ((None, "thread"), "legacy"),
    ]:
        watched = scene.find(scene.on(*map(scene.named, streams)))
        assert watched.stream is scene.named(found), streams
        assert watched.timed, streams
        assert id(scene.own) in map(id, scene.prepared), streams


def test_work_that_no_stream_times_is_told_apart(scene: Scene) -> None:
    for streams, on_stream, outside in [
        (("own", "legacy"), True, True),
        (("private", None), True, True),
        (("private",), False, True),
        ((), False, False),
    ]:
        with naming(streams):
            watched = scene.find(scene.on(*map(scene.named, streams)))
            assert watched.timed is not outside
            assert (watched.on_stream, watched.outside > 0) == (on_stream, outside)
            assert watched.seen is outside


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

    assert scene.find(launch).stream is scene.device.legacy


def test_work_that_waits_for_the_device_lets_the_hold_expire(scene: Scene) -> None:
    def waits(current: Stream) -> None:
        scene.device.kernels.launch(scene.work, current)
        scene.device.streams.synchronize(current)

    with pytest.raises(HoldExpired):
        scene.find(waits)
    scene.device.streams.synchronize()  # and nothing is held any more


def test_work_beside_the_timed_stream_matters_from_one_per_cent_on(scene: Scene) -> None:
    short, long = scene.launch_of(1 * MiB), scene.launch_of(512 * MiB)

    def both(current: Stream, inside: Launch, beside: Launch) -> None:
        scene.device.kernels.launch(inside, current)
        scene.device.kernels.launch(beside, scene.device.private)

    assert not scene.find(lambda current: both(current, short, long)).timed
    assert scene.find(lambda current: both(current, long, short)).stream is scene.own


def test_work_is_launched_once_where_it_runs_on_the_current_stream(scene: Scene) -> None:
    long, launches = scene.launch_of(8 * GiB), list[Stream]()
    for stream, found, most in (
        (None, scene.own, 1),
        (scene.device.legacy, scene.device.legacy, 3),
    ):
        launches.clear()
        launch = scene.on(*(stream,) * 6, work=long)

        def counted(current: Stream, launch: Callable[[Stream], None] = launch) -> None:
            launches.append(current)
            launch(current)

        watched = scene.find(counted)
        assert watched.stream is found
        assert watched.seconds > 0.02
        assert len(launches) == most


# Through a measurement


def take(scene: Scene, launch: Callable[[Stream], None], stream: Any = None, **plan: Any) -> Any:
    target = scene.bench.target(lambda: launch(scene.device.current_of_libraries), stream=stream)
    return scene.bench.take(target, **plan)


def test_a_callable_is_timed_where_it_launches(scene: Scene) -> None:
    own, legacy = take(scene, scene.on(None)), take(scene, scene.on(scene.device.legacy))
    assert own.sampler == legacy.sampler == "blocked"
    assert f"timed on {LEGACY}, where it launches" in legacy.notes
    assert not [note for note in own.notes if note.startswith("timed on")]
    assert legacy.latency == pytest.approx(own.latency, rel=0.1)
    assert own.latency > 5 * own.floor


def test_what_no_stream_times_is_timed_by_the_hosts_clock(scene: Scene) -> None:
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


def test_work_that_the_callable_waits_for_is_seen(scene: Scene) -> None:
    def waited(_: Stream) -> None:
        scene.device.kernels.launch(scene.work, scene.device.private)
        scene.device.streams.synchronize(scene.device.private)

    taken = take(scene, waited)
    assert (taken.sampler, taken.work_seen) == ("host", True)


def test_without_cupti_the_current_stream_is_timed_where_work_is_seen_there(scene: Scene) -> None:
    def refuse(work: object) -> Any:
        raise NotCounted("PyTorch's profiler has CUPTI")

    replaced(scene.device.counters, spans=refuse)
    own, legacy = take(scene, scene.on(None)), take(scene, scene.on(scene.device.legacy))
    assert (own.sampler, own.work_seen) == ("blocked", True)
    assert (legacy.sampler, legacy.work_seen) == ("host", False)
    for taken in (own, legacy):
        assert "own streams not checked: PyTorch's profiler has CUPTI" in taken.notes


def test_work_that_cupti_does_not_record_is_timed_on_the_current_stream(scene: Scene) -> None:
    """As a prefetch of managed memory."""
    spans = scene.device.counters.spans

    def only_idle(work: Callable[[], None]) -> Any:
        return [span for span in spans(work) if "copy" not in span.name]

    replaced(scene.device.counters, spans=only_idle)
    taken = take(scene, scene.on(None))
    assert (taken.sampler, taken.work_seen) == ("blocked", True)


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
    """Nothing is left of it when the launch returns."""
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
        r"[\d.]+ us of its work run beside the timed stream: wall-clock time",
        whole.sampler_reason,
    )
    assert whole.latency > alone.latency
    assert judged(whole).outcome is Outcome.PASS
    inside = take(scene, joined)
    assert inside.sampler == "blocked"
    assert inside.latency > alone.latency
    with pytest.raises(
        BadCall, match=r'sampler "blocked" was asked for, but [\d.]+ us of its work'
    ):
        take(scene, waited, sampler="blocked")
