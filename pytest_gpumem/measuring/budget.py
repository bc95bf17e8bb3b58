"""A total budget: what each measurement is likely to need, and how what is left is shared out over those that are left. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_gpumem.measuring.flush import FLUSH_FACTOR
from pytest_gpumem.measuring.samplers import UNTIMED, batch_of
from pytest_gpumem.measuring.stopping import MOST_SAMPLES
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement

FIXED = 0.05
"""Seconds set aside in each measurement for what is not sampling: its checks, its placements, what is loaded once."""
HOST = 50e-6
"""Seconds of host work for each sample, queueing and waiting."""
LEAST = 1e-3
"""Seconds of sampling that a measurement is given however little is left: a plan without any time would be no plan."""


def need(measurement: Measurement, facts: DeviceFacts, most: float) -> float:
    """Seconds that measuring the same again takes, if it goes on to the most samples that are of use.

    An estimate from the latency alone: what puts inputs or pages back before a sample is unknown.

    Args:
        measurement: an earlier one of the same test and label.
        facts: the device, for what a flush takes.
        most: seconds that are never exceeded: the budget of a measurement where there is no total.
    """
    sample = measurement.latency
    if measurement.sampler == "batched":
        sample *= UNTIMED + batch_of(measurement.latency, foreign=False)
    if measurement.mode != "hot":
        sample += FLUSH_FACTOR * facts.l2_bytes / facts.peak_bandwidth
    return min(FIXED + MOST_SAMPLES * (sample + HOST), most)


def share_out(total: float, needs: Sequence[float | None]) -> list[float]:
    """Shares of a total, in the order of `needs`: they add up to it.

    Whoever needs less than an equal share gets what he needs, and what that leaves is shared equally by the others ("water-filling",
    max-min fairness: Bertsekas and Gallager, Data Networks, 6.5.2). Where everyone gets what he needs, what is left over is shared
    equally by all, because a need is an estimate.

    Args:
        total: what there is, not negative.
        needs: what each needs, in the total's unit; None where that is unknown, which counts as more than there is.
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
    """What is left of a total budget, and which measurements it is for.

    The shares of the measurements to come never add up to more than what is left. A measurement may exceed its share, though: it takes
    its least samples and its checks however short that is, and what it exceeds comes off the shares of the others.
    """

    def __init__(self, total: float, expected: Mapping[str, Mapping[str, float]]) -> None:
        """Nothing is spent yet.

        Args:
            total: seconds for all measurements together.
            expected: by test, the seconds that its measurements are likely to need, by label. A test without any is unknown, and counts
                as one measurement.
        """
        self.total = total
        self.spent = 0.0
        """Seconds used so far."""
        self._left = {test: dict(needs) for test, needs in expected.items()}
        self.tests = len(expected)
        """Tests that measure."""
        self.known = sum(bool(needs) for needs in expected.values())
        """Those among them whose cost is known."""

    def most(self) -> float:
        """Seconds of the largest share, as things stand."""
        return max(share_out(self._remaining, [need for needs in self._left.values() for need in _of(needs)]), default=0.0)

    def share(self, test: str, label: str) -> float:
        """Seconds of sampling that a measurement gets which is about to begin; at least 1 ms."""
        own = self._left.get(test, {})
        others = [need for other, needs in self._left.items() if other != test for need in _of(needs)]
        others += [need for expected, need in own.items() if expected != label]
        return max(share_out(self._remaining, [own.get(label), *others])[0] - FIXED, LEAST)

    def took(self, test: str, label: str, seconds: float) -> None:
        """Book what a measurement took, whether or not it came to its end."""
        self.spent += seconds
        self._left.get(test, {}).pop(label, None)

    def ended(self, test: str) -> None:
        """The test measures nothing more: what it did not use is for the others."""
        self._left.pop(test, None)

    @property
    def _remaining(self) -> float:
        return max(self.total - self.spent, 0.0)


def _of(needs: Mapping[str, float]) -> Sequence[float | None]:
    """The measurements that a test is likely to take: one of unknown cost where nothing is known."""
    return list(needs.values()) or [None]
