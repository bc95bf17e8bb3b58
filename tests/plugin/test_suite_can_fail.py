"""The memory suite can fail: take one mechanism out of the simulated device, and its tests turn red, no others of their modules.

Tests that need a GPU are seen red there: `tests/cuda/test_suite_can_fail_on_gpu.py`.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from sessions import Run

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import AccessProperty
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS, Datasheet
from pytest_gpumem.devices.simulated.device import SimulatedDevice, SimulatedL2, SimulatedManaged
from pytest_gpumem.devices.simulated.kernels import SimulatedKernels
from pytest_gpumem.devices.simulated.memory import SimulatedContent, SimulatedMemory
from pytest_gpumem.devices.simulated.pages import PageLog, Pages
from pytest_gpumem.devices.simulated.roofline import L2State, Roofline, Use
from pytest_gpumem.devices.simulated.streams import (
    COMPUTE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    SimulatedStreams,
    Timeline,
    Work,
)
from pytest_gpumem.kernels import calls
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import Access, Call, Kernel
from pytest_gpumem.measuring.harness import Flush
from pytest_gpumem.memory import l2, window_request
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.units import MiB

Patch = pytest.MonkeyPatch

SUITE = Path(__file__).parents[1] / "memory"


# What is taken out. The session runs inside this process, so a patch of the model is a patch of its device.


def no_window(patch: Patch) -> None:
    """A window is taken and forgotten."""
    patch.setattr(SimulatedL2, "set_window", lambda self, stream, window: None)


def no_set_aside(patch: Patch) -> None:
    """The driver says that it granted what was asked for, and sets nothing aside."""
    request = L2State.request_set_aside

    def only_says_so(self: L2State, nbytes: int) -> int:
        request(self, 0)
        return nbytes

    patch.setattr(L2State, "request_set_aside", only_says_so)


def largest_set_aside(patch: Patch) -> None:
    """What fits is the maximum, as guides have it."""
    patch.setattr(l2, "fit_set_aside", lambda facts, nbytes: facts.persisting_l2_max_bytes)


def hit_ratio_ignored(patch: Patch) -> None:
    """Every access under a window persists."""
    set_window = SimulatedL2.set_window
    patch.setattr(
        SimulatedL2,
        "set_window",
        lambda self, stream, window: set_window(
            self, stream, window and replace(window, hit_ratio=1.0)
        ),
    )


def no_prefetch(patch: Patch) -> None:
    """A prefetch to the device moves no page."""
    prefetch = SimulatedManaged.prefetch
    patch.setattr(
        SimulatedManaged,
        "prefetch",
        lambda self, allocation, to_host, stream: (
            prefetch(self, allocation, to_host, stream) if to_host else None
        ),
    )


def pages_stay_where_they_are(patch: Patch) -> None:
    """A prefetch to the host moves no page: only the first sample of a placement faults."""
    prefetch = SimulatedManaged.prefetch
    patch.setattr(
        SimulatedManaged,
        "prefetch",
        lambda self, allocation, to_host, stream: (
            None if to_host else prefetch(self, allocation, to_host, stream)
        ),
    )


def pages_never_stay(patch: Patch) -> None:
    """Whatever a kernel or a prefetch brings to the device is back on the host at the next access: every launch faults."""
    touched = Pages.touched_by_device

    def faulting(self: Pages, nbytes: float, *, page_by_page: bool) -> tuple[float, float]:
        self.place = "host"
        return touched(self, nbytes, page_by_page=page_by_page)

    patch.setattr(Pages, "touched_by_device", faulting)


def advice_does_nothing(patch: Patch) -> None:
    """The driver hears no advice."""
    patch.setattr(SimulatedManaged, "advise", lambda *_, **__: None)


def advice_stays(patch: Patch) -> None:
    """What was advised is never taken back."""
    advise = SimulatedManaged.advise
    patch.setattr(
        SimulatedManaged,
        "advise",
        lambda self, *args, on: advise(self, *args, on=True) if on else None,
    )


def migration_costs_nothing(patch: Patch) -> None:
    """Pages cross the link in no time."""
    sheet(patch, migration_share=1e12)


def prefetches_back_are_slow(patch: Patch) -> None:
    """A prefetch to the host takes twice as long as one to the device."""
    moved = PageLog.moved

    def slower(self: PageLog, direction: str, nbytes: float, cause: str) -> float:
        seconds = moved(self, direction, nbytes, cause)
        if (direction, cause) != ("to_host", "prefetch"):
            return seconds
        self.seconds["to_host"] += seconds
        return 2 * seconds

    patch.setattr(PageLog, "moved", slower)


def pageable_instead_of_pinned(patch: Patch) -> None:
    """What was to be page-locked is ordinary memory."""
    allocate = SimulatedMemory.allocate

    def unlocked(self: SimulatedMemory, nbytes: int, kind: MemoryKind, **flags: Any) -> Any:
        return allocate(
            self, nbytes, MemoryKind.PAGEABLE if kind is MemoryKind.PINNED else kind, **flags
        )

    patch.setattr(SimulatedMemory, "allocate", unlocked)


def registering_locks_nothing(patch: Patch) -> None:
    """`cudaHostRegister` leaves the memory pageable."""
    adopt = SimulatedMemory.adopt
    patch.setattr(
        SimulatedMemory, "adopt", lambda self, array, register: adopt(self, array, register=False)
    )


def sheet(patch: Patch, **changes: float) -> None:
    """The device has other figures."""
    make = SimulatedDevice.__init__
    patch.setattr(
        SimulatedDevice,
        "__init__",
        lambda self, datasheet, **options: make(self, replace(datasheet, **changes), **options),
    )


def uses(patch: Patch, change: Callable[[Use], None]) -> None:
    """`change` changes the bytes that each launch moves of an array."""
    traffic = Roofline.traffic

    def changed(self: Roofline, *arguments: Any, **more: Any) -> Any:
        made = traffic(self, *arguments, **more)
        for use in made.uses:
            change(use)
        return made

    patch.setattr(Roofline, "traffic", changed)


def kernels(patch: Patch, change: Callable[[Kernel], Kernel]) -> None:
    """The device sees each kernel as `change(kernel)` gives it; the suite sees it as it is."""
    ready = SimulatedKernels._ready
    patch.setattr(
        SimulatedKernels,
        "_ready",
        lambda self, launch: ready(self, replace(launch, kernel=change(launch.kernel))),
    )


def accesses_by(patch: Patch, change: Callable[[str, Call, Access], Access]) -> None:
    """Each access is what `change(kernel, call, access)` says."""

    def changed(kernel: Kernel) -> Kernel:
        return replace(
            kernel,
            accesses=lambda call: tuple(
                change(kernel.name, call, a) for a in kernel.accesses(call)
            ),
        )

    kernels(patch, changed)


def sectors(patch: Patch, cost: Callable[[str, Call, Access], float]) -> None:
    """Each request moves as many sectors as `cost(kernel, call, access)` says."""
    accesses_by(
        patch,
        lambda kernel, call, access: replace(
            access, sectors_per_request=cost(kernel, call, access)
        ),
    )


def strides_cost_nothing(patch: Patch) -> None:
    """Every request is served as if its words lay side by side."""
    sectors(patch, lambda kernel, call, access: 4.0)


def order_matters(patch: Patch) -> None:
    """Words in another order than the threads' cost a sector each, as before compute capability 2.0."""
    sectors(
        patch,
        lambda kernel, call, access: (
            32.0 if kernel == "permuted_copy" else access.sectors_per_request
        ),
    )


