"""Persisting L2: the set-aside and a stream's access-policy window (CUDA Best Practices Guide, 9.2.2)."""

from __future__ import annotations

import math
from typing import Any

from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.cuda.errors import check
from pytest_gpumem.devices.cuda.streams import CudaStream
from pytest_gpumem.devices.protocol import DeviceError, Unsupported, WindowSpec
from pytest_gpumem.records.device import DeviceFacts


def set_aside() -> int:
    """`cudaLimitPersistingL2CacheSize` in bytes."""
    return int(check(R.cudaDeviceGetLimit(R.cudaLimit.cudaLimitPersistingL2CacheSize), "reading the L2 set-aside"))


def request_set_aside(nbytes: int, facts: DeviceFacts) -> int:
    """Set it, at most to the largest that the device has, and give back what was granted.

    Raises:
        Unsupported: no persisting L2, a MIG instance, or MPS, whose server alone can set it (CUDA Programming Guide, L2 set-aside).
    """
    reason = unsupported(facts)
    if reason is not None:
        raise Unsupported(reason)
    wanted = min(nbytes, facts.persisting_l2_max_bytes)
    check(R.cudaDeviceSetLimit(R.cudaLimit.cudaLimitPersistingL2CacheSize, wanted), f"setting aside {wanted} bytes of L2")
    return set_aside()


def unsupported(facts: DeviceFacts) -> str | None:
    """Why the set-aside cannot be changed here, or None."""
    if not facts.persisting_l2_max_bytes:
        return f"{facts.name} ({facts.arch}) has no persisting L2: compute capability 8.0 or newer is needed"
    if facts.mig_profile is not None:
        return "the L2 set-aside is disabled in MIG mode"
    if facts.mps:
        return (
            "under MPS the L2 set-aside can be set only when the server starts (CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT)"
        )
    return None


def set_window(stream: CudaStream, window: WindowSpec | None, facts: DeviceFacts) -> None:
    """Set the window, or turn it off.

    Raises:
        DeviceError: the window is larger than the device takes, or the hit ratio is not in [0, 1].
    """
    if window is not None:
        if not 0 < window.nbytes <= facts.access_policy_max_window_bytes:
            raise DeviceError(f"a window of {window.nbytes} bytes: 1 to {facts.access_policy_max_window_bytes} are possible")
        if not 0.0 <= window.hit_ratio <= 1.0:
            raise DeviceError(f"a hit ratio of {window.hit_ratio}: 0 to 1 is possible")
    check(
        R.cudaStreamSetAttribute(stream.handle, R.cudaStreamAttrID.cudaLaunchAttributeAccessPolicyWindow, packed(window)),
        "setting the access-policy window",
    )


def window(stream: CudaStream) -> WindowSpec | None:
    """The window as the driver holds it; None if it is off."""
    value = check(
        R.cudaStreamGetAttribute(stream.handle, R.cudaStreamAttrID.cudaLaunchAttributeAccessPolicyWindow),
        "reading the access-policy window",
    )
    return unpacked(value)


def reset_persisting() -> None:
    """Turn all persisting lines to normal."""
    check(R.cudaCtxResetPersistingL2Cache(), "resetting persisting L2 lines")


def packed(window: WindowSpec | None) -> Any:
    """The stream attribute of a window. Hits persist, misses stream; a window of no bytes is off."""
    value = R.cudaStreamAttrValue()
    policy = value.accessPolicyWindow  # writes through to `value`
    policy.base_ptr = 0 if window is None else window.address
    policy.num_bytes = 0 if window is None else window.nbytes
    policy.hitRatio = 0.0 if window is None else window.hit_ratio
    policy.hitProp = R.cudaAccessProperty.cudaAccessPropertyNormal if window is None else R.cudaAccessProperty.cudaAccessPropertyPersisting
    policy.missProp = R.cudaAccessProperty.cudaAccessPropertyNormal if window is None else R.cudaAccessProperty.cudaAccessPropertyStreaming
    return value


def unpacked(value: Any) -> WindowSpec | None:
    """The window in a stream attribute. The hit ratio went through a 32-bit float; what that rounded is rounded back."""
    policy = value.accessPolicyWindow
    if not int(policy.num_bytes):
        return None
    ratio = float(policy.hitRatio)
    return WindowSpec(int(policy.base_ptr), int(policy.num_bytes), round(ratio, 7) if math.isfinite(ratio) else ratio)
