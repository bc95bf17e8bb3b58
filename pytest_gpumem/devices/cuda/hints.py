"""Persisting L2, and prefetches and advice of managed memory.

CUDA 12 and 13 name a place in different ways. Source: CUDA Best Practices Guide, 9.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.bindings
from cuda.bindings import driver as D
from cuda.bindings import runtime as R

from pytest_gpumem.devices.cuda.context import check
from pytest_gpumem.devices.protocol import AccessProperty, Advice, Stream, WindowSpec
from pytest_gpumem.records.device import DeviceFacts

PROPERTIES = (AccessProperty.NORMAL, AccessProperty.STREAMING, AccessProperty.PERSISTING)
"""By the number that the driver and the runtime give them."""
_SET_ASIDE = R.cudaLimit.cudaLimitPersistingL2CacheSize
_WINDOW = R.cudaStreamAttrID.cudaLaunchAttributeAccessPolicyWindow
_OFF = WindowSpec(0, 0, 0.0, AccessProperty.NORMAL, AccessProperty.NORMAL)  # of no bytes

_BINDINGS_MAJOR = int(cuda.bindings.__version__.split(".", 1)[0])
_CPU = -1  # cudaCpuDeviceId


class CudaL2:
    def __init__(self, facts: DeviceFacts) -> None:
        self._facts = facts

    def set_aside(self) -> int:
        return int(check(R.cudaDeviceGetLimit(_SET_ASIDE), "reading the L2 set-aside"))

    def request_set_aside(self, nbytes: int) -> int:
        wanted = min(nbytes, self._facts.persisting_l2_max_bytes)
        check(R.cudaDeviceSetLimit(_SET_ASIDE, wanted), f"setting aside {wanted} bytes of L2")
        return self.set_aside()

    def set_window(self, stream: Stream, window: WindowSpec | None) -> None:
        value = packed(window, R.cudaStreamAttrValue)
        result = R.cudaStreamSetAttribute(stream.handle, _WINDOW, value)
        check(result, "setting the access-policy window")

    def window(self, stream: Stream) -> WindowSpec | None:
        result = R.cudaStreamGetAttribute(stream.handle, _WINDOW)
        return unpacked(check(result, "reading the access-policy window"))

    def reset_persisting(self) -> None:
        check(R.cudaCtxResetPersistingL2Cache(), "resetting persisting L2 lines")


def packed(window: WindowSpec | None, kind: Callable[[], Any]) -> Any:
    """The attribute of a window for a stream or for a graph's kernel."""
    value = kind()
    _fill(value.accessPolicyWindow, window or _OFF, R.cudaAccessProperty)
    return value


def launch_attribute(window: WindowSpec) -> Any:
    """The window as the driver's attribute of a launch, for `cuLaunchKernelEx`."""
    attribute = D.CUlaunchAttribute()
    attribute.id = D.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    _fill(attribute.value.accessPolicyWindow, window, D.CUaccessProperty)
    return attribute


def _fill(policy: Any, window: WindowSpec, properties: Callable[[int], Any]) -> None:
    policy.base_ptr = window.address
    policy.num_bytes = window.nbytes
    policy.hitRatio = window.hit_ratio
    policy.hitProp = properties(PROPERTIES.index(window.hit))
    policy.missProp = properties(PROPERTIES.index(window.miss))


def unpacked(value: Any) -> WindowSpec | None:
    policy = value.accessPolicyWindow
    if not int(policy.num_bytes):
        return None
    return WindowSpec(
        address=int(policy.base_ptr),
        nbytes=int(policy.num_bytes),
        hit_ratio=round(float(policy.hitRatio), 7),  # it went through 32 bits
        hit=PROPERTIES[int(policy.hitProp)],
        miss=PROPERTIES[int(policy.missProp)],
    )


def malloc_managed(nbytes: int, doing: str) -> int:
    return int(check(R.cudaMallocManaged(nbytes, R.cudaMemAttachGlobal), doing))


def prefetch(address: int, nbytes: int, index: int, to_host: bool, stream: int) -> Any:
    """Call `cudaMemPrefetchAsync`, which takes flags too from CUDA 13 on."""
    where = location(index, to_host)
    if _BINDINGS_MAJOR < 13:
        return R.cudaMemPrefetchAsync(address, nbytes, where, stream)
    return R.cudaMemPrefetchAsync(address, nbytes, where, 0, stream)


def location(index: int, to_host: bool) -> Any:
    """A place for the driver: a device number (CUDA 12) or a location (CUDA 13)."""
    if _BINDINGS_MAJOR < 13:
        return _CPU if to_host else index
    made = R.cudaMemLocation()
    kinds = R.cudaMemLocationType
    if to_host:
        made.type, made.id = kinds.cudaMemLocationTypeHost, 0
    else:
        made.type, made.id = kinds.cudaMemLocationTypeDevice, index
    return made


def advice_number(advice: Advice, *, on: bool) -> Any:
    """Such as `cudaMemAdviseUnsetReadMostly`."""
    name = advice.value.title().replace("_", "")
    return getattr(R.cudaMemoryAdvise, f"cudaMemAdvise{'Set' if on else 'Unset'}{name}")
