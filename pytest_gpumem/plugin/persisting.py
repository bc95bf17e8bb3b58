"""The fixture `persisting_stream`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.memory.l2 import PersistingStream, Thrashing, persisting
from pytest_gpumem.memory.window_request import window_request
from pytest_gpumem.plugin.gpu_test import GpuTest
from pytest_gpumem.units import did_you_mean

KEYWORDS = tuple(
    p.name
    for p in signature(window_request).parameters.values()
    if p.kind is Parameter.KEYWORD_ONLY
)


@contextmanager
def persisting_stream(test: GpuTest, buffer: Any, **options: Any) -> Iterator[PersistingStream]:
    """A stream whose access-policy window lies on `buffer`. Arguments and errors as
    `memory.l2.persisting`.

    `buffer` may also be the array that `device_buffer(..., like=)` made.

    Warns of `Thrashing` if hit ratios x bytes exceed the set-aside, unless with
    `allow_thrash=True`.
    Raises `BadCall`: the block ended and nothing was measured on the stream, such as without
    `stream=`; or an unknown keyword.
    """
    for name in options:
        if name not in KEYWORDS:
            hint = did_you_mean(name, KEYWORDS) or f"; accepted are {', '.join(KEYWORDS)}"
            raise BadCall(f"persisting_stream() has no keyword {name!r}{hint}")
    found = test.arena.find(buffer)
    with persisting(test.device, buffer if found is None else found, **options) as stream:
        test.streams.append(stream)
        if (message := stream.thrashing) is not None:
            test.item.warn(Thrashing(message))
        yield stream
        if not stream.used:
            raise BadCall(
                "nothing was measured on this persisting_stream: pass stream= to gpu_benchmark"
            )
