"""Prefetches, advice and discards in the words of CUDA 12 and of CUDA 13."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.runtime")

from cuda.bindings import runtime as R

from pytest_gpumem.devices.cuda import places
from pytest_gpumem.devices.protocol import Advice


def test_the_installed_bindings_take_the_arguments_chosen_for_them() -> None:
    """Without a driver the calls give error codes; a wrong signature raises TypeError."""
    where = places.location(0, to_host=False)
    (error,) = R.cudaMemAdvise(0, 0, places.advice_number(Advice.READ_MOSTLY, on=True), where)
    assert isinstance(error, R.cudaError_t)
    (error,) = places.prefetch(0, 0, 0, False, 0)
    assert isinstance(error, R.cudaError_t)
    if hasattr(R, "cudaMemDiscardBatchAsync"):
        (error,) = R.cudaMemDiscardBatchAsync([0x10000], [4096], 1, 0, 1)
        assert isinstance(error, R.cudaError_t)


def test_the_driver_knows_the_attribute_that_tells_ats_from_hmm() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert hasattr(
        driver.CUdevice_attribute,
        "CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
    )
