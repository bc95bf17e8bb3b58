"""The memory suite can fail: take one mechanism out of the simulated device, and the suite's tests of it turn red, no others."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.devices.protocol import Launch, MemoryKind
from pytest_gpumem.devices.simulated import timing
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.devices.simulated.device import SimulatedDevice
from pytest_gpumem.devices.simulated.memory import L2, Lines
from pytest_gpumem.devices.simulated.pages import PageLog, Pages, Touched
from pytest_gpumem.devices.simulated.timing import Timing
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import Access, Call, Kernel
from pytest_gpumem.memory import l2

Run = Callable[..., pytest.RunResult]
Patch = pytest.MonkeyPatch

SUITE = Path(__file__).parents[1] / "memory"


# What is taken out. The session runs inside this process, so a patch of the model is a patch of its device.


def no_window(patch: Patch) -> None:
    """A window is taken and forgotten."""
    patch.setattr(SimulatedDevice, "set_window", lambda self, stream, window: None)


def no_set_aside(patch: Patch) -> None:
    """The driver says that it granted what was asked for, and sets nothing aside."""
    request = L2.request_set_aside

    def only_says_so(self: L2, nbytes: int) -> int:
        request(self, 0)
        return nbytes

    patch.setattr(L2, "request_set_aside", only_says_so)


def largest_set_aside(patch: Patch) -> None:
    """What fits is the maximum, as guides have it."""
    patch.setattr(l2, "fit_set_aside", lambda facts, nbytes: facts.persisting_l2_max_bytes)


def hit_ratio_ignored(patch: Patch) -> None:
    """Every access under a window persists, so a window beyond the set-aside thrashes."""
    set_window = SimulatedDevice.set_window
    patch.setattr(
        SimulatedDevice,
        "set_window",
        lambda self, stream, window: set_window(self, stream, window and replace(window, hit_ratio=1.0)),
    )


def no_prefetch(patch: Patch) -> None:
    """A prefetch to the device moves no page."""
    prefetch = SimulatedDevice.prefetch
    patch.setattr(
        SimulatedDevice,
        "prefetch",
        lambda self, allocation, to_host, stream: prefetch(self, allocation, to_host, stream) if to_host else None,
    )


def pages_stay_where_they_are(patch: Patch) -> None:
    """A prefetch to the host moves no page: only the first sample of a placement faults."""
    prefetch = SimulatedDevice.prefetch
    patch.setattr(
        SimulatedDevice,
        "prefetch",
        lambda self, allocation, to_host, stream: None if to_host else prefetch(self, allocation, to_host, stream),
    )


def pages_never_stay(patch: Patch) -> None:
    """Whatever a kernel or a prefetch brings to the device is back on the host at the next access: every launch faults."""
    touched = Pages.touched_by_device

    def faulting(self: Pages, share: float, *, writes: bool) -> Touched:
        self.to_host()
        return touched(self, share, writes=writes)

    patch.setattr(Pages, "touched_by_device", faulting)


def advice_does_nothing(patch: Patch) -> None:
    """The driver hears no advice."""
    patch.setattr(SimulatedDevice, "advise", lambda *_, **__: None)


def advice_stays(patch: Patch) -> None:
    """What was advised is never taken back."""
    advise = SimulatedDevice.advise
    patch.setattr(SimulatedDevice, "advise", lambda self, *args, on: advise(self, *args, on=True) if on else None)


def discards_keep_the_content(patch: Patch) -> None:
    """A discard does nothing."""
    patch.setattr(SimulatedDevice, "discard", lambda *_: None)


def migration_costs_nothing(patch: Patch) -> None:
    """Pages cross the link in no time."""
    patch.setattr(PageLog, "_crossed", lambda self, nbytes, cause: 1e-15 * nbytes)


def pageable_instead_of_pinned(patch: Patch) -> None:
    """What was to be page-locked is ordinary memory."""
    allocate = SimulatedDevice.allocate

    def unlocked(self: SimulatedDevice, nbytes: int, kind: MemoryKind, **flags: Any) -> Any:
        return allocate(self, nbytes, MemoryKind.PAGEABLE if kind is MemoryKind.PINNED else kind, **flags)

    patch.setattr(SimulatedDevice, "allocate", unlocked)


def registering_locks_nothing(patch: Patch) -> None:
    """`cudaHostRegister` leaves the memory pageable."""
    adopt = SimulatedDevice.adopt
    patch.setattr(SimulatedDevice, "adopt", lambda self, array, register: adopt(self, array, register=False))


def kernels(patch: Patch, change: Callable[[Kernel], Kernel]) -> None:
    """The device sees each kernel as `change(kernel)` gives it; the suite sees it as it is."""
    prepare = SimulatedDevice._prepare

    def prepared(self: SimulatedDevice, launch: Launch) -> Any:
        return replace(prepare(self, replace(launch, kernel=change(launch.kernel))), launch=launch)

    patch.setattr(SimulatedDevice, "_prepare", prepared)


def accesses_by(patch: Patch, change: Callable[[str, Call, Access], Access]) -> None:
    """Each access is what `change(kernel, call, access)` says."""

    def changed(kernel: Kernel) -> Kernel:
        return replace(kernel, accesses=lambda call: tuple(change(kernel.name, call, a) for a in kernel.accesses(call)))

    kernels(patch, changed)


def sectors(patch: Patch, cost: Callable[[str, Call, Access], float]) -> None:
    """Each request moves as many sectors as `cost(kernel, call, access)` says."""
    accesses_by(patch, lambda kernel, call, access: replace(access, sectors_per_request=cost(kernel, call, access)))


def strides_cost_nothing(patch: Patch) -> None:
    """Every request is served as if its words lay side by side."""
    sectors(patch, lambda kernel, call, access: 4.0)


def offsets_cost_twice(patch: Patch) -> None:
    """A request at any offset moves twice the sectors."""
    sectors(patch, lambda kernel, call, access: 8.0 if call.scalars.get("offset") else access.sectors_per_request)


def order_matters(patch: Patch) -> None:
    """Words in another order than the threads' cost a sector each, as before compute capability 2.0."""
    sectors(patch, lambda kernel, call, access: 32.0 if kernel == "permuted_copy" else access.sectors_per_request)


