"""Which part of the memory system a launch is about: the NVTX category of its range."""

from __future__ import annotations

from pytest_gpumem.measuring.target import Target

MANAGED, LINK, L2, DRAM = "managed", "link", "L2", "DRAM"


def category_of(target: Target, mode: str, l2_bytes: int) -> str | None:
    """The category of a target's launches; of several that hold, the slowest part decides.

    Args:
        target: what is measured.
        mode: state of the cache before each sample.
        l2_bytes: size of the device's L2.

    Gives "managed" where pages are put back before every sample, "link" where declared bytes cross a link, "L2" where a window lies on
    part of the data, or where caches stay as they are and may hold it all, "DRAM" for other bytes, and None where nothing is known.
    """
    traffic, footprint = target.traffic, target.footprint
    if target.homes:
        return MANAGED
    if traffic is not None and traffic.link:
        return LINK
    if target.window is not None or (mode == "hot" and (footprint is None or footprint <= l2_bytes)):
        return L2
    return None if traffic is None else DRAM
