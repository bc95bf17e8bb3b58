"""The host link as a user meets it: the cap, work that overlaps and its limit, kinds of memory, mistakes in one line."""

from __future__ import annotations

from typing import Any

import pytest
from sessions import Run


@pytest.fixture
def run(pytester: pytest.Pytester, gpumem: Run) -> Run:
    def run(body: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(
            f"import pytest\nimport numpy as np\nfrom pytest_gpumem import MiB\n\n{body}"
        )
        return gpumem(*arguments)

    return run


def test_the_cap_on_pinned_memory(run: Run) -> None:
    result = run("def test_much(pinned_buffer):\n    pinned_buffer(65 << 30)\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*OutOfMemory: 65 GiB of page-locked memory pass the cap of 64 GiB, half of the host's 128 GiB: ask *"
        ]
    )


OVERLAP = """
def test_staged(gpu_benchmark, staged_copy):
    result = gpu_benchmark(staged_copy(4, 16 * MiB, rounds=800, chunks=8), min_overlap={least!r})
    assert 0.5 < result.hidden < 1
    assert len(result.overlap.parts) == 3
    assert result.overlap.bound < result.latency < result.overlap.sequential
"""


@pytest.mark.parametrize(("least", "outcome"), [("60%", {"passed": 1}), ("99.9%", {"failed": 1})])
def test_min_overlap_holds_a_staged_copy(run: Run, least: str, outcome: dict[str, Any]) -> None:
    result = run(OVERLAP.format(least=least), "-v")
    result.assert_outcomes(**outcome)
    if "failed" in outcome:
        result.stdout.fnmatch_lines(
            [
                f"*of what overlap can hide is below min_overlap {least} (call)*",
                "*overlap * of what can be hidden, 4 streams: in turn * bound *",
            ]
        )


def test_min_overlap_where_nothing_overlaps_fails(run: Run) -> None:
    body = """
@pytest.mark.gpumem(min_overlap="50%")
def test_copy(gpu_benchmark, gpu_work, device_buffer, pinned_buffer):
    gpu_benchmark(gpu_work.copy(device_buffer(MiB), pinned_buffer(MiB)))
"""
    result = run(body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*min_overlap 50% (marker) cannot be judged: nothing overlaps in it*"]
    )


def test_work_that_is_measured_wrongly_is_one_line(run: Run) -> None:
    body = """
def test_sizes(gpu_work, device_buffer, pinned_buffer):
    gpu_work.copy(device_buffer(MiB), pinned_buffer(2 * MiB))

def test_arguments(gpu_benchmark, gpu_work):
    gpu_benchmark(gpu_work.host(print), 3)

def test_alone(gpu_benchmark, gpu_work):
    gpu_benchmark(gpu_work.host(print)).overlap

def test_kind(memory_kind):
    memory_kind("here")
"""
    result = run(body)
    result.assert_outcomes(failed=4)
    for line in (
        "*BadCall: memcpy: a copy of 2 MiB to 1 MiB: source and destination must be of the same size",
        "*BadCall: gpu_benchmark(print): work of gpu_work takes no arguments and no stream=: it has its own",
        "*NoTraffic: print has no parts that overlap: measure staged_copy or gpu_work.together",
        "*BadBuffer: memory_kind() takes an address, a buffer or an array, not str",
    ):
        result.stdout.fnmatch_lines([line])


def test_a_part_runs_on_its_persisting_stream_until_that_ends(run: Run) -> None:
    body = """
def test_window(gpu_benchmark, gpu_device, gpu_kernels, gpu_work, device_buffer, persisting_stream):
    x, y = device_buffer(1 * MiB), device_buffer(1 * MiB)
    with persisting_stream(x) as stream:
        work = gpu_work.kernel(gpu_kernels.copy.with_stream(stream), x, y)
        assert gpu_benchmark(work).latency > 0
        ran = gpu_device.counters.what_ran(lambda: work.queue(gpu_device.streams.create()), lambda: None)
        assert [step.window for step in ran.launch if step.kind == "kernel"] == ["1 MiB at hit ratio 1, persisting, else streaming"]
    work.queue(gpu_device.streams.create())
"""
    result = run(body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*BadCall: the stream of copy is a persisting stream whose `with` block has ended: *"]
    )


def test_kinds_numa_and_peers(run: Run) -> None:
    body = """
def test_kinds(memory_kind, pinned_buffer, device_buffer, pooled_buffer, pageable_buffer):
    assert [memory_kind(b) for b in (pinned_buffer(MiB), device_buffer(MiB), pageable_buffer(MiB))] == ["pinned", "device", "pageable"]
    assert memory_kind(np.zeros(10)) == "pageable"
    assert memory_kind(pooled_buffer(MiB)) == "device"

@pytest.mark.parametrize("numa", [0, 3, -1, "0"])
def test_node(pinned_buffer, numa):
    pinned_buffer(MiB, numa=numa)

def test_peer(peer_buffer):
    peer_buffer(MiB)
"""
    result = run(body, "-rs")
    result.assert_outcomes(passed=2, skipped=3, failed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*numa=3: this process cannot run on such a NUMA node*",
            "*BadBuffer: numa='0'; it is the number of a NUMA node of the host, or None*",
            "*one GPU is simulated: there is no peer*",
        ]
    )


def test_the_fixtures_skip_with_the_plugin_off(pytester: pytest.Pytester, session: Run) -> None:
    fixtures = "gpu_work, staged_copy, pageable_buffer, peer_buffer, memory_kind"
    pytester.makepyfile(f"def test_it({fixtures}): pass")
    session().assert_outcomes(skipped=1)
