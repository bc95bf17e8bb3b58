"""A total budget: what each measurement is likely to need, and its share of what is left. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytest_gpumem.measuring.harness import FLUSH_FACTOR
from pytest_gpumem.measuring.samplers import BATCHES, batch_of, untimed_of
from pytest_gpumem.measuring.stopping import MOST_SAMPLES
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement

FIXED = 0.05  # seconds of a measurement besides sampling: checks, placements, loading of code
HOST = 50e-6  # seconds of host work for each sample, queueing and waiting
LEAST = 1e-3  # least seconds of sampling of a measurement, however little time is left


def need(measurement: Measurement, facts: DeviceFacts, most: float) -> float:
    """Return the seconds that the same measurement takes with the largest number of samples.

    They follow from its latency alone, and are `most` at most.
    """
    sample = measurement.latency
    if measurement.sampler in BATCHES:
        batch = batch_of(measurement.latency, foreign=False)
        sample *= untimed_of(batch, len(measurement.placements)) + batch
    if measurement.mode != "hot" and facts.dram_peak:  # without a peak a flush counts as nothing
        sample += FLUSH_FACTOR * facts.l2_bytes / facts.dram_peak
    return min(FIXED + MOST_SAMPLES * (sample + HOST), most)


def share_out(total: float, needs: Sequence[float | None]) -> list[float]:
    """Return shares that add up to a total, in the order of `needs`.

    A need below an equal share is met, and the others share the rest equally (max-min fairness,
    "water-filling": Bertsekas and Gallager, Data Networks, 6.5.2). If all needs are met, all share
    the rest equally, because a need is an estimate.
    `needs`: None is an unknown need, which counts as more than the total.
    """
    shares, left = [0.0] * len(needs), total
    by_need = [math.inf if need is None else need for need in needs]
    waiting = sorted(range(len(needs)), key=by_need.__getitem__)
    while waiting:
        first = by_need[waiting[0]]
        if first > left / len(waiting):
            break
        shares[waiting.pop(0)] = first
        left -= first
    everyone = waiting or range(len(needs))
    for index in everyone:
        shares[index] += left / len(everyone)
    return shares


class Ledger:
    """The time that is left of a total budget, and the measurements that share it.

    The shares of the coming measurements never add up to more. A measurement that exceeds its share
    takes from the others.
    """

    def __init__(self, total: float, expected: Mapping[str, Mapping[str, float]]) -> None:
        """Begin with nothing spent.

        `total`: seconds for all measurements together.
        `expected`: by test, the seconds that its measurements are likely to need, by label. A test
            without labels counts as a measurement of unknown cost.
        """
        self.total = total
        self.spent = 0.0  # seconds used so far
        self._left = {test: dict(needs) for test, needs in expected.items()}
        self.tests = len(expected)  # tests that measure
        self.known = sum(bool(needs) for needs in expected.values())  # tests of known cost

    def most(self) -> float:
        """Seconds of the largest share at present."""
        return max(share_out(self._remaining, self._needs()), default=0.0)

    def share(self, test: str, label: str) -> float:
        """Seconds of sampling for a measurement that is about to begin; at least 1 ms."""
        of_test = self._left.get(test, {})
        needs = [of_test.get(label), *self._needs(without=test)]
        for other, need in of_test.items():
            if other != label:
                needs.append(need)
        return max(share_out(self._remaining, needs)[0] - FIXED, LEAST)

    def took(self, test: str, label: str, seconds: float) -> None:
        """Count the seconds of a measurement, finished or not."""
        self.spent += seconds
        self._left.get(test, {}).pop(label, None)

    def ended(self, test: str) -> None:
        """Leave the time that a test did not use to the others: it measures nothing more."""
        self._left.pop(test, None)

    @property
    def _remaining(self) -> float:
        return max(self.total - self.spent, 0.0)

    def _needs(self, *, without: str | None = None) -> list[float | None]:
        """Return the needs of all measurements: a single unknown for a test of unknown cost."""
        everything: list[float | None] = []
        for test, needs in self._left.items():
            if test != without:
                everything += needs.values() or [None]
        return everything