def strides_cost_double(patch: Patch) -> None:
    """Each strided request moves twice the sectors that it touches."""

    def double(kernel: str, call: Call, access: Access) -> Access:
        if kernel != "stride_copy" or call.scalars["stride"] == 1:
            return access
        return replace(
            access,
            footprint=2 * access.footprint,
            sectors_per_request=min(32.0, 2 * access.sectors_per_request),
        )

    accesses_by(patch, double)


def warps_share_their_pages(patch: Patch) -> None:
    """The warps of `init_warp_per_page` stride over the whole array, as those of `init` do."""
    accesses_by(patch, lambda kernel, call, access: replace(access, page_by_page=False))


def every_request_is_coalesced(patch: Patch) -> None:
    """The prediction, and with it the model, has four sectors for each request."""
    touch = calls.touch
    patch.setattr(
        calls, "touch", lambda *arguments, **facts: touch(*arguments, **facts | {"sectors": 4.0})
    )


def bank_conflicts_cost_nothing(patch: Patch) -> None:
    """L1 and shared memory serve all requests at once."""
    kernels(
        patch,
        lambda kernel: (
            replace(kernel, on_chip_cycles=None) if kernel.name.startswith("transpose") else kernel
        ),
    )


def padding_does_nothing(patch: Patch) -> None:
    """The words of a column lie in one bank, padded or not."""
    conflicts = CATALOGUE["transpose_tiled"].on_chip_cycles
    kernels(
        patch,
        lambda kernel: (
            replace(kernel, on_chip_cycles=conflicts)
            if kernel.name == "transpose_padded"
            else kernel
        ),
    )


def every_walk_is_the_same(patch: Patch) -> None:
    """No walk goes on: each finds the lines of the one before."""
    accesses_by(patch, lambda kernel, call, access: replace(access, onward=False))


def the_link_answers_at_once(patch: Patch) -> None:
    """Mapped host memory is as near as L2."""
    sheet(patch, link_latency=DATASHEETS["h100"].l2_latency)


def nothing_hits_twice(patch: Patch) -> None:
    """Whatever a launch reads comes from DRAM, also what it has read before."""
    l2_keeps_nothing(patch)

    def again(use: Use) -> None:
        use.distinct, use.repeated = use.distinct + use.repeated, 0.0

    uses(patch, again)


