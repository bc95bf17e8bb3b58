"""The sector predictor, against the counts of the CUDA C++ Best Practices Guide, 9.2.1."""

from __future__ import annotations

import pytest
from kernel_calls import sized

from pytest_gpumem.kernels.calls import SECTORS_COALESCED, requested_bytes, sectors_per_request
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import Access, Call


def share(name, **scalars):
    return SECTORS_COALESCED / sectors_per_request(CATALOGUE[name].accesses(Call(sized(odata=4096, idata=4096), scalars)))


def test_copies_are_predicted_by_their_sectors():
    assert [share("offset_copy", offset=o) for o in (0, 1, 8, 31, 32)] == [1, 4 / 5, 1, 4 / 5, 1]
    assert [share("stride_copy", stride=s) for s in (1, 2, 3, 8, 32)] == [1, 1 / 2, 1 / 3, 1 / 8, 1 / 8]
    assert share("permuted_copy") == 1


def test_reads_and_writes_count_by_what_they_ask_for():
    assert share("transpose", width=64, height=64) == pytest.approx(2 / (1 + 8))
    coalesced, scattered = Access("a", "read", 300, 300), Access("b", "write", 100, 100, sectors_per_request=32)
    assert sectors_per_request([coalesced, scattered]) == (300 * 4 + 100 * 32) / 400


def test_repeats_are_asked_for_again():
    table = Access("table", "read", 100, 1000)
    assert requested_bytes([table, Access("b", "write", 50, 50)]) == 1050
    assert sectors_per_request([table, Access("b", "write", 100, 100, sectors_per_request=15)]) == 5


def test_nothing_asked_for_has_no_sectors():
    with pytest.raises(ValueError, match="no access asks for a byte"):
        sectors_per_request([])
