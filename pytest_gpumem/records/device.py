"""A device: identity, capacities and the key of its baselines; and the present state of a card."""

from __future__ import annotations

import re

from msgspec import field

from pytest_gpumem.records import Count, NotNegative, Record
from pytest_gpumem.units import ShownError


class UnknownPeak(ShownError, ValueError):
    """A share of a bandwidth was requested that the driver does not report."""


SIMULATED = "simulated"  # begins the key of a simulated device


class DeviceFacts(Record, frozen=True):
    """The facts of a device, read once when it is opened.

    Sizes are in bytes, rates in bytes per second, clocks in hertz. None is unknown: the driver does
    not report it.
    """

    name: str  # Marketing name, as NVML gives it
    simulated: bool  # True for the simulated device; its results never mix with a real device's
    compute_capability: tuple[int, int]  # Major and minor version, such as (9, 0)
    sm_count: int  # Streaming multiprocessors
    max_threads_per_sm: int  # Most resident threads of an SM
    memory_bytes: int  # Device memory in total
    l2_bytes: int  # `l2CacheSize`
    persisting_l2_max_bytes: int
    """`persistingL2CacheMaxSize`: the largest set-aside; 0 where persistence cannot work."""
    access_policy_max_window_bytes: int
    """`accessPolicyMaxWindowSize`: the largest access-policy window."""
    memory_clock_hz: float  # Peak memory clock; 0 where the driver reports none
    dram_peak: float = field(name="peak_bandwidth")
    """Theoretical DRAM bandwidth: 2 (double data rate) x memory clock x bus width / 8; 0 where it
    is unknown."""
    async_engines: int  # `asyncEngineCount`: copies that can run at the same time as kernels
    can_map_host: bool
    """`canMapHostMemory`: host memory can be mapped into the device's address space."""
    concurrent_managed_access: bool
    """`concurrentManagedAccess`: pages migrate on demand, prefetch works."""
    integrated: bool  # The GPU shares physical memory with the host
    shared_bytes_per_sm: int | None = None
    """`sharedMemPerMultiprocessor`: shared memory of an SM, for all its resident blocks."""
    max_shared_bytes_per_block: int | None = None
    """`sharedMemPerBlockOptin`: the most shared memory that a block can have, if its kernel opts
    in."""
    host_page_tables: bool = False
    """`pageableMemoryAccessUsesHostPageTables` (ATS): the GPU walks the host's page tables, and
    reads host pages without a fault."""
    uuid: str | None = None  # UUID of the GPU or of the MIG instance
    ecc: bool | None = None  # ECC is on
    mig_profile: str | None = None  # MIG profile such as "1g.10gb", if the device is a MIG instance
    mps: bool = False  # An MPS server runs between this process and the GPU
    driver: str | None = None  # Driver version, such as "580.95.05"
    cuda: str | None = None  # CUDA runtime version, such as "13.0"
    link: str | None = None  # Name of the host link, such as "PCIe Gen5 x16"
    link_bandwidth: float | None = None
    """Theoretical bandwidth of the host link in one direction, in bytes per second."""
    sm_clock_hz: float | None = None  # Highest SM clock
    pci_bus_id: str | None = None  # PCI bus id, such as "0000:18:00.0"

    @property
    def peak_bandwidth(self) -> float:
        """Theoretical DRAM bandwidth in bytes per second (CUDA Best Practices Guide, 8.2.1).

        Raises:
            UnknownPeak: the driver reports no memory clock or no bus width.
        """
        if not self.dram_peak:
            raise UnknownPeak(
                f"the peak bandwidth of {self.name} is unknown: the driver reports no memory clock "
                "or no bus width; compare with a bandwidth in bytes per second, or set "
                "max_regression"
            )
        return self.dram_peak

    @property
    def l2_step_bytes(self) -> int:
        """Granularity of the set-aside in bytes: L2/16 on H100 and H200."""
        return self.l2_bytes // 16

    @property
    def persists(self) -> bool:
        """True if it has persisting L2, which a MIG instance has not."""
        return self.persisting_l2_max_bytes > 0 and self.mig_profile is None

    @property
    def key(self) -> str:
        """Name of the folder of this device's baselines, with the properties whose differences make
        two results incomparable. Driver and clocks are context.
        """
        parts = [self.name]
        if self.simulated:
            parts.insert(0, SIMULATED)
        if self.mig_profile:
            parts.append(self.mig_profile)
        major, minor = self.compute_capability
        parts += [f"sm{major}{minor}", f"{round(self.memory_bytes / 2**30)}GiB"]
        if self.ecc is not None:
            parts.append("ecc" if self.ecc else "noecc")
        return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(parts)).strip("-")


class CardProcess(Record, frozen=True):
    """A process with a context on the card."""

    pid: int  # Process id; in a container it may be the host's
    name: str | None = None  # Name of its program; None if unknown
    memory_bytes: int | None = None  # Bytes of its memory on the card; None if unknown


class Card(Record, frozen=True):
    """Present state of a card. None is unknown: the driver or the card does not report it."""

    name: str | None = None  # The product's name
    mig: bool | None = None  # The card is split into MIG instances
    throttle_reasons: tuple[str, ...] | None = None
    """Active clock event reasons that slow it, such as "sw_power_cap", without idling and
    application clocks."""
    processes: tuple[CardProcess, ...] | None = None  # Other processes with a context on the card


class Conditions(Record, frozen=True):
    """State of the device at a moment, from NVML or the simulated clock."""

    sm_clock_hz: NotNegative | None = None  # SM clock in hertz
    memory_clock_hz: NotNegative | None = None  # Memory clock in hertz
    temperature_c: float | None = None  # GPU temperature in degrees Celsius
    power_w: NotNegative | None = None  # Board power in watts
    throttle_reasons: tuple[str, ...] | None = ()
    """Active clock event reasons that slow the device, such as "sw_power_cap"; None where the
    driver does not report them."""
    other_processes: Count | None = None
    """Other compute processes on the device; None where the driver does not report them."""


_LANE_RATES = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
"""Bytes per second of a lane, one way, after line coding (PCI Express Base Specification)."""


def peak_bandwidth(memory_clock_hz: float, bus_bits: int) -> float:
    """Return the theoretical DRAM bandwidth in bytes per second (CUDA Best Practices Guide, 8.2.1):
    the factor 2 is the double data rate."""
    return 2 * memory_clock_hz * bus_bits / 8


def host_link(
    generation: int, width: int, *, integrated: bool = False, host_page_tables: bool = False
) -> tuple[str | None, float | None]:
    """Return the host link in words, and its theoretical bandwidth one way in bytes per second.

    A GPU that walks the host's page tables reads over a coherent link such as NVLink-C2C. 0 is an
    unknown generation or width.
    """
    if integrated:
        return "memory shared with the host", None
    if host_page_tables:
        return "coherent link to the host", None
    if not generation or not width:
        return None, None
    rate = _LANE_RATES.get(generation)
    return f"PCIe Gen{generation} x{width}", rate and rate * width