def l2_is_three_times_its_size(patch: Patch) -> None:
    """L2 holds more than the device says that it has."""
    make = L2State.__init__

    def larger(self: L2State, datasheet: Datasheet) -> None:
        make(self, datasheet)
        self.nbytes *= 3

    patch.setattr(L2State, "__init__", larger)


def l2_keeps_nothing(patch: Patch) -> None:
    """Every launch finds an empty L2."""
    patch.setattr(L2State, "touch", lambda self, allocation, nbytes: None)


def flushes_do_nothing(patch: Patch) -> None:
    """L2 is as hot before a sample as the sample before has left it, whatever the mode."""
    patch.setattr(Flush, "__call__", lambda self, stream: None)


def dram_at_three_quarters(patch: Patch) -> None:
    """As with a memory clock that is stuck."""
    sheet(patch, dram_share=0.75 * DATASHEETS["h100"].dram_share)


def own_code_does_not_run(patch: Patch) -> None:
    """A function of the user's own queues its work and computes nothing."""
    call = SimulatedKernels.call
    patch.setattr(
        SimulatedKernels,
        "call",
        lambda self, foreign, stream: call(self, replace(foreign, reference=lambda: None), stream),
    )


def results_do_not_come_back(patch: Patch) -> None:
    """A host that reads managed memory in place finds zeros there."""
    guest = SimulatedMemory.guest
    patch.setattr(
        SimulatedMemory, "guest", lambda self, *arguments: np.zeros_like(guest(self, *arguments))
    )


def windows_begin_with_the_buffer(patch: Patch) -> None:
    """An offset is taken and forgotten."""
    patch.setattr(window_request, "_offset", lambda buffer, offset: 0)


def windows_cover_whole_buffers(patch: Patch) -> None:
    """A window of a part of a buffer goes on to its end."""
    patch.setattr(
        window_request,
        "_window_bytes",
        lambda facts, buffer, window, offset: buffer.nbytes - offset,
    )


def other_lines_are_normal(patch: Patch) -> None:
    """What `miss` says is taken and forgotten."""
    patch.setattr(PersistingStream, "_miss", AccessProperty.NORMAL)


def fits_above_half_of_l2(patch: Patch) -> None:
    """A fitted window gets half of L2 however large it is, at hit ratio 1, and costs as much as thrashing does."""
    patch.setattr(l2, "fit_hit_ratio", lambda set_aside, nbytes: 1.0)
    patch.setattr(
        window_request.WindowRequest, "off", property(lambda self: self.set_aside == "off")
    )
    patch.setattr(
        window_request.WindowRequest,
        "persists",
        property(lambda self: self.hit is AccessProperty.PERSISTING),
    )
    windows_cost(patch)


def windows_cost(patch: Patch) -> None:
    """A kernel under a window takes half as long again."""
    kernel = Roofline.kernel
    patch.setattr(
        Roofline,
        "kernel",
        lambda self, traffic, window=None: (
            kernel(self, traffic, window) * (1.0 if window is None else 1.5)
        ),
    )


def windows_get_no_granule_more(patch: Patch) -> None:
    """A fitted set-aside is the least that holds the window."""
    patch.setattr(window_request, "FREE_STEPS", 0)


def rounding_is_ignored(patch: Patch) -> None:
    """Hit ratios are fitted to what was asked for, whatever the driver granted."""
    request = SimulatedL2.request_set_aside

    def as_asked(self: SimulatedL2, nbytes: int) -> int:
        request(self, nbytes)
        return nbytes

    patch.setattr(SimulatedL2, "request_set_aside", as_asked)


def thrashing_is_not_said(patch: Patch) -> None:
    """Windows may ask for more than is set aside without a word."""
    patch.setattr(PersistingStream, "thrashing", None)


def other_lines_go_first(patch: Patch) -> None:
    """Lines under a window that do not persist are streaming."""
    patch.setattr(PersistingStream, "_miss", AccessProperty.STREAMING)


def flags_slow_the_link(patch: Patch) -> None:
    """Memory that is not mapped, not portable or write-combined is copied at half the rate."""
    allocate, copy, slow = SimulatedMemory.allocate, Roofline.copy, list[Any]()

    def flagged(self: SimulatedMemory, nbytes: int, kind: MemoryKind, **flags: bool) -> Any:
        made = allocate(self, nbytes, kind, **flags)
        if (
            flags.get("write_combined")
            or not flags.get("mapped", True)
            or not flags.get("portable", True)
        ):
            slow.append(made)
        return made

    def slower(self: Roofline, destination: Any, source: Any, nbytes: int) -> float:
        return copy(self, destination, source, nbytes) * (
            2 if any(a is destination or a is source for a in slow) else 1
        )

    patch.setattr(SimulatedMemory, "allocate", flagged)
    patch.setattr(Roofline, "copy", slower)