def bank_conflicts_cost_nothing(patch: Patch) -> None:
    """L1 and shared memory serve all requests at once."""
    kernels(patch, lambda kernel: replace(kernel, on_chip_cycles=None))


def padding_does_nothing(patch: Patch) -> None:
    """The words of a column lie in one bank, padded or not."""
    conflicts = CATALOGUE["transpose_tiled"].on_chip_cycles
    kernels(patch, lambda kernel: replace(kernel, on_chip_cycles=conflicts) if kernel.name == "transpose_padded" else kernel)


def every_walk_is_the_same(patch: Patch) -> None:
    """No walk goes on: each finds the lines of the one before."""
    accesses_by(patch, lambda kernel, call, access: replace(access, onward=False))


def the_link_answers_at_once(patch: Patch) -> None:
    """Mapped host memory is as near as L2."""
    make = SimulatedDevice.__init__

    def nearer(self: SimulatedDevice, datasheet: Datasheet, **options: Any) -> None:
        make(self, replace(datasheet, link_latency=datasheet.l2_latency), **options)

    patch.setattr(SimulatedDevice, "__init__", nearer)


def nothing_hits_twice(patch: Patch) -> None:
    """Between two uses of a line, L2 has always replaced it."""
    patch.setattr(timing, "miss_ratio", lambda reuse, knee, sharpness: 1.0)


def l2_is_three_times_its_size(patch: Patch) -> None:
    """L2 holds more than the device says that it has, a table beside a stream too."""
    capacity = L2.capacity.fget
    patch.setattr(L2, "capacity", property(lambda self: 3 * capacity(self)))


def l2_keeps_nothing(patch: Patch) -> None:
    """Every launch finds an empty L2."""
    patch.setattr(L2, "lines", lambda self, allocation: Lines())


def dram_at_three_quarters(patch: Patch) -> None:
    """As with a memory clock that is stuck."""
    time = Timing._dram_time
    patch.setattr(Timing, "_dram_time", lambda self, *nbytes: time(self, *nbytes) / 0.75)


def own_code_does_not_run(patch: Patch) -> None:
    """A function of the user's own queues its work and computes nothing."""
    call = SimulatedDevice.call
    patch.setattr(SimulatedDevice, "call", lambda self, foreign, stream: call(self, replace(foreign, reference=lambda: None), stream))


def windows_cost(patch: Patch) -> None:
    """A kernel under a window takes a fifth longer, whatever hits."""
    kernel = Timing.kernel
    patch.setattr(Timing, "kernel", lambda self, work, window: kernel(self, work, window) * (1.0 if window is None else 1.2))


