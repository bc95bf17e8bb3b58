"""Facts of the simulated GPUs, in bytes, bytes per second, seconds and hertz.

Sources: [H100] and [H200] are NVIDIA's datasheets, [CUDA] the CUDA C++ Programming Guide
("Technical Specifications per Compute Capability"), [BPG] the CUDA C++ Best Practices Guide. The
other figures were measured on H100s and H200s with this project's memory suite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_gpumem.records.device import DeviceFacts, host_link, peak_bandwidth
from pytest_gpumem.units import GiB, KiB, MiB

_LINK = host_link(5, 16)  # [H100]


@dataclass(frozen=True)
class Datasheet:
    name: str
    memory_bytes: int
    memory_clock: float  # half of the data rate of a pin
    memory_bus_bits: int
    l2_bytes: int
    persisting_l2_max_bytes: int
    default_set_aside: int  # limit of persisting L2 in a new context
    l2_bandwidth: float
    pageable_to_device: float  # copies of pageable memory, which the driver stages
    pageable_to_host: float
    copy_start: float  # from the start of a copy until its first byte moves
    fault: float  # a page of `roofline.PAGE_BYTES` that faults on the GPU

    compute_capability: tuple[int, int] = (9, 0)
    sm_count: int = 132  # [H100] [H200]
    max_threads_per_sm: int = 2048  # [CUDA]
    shared_bytes_per_sm: int = 228 * KiB  # [CUDA]
    max_shared_bytes_per_block: int = 227 * KiB  # [CUDA]
    sm_clock: float = 1.98e9  # [H100]
    ecc: bool = True  # [H100]
    access_policy_max_window_bytes: int = 128 * MiB
    async_engines: int = 3
    link_share: float = 0.877  # share of the link that pinned copies and kernels reach
    migration_share: float = 0.66  # share of the link that migrations of pages reach
    dram_share: float = 0.93  # share of the peak that kernels reach
    l1_latency: float = 22e-9  # of a dependent load
    l2_latency: float = 145e-9
    dram_latency: float = 347e-9
    link_latency: float = 1.2e-6
    launch: float = 0.8e-6  # of a kernel or a copy on the device, beside its bytes
    record: float = 1.28e-6  # between two events that follow each other
    tick: float = 32e-9  # resolution of events
    host_memory_bytes: int = 128 * GiB
    context_bytes: int = 512 * MiB  # device memory that a context takes

    @property
    def dram_peak(self) -> float:
        return peak_bandwidth(self.memory_clock, self.memory_bus_bits)

    @property
    def link_bandwidth(self) -> float:
        """Theoretical, each way."""
        return _LINK[1] or 0.0

    def facts(self) -> DeviceFacts:
        names = [name for name in DeviceFacts.__struct_fields__ if hasattr(self, name)]
        return DeviceFacts(
            **{name: getattr(self, name) for name in names},
            simulated=True,
            link=_LINK[0],
            memory_clock_hz=self.memory_clock,
            sm_clock_hz=self.sm_clock,
            can_map_host=True,
            concurrent_managed_access=True,
            integrated=False,
        )


_H100 = Datasheet(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * GiB,  # [H100]
    memory_clock=2.619e9,  # [H100] 3.35 TB/s
    memory_bus_bits=5120,  # [H100]
    l2_bytes=50 * MiB,  # [H100]
    persisting_l2_max_bytes=50 * MiB * 10 // 16,
    default_set_aside=50 * MiB * 3 // 16,
    l2_bandwidth=7.7e12,
    pageable_to_device=7.8e9,
    pageable_to_host=10.7e9,
    copy_start=3.3e-6,
    fault=5.8e-6,
)

DATASHEETS = {
    "h100": _H100,
    "h200": replace(
        _H100,
        name="NVIDIA H200",
        memory_bytes=141 * GiB,  # [H200]
        memory_clock=3.125e9,  # [H200] 4.8 TB/s
        memory_bus_bits=6144,  # [H200]
        l2_bytes=60 * MiB,
        persisting_l2_max_bytes=60 * MiB * 10 // 16,
        default_set_aside=60 * MiB * 3 // 16,
        l2_bandwidth=8.6e12,
        pageable_to_device=8e9,
        pageable_to_host=15.6e9,
        copy_start=6.3e-6,
        fault=6.6e-6,
    ),
}