def engines(patch: Patch, change: Callable[[str], str]) -> None:
    """Work runs on the engine that `change` gives."""
    queue = Timeline.queue

    def changed(self: Timeline, stream: Any, item: Any, cost: float) -> None:
        queue(
            self,
            stream,
            replace(item, engine=change(item.engine)) if isinstance(item, Work) else item,
            cost,
        )

    patch.setattr(Timeline, "queue", changed)


def one_copy_engine(patch: Patch) -> None:
    """The device says that it has three, and has one."""
    engines(patch, lambda engine: HOST_TO_DEVICE if engine == DEVICE_TO_HOST else engine)


def nothing_overlaps(patch: Patch) -> None:
    """Copies wait for kernels, and kernels for copies."""
    engines(patch, lambda engine: COMPUTE)


def every_copy_makes_the_host_wait(patch: Patch) -> None:
    """Pinned memory is copied as pageable memory is, chunks apart."""
    copy = SimulatedContent.copy

    def waiting(
        self: SimulatedContent, destination: Any, source: Any, nbytes: int, stream: Any
    ) -> None:
        if nbytes >= 64 * MiB:
            self._timeline.forbid_capture("the host waits")
        copy(self, destination, source, nbytes, stream)
        if nbytes >= 64 * MiB:
            self._timeline.wait(stream)

    patch.setattr(SimulatedContent, "copy", waiting)


def joining_streams_takes_a_millisecond(patch: Patch) -> None:
    """A stream that waits for another one wakes late."""
    join = SimulatedStreams.join

    def late(self: SimulatedStreams, stream: Any, other: Any) -> None:
        join(self, stream, other)
        self._timeline.queue(stream, Work(COMPUTE, lambda: 1e-3), 0.0)

    patch.setattr(SimulatedStreams, "join", late)


def every_copy_takes_as_long(patch: Patch) -> None:
    """However few its bytes, a copy takes as long as one of 16 MiB."""
    copy = Roofline.copy
    patch.setattr(
        Roofline,
        "copy",
        lambda self, to, source, nbytes: copy(self, to, source, max(nbytes, 16 * MiB)),
    )


def small_copies_cost_nothing_extra(patch: Patch) -> None:
    """A copy is begun in no time."""
    sheet(patch, copy_start=0.0)


def device_memory_is_copied_over_the_link(patch: Patch) -> None:
    """Down to the host and up again."""
    copy = SimulatedContent.copy

    def around(self: SimulatedContent, to: Any, source: Any, nbytes: int, stream: Any) -> None:
        copy(self, to, source, nbytes, stream)
        if not (to.kind.on_host or source.kind.on_host):
            self._timeline.queue(
                stream, Work(COMPUTE, lambda: 2 * nbytes / self._roofline.sheet.link_bandwidth), 0.0
            )

    patch.setattr(SimulatedContent, "copy", around)


def kernels_take_twenty_times_as_long(patch: Patch) -> None:
    """So long that copies are no large part of what is copied and worked on."""
    kernel = Roofline.kernel
    patch.setattr(Roofline, "kernel", lambda self, *arguments: 20 * kernel(self, *arguments))


def the_link_is_at_half_its_width(patch: Patch) -> None:
    """As with a card that sits in the wrong slot."""
    sheet(patch, link_share=DATASHEETS["h100"].link_share / 1.45)


def mapped_memory_crosses_no_link(patch: Patch) -> None:
    """Kernels read host memory as if it were theirs."""

    def near(use: Use) -> None:
        if use.allocation.kind.on_host:
            use.distinct = use.repeated = 0.0

    uses(patch, near)


def mapped_memory_crosses_the_link_once(patch: Patch) -> None:
    """What was read once is kept on the device."""

    def once(use: Use) -> None:
        if use.allocation.kind.on_host:
            use.repeated = 0.0

    uses(patch, once)


def zero_copy_is_slow(patch: Patch) -> None:
    """Kernels reach a third of the link's bandwidth."""

    def slow(use: Use) -> None:
        if use.allocation.kind.on_host:
            use.distinct, use.repeated = 3 * use.distinct, 3 * use.repeated

    uses(patch, slow)


def the_link_is_not_told(patch: Patch) -> None:
    """Bytes beyond the link count as the device's own."""
    patch.setattr(MemoryKind, "beyond_link", property(lambda self: False))


def kinds_are_not_told(patch: Patch) -> None:
    """No pointer belongs to anything."""
    patch.setattr(SimulatedMemory, "kind_at", lambda self, address: None)


def everything_is_pageable(patch: Patch) -> None:
    """Every pointer belongs to the process."""
    patch.setattr(SimulatedMemory, "kind_at", lambda self, address: MemoryKind.PAGEABLE)


