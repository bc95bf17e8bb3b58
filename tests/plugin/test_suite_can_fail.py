"""What a roofline can show: the tests of the memory suite that run on the simulated device.

Each row of `REMOVALS` takes a mechanism out of that device and names the tests that turn red. All
other tests need a GPU; `ci/bench/suite_can_fail.py` sees them red there.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from sessions import Run

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import AccessProperty
from pytest_gpumem.devices.simulated import streams
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS, Datasheet
from pytest_gpumem.devices.simulated.device import (
    SimulatedDevice,
    SimulatedKernels,
    SimulatedL2,
)
from pytest_gpumem.devices.simulated.memory import SimulatedContent, SimulatedMemory
from pytest_gpumem.devices.simulated.roofline import Pages, Roofline
from pytest_gpumem.devices.simulated.streams import COMPUTE, Operation, SimulatedStreams
from pytest_gpumem.kernels import access_pattern
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.memory import l2, window_request
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.units import MiB

Patch = pytest.MonkeyPatch

SUITE = Path(__file__).parents[1] / "memory"
QUICKLY = ("-o", "gpumem_placements=2", "-o", "gpumem_precision=5%", "--benchmark-quiet", "-q")


# Ways to take something out: each changes one method of the simulated device, in this process.


def put(patch: Patch, owner: Any, name: str, value: Any) -> None:
    patch.setattr(owner, name, value)  # what is missing is what these tests are about


def wrap(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace `owner.name` by `change(original, *arguments)`."""
    original = getattr(owner, name)

    def changed(*arguments: Any, **options: Any) -> Any:
        return change(original, *arguments, **options)

    put(patch, owner, name, changed)


def sheet(patch: Patch, **changes: Any) -> None:
    """Give the device other figures."""

    def make(init: Any, self: Any, datasheet: Datasheet, **options: Any) -> None:
        init(self, replace(datasheet, **changes), **options)

    wrap(patch, SimulatedDevice, "__init__", make)


def accesses(patch: Patch, kernel_name: str = "", **changes: Any) -> None:
    """Change the accesses of a kernel, or of all, as the device sees them."""

    def ready(original: Any, self: Any, launch: Any) -> Any:
        kernel = launch.kernel
        if kernel_name in ("", kernel.name):

            def changed(call: Any) -> tuple[Any, ...]:
                return tuple(replace(access, **changes) for access in kernel.accesses(call))

            launch = replace(launch, kernel=replace(kernel, accesses=changed))
        return original(self, launch)

    wrap(patch, SimulatedKernels, "_ready", ready)


def no_window(patch: Patch) -> None:
    put(patch, SimulatedL2, "set_window", lambda self, stream, window: None)


def windows_that_cost(patch: Patch) -> None:
    """A window of any size gets a hit ratio of 1, and a kernel under it takes half as long again."""
    put(patch, l2, "fit_hit_ratio", lambda set_aside, nbytes: 1.0)
    put(patch, PersistingStream, "off", property(lambda self: self.wanted == "off"))
    persists = property(lambda self: self.hit is AccessProperty.PERSISTING)
    put(patch, PersistingStream, "persists", persists)

    def kernel(original: Any, self: Any, traffic: Any, used: Any = None) -> Any:
        return original(self, traffic, used) * (1.0 if used is None else 1.5)

    wrap(patch, Roofline, "kernel", kernel)


def no_granule_more(patch: Patch) -> None:
    put(patch, window_request, "FREE_STEPS", 0)


def silent_thrashing(patch: Patch) -> None:
    put(patch, PersistingStream, "thrashing", None)


def pages_that_stay(patch: Patch) -> None:
    """A prefetch to the host moves no page: only the first sample of a placement faults."""

    def prefetch(original: Any, self: Any, allocation: Any, to_host: bool, stream: Any) -> None:
        if not to_host:
            original(self, allocation, to_host, stream)

    wrap(patch, SimulatedContent, "prefetch", prefetch)


def pages_that_never_stay(patch: Patch) -> None:
    """What comes to the device is back on the host at the next access: every launch faults."""

    def touched(original: Any, self: Pages, nbytes: float, **options: Any) -> Any:
        self.place = "host"
        return original(self, nbytes, **options)

    wrap(patch, Pages, "touched_by_device", touched)


def no_results_on_the_host(patch: Patch) -> None:
    """A host that reads managed memory in place finds zeros there."""

    def guest(original: Any, self: Any, *arguments: Any) -> Any:
        return np.zeros_like(original(self, *arguments))

    wrap(patch, SimulatedMemory, "guest", guest)


def pageable_for_pinned(patch: Patch) -> None:
    def allocate(original: Any, self: Any, nbytes: int, kind: MemoryKind, **flags: Any) -> Any:
        if kind is MemoryKind.PINNED:
            kind = MemoryKind.PAGEABLE
        return original(self, nbytes, kind, **flags)

    wrap(patch, SimulatedMemory, "allocate", allocate)


