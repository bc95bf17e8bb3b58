"""A total budget: the time that each measurement is likely to need, and its share of the time that is left. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_gpumem.measuring.harness import FLUSH_FACTOR
from pytest_gpumem.measuring.samplers import BATCHES, batch_of, untimed_of
from pytest_gpumem.measuring.stopping import MOST_SAMPLES
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement

FIXED = 0.05  # seconds of each measurement besides sampling: checks, placements, and code that is loaded once
HOST = 50e-6  # seconds of host work for each sample, queueing and waiting
LEAST = 1e-3  # least seconds of sampling of a measurement, however little time is left


def need(measurement: Measurement, facts: DeviceFacts, most: float) -> float:
    """Seconds that the same measurement takes with the largest number of samples, by its latency alone; `most` at most.
    The time to restore inputs or pages before a sample is unknown.
    """
    sample = measurement.latency
    if measurement.sampler in BATCHES:
        batch = batch_of(measurement.latency, foreign=False)
        sample *= untimed_of(batch, len(measurement.placements)) + batch
    if (
        measurement.mode != "hot" and facts.dram_peak
    ):  # without a known peak a flush counts as nothing
        sample += FLUSH_FACTOR * facts.l2_bytes / facts.dram_peak
    return min(FIXED + MOST_SAMPLES * (sample + HOST), most)


def share_out(total: float, needs: Sequence[float | None]) -> list[float]:
    """Shares that add up to a total, in the order of `needs`; None there is an unknown need, which counts as more than the total.

    A need below an equal share is met, and the others share the rest equally (max-min fairness, "water-filling": Bertsekas and Gallager,
    Data Networks, 6.5.2). If all needs are met, all share the rest equally, because a need is an estimate.
    """
    shares, left = [0.0] * len(needs), total
    waiting = sorted(range(len(needs)), key=lambda i: (needs[i] is None, needs[i] or 0.0))
    while waiting:
        first = needs[waiting[0]]
        if first is None or first > left / len(waiting):
            break
        shares[waiting.pop(0)] = first
        left -= first
    everyone = waiting or range(len(needs))
    for i in everyone:
        shares[i] += left / len(everyone)
    return shares


class Ledger:
    """The time that is left of a total budget, and the measurements that share it.
    The shares of the coming measurements never add up to more. A measurement that exceeds its share takes from the others.
    """

    def __init__(self, total: float, expected: Mapping[str, Mapping[str, float]]) -> None:
        """Nothing is spent yet.
        `total`: seconds for all measurements together.
        `expected`: by test, the seconds that its measurements are likely to need, by label. A test with none counts as one measurement of
        unknown cost.
        """
        self.total = total
        self.spent = 0.0  # seconds used so far
        self._left = {test: dict(needs) for test, needs in expected.items()}
        self.tests = len(expected)  # tests that measure
        self.known = sum(
            bool(needs) for needs in expected.values()
        )  # those of them whose cost is known

    def most(self) -> float:
        """Seconds of the largest share at present."""
        return max(
            share_out(
                self._remaining, [need for needs in self._left.values() for need in _of(needs)]
            ),
            default=0.0,
        )

    def share(self, test: str, label: str) -> float:
        """Seconds of sampling for a measurement that is about to begin; at least 1 ms."""
        own = self._left.get(test, {})
        others = [
            need for other, needs in self._left.items() if other != test for need in _of(needs)
        ]
        others += [need for expected, need in own.items() if expected != label]
        return max(share_out(self._remaining, [own.get(label), *others])[0] - FIXED, LEAST)

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


def _of(needs: Mapping[str, float]) -> Sequence[float | None]:
    """The needs of a test's measurements: one of unknown cost where nothing is known."""
    return list(needs.values()) or [None]