def pinned_memory_lies_elsewhere_on_the_device(patch: Patch) -> None:
    """As without unified virtual addressing."""
    allocate = SimulatedMemory.allocate

    def elsewhere(self: SimulatedMemory, nbytes: int, kind: MemoryKind, **flags: bool) -> Any:
        made = allocate(self, nbytes, kind, **flags)
        if kind is MemoryKind.PINNED and made.address:
            made.address += 2**44
        return made

    patch.setattr(SimulatedMemory, "allocate", elsewhere)


ASSERTION = r"^E +(AssertionError: )?assert "
"""The test's own assertion failed."""


@dataclass(frozen=True)
class Removal:
    """A mechanism that is taken out, the tests of the suite that turn red, and what each of them says."""

    out: Callable[[Patch], None]
    red: frozenset[str]
    says: str = ASSERTION


NEVER_SLOWER = {
    (of_32, kernel): f"test_a_fitted_window_is_never_slower_than_none[{of_32}-{kernel}]"
    for of_32 in (1, 2, 4, 8, 12, 16, 24, 32, 48)
    for kernel in ("reset_data", "sliding_window")
}
ABOVE_HALF = {test for (of_32, _), test in NEVER_SLOWER.items() if of_32 > 16}
HELD = [
    f"test_the_driver_holds_the_window_that_was_asked_for[{properties}]"
    for properties in ("persisting-normal", "streaming-streaming")
]
SMALL_WINDOW = "test_a_small_window_gets_a_granule_more_than_holds_it"
ROUNDED = "test_a_hit_ratio_is_fitted_to_what_the_driver_granted"
SAID_TO_THRASH = "test_a_window_beyond_its_set_aside_is_said_to_thrash"
COSTS_NOTHING = "test_a_fitted_hit_ratio_costs_nothing_where_the_table_stays"
SECTORS = {
    f"test_a_request_touches_the_guides_sectors[{one}]"
    for one in ("offset_copy-1-5", "stride_copy-2-8", "stride_copy-32-32")
}
FLUSHED = {
    f"test_a_flush_leaves_little_of_a_walk_in_l2[{mode}]" for mode in ("clean-cold", "dirty-cold")
}
GPU_FIRST = {
    f"test_first_touch_by_the_gpu_avoids_faults[{init}]" for init in ("init", "init_warp_per_page")
}
LINK_BOUNDS = "test_the_link_bounds_migration_and_not_the_kernel"
READ_COPY = "test_read_mostly_gives_a_reader_a_copy"
PREFER_DEVICE, PREFER_HOST = (
    "test_pages_that_prefer_the_device_migrate_like_others",
    "test_pages_that_prefer_the_host_stay_there",
)
TAKEN_BACK = "test_advice_that_is_taken_back_leaves_no_trace"
TEXTS_SIZE = "test_the_texts_own_size"
PREFETCHED = {
    "test_prefetch_beats_faulting",
    TEXTS_SIZE,
    "test_prefetched_is_nearly_device_memory",
    *(LINK_BOUNDS, READ_COPY, PREFER_DEVICE),
}
INITIALISERS = {
    f"test_a_warp_for_each_page_faults_less_than_all_warps_on_all_pages[{page}]"
    for page in (4096, 65536, 2097152)
}
STREAM = {f"test_{name}" for name in ("copy", "mul", "stream_add", "triad", "write", "read", "dot")}

PADDING = "test_padding_a_tile_removes_its_bank_conflicts"
LADDER = "test_the_ladder_from_l1_to_the_host"
MAPPED = "test_dram_answers_sooner_than_mapped_host_memory"
KNEE = "test_l2_read_bandwidth_has_a_knee"

# The host link

BOTH_WAYS = "test_both_ways_at_once"
INSIDE = "test_device_to_device_is_no_matter_of_the_link"
BESIDE = "test_a_copy_beside_a_kernel_on_other_data"
THREE_AT_ONCE = "test_copies_both_ways_and_the_kernel_run_at_once"
UNEVEN = "test_a_number_of_chunks_that_divides_nothing"
HOST_WORK = "test_host_work_beside_a_copy_and_a_kernel"
RETURNS = "test_pinned_copies_return_at_once_and_pageable_ones_do_not"
READ_ONCE = "test_reading_once_in_place_is_no_slower_than_copying_first"
READ_AGAIN = "test_reading_again_crosses_the_link_again"
READ_STRIDED = "test_strided_reads_move_whole_sectors_over_the_link"
LINK_BYTES = "test_the_links_bytes_are_what_counts"
SLICES = "test_an_array_and_its_slices_are_of_the_memory_behind_them"
ONE_ADDRESS = "test_pinned_memory_has_one_address_on_both_sides"
FLAGS = ({"mapped": False}, {"portable": False}, {"write_combined": True})
HIDES = "of what overlap can hide is below min_overlap"
"""A staged copy or parts that run at once hide too little."""


def staging(streams: int, rounds: int = 200) -> str:
    return f"test_staging_follows_the_estimate[{streams}-{rounds}]"


