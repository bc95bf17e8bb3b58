"""Data of each simulated GPU: published figures, and parameters fitted to named rows.

Two kinds of numbers, never mixed. *Published* ones come from the source named beside them. *Fitted* ones (`Fit`) were adjusted
until the model met the rows that `ci/bench/simulated_fit.py` calls its fit set; the same script prints the error on every row,
those held out included. Sizes are bytes, rates bytes per second, times seconds, clocks hertz.

Sources:
    [GA102] NVIDIA Ampere GA102 GPU Architecture whitepaper, tables 2 and 9 (GeForce RTX 3090).
    [A100] NVIDIA A100 80GB datasheet and "NVIDIA A100 Tensor Core GPU Architecture" whitepaper, table 4.
    [H100] NVIDIA H100 datasheet (SXM) and "NVIDIA H100 Tensor Core GPU Architecture" whitepaper.
    [H200] NVIDIA H200 datasheet (SXM).
    [CUDA] CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    [BPG] CUDA C++ Best Practices Guide 9.2.2 (set-aside of A100) and 9.1.1 (pinned transfers).
    [Mao] "CUDA L2 Persistent Cache" (Lei Mao), table of an RTX 3090.
    [benches] RRZE gpu-benches: L2 bandwidth and latencies of A100, H100; STREAM bandwidth of A100, H200; read bandwidth of RTX 3090.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_gpumem.kernels.kernel import RESERVED_SHARED_BYTES
from pytest_gpumem.records.device import DeviceFacts, host_link, peak_bandwidth
from pytest_gpumem.units import GiB, KiB, MiB

_LANES = 16


@dataclass(frozen=True)
class Fit:
    """Parameters that no datasheet gives, adjusted to rows of `ci/bench/simulated_fit.py`."""

    read_efficiency: float  # share of the peak that pure reads reach
    write_efficiency: float  # share of the peak that pure writes reach
    turnaround: (
        float  # share of the peak lost where reads and writes mix one to one (the bus turns around)
    )
    l2_hit_time: float  # time of one loop iteration of a thread whose load hits L2: latency, index arithmetic and the store's issue
    l2_miss_time: float  # latency that a load from DRAM adds
    shared_l2: float
    """Share of L2 that serves as one cache for lines which all SMs read: 1/2 where L2 has two partitions that each keep a copy."""
    sharpness: float  # slope of the miss curve at capacity: low associativity and hashing blur the step of an ideal LRU cache
    knee: float  # reuse distance, in capacities, at which half of the accesses miss
    persisting_knee: float  # the same for persisting lines in their set-aside
    persisting_sharpness: float  # the same for persisting lines
    write_pressure: (
        float  # share of the cache that dirty lines take from reads when writes saturate the memory
    )
    thrash: float  # extra cost of a miss that replaces a persisting line
    streaming_retention: (
        float  # chance of a line with the streaming property to survive where a normal line would
    )
    streaming_update: float  # extra cost of a miss on a streaming line that is read and written: it may be evicted in between
    squeeze_share: float  # share of L2 outside the set-aside below which a saturated write stream slows down; 0: it never does
    squeeze_slope: float  # share of the write bandwidth lost for each unit of L2 below that
    turnover: float
    """Time in which the place of a block that ends is taken by the next one, over the root of its threads: the slowest warp decides."""
    l1_knee: float  # bytes that an SM reads over and over, over its L1 and shared memory, at which half of the loads miss L1
    l1_sharpness: float  # slope of the miss curve of L1
    sparsity: float  # exponent of the bandwidth lost where only a share of the sectors is used
    merging: float  # cost of a written sector that several requests fill, over that of one that a single request fills


@dataclass(frozen=True)
class Datasheet:
    """One GPU as the model sees it."""

    name: str  # marketing name
    compute_capability: tuple[int, int]
    sm_count: int
    max_threads_per_sm: int  # [CUDA]
    max_blocks_per_sm: int  # [CUDA]
    shared_bytes_per_sm: int  # [CUDA]
    memory_bytes: int
    memory_clock: float  # half of the data rate of a pin, as the driver reports it
    memory_bus_bits: int
    sm_clock: float  # boost clock
    ecc: bool | None  # ECC as delivered
    l2_bytes: int
    persisting_l2_max_bytes: int
    default_set_aside: int  # limit found in a new context
    l2_bandwidth: float
    l2_latency: float  # of a dependent load that hits L2
    dram_latency: float  # of a dependent load that misses L2
    link_generation: int  # of PCI Express, with 16 lanes
    pinned_share: float  # share of the link that pinned copies reach
    pageable_to_device: float  # pageable copies, host to device: staged by the driver
    pageable_to_host: float
    async_engines: int
    fit: Fit

    access_policy_max_window_bytes: int = 128 * MiB  # seen on H100 and H200
    dirty_share: float = 0.5  # share of L2 that may be dirty. Fit set: the rows "flush" of H100.
    overlap: float = 3.0
    """Exponent of the norm that joins the bounds of a kernel: no bound hides another one wholly. Fit set: "264 blocks" rows of H100."""
    launch: float = 0.8e-6  # least time of a kernel on the device. Fit set: rows "floor" of H100.
    record: float = 1.28e-6
    """Between two events with nothing between. Fit set: rows "floor" of H100."""
    visibility: float = 1.2e-6  # added to an event behind a kernel. Fit set: rows "floor" of H100.
    ramp: float = 1.3e-6
    """First loads from DRAM until bandwidth is reached. Fit set: rows "flush" of H100."""
    tick: float = 32e-9  # resolution of events. Fit set: rows "floor" of H100.
    random_efficiency: float = 0.5  # share of the bandwidth left where lines are touched in no order. An assumption, not fitted.
    l1_latency_cycles: float = 43.0
    """Of a dependent load that hits L1. Fit set: the suite's latencies of H100."""
    shared_latency_cycles: float = 30.0
    """Of a dependent load from shared memory. An assumption, not fitted."""
    edge_cost: float = 4 / 9
    """Share of a fifth sector's cost that neighbouring warps do not hide: 9/10 of the throughput remains. [BPG 9.2.1.3]"""
    zero_copy_share: float = 0.95  # bandwidth of kernels that read host memory over that of copies. An assumption, not fitted.
    sector_packets: float = 2.35
    """Cost of a sector that crosses the link alone, over that of one of four. Fit set: H100's row "mapped, stride 32"."""
    link_latency: float = 1.2e-6  # of a dependent load from mapped host memory. Fit set: the suite's latencies of H100.
    fault_group_bytes: int = 645 * KiB
    """Bytes that one group of page faults moves: 26 groups for 16 MiB. Fit set: row "faulting"
    of H100."""
    fault_group_time: float = 58e-6
    """Time of one group of page faults, which the host's driver serves. Fit set: rows of faulting kernels of each machine."""
    collapse_time: float = 200e-6  # time in which a written page loses its copy on the other side. Fit set: H100's row "written".
    faults_per_group: float = 159 / 26
    """Page faults of the GPU in one group: 159 in 26 groups, in the same profile of 16 MiB as
    above."""
    page_by_page_faults: float = 6 / 96
    """Groups of faults over those of other kernels, where each warp has a page of its own. Fit set: H100's rows "init from the host" and
    "init, a warp for 64 KiB", whose times differ by less than the runs."""
    cpu_fault_bytes: int = 16 * MiB // 48
    """Bytes that one page fault of the host brings: 48 faults for 16 MiB, likewise."""
    populate_bytes: int = 2 * MiB  # page size of a first touch by the device
    populate_time: float = 4e-6  # time of mapping one such page. An assumption, not fitted.
    migration_share: float = 0.75
    """Share of the link that prefetches and migrations reach. An assumption, not fitted."""
    host_memory_bytes: int = 128 * GiB  # memory of the modelled host
    host_bandwidth: float = 13e9  # host code that reads or writes host memory. Fit set: H100's row "packed on the host".
    page_locking: float = 1.6e9  # bytes that the driver allocates and locks in a second. Fit set: H100's rows "cudaHostAlloc".
    registering: float = 23e9
    """Bytes of existing pages that it locks. Fit set: H100's rows "cudaHostRegister"."""
    copy_start: float = 3.3e-6
    """From the start of a copy until its first byte moves, which the host's bridges decide. Fit set: row "4 KiB" of each machine."""
    duplex_loss: float = 0.12  # share of a copy's time lost while another runs the other way. Fit set: H100's row "both ways".
    context_bytes: int = 512 * MiB  # device memory that a context takes. An assumption, not fitted.

    @property
    def dram_peak(self) -> float:
        return peak_bandwidth(self.memory_clock, self.memory_bus_bits)

    @property
    def link(self) -> str:
        return host_link(self.link_generation, _LANES)[0]

    @property
    def link_bandwidth(self) -> float:
        """Theoretical, one way."""
        return host_link(self.link_generation, _LANES)[1] or 0.0

    @property
    def pinned_bandwidth(self) -> float:
        return self.link_bandwidth * self.pinned_share

    def facts(self) -> DeviceFacts:
        """The facts of a device made after this sheet, whose fields have the same names; `simulated` is true."""
        alike = {
            name: getattr(self, name)
            for name in DeviceFacts.__struct_fields__
            if hasattr(self, name)
        }
        return DeviceFacts(
            **alike,
            simulated=True,
            memory_clock_hz=self.memory_clock,
            sm_clock_hz=self.sm_clock,
            can_map_host=True,
            concurrent_managed_access=True,
            pageable_memory_access=False,
            integrated=False,
            max_shared_bytes_per_block=self.shared_bytes_per_sm - RESERVED_SHARED_BYTES,
        )