def registering_nothing(patch: Patch) -> None:
    """`cudaHostRegister` leaves the memory pageable."""

    def adopt(original: Any, self: Any, array: Any, register: bool) -> Any:
        return original(self, array, register=False)

    wrap(patch, SimulatedMemory, "adopt", adopt)


def flags_that_slow(patch: Patch) -> None:
    """Memory that is not mapped, not portable or write-combined is copied at half the rate."""
    slow: list[Any] = []

    def allocate(original: Any, self: Any, nbytes: int, kind: MemoryKind, **flags: Any) -> Any:
        made = original(self, nbytes, kind, **flags)
        default = {"write_combined": False, "mapped": True, "portable": True}
        if {**default, **flags} != default:
            slow.append(made)
        return made

    def copy(original: Any, self: Any, to: Any, source: Any, nbytes: int) -> float:
        is_slow = any(made is to or made is source for made in slow)
        return float(original(self, to, source, nbytes)) * (1 + is_slow)

    wrap(patch, SimulatedMemory, "allocate", allocate)
    wrap(patch, Roofline, "copy", copy)


def no_kinds(patch: Patch) -> None:
    put(patch, SimulatedMemory, "kind_at", lambda self, address: None)


def all_pageable(patch: Patch) -> None:
    put(patch, SimulatedMemory, "kind_at", lambda self, address: MemoryKind.PAGEABLE)


def late_joins(patch: Patch) -> None:
    """A stream that waits for another wakes after a millisecond."""

    def join(original: Any, self: Any, stream: Any, other: Any) -> None:
        original(self, stream, other)
        self._timeline.queue(stream, Operation(COMPUTE, lambda: 1e-3), 0.0)

    wrap(patch, SimulatedStreams, "join", join)


def copies_of_one_length(patch: Patch) -> None:
    """However few its bytes, a copy takes as long as that of 16 MiB."""

    def copy(original: Any, self: Any, to: Any, source: Any, nbytes: int) -> Any:
        return original(self, to, source, max(nbytes, 16 * MiB))

    wrap(patch, Roofline, "copy", copy)


def free_starts_of_copies(patch: Patch) -> None:
    """Neither the device nor the host, which queues them, takes time for a copy beside its bytes."""
    sheet(patch, copy_start=0.0)
    put(patch, streams, "LAUNCH", 0.0)


def device_copies_over_the_link(patch: Patch) -> None:
    def copy(original: Any, self: Any, to: Any, source: Any, nbytes: int, stream: Any) -> None:
        original(self, to, source, nbytes, stream)
        if not (to.kind.on_host or source.kind.on_host):
            seconds = 2 * nbytes / self._roofline.sheet.link_bandwidth
            self._timeline.queue(stream, Operation(COMPUTE, lambda: seconds), 0.0)

    wrap(patch, SimulatedContent, "copy", copy)


def slow_kernels(patch: Patch) -> None:
    wrap(patch, Roofline, "kernel", lambda original, *arguments: 20 * original(*arguments))


def slow_dram(patch: Patch) -> None:
    sheet(patch, dram_share=0.75 * DATASHEETS["h100"].dram_share)


def free_strides(patch: Patch) -> None:
    accesses(patch, sectors_per_request=4.0)


def costly_order(patch: Patch) -> None:
    """Words in another order than the threads' cost a sector each."""
    accesses(patch, "permuted_copy", sectors_per_request=32.0)


def coalesced_requests(patch: Patch) -> None:
    """The prediction has four sectors for each request."""

    def touch(original: Any, *arguments: Any, **facts: Any) -> Any:
        return original(*arguments, **{**facts, "sectors": 4.0})

    wrap(patch, access_pattern, "touch", touch)


def useless_padding(patch: Patch) -> None:
    """The words of a column lie in one bank, padded or not."""
    conflicts = CATALOGUE["transpose_tiled"].on_chip_cycles

    def ready(original: Any, self: Any, launch: Any) -> Any:
        if launch.kernel.name == "transpose_padded":
            kernel = replace(launch.kernel, on_chip_cycles=conflicts)
            launch = replace(launch, kernel=kernel)
        return original(self, launch)

    wrap(patch, SimulatedKernels, "_ready", ready)


def equal_walks(patch: Patch) -> None:
    """No walk goes on: each finds the lines of the walk before."""
    accesses(patch, onward=False)


def no_hits(patch: Patch) -> None:
    """Whatever a launch reads comes from DRAM, also what it has read before."""
    put(patch, Roofline, "_leave_in_l2", lambda self, traffic: None)

    def traffic(original: Any, *arguments: Any, **options: Any) -> Any:
        made = original(*arguments, **options)
        for use in made.uses:
            use.distinct, use.repeated = use.distinct + use.repeated, 0.0
        return made

    wrap(patch, Roofline, "traffic", traffic)