REMOVALS = [
    Removal(no_window, frozenset({*HELD, ROUNDED})),
    Removal(no_set_aside, frozenset({SMALL_WINDOW, ROUNDED})),
    Removal(largest_set_aside, frozenset({SMALL_WINDOW})),
    Removal(hit_ratio_ignored, frozenset(HELD)),
    Removal(windows_cost, frozenset({*NEVER_SLOWER.values(), COSTS_NOTHING} - ABOVE_HALF)),
    Removal(fits_above_half_of_l2, frozenset({*NEVER_SLOWER.values(), COSTS_NOTHING})),
    Removal(windows_get_no_granule_more, frozenset({SMALL_WINDOW})),
    Removal(rounding_is_ignored, frozenset({ROUNDED})),
    Removal(thrashing_is_not_said, frozenset({SAID_TO_THRASH}), says="not found in warning list"),
    Removal(windows_begin_with_the_buffer, frozenset(HELD)),
    Removal(windows_cover_whole_buffers, frozenset(HELD)),
    Removal(other_lines_are_normal, frozenset({HELD[1]})),
    Removal(other_lines_go_first, frozenset({HELD[0]})),
    Removal(no_prefetch, frozenset(PREFETCHED)),
    Removal(
        pages_stay_where_they_are,
        frozenset(
            {
                "test_prefetch_beats_faulting",
                TEXTS_SIZE,
                LINK_BOUNDS,
                READ_COPY,
                PREFER_DEVICE,
                TAKEN_BACK,
            }
            | {PREFER_HOST, "test_pages_accessed_by_the_device_are_mapped_without_a_fault"}
            | INITIALISERS
        ),
    ),
    Removal(warps_share_their_pages, frozenset(INITIALISERS)),
    Removal(pages_never_stay, frozenset(PREFETCHED | GPU_FIRST)),
    Removal(
        advice_does_nothing,
        frozenset(
            {
                PREFER_HOST,
                "test_pages_accessed_by_the_device_are_mapped_without_a_fault",
            }
        ),
        says=f"{ASSERTION}|page faults of the GPU in one launch, above max_gpu_page_faults 0",
    ),
    Removal(advice_stays, frozenset({TAKEN_BACK})),
    Removal(migration_costs_nothing, frozenset({LINK_BOUNDS})),
    Removal(prefetches_back_are_slow, frozenset({LINK_BOUNDS})),
    Removal(
        pageable_instead_of_pinned,
        frozenset(
            {
                "test_pinned_to_device_beats_pageable",
                "test_device_to_pinned_beats_pageable",
                "test_pinned_reaches_most_of_the_link",
            }
            | {
                BOTH_WAYS,
                BESIDE,
                THREE_AT_ONCE,
                UNEVEN,
                HOST_WORK,
                RETURNS,
                "test_pageable_memory_hides_less",
            }
            | {
                staging(8),
                staging(16),
                READ_ONCE,
                READ_AGAIN,
                READ_STRIDED,
                LINK_BYTES,
                MAPPED,
                LADDER,
            }
            | {
                "test_a_pointer_tells_its_kind_also_within_a_slice[pinned]",
                "test_past_the_end_is_not_the_buffers[pinned]",
                ONE_ADDRESS,
            }
        ),
        says=f"{ASSERTION}|{HIDES}|(nodes|x) is pageable memory, which kernels cannot see",
    ),
    Removal(
        registering_locks_nothing,
        frozenset(
            {
                "test_registered_memory_is_as_fast_as_pinned",
                "test_registered_memory_goes_back_to_pageable",
                SLICES,
            }
            | {"test_a_pointer_tells_its_kind_also_within_a_slice[registered]"}
        ),
    ),
    Removal(
        flags_slow_the_link,
        frozenset(
            f"test_flags_of_pinned_memory_leave_the_link_as_fast[{flags}]" for flags in FLAGS
        ),
    ),
    Removal(
        one_copy_engine, frozenset({BOTH_WAYS, THREE_AT_ONCE, UNEVEN}), says=f"{ASSERTION}|{HIDES}"
    ),
    Removal(
        nothing_overlaps,
        frozenset(
            {BOTH_WAYS, BESIDE, THREE_AT_ONCE, UNEVEN, staging(4, 1600)}
            | {staging(n) for n in (2, 4, 8, 16)}
        ),
        says=f"{ASSERTION}|{HIDES}",
    ),
    Removal(
        every_copy_makes_the_host_wait,
        frozenset({BOTH_WAYS, BESIDE, HOST_WORK, RETURNS}),
        says=f"{ASSERTION}|{HIDES}",
    ),
    Removal(
        joining_streams_takes_a_millisecond,
        frozenset(
            {BOTH_WAYS, BESIDE, THREE_AT_ONCE, UNEVEN, HOST_WORK, staging(4, 1600)}
            | {staging(n) for n in (1, 2, 4, 8, 16)}
        ),
        says=f"{ASSERTION}|{HIDES}",
    ),
    Removal(
        every_copy_takes_as_long,
        frozenset(
            {
                "test_the_bandwidth_rises_with_the_size",
                THREE_AT_ONCE,
                UNEVEN,
                staging(8),
                staging(16),
            }
        ),
        says=f"{ASSERTION}|{HIDES}",
    ),
    Removal(
        small_copies_cost_nothing_extra, frozenset({"test_one_packed_copy_beats_many_small_ones"})
    ),
    Removal(device_memory_is_copied_over_the_link, frozenset({INSIDE})),
    Removal(
        kernels_take_twenty_times_as_long,
        frozenset({"test_intermediates_that_stay_on_the_device_save_a_round_trip"}),
    ),
    Removal(the_link_is_at_half_its_width, frozenset({"test_pinned_reaches_most_of_the_link"})),
    Removal(mapped_memory_crosses_no_link, frozenset({READ_AGAIN, READ_STRIDED})),
    Removal(mapped_memory_crosses_the_link_once, frozenset({READ_AGAIN, READ_STRIDED})),
    Removal(zero_copy_is_slow, frozenset({READ_ONCE})),
    Removal(
        the_link_is_not_told,
        frozenset({BOTH_WAYS, LINK_BYTES}),
        says=f"{ASSERTION}|NoTraffic: the traffic of .* is unknown",
    ),
    Removal(
        kinds_are_not_told,
        frozenset(
            {
                f"test_a_pointer_tells_its_kind_also_within_a_slice[{kind.value}]"
                for kind in MemoryKind
                if kind not in (MemoryKind.PEER, MemoryKind.POOLED)
            }
            | {
                f"test_past_the_end_is_not_the_buffers[{kind}]"
                for kind in ("device", "managed", "pinned")
            }
            | {SLICES, "test_registered_memory_goes_back_to_pageable"}
        ),
    ),
    Removal(
        everything_is_pageable,
        frozenset(
            {
                f"test_a_pointer_tells_its_kind_also_within_a_slice[{kind}]"
                for kind in ("device", "managed", "pinned", "registered")
            }
            | {
                f"test_past_the_end_is_not_the_buffers[{kind}]"
                for kind in ("device", "managed", "pinned")
            }
            | {SLICES, "test_registered_memory_goes_back_to_pageable", "test_null_is_no_memory"}
        ),
    ),
    Removal(pinned_memory_lies_elsewhere_on_the_device, frozenset({ONE_ADDRESS})),
    Removal(strides_cost_nothing, frozenset({"test_stride_copy", READ_STRIDED})),
    Removal(strides_cost_double, frozenset({"test_stride_copy"})),
    Removal(every_request_is_coalesced, frozenset(SECTORS)),
    Removal(order_matters, frozenset({"test_permutation_within_aligned_segments_is_nearly_free"})),
    Removal(bank_conflicts_cost_nothing, frozenset({PADDING})),
    Removal(padding_does_nothing, frozenset({PADDING, "test_a_padded_transpose_is_nearly_a_copy"})),
    Removal(l2_keeps_nothing, frozenset({"test_l2_answers_sooner_than_dram", *FLUSHED, LADDER})),
    Removal(
        nothing_hits_twice, frozenset({"test_l2_answers_sooner_than_dram", *FLUSHED, LADDER, KNEE})
    ),
    Removal(l2_is_three_times_its_size, frozenset({KNEE, *FLUSHED, LADDER})),
    Removal(
        every_walk_is_the_same,
        frozenset({"test_a_walk_that_goes_on_finds_no_line_of_the_last", LADDER}),
    ),
    Removal(the_link_answers_at_once, frozenset({MAPPED, LADDER})),
    Removal(flushes_do_nothing, frozenset(FLUSHED)),
    Removal(dram_at_three_quarters, frozenset(STREAM), says=r"is below min_bandwidth \d+ GB/s"),
    Removal(
        results_do_not_come_back, frozenset({"test_a_host_that_reads_results_in_place_gets_them"})
    ),
    Removal(
        own_code_does_not_run,
        frozenset({"test_case_that_also_runs_simulated"}),
        says="WrongResult: scale: ",
    ),
]