HOPPER_FIT = Fit(  # H100: rows marked fit, and all rows of its recorded suite
    read_efficiency=0.95,
    write_efficiency=0.976,
    turnaround=0.035,
    l2_hit_time=321e-9,
    l2_miss_time=187e-9,
    shared_l2=0.376,
    sharpness=7.19,
    knee=0.84,
    persisting_knee=1.18,
    persisting_sharpness=14.6,
    write_pressure=0.337,
    thrash=0.0,
    streaming_retention=0.274,
    streaming_update=2.31,
    squeeze_share=0.676,
    squeeze_slope=2.23,
    turnover=31e-9,
    l1_knee=0.685,
    l1_sharpness=3.9,
    sparsity=0.526,
    merging=4.89,
)

GA102_FIT = replace(  # RTX 3090: tables of 1, 3 and 5 MB [Mao], read of 1 GiB [benches]; all else as on H100
    HOPPER_FIT,
    read_efficiency=0.97,
    write_efficiency=0.97,
    turnaround=0.06,
    l2_hit_time=213e-9,
    l2_miss_time=266e-9,
    shared_l2=1.0,
    sharpness=4.19,
    knee=0.958,
    persisting_knee=1.33,
    persisting_sharpness=6.81,
    write_pressure=0.0,
    thrash=0.174,
    streaming_retention=0.5,
    streaming_update=0.0,
    squeeze_share=0.0,
    squeeze_slope=0.0,
    l1_knee=0.406,
)