def idle_own_code(patch: Patch) -> None:
    """A function of the user's own queues its work and computes nothing."""

    def call(original: Any, self: Any, foreign: Any, stream: Any) -> None:
        original(self, replace(foreign, reference=lambda: None), stream)

    wrap(patch, SimulatedKernels, "call", call)


ASSERTION = r"^E +(AssertionError: )?assert "
OVERLAP = f"{ASSERTION}|of what overlap can hide is below min_overlap"
STREAMS = (
    "a_copy_beside_a_kernel_on_other_data both_ways_at_once host_work_beside_a_copy_and_a_kernel"
    " copies_both_ways_and_the_kernel_run_at_once a_number_of_chunks_that_divides_nothing"
)
KINDS = (
    r"an_array_and_its_slices_are_of_the_memory_behind_them past_the_end_is_not_the_buffers\[.*"
    r" registered_memory_goes_back_to_pageable"
)
MIGRATION = (
    "prefetch_beats_faulting the_texts_own_size read_mostly_gives_a_reader_a_copy"
    " the_link_bounds_migration_and_not_the_kernel"
    " pages_that_prefer_the_device_migrate_like_others"
)

REMOVALS = [
    (no_window, r"a_hit_ratio_is_fitted_to_what_the_driver_granted the_driver_holds_.*", ASSERTION),
    (
        windows_that_cost,
        r"a_fitted_window_is_never_slower_than_none\[.*"
        " a_fitted_hit_ratio_costs_nothing_where_the_table_stays",
        ASSERTION,
    ),
    (no_granule_more, "a_small_window_gets_a_granule_more_than_holds_it", ASSERTION),
    (
        silent_thrashing,
        "a_window_beyond_its_set_aside_is_said_to_thrash",
        "not found in warning list",
    ),
    (
        pages_that_stay,
        f"{MIGRATION} a_warp_for_each_page_faults_less_than_all_warps_on_all_pages.*"
        " advice_that_is_taken_back_leaves_no_trace pages_that_prefer_the_host_stay_there"
        " pages_accessed_by_the_device_are_mapped_without_a_fault",
        ASSERTION,
    ),
    (
        pages_that_never_stay,
        f"{MIGRATION} prefetched_is_nearly_device_memory first_touch_by_the_gpu_avoids_faults.*",
        ASSERTION,
    ),
    (no_results_on_the_host, "a_host_that_reads_results_in_place_gets_them", ASSERTION),
    (
        pageable_for_pinned,
        f"{STREAMS} pinned_.* device_to_pinned_beats_pageable pageable_memory_hides_less"
        r" staging_follows_the_estimate\[(8|16)-200\] (a_pointer_tells|past_the_end)_.*\[pinned\]"
        " reading_(again|once)_.*"
        " strided_reads_move_whole_sectors_over_the_link the_links_bytes_are_what_counts"
        " the_ladder_from_l1_to_the_host dram_answers_sooner_than_mapped_host_memory",
        f"{OVERLAP}|is pageable memory, which kernels cannot see",
    ),
    (
        registering_nothing,
        r"registered_memory_.* an_array_and_its_slices_are_.* a_pointer_tells_.*\[registered\]",
        ASSERTION,
    ),
    (flags_that_slow, "flags_of_pinned_memory_leave_the_link_as_fast.*", ASSERTION),
    (no_kinds, f"{KINDS} a_pointer_tells_its_kind_also_within_a_slice.*", ASSERTION),
    (
        all_pageable,
        rf"{KINDS} null_is_no_memory a_pointer_tells_its_kind_.*\[(?!pageable).*",
        ASSERTION,
    ),
    (late_joins, f"{STREAMS} staging_follows_the_estimate.*", OVERLAP),
    (
        copies_of_one_length,
        "a_number_of_chunks_that_divides_nothing copies_both_ways_and_the_kernel_run_at_once"
        r" staging_follows_the_estimate\[(8|16)-200\] the_bandwidth_rises_with_the_size",
        OVERLAP,
    ),
    (free_starts_of_copies, "one_packed_copy_beats_many_small_ones", ASSERTION),
    (device_copies_over_the_link, "device_to_device_is_no_matter_of_the_link", ASSERTION),
    (slow_kernels, "intermediates_that_stay_on_the_device_save_a_round_trip", ASSERTION),
    (
        slow_dram,
        "copy mul stream_add triad write read dot",
        r"is below min_bandwidth \d+ GB/s",
    ),
    (free_strides, "stride_copy strided_reads_move_whole_sectors_over_the_link", ASSERTION),
    (costly_order, "permutation_within_aligned_segments_is_nearly_free", ASSERTION),
    (coalesced_requests, "a_request_touches_the_guides_sectors.*", ASSERTION),
    (
        useless_padding,
        "a_padded_transpose_is_nearly_a_copy padding_a_tile_removes_its_bank_conflicts",
        ASSERTION,
    ),
    (
        equal_walks,
        "a_walk_that_goes_on_finds_no_line_of_the_last the_ladder_from_l1_to_the_host",
        ASSERTION,
    ),
    (
        no_hits,
        "a_flush_leaves_little_of_a_walk_in_l2.* l2_answers_sooner_than_dram"
        " l2_read_bandwidth_has_a_knee the_ladder_from_l1_to_the_host",
        ASSERTION,
    ),
    (idle_own_code, "case_that_also_runs_simulated", "WrongResult: scale: "),
]
"""What is taken out, patterns of the tests that turn red, and what each of them says."""


