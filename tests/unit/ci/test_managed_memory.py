"""The record of managed memory: both parts on the simulated device, and claims that can fail."""

from __future__ import annotations

import copy
import json
from typing import Any

import managed_memory
import pytest
from managed_memory import DEVICE_MEMORY, FAULTING, PREFETCHED, SIZE, claims, table

from pytest_gpumem.devices.opening import choose


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """The answers of the workers, without the processes around them."""
    chosen = choose("sim")

    def answer(**job: Any) -> dict[str, Any]:
        return managed_memory.work(chosen, job)

    names = [DEVICE_MEMORY, FAULTING, PREFETCHED, managed_memory.INIT, managed_memory.INIT_PER_PAGE]
    first = answer(variants=names, budget=0.02, cost=True)
    return {
        "kind": "managed_memory",
        "device": {"name": "H100", "simulated": True, "driver": None, "cuda": None, "uuid": None},
        "bytes": SIZE,
        "variants": first["variants"],
        "short": first["short"],
        "processes": [answer(variants=managed_memory.CLAIMED, budget=0.02, cost=False) for _ in range(2)],
        "ended": "2026-11-21T00:00:00",
    }


def test_all_claims_hold_on_the_simulated_device_and_the_record_is_json(record: dict[str, Any]) -> None:
    assert [claim for claim in claims(record) if not claim["holds"]] == []
    assert json.loads(json.dumps(record)) == record
    assert "DOES NOT HOLD" not in table(record)
    assert all(len(line) <= 110 for line in table(record).splitlines())


@pytest.mark.parametrize(
    ("spoil", "fails"),
    [
        (lambda r: r["variants"][1].update(seconds=1e-6), "faulting over prefetched"),
        (lambda r: r["variants"][2].update(seconds=1.0), "prefetched over device memory"),
        (lambda r: r["variants"][2]["launch"].update(gpu_faults=1), "GPU page faults of one prefetched launch"),
        (lambda r: r["variants"][1]["launch"].update(gpu_faults=0), "GPU page faults of one faulting launch"),
        (lambda r: r["processes"][0]["variants"][2].update(seconds=1e-3), "spread of prefetched between processes"),
        (lambda r: r["short"]["after"].update(launch=1.0), "change of an idle launch once CUPTI has counted"),
    ],
)
def test_each_claim_can_fail(spoil: Any, fails: str, record: dict[str, Any]) -> None:
    spoilt = copy.deepcopy(record)
    spoil(spoilt)
    assert fails in [claim["what"] for claim in claims(spoilt) if claim["holds"] is False]
    assert "DOES NOT HOLD" in table(spoilt)


def test_what_could_not_be_looked_at_is_no_claim_that_holds(record: dict[str, Any]) -> None:
    spoilt = copy.deepcopy(record)
    for one in spoilt["variants"]:
        one.update(launch=None, before=None, not_counted="no cupti-python")
    unseen = [claim["what"] for claim in claims(spoilt) if claim["holds"] is None]
    assert len(unseen) == 2
    assert "not counted: no cupti-python" in table(spoilt)
