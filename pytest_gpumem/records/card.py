"""A GPU as its driver's management library sees it: state and settings of the card, beside what CUDA says of it as a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CardProcess:
    """A process that holds a context on the card."""

    pid: int
    """Its number, in a container perhaps the host's."""
    name: str | None = None
    """Its program, where the driver says."""
    memory_bytes: int | None = None
    """Bytes of the card's memory that it holds, where the driver says."""


@dataclass(frozen=True)
class Card:
    """The state of one card now. None stands for what the driver or the card does not say."""

    cards: int
    """Cards that the driver manages."""
    name: str | None = None
    """The product's name."""
    driver: str | None = None
    """Version of the driver."""
    cuda: tuple[int, int] | None = None
    """Newest version of CUDA that the driver supports, major and minor."""
    persistence: bool | None = None
    """The driver stays loaded while nobody uses the card."""
    compute_mode: str | None = None
    """Who may open contexts: "default", "exclusive process" (one process at a time), "prohibited"."""
    mig: bool | None = None
    """The card is split into MIG instances."""
    ecc: bool | None = None
    """ECC is on now."""
    ecc_pending: bool | None = None
    """ECC is on after the next start."""
    uncorrected_errors: int | None = None
    """Memory errors over the card's life that ECC could not correct."""
    remap_pending: bool | None = None
    """A row of memory is to be replaced at the next reset."""
    remap_failed: bool | None = None
    """A row of memory could not be replaced."""
    sm_clock_hz: float | None = None
    """SM clock now, in hertz."""
    max_sm_clock_hz: float | None = None
    """Highest SM clock, in hertz."""
    memory_clock_hz: float | None = None
    """Memory clock now, in hertz."""
    max_memory_clock_hz: float | None = None
    """Highest memory clock, in hertz."""
    temperature_c: float | None = None
    """Temperature of the GPU in degrees Celsius."""
    power_w: float | None = None
    """Power of the board now, in watts."""
    power_limit_w: float | None = None
    """Power that the board is held to, in watts."""
    default_power_limit_w: float | None = None
    """Power that it is held to where nobody says otherwise, in watts."""
    throttle_reasons: tuple[str, ...] | None = None
    """Clock event reasons that slow it now, such as "sw_power_cap"; idling and chosen clocks are not among them."""
    chosen_clocks: bool | None = None
    """Somebody chose the clocks (`nvidia-smi -ac`)."""
    link_generation: int | None = None
    """PCIe generation now; it drops while the card idles."""
    max_link_generation: int | None = None
    """Highest that card and slot can do together."""
    card_link_generation: int | None = None
    """Highest that the card can do."""
    link_width: int | None = None
    """PCIe lanes now."""
    max_link_width: int | None = None
    """Most lanes that card and slot can do together."""
    processes: tuple[CardProcess, ...] | None = None
    """Processes of others that hold a context."""