DISTURBED = 40
"""Copies of a session until others have ended that use the link: two of three take 20 times as long."""
QUICKLY = ("-o", "gpumem_placements=2", "-o", "gpumem_precision=5%", "--benchmark-quiet", "-q")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the suite, compiled once: no module of it may be taken for one of the same name in the session outside."""
    folder = tmp_path_factory.mktemp("copy") / "suite"
    shutil.copytree(SUITE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def suite(
    copied: Path, gpumem: Run, monkeypatch: Patch
) -> Callable[..., tuple[set[str], dict[str, str]]]:
    """Runs modules of the suite, or all, quickly; gives the names of the tests that passed, and the text of those that failed."""
    monkeypatch.chdir(copied.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)

    def run(*modules: str) -> tuple[set[str], dict[str, str]]:
        paths = [f"suite/{module}" for module in modules] or ["suite"]
        passed, _, failed = gpumem(
            *paths, "--import-mode=importlib", *QUICKLY
        ).reprec.listoutcomes()  # type: ignore[attr-defined]
        assert all(report.when == "call" for report in failed), failed
        return {name(r) for r in passed}, {name(r): r.longreprtext for r in failed}

    return run


MIG, PERSISTS_NOT = "the set-aside is disabled in MIG mode", "has no persisting L2"
SHARED = {
    "integrated": True,
    "pageable_memory_access": True,
    "host_page_tables": True,
    "link_bandwidth": None,
}
L2_TESTS, MANAGED_TESTS = ("test_l2_persistence.py", "test_l2_seeds.py"), ("test_managed.py",)


@pytest.mark.parametrize(
    ("facts", "modules", "skips", "reason"),
    [
        (
            {"compute_capability": (7, 5), "persisting_l2_max_bytes": 0},
            L2_TESTS,
            39,
            f"{PERSISTS_NOT}|needs a GPU",
        ),
        (
            {"mig_profile": "1g.10gb", "persisting_l2_max_bytes": 0},
            L2_TESTS,
            39,
            f"{MIG}|{PERSISTS_NOT}|needs a GPU",
        ),
        ({"mps": True}, L2_TESTS, 30, "under MPS the L2 set-aside is fixed|needs a GPU"),
        (
            {**SHARED, "integrated": False},
            (*MANAGED_TESTS, "test_host_link.py"),
            10,
            "host's page tables|host link is unknown|no peer|needs a GPU",
        ),
        (
            {**SHARED, "memory_clock_hz": 0.0, "dram_peak": 0.0},
            (*MANAGED_TESTS, "test_stream.py"),
            16,
            "host's page tables|peak of .* is unknown|needs a GPU",
        ),
        (
            {"concurrent_managed_access": False},
            MANAGED_TESTS,
            17,
            "concurrentManagedAccess is 0|needs a GPU",
        ),
    ],
    ids=["compute capability 7.5", "MIG", "MPS", "coherent link", "integrated", "no migration"],
)
def test_the_suite_skips_what_a_gpu_cannot_show(
    suite: Callable[[], Any],
    gpumem: Run,
    monkeypatch: Patch,
    facts: dict[str, Any],
    modules: Sequence[str],
    skips: int,
    reason: str,
) -> None:
    """No test of these modules fails by what the facts exclude, and each skip says why."""
    of_sheet = Datasheet.facts
    monkeypatch.setattr(Datasheet, "facts", lambda self: structs.replace(of_sheet(self), **facts))
    paths = [f"suite/{module}" for module in modules]
    _, skipped, failed = gpumem(*paths, "--import-mode=importlib", *QUICKLY).reprec.listoutcomes()  # type: ignore[attr-defined]
    assert [report.nodeid for report in failed] == []
    assert len(skipped) >= skips
    assert [
        report.longrepr for report in skipped if not re.search(reason, str(report.longrepr))
    ] == []


def modules_of(tests: frozenset[str]) -> list[str]:
    """The modules of the suite that hold these tests."""
    functions = {test.partition("[")[0] for test in tests}
    held = {
        path.name: functions & set(re.findall(r"^def (\w+)\(", path.read_text(), re.MULTILINE))
        for path in SUITE.glob("test_*.py")
    }
    assert set().union(*held.values()) == functions
    return sorted(name for name, found in held.items() if found)


def name(report: pytest.TestReport) -> str:
    return report.nodeid.split("::")[1]


@pytest.mark.parametrize("removal", [pytest.param(r, id=r.out.__name__) for r in REMOVALS])
def test_a_missing_mechanism_turns_its_tests_red(
    removal: Removal, suite: Callable[[], Any], monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        removal.out(patch)
        _passed, failed = suite(*modules_of(removal.red))
    assert set(failed) == removal.red
    for test, text in failed.items():
        assert re.search(removal.says, text, re.MULTILINE), (test, text)


def test_the_suite_is_green_and_every_test_of_it_was_seen_red(suite: Callable[[], Any]) -> None:
    """A test that joins the suite needs a removal that turns it red."""
    passed, failed = suite()
    assert failed == {}
    assert passed == set().union(*(r.red for r in REMOVALS))


def test_a_link_that_others_use_for_a_while_is_measured_again(
    suite: Callable[..., Any], monkeypatch: Patch
) -> None:
    copy, copies = Roofline.copy, itertools.count()

    def disturbed(self: Roofline, to: Any, source: Any, nbytes: int) -> float:
        number = next(copies)
        return copy(self, to, source, nbytes) * (20 if number < DISTURBED and number % 3 else 1)

    monkeypatch.setattr(Roofline, "copy", disturbed)
    passed, _failed = suite(f"test_zero_copy.py::{READ_AGAIN}")
    assert passed == {READ_AGAIN}
    assert next(copies) > DISTURBED
