"""CUPTI's callbacks, through one subscriber that all receivers of this process share: CUPTI serves one at a time.

Source: CUPTI, Callback API: `cuptiSubscribe`, `cuptiEnableCallback`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pytest_gpumem.devices.protocol import NotCounted

Receive = Callable[[int, Any], None]
"""A receiver. CUPTI calls it with the id of a callback and its data, in the calling thread, before the call returns.

CUPTI ignores the errors of a receiver.
"""

_IDS = {"DRIVER_API": "driver_api_trace_cbid", "RUNTIME_API": "runtime_api_trace_cbid", "RESOURCE": "CallbackIdResource"}
"""By the name of a `CUpti_CallbackDomain`, the enumeration of its ids in cupti-python."""


class Callbacks:
    """Hands CUPTI's callbacks to their receivers; subscribed while there are any, so that other tools can have CUPTI otherwise."""

    def __init__(self) -> None:
        self._cupti: Any = None
        self._subscriber: Any = None
        self._receivers: dict[tuple[int, int], tuple[Receive, ...]] = {}

    def add(self, domain: str, names: Sequence[str], receive: Receive) -> Callable[[], None]:
        """Have `receive` called for these callbacks; gives the function that ends it.

        Args:
            domain: "DRIVER_API", "RUNTIME_API" or "RESOURCE".
            names: as in cupti-python; those that the installed version lacks are left out.
            receive: must be quick, and call nothing of CUDA.

        Raises:
            NotCounted: cupti-python or CUPTI is missing, or another tool holds it.
        """
        try:
            from cupti import cupti
        except ImportError as error:
            raise NotCounted(f"cupti-python cannot be imported ({error}): `gpumem doctor` names the extra to install") from error
        errors = (cupti.cuptiError, RuntimeError)  # RuntimeError: cupti-python found no libcupti
        ids = getattr(cupti, _IDS[domain])
        keys = [(int(getattr(cupti.CallbackDomain, domain)), int(getattr(ids, name))) for name in names if hasattr(ids, name)]
        self._cupti = cupti
        try:
            if self._subscriber is None:
                self._subscriber = cupti.subscribe(self._called, None)
            for key in keys:
                first = key not in self._receivers
                self._receivers[key] = (*self._receivers.get(key, ()), receive)
                if first:
                    cupti.enable_callback(1, self._subscriber, *key)
        except errors as error:
            self._remove(keys, receive)
            raise NotCounted(f"CUPTI refuses callbacks: {str(error).partition(chr(10))[0]}") from error
        return lambda: self._remove(keys, receive)

    def _remove(self, keys: Sequence[tuple[int, int]], receive: Receive) -> None:
        cupti = self._cupti
        for key in keys:
            left = tuple(one for one in self._receivers.pop(key, ()) if one is not receive)
            if left:
                self._receivers[key] = left
            elif self._subscriber is not None:
                with suppress(cupti.cuptiError):  # after a lost context
                    cupti.enable_callback(0, self._subscriber, *key)
        if not self._receivers and self._subscriber is not None:
            subscriber, self._subscriber = self._subscriber, None
            with suppress(cupti.cuptiError):
                cupti.unsubscribe(subscriber)

    def _called(self, _data: Any, domain: Any, cbid: Any, data: Any) -> None:
        for receive in self._receivers.get((int(domain), int(cbid)), ()):
            with suppress(Exception):  # it would end in CUPTI's own code
                receive(int(cbid), data)


CALLBACKS = Callbacks()
"""The callbacks of this process."""
