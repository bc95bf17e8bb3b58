"""Seeded disturbances, of the sizes that real GPUs show: from sample to sample, from placement to placement, after a pause."""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

import numpy as np

from pytest_gpumem.devices.simulated.datasheets import MIB

_NORMAL = NormalDist()
_BLOCK = 4096


class Noise:
    """The disturbances of one device. The same seed and the same calls give the same numbers."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator = np.random.default_rng(seed)
        self._drawn: list[float] = []
        self._placements: dict[tuple[int, ...], float] = {}
        self._launches = 0

    def sample(self, seconds: float) -> float:
        """Factor of one launch: lognormal, 0.3 % for a launch of a microsecond down to 0.05 % for a long one."""
        if not self._drawn:
            self._drawn = self._generator.standard_normal(_BLOCK).tolist()
        sigma = 0.0005 + 0.0025 / (1.0 + seconds / 10e-6)
        return math.exp(sigma * self._drawn.pop())

    def placement(self, addresses: tuple[int, ...], footprint: float) -> float:
        """Factor of where the buffers lie: the same for the same addresses.

        Standard deviation 2.1 % for three arrays of 2 MiB, 0.37 % for three of 32 MiB, then falling faster than the footprint grows.
        """
        z = self._placements.get(addresses)
        if z is None:
            digest = hashlib.blake2b(repr((self._seed, addresses)).encode(), digest_size=8).digest()
            z = _NORMAL.inv_cdf((int.from_bytes(digest, "little") + 0.5) / 2**64)
            self._placements[addresses] = z = min(3.0, max(-3.0, z))
        small, large = 6 * MIB, 96 * MIB
        spread = 0.021 * min(1.0, (small / max(1.0, min(footprint, large))) ** 0.626) * min(1.0, large / max(1.0, footprint)) ** 1.2
        return math.exp(spread * z)

    def warm_up(self) -> float:
        """Factor of the first launches after the device was made or stood idle: clocks rise, tables are filled."""
        self._launches += 1
        return 1.0 + 0.4 * math.exp(-self._launches / 2) if self._launches < 40 else 1.0

    def rest(self) -> None:
        """The device stood idle."""
        self._launches = 0