def the_set_aside_has_no_end(patch: Patch) -> None:
    """Whatever lies under a window persists, and costs no room; nor does the set-aside."""
    make = SimulatedDevice.__init__

    def endless(self: SimulatedDevice, datasheet: Datasheet, **options: Any) -> None:
        fit = replace(datasheet.fit, persisting_knee=1e3, squeeze_share=0.0)
        make(self, replace(datasheet, fit=fit), **options)

    patch.setattr(SimulatedDevice, "__init__", endless)


def lines_persist_for_good(patch: Patch) -> None:
    """No reset reaches the lines that persist."""
    patch.setattr(L2, "reset_persisting", lambda self: None)


def shared_memory_is_as_far_as_dram(patch: Patch) -> None:
    """A load from shared memory takes as long as one that misses L2."""
    make = SimulatedDevice.__init__

    def farther(self: SimulatedDevice, datasheet: Datasheet, **options: Any) -> None:
        make(self, replace(datasheet, shared_latency_cycles=datasheet.dram_latency * datasheet.sm_clock), **options)

    patch.setattr(SimulatedDevice, "__init__", farther)


ASSERTION = r"^E +(AssertionError: )?assert "
"""The test's own assertion failed."""


@dataclass(frozen=True)
class Removal:
    """A mechanism that is taken out, the tests of the suite that turn red, and what each of them says."""

    out: Callable[[Patch], None]
    red: frozenset[str]
    says: str = ASSERTION


BUSY_LOOKUP = "test_lookup_table_stays_in_l2_of_a_busy_gpu"
THRASHING = "test_a_fitted_hit_ratio_avoids_thrashing"
PERSISTENCE = {"test_lookup_table_stays_in_l2", BUSY_LOOKUP, "test_sliding_window", THRASHING}
SLIDING = {f"test_sliding_window_at_{sizes}" for sizes in ("the_texts_sizes", "shares_of_l2")}
AT_SHARES, RESET = "test_reset_data_at_shares_of_l2", "test_a_reset_gives_the_next_kernel_all_of_l2"
GAINS = PERSISTENCE | {AT_SHARES, RESET}
GPU_FIRST = {f"test_first_touch_by_the_gpu_avoids_faults[{init}]" for init in ("init", "init_warp_per_page")}
LINK_BOUNDS = "test_the_link_bounds_migration_and_not_the_kernel"
READ_COPY, READ_WRITTEN = "test_read_mostly_gives_a_reader_a_copy", "test_writing_read_mostly_memory_drops_the_other_copies"
PREFER_DEVICE, PREFER_HOST = "test_pages_that_prefer_the_device_migrate_like_others", "test_pages_that_prefer_the_host_stay_there"
TAKEN_BACK, DISCARDED = "test_advice_that_is_taken_back_leaves_no_trace", "test_discarded_content_is_not_copied"
PREFETCHED = {
    "test_prefetch_beats_faulting",
    "test_prefetched_is_nearly_device_memory",
    *(LINK_BOUNDS, READ_COPY, READ_WRITTEN, PREFER_DEVICE),
}
INITIALISERS = {"test_all_warps_on_all_pages", *(f"test_a_warp_for_each_page[{page}]" for page in (4096, 65536, 2097152))}
STREAM = {f"test_{name}" for name in ("copy", "mul", "stream_add", "triad", "write", "read", "dot")}

STRIDED_WRITES = "test_a_tile_in_shared_memory_beats_strided_writes"
PADDING = "test_padding_a_tile_removes_its_bank_conflicts"
MAPPED = "test_dram_answers_sooner_than_mapped_host_memory"
KNEE = "test_l2_read_bandwidth_has_a_knee"

