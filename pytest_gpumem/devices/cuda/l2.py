"""Persisting L2: the set-aside and access-policy windows (CUDA Best Practices Guide, 9.2.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as D  # noqa: N812
from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.checks import check_window, unsupported
from pytest_gpumem.devices.cuda.errors import check
from pytest_gpumem.devices.protocol import (
    AccessProperty,
    DeviceError,
    Stream,
    Unsupported,
    WindowSpec,
)
from pytest_gpumem.records.device import DeviceFacts

_NUMBERS = {
    AccessProperty.NORMAL: int(R.cudaAccessProperty.cudaAccessPropertyNormal),
    AccessProperty.STREAMING: int(R.cudaAccessProperty.cudaAccessPropertyStreaming),
    AccessProperty.PERSISTING: int(R.cudaAccessProperty.cudaAccessPropertyPersisting),
}
"""The driver and the runtime number the properties alike."""
_PROPERTIES = {number: which for which, number in _NUMBERS.items()}
_WINDOW = R.cudaStreamAttrID.cudaLaunchAttributeAccessPolicyWindow
_OFF = WindowSpec(0, 0, 0.0, AccessProperty.NORMAL, AccessProperty.NORMAL)


class CudaL2:
    """The set-aside of one device and the windows of its streams."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts = facts

    def set_aside(self) -> int:
        return int(
            check(
                R.cudaDeviceGetLimit(R.cudaLimit.cudaLimitPersistingL2CacheSize),
                "reading the L2 set-aside",
            )
        )

    def request_set_aside(self, nbytes: int) -> int:
        # Under MPS only its server can set it (CUDA Programming Guide, L2 set-aside).
        reason = unsupported(self._facts, self.set_aside)
        if reason is not None:
            raise Unsupported(reason)
        wanted = min(nbytes, self._facts.persisting_l2_max_bytes)
        check(
            R.cudaDeviceSetLimit(R.cudaLimit.cudaLimitPersistingL2CacheSize, wanted),
            f"setting aside {wanted} bytes of L2",
        )
        return self.set_aside()

    def set_window(self, stream: Stream, window: WindowSpec | None) -> None:
        if window is not None:
            check_window(window, self._facts)
        value = packed(window, R.cudaStreamAttrValue)
        check(
            R.cudaStreamSetAttribute(stream.handle, _WINDOW, value),
            "setting the access-policy window",
        )

    def window(self, stream: Stream) -> WindowSpec | None:
        return unpacked(
            check(
                R.cudaStreamGetAttribute(stream.handle, _WINDOW), "reading the access-policy window"
            )
        )

    def reset_persisting(self) -> None:
        check(R.cudaCtxResetPersistingL2Cache(), "resetting persisting L2 lines")


def packed(window: WindowSpec | None, kind: Callable[[], Any]) -> Any:
    """The attribute of a window, for a stream or for a graph's kernel as `kind` says; a window of
    no bytes is off."""
    value = kind()
    # writes through to `value`
    _fill(value.accessPolicyWindow, window or _OFF, R.cudaAccessProperty)
    return value


def launch_attribute(window: WindowSpec) -> Any:
    """The window as the attribute of one launch, in the driver's types, which `cuLaunchKernelEx`
    takes."""
    attribute = D.CUlaunchAttribute()
    attribute.id = D.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    _fill(attribute.value.accessPolicyWindow, window, D.CUaccessProperty)
    return attribute


def _fill(policy: Any, window: WindowSpec, properties: Callable[[int], Any]) -> None:
    policy.base_ptr = window.address
    policy.num_bytes = window.nbytes
    policy.hitRatio = window.hit_ratio
    policy.hitProp = properties(_NUMBERS[window.hit])
    policy.missProp = properties(_NUMBERS[window.miss])


def unpacked(value: Any) -> WindowSpec | None:
    """The window in an attribute. The hit ratio went through a 32-bit float; what that rounded is
    rounded back.
    Raises `DeviceError`: an access property that is none of CUDA's three.
    """
    policy = value.accessPolicyWindow
    if not int(policy.num_bytes):
        return None
    ratio = float(policy.hitRatio)
    ratio = round(ratio, 7) if math.isfinite(ratio) else ratio
    numbers = int(policy.hitProp), int(policy.missProp)
    if not {*numbers} <= {*_PROPERTIES}:
        raise DeviceError(
            f"an access-policy window with the properties {numbers}; CUDA has "
            f"{', '.join(map(str, _PROPERTIES))}"
        )
    hit, miss = (_PROPERTIES[number] for number in numbers)
    return WindowSpec(int(policy.base_ptr), int(policy.num_bytes), ratio, hit, miss)