A100_FIT = replace(  # A100: arrays of 1 GiB [benches], 50 MB at ratio 1 and 60 MB tuned [BPG]; cache as on H100, no squeeze seen there
    HOPPER_FIT,
    read_efficiency=0.9,
    write_efficiency=0.93,
    thrash=0.5,
    streaming_update=0.5,
    squeeze_share=0.0,
    squeeze_slope=0.0,
)

_H100 = Datasheet(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    sm_count=132,  # [H100]
    max_threads_per_sm=2048,  # [CUDA]
    max_blocks_per_sm=32,  # [CUDA]
    shared_bytes_per_sm=228 * KiB,  # [CUDA]
    memory_bytes=80 * GiB,  # [H100]
    memory_clock=2.619e9,  # [H100] 3.35 TB/s
    memory_bus_bits=5120,  # [H100]
    sm_clock=1.98e9,  # [H100]
    ecc=True,  # [H100]
    l2_bytes=50 * MiB,  # [H100]
    persisting_l2_max_bytes=50 * MiB * 10 // 16,  # 32768000, as this project's H100s report it
    default_set_aside=50 * MiB * 3 // 16,  # 9830400, as this project's H100s report it
    l2_bandwidth=7.7e12,  # fit set: the suite's rows of H100
    l2_latency=145e-9,  # likewise
    dram_latency=347e-9,  # likewise
    link_generation=5,  # [H100]
    pinned_share=0.877,  # fit set: row "pinned, host to device" of H100
    pageable_to_device=7.8e9,  # fit set: rows "pageable" of H100
    pageable_to_host=10.7e9,
    async_engines=3,
    fit=HOPPER_FIT,
)

