"""The script that counts every kernel of the catalogue: its cases, and why it says that counts differ."""

from __future__ import annotations

import catalogue_traffic_cases

from pytest_gpumem.kernels.catalogue import CATALOGUE


def test_every_kernel_has_arguments_that_its_own_check_accepts() -> None:
    assert list(catalogue_traffic_cases.CALLS) == list(CATALOGUE)
