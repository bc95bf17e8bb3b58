"""Windows as the driver's structures, which can be built without a driver."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.runtime")

from cuda.bindings import runtime as R

from pytest_gpumem.devices.cuda import streams
from pytest_gpumem.devices.protocol import AccessProperty, WindowSpec


def test_properties_come_back_as_they_went() -> None:
    for miss in [AccessProperty.STREAMING, AccessProperty.NORMAL]:
        for hit in AccessProperty:
            window = WindowSpec(0x7F0000000000, 8 << 20, 0.5, hit, miss)
            value = streams.packed(window, R.cudaStreamAttrValue)
            assert streams.unpacked(value) == window, (miss, hit)
            assert value.accessPolicyWindow.hitProp.name.lower().endswith(hit.value)
            # The driver's structure has the runtime's layout.
            assert streams.unpacked(streams.launch_attribute(window).value) == window, (miss, hit)