REMOVALS = [
    Removal(no_window, frozenset(GAINS)),
    Removal(no_set_aside, frozenset(GAINS)),
    Removal(largest_set_aside, frozenset({BUSY_LOOKUP})),
    Removal(hit_ratio_ignored, frozenset({THRASHING, AT_SHARES})),
    Removal(windows_cost, frozenset({"test_reset_data_at_the_texts_sizes", AT_SHARES})),
    Removal(the_set_aside_has_no_end, frozenset({*SLIDING, THRASHING, AT_SHARES})),
    Removal(lines_persist_for_good, frozenset({RESET})),
    Removal(shared_memory_is_as_far_as_dram, frozenset({"test_a_table_in_shared_memory"})),
    Removal(no_prefetch, frozenset(PREFETCHED)),
    Removal(
        pages_stay_where_they_are,
        frozenset(
            {"test_prefetch_beats_faulting", LINK_BOUNDS, READ_COPY, READ_WRITTEN, PREFER_DEVICE, PREFER_HOST, TAKEN_BACK, DISCARDED}
            | INITIALISERS
        ),
    ),
    Removal(pages_never_stay, frozenset(PREFETCHED | GPU_FIRST | {DISCARDED})),
    Removal(
        advice_does_nothing,
        frozenset({READ_WRITTEN, PREFER_HOST, "test_pages_accessed_by_the_device_are_mapped_without_a_fault"}),
        says=f"{ASSERTION}|migrated in one launch .* above max_migrated 0 B",
    ),
    Removal(advice_stays, frozenset({READ_COPY, TAKEN_BACK})),
    Removal(discards_keep_the_content, frozenset({DISCARDED})),
    Removal(migration_costs_nothing, frozenset({LINK_BOUNDS})),
    Removal(
        pageable_instead_of_pinned,
        frozenset({"test_pinned_to_device_beats_pageable", "test_device_to_pinned_beats_pageable", MAPPED}),
        says=f"{ASSERTION}|nodes is pageable memory, which kernels cannot see",
    ),
    Removal(registering_locks_nothing, frozenset({"test_registered_memory_is_as_fast_as_pinned"})),
    Removal(strides_cost_nothing, frozenset({"test_stride_copy", STRIDED_WRITES})),
    Removal(offsets_cost_twice, frozenset({"test_offset_copy"})),
    Removal(order_matters, frozenset({"test_permutation_within_aligned_segments_is_nearly_free"})),
    Removal(bank_conflicts_cost_nothing, frozenset({PADDING})),
    Removal(padding_does_nothing, frozenset({PADDING, "test_a_padded_transpose_is_nearly_a_copy"})),
    Removal(l2_keeps_nothing, frozenset({"test_l2_answers_sooner_than_dram"})),
    Removal(nothing_hits_twice, frozenset({"test_l2_answers_sooner_than_dram", KNEE, *GAINS})),
    Removal(l2_is_three_times_its_size, frozenset({KNEE, "test_lookup_table_stays_in_l2", "test_sliding_window", AT_SHARES, RESET})),
    Removal(every_walk_is_the_same, frozenset({"test_a_walk_that_goes_on_finds_no_line_of_the_last"})),
    Removal(the_link_answers_at_once, frozenset({MAPPED})),
    Removal(dram_at_three_quarters, frozenset(STREAM), says=r"min_bandwidth 8[05]% of peak"),
    Removal(own_code_does_not_run, frozenset({"test_case_that_also_runs_simulated"}), says="WrongResult: scale: "),
]


@pytest.fixture
def suite(pytester: pytest.Pytester, gpumem: Run) -> Callable[[], tuple[set[str], dict[str, str]]]:
    """Runs a copy of the suite, quickly; gives the names of the tests that passed, and the text of those that failed."""
    quickly = ("--gpumem-placements=2", "--gpumem-precision=5%", "--benchmark-quiet", "-q", "-p", "no:hypothesispytest")
    # A folder and importlib, so that no module of it is taken for one of the same name in the session outside.
    shutil.copytree(SUITE, pytester.path / "suite", ignore=shutil.ignore_patterns("__pycache__"))

    def run() -> tuple[set[str], dict[str, str]]:
        passed, _, failed = gpumem("suite", "--import-mode=importlib", *quickly).reprec.listoutcomes()  # type: ignore[attr-defined]
        assert all(report.when == "call" for report in failed), failed
        return {name(r) for r in passed}, {name(r): r.longreprtext for r in failed}

    return run


def name(report: pytest.TestReport) -> str:
    return report.nodeid.split("::")[1]


@pytest.mark.parametrize("removal", [pytest.param(r, id=r.out.__name__) for r in REMOVALS])
def test_a_missing_mechanism_turns_its_tests_red(removal: Removal, suite: Callable[[], Any], monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        removal.out(patch)
        passed, failed = suite()
    assert set(failed) == removal.red
    assert passed
    for test, text in failed.items():
        assert re.search(removal.says, text, re.MULTILINE), (test, text)


def test_the_suite_is_green_and_every_test_of_it_was_seen_red(suite: Callable[[], Any]) -> None:
    """A test that joins the suite needs a removal that turns it red."""
    passed, failed = suite()
    assert failed == {}
    assert passed == set().union(*(r.red for r in REMOVALS))
