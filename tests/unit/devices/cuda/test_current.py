"""The GPU of a session is current in its tests, and what the project chose is current again afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

from pytest_gpumem.devices.cuda import device, launches
from pytest_gpumem.devices.cuda.device import Current
from pytest_gpumem.devices.cuda.guests import arrays
from pytest_gpumem.devices.cuda.launches import CudaKernels
from pytest_gpumem.devices.protocol import DeviceError, Foreign


class Thread:
    """The current device of a thread, for both runtimes; None before there is a context."""

    def __init__(self, device: int | None) -> None:
        self.device = device
        self.used: list[int] = []

    def getDevice(self) -> int:  # noqa: N802
        return self.device or 0

    def setDevice(self, index: int) -> None:  # noqa: N802
        self.device = index
        self.used.append(index)

    def cudaSetDevice(self, index: int) -> tuple[int]:  # noqa: N802
        assert self.device == index
        return (0,)

    def cuCtxGetCurrent(self) -> tuple[int, int]:  # noqa: N802
        return (0, 0) if self.device is None else (0, 0x1000)


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Thread:
    made = Thread(None)
    for name in ("runtime", "R", "D"):
        monkeypatch.setattr(device, name, made)
    return made


def test_a_block_puts_back_what_was_current(thread: Thread) -> None:
    own = Current(0)
    thread.device = 0
    with own.during():
        pass
    assert thread.used == []
    thread.device = 1
    assert own.elsewhere() == 1

    def fails() -> None:
        with own.during():
            assert thread.device == 0
            assert own.elsewhere() is None
            thread.setDevice(2)
            raise RuntimeError("made to fail")

    with pytest.raises(RuntimeError, match="made to fail"):
        fails()
    assert thread.device == 1


@pytest.mark.parametrize(("chosen", "afterwards"), [(None, 1), (0, 0), (2, 2)])
def test_the_first_block_puts_back_what_was_current_before_the_gpu_was_opened(
    thread: Thread, chosen: int | None, afterwards: int
) -> None:
    """Without a context there was no choice, and none is put back: that would create a context on another GPU."""
    thread.device = chosen
    own = Current(1)
    thread.device = 1  # opened
    with own.during():
        assert thread.device == 1
    assert thread.device == afterwards


def test_a_function_that_makes_another_gpu_current_is_an_error(
    monkeypatch: pytest.MonkeyPatch, h100: Any
) -> None:
    thread = Thread(0)
    monkeypatch.setattr(launches, "runtime", thread)
    monkeypatch.setattr(arrays, "current", lambda index, stream: nullcontext())
    kernels = CudaKernels(0, h100, cast(Any, SimpleNamespace()))
    kernels.call(Foreign(lambda: None), cast(Any, None))
    with pytest.raises(
        DeviceError, match=r"the measured function made GPU 1 current.*--gpumem-device cuda:1"
    ):
        kernels.call(Foreign(lambda: thread.setDevice(1)), cast(Any, None))


def test_the_contexts_of_libraries_are_entered_once_for_many_calls(
    monkeypatch: pytest.MonkeyPatch, h100: Any
) -> None:
    entered: list[Any] = []

    @contextmanager
    def counted(index: int, stream: Any) -> Iterator[None]:
        entered.append(stream)
        yield

    monkeypatch.setattr(launches, "runtime", Thread(0))
    monkeypatch.setattr(arrays, "current", counted)
    kernels, one, two = (
        CudaKernels(0, h100, cast(Any, SimpleNamespace())),
        cast(Any, object()),
        cast(Any, object()),
    )

    def fails() -> None:
        with kernels.current_stream(one):
            for _ in range(3):
                kernels.call(Foreign(lambda: None), one)
            assert entered == [one]
            kernels.call(Foreign(lambda: None), two)  # on another stream
            assert entered == [one, two]
            raise RuntimeError("made to fail")

    with pytest.raises(RuntimeError, match="made to fail"):
        fails()
    kernels.call(Foreign(lambda: None), one)
    assert entered == [one, two, one]