def matches(test: str, patterns: str) -> bool:
    return any(re.fullmatch(f"test_{pattern}", test) for pattern in patterns.split(" "))


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the suite: no module of it is taken for that of this session."""
    folder = tmp_path_factory.mktemp("copy") / "suite"
    shutil.copytree(SUITE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def suite(copied: Path, gpumem: Run, monkeypatch: Patch) -> Callable[..., Any]:
    """Runs modules of the suite; gives the reports of tests that passed, skipped and failed."""
    monkeypatch.chdir(copied.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)

    def run(*modules: str) -> Any:
        paths = [f"suite/{module}" for module in modules] or ["suite"]
        result: Any = gpumem(*paths, "--import-mode=importlib", *QUICKLY)
        return result.reprec.listoutcomes()

    return run


def name(report: pytest.TestReport) -> str:
    return report.nodeid.split("::")[1]


def modules_of(patterns: str) -> list[str]:
    """The modules of the suite that hold the tests of these patterns."""
    modules = []
    for path in sorted(SUITE.glob("test_*.py")):
        functions = re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
        for pattern in patterns.split(" "):
            function = re.compile(f"test_{pattern.partition(chr(92) + '[')[0]}")
            if any(function.fullmatch(test) for test in functions):
                modules.append(path.name)
                break
    return modules


@pytest.mark.parametrize(
    ("remove", "red", "says"), [pytest.param(*row, id=row[0].__name__) for row in REMOVALS]
)
def test_a_missing_mechanism_turns_its_tests_red(
    remove: Callable[[Patch], None],
    red: str,
    says: str,
    suite: Callable[..., Any],
    monkeypatch: Patch,
) -> None:
    with monkeypatch.context() as patch:
        remove(patch)
        passed, _, failed = suite(*modules_of(red))
    assert failed
    assert [name(report) for report in failed if not matches(name(report), red)] == []
    assert [name(report) for report in passed if matches(name(report), red)] == []
    for report in failed:
        assert re.search(says, report.longreprtext, re.MULTILINE), report.longreprtext


def test_the_suite_is_green_and_every_test_of_it_was_seen_red(suite: Callable[..., Any]) -> None:
    """A test that joins the suite needs a removal that turns it red."""
    passed, _, failed = suite()
    assert failed == []
    everything = " ".join(red for _, red, _ in REMOVALS)
    assert [name(report) for report in passed if not matches(name(report), everything)] == []


NO_L2 = {"compute_capability": (7, 5), "persisting_l2_max_bytes": 0}
INTEGRATED = {
    "integrated": True,
    "host_page_tables": True,
    "link_bandwidth": None,
    "memory_clock_hz": 0.0,
    "dram_peak": 0.0,
}


@pytest.mark.parametrize(
    ("facts", "modules", "reason"),
    [
        (NO_L2, ("test_l2_persistence.py", "test_l2_seeds.py"), "has no persisting L2"),
        (
            INTEGRATED,
            ("test_managed.py", "test_stream.py"),
            "host's page tables|peak of .* is unknown",
        ),
        (
            {"concurrent_managed_access": False},
            ("test_managed.py",),
            "concurrentManagedAccess is 0",
        ),
    ],
    ids=["compute capability 7.5", "integrated", "no migration"],
)
def test_the_suite_skips_what_a_gpu_cannot_show(
    suite: Callable[..., Any],
    monkeypatch: Patch,
    facts: dict[str, Any],
    modules: Sequence[str],
    reason: str,
) -> None:
    """No test of these modules fails by what the facts exclude, and each skip says why."""
    wrap(monkeypatch, Datasheet, "facts", lambda of, sheet: structs.replace(of(sheet), **facts))
    _, skipped, failed = suite(*modules)
    assert [report.nodeid for report in failed] == []
    reasons = [str(report.longrepr) for report in skipped]
    assert [text for text in reasons if re.search(reason, text)] != []
    assert [text for text in reasons if not re.search(f"{reason}|needs a GPU", text)] == []