DATASHEETS: dict[str, Datasheet] = {
    "rtx3090": Datasheet(
        name="NVIDIA GeForce RTX 3090",
        compute_capability=(8, 6),
        sm_count=82,  # [GA102]
        max_threads_per_sm=1536,  # [CUDA]
        max_blocks_per_sm=16,  # [CUDA]
        shared_bytes_per_sm=100 * KiB,  # [CUDA]
        memory_bytes=24 * GiB,  # [GA102]
        memory_clock=9.751e9,  # [GA102] 19.5 Gbit/s a pin
        memory_bus_bits=384,  # [GA102]
        sm_clock=1.695e9,  # [GA102]
        ecc=None,  # [GA102] GDDR6X without ECC
        l2_bytes=6 * MiB,  # [GA102]
        persisting_l2_max_bytes=11
        * 6
        * MiB
        // 16,  # 4325376, as GA102 with 6 MiB of L2 reports it (published device queries)
        default_set_aside=0,
        l2_bandwidth=2.5e12,  # an assumption, not fitted
        l2_latency=140e-9,  # an assumption, not fitted
        dram_latency=300e-9,  # an assumption, not fitted
        link_generation=4,  # [GA102]
        pinned_share=0.785,  # 12.36 of 15.75 GB/s on Gen3 x16 (nvbandwidth, README); [BPG] 9.1.1 gives 12
        pageable_to_device=8e9,  # an assumption, not fitted
        pageable_to_host=8e9,  # an assumption, not fitted
        async_engines=2,
        registering=20e9,  # an assumption, not fitted
        fit=GA102_FIT,
    ),
    "a100": Datasheet(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        sm_count=108,  # [A100]
        max_threads_per_sm=2048,  # [CUDA]
        max_blocks_per_sm=32,  # [CUDA]
        shared_bytes_per_sm=164 * KiB,  # [CUDA]
        memory_bytes=80 * GiB,  # [A100]
        memory_clock=1.593e9,  # [A100] 2039 GB/s
        memory_bus_bits=5120,  # [A100]
        sm_clock=1.41e9,  # [A100]
        ecc=True,  # [A100]
        l2_bytes=40 * MiB,  # [A100]
        persisting_l2_max_bytes=30 * MiB,  # [BPG] 9.2.2
        default_set_aside=0,
        l2_bandwidth=5.4e12,  # [benches]
        l2_latency=225e-9,  # [benches] mean of the near (150 ns) and the far partition (301 ns)
        dram_latency=404e-9,  # [benches]
        link_generation=4,  # [A100]
        pinned_share=0.785,  # as above
        pageable_to_device=8e9,  # an assumption, not fitted
        pageable_to_host=8e9,  # an assumption, not fitted
        async_engines=3,
        registering=20e9,  # an assumption, not fitted
        fit=A100_FIT,
    ),
    "h100": _H100,
    "h200": replace(  # [H200] as an H100 in all else
        _H100,
        name="NVIDIA H200",
        memory_bytes=141 * GiB,  # [H200] 141 GB
        memory_clock=3.125e9,  # [H200] 4.8 TB/s
        memory_bus_bits=6144,  # [H200] six stacks of HBM3e
        l2_bytes=60 * MiB,  # 62914560, as this project's H200s report it
        persisting_l2_max_bytes=60 * MiB * 10 // 16,  # 39321600, likewise
        default_set_aside=60 * MiB * 3 // 16,  # 11796480, likewise
        l2_bandwidth=8.6e12,  # fit set: rows of the L2's read bandwidth of H200
        pageable_to_device=8e9,  # fit set: rows "pageable" of H200, whose hosts differ by half
        pageable_to_host=15.6e9,
        copy_start=6.3e-6,
        fault_group_time=66e-6,
    ),
}
