"""Packing of arguments and the cache of prepared launches, with a fake compiler."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.driver")

from cuda.bindings import driver as D  # noqa: N812
from cupy.cuda import driver
from known_devices import H100

from pytest_gpumem.devices.cuda.compiler import entry_for
from pytest_gpumem.devices.cuda.l2 import unpacked
from pytest_gpumem.devices.cuda.launches import CudaKernels, packed_arguments
from pytest_gpumem.devices.cuda.nvrtc import first_error
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, DeviceError, Launch, WindowSpec
from pytest_gpumem.kernels.kernel import ArrayFacts, Call, Kernel, LaunchShape, Parameter, Role

SIZE = 3 << 30  # above 2^31: a size must travel as 64 bits


def kernel(**changes: Any) -> Kernel:
    parameters = (
        Parameter("a", Role.READ),
        Parameter("out", Role.WRITE),
        Parameter("scale", Role.SCALAR, 2.5),
    )
    fields: dict[str, Any] = {
        "name": "scaled",
        "parameters": parameters,
        "shape": lambda facts, call: LaunchShape(4, 128),
        "accesses": lambda call: (),
        "source": "scaled.cu",
        "entry": "scaled<{dtype}>",
    }
    return Kernel(**{**fields, **changes})


def launch(of: Kernel, dtype: str = "f4", **scalars: float) -> Launch:
    array = ArrayFacts(SIZE, dtype, np.dtype(dtype).itemsize)
    allocations = {
        "a": Allocation(MemoryKind.DEVICE, array.nbytes, 0x7F12_3456_7800, 0),
        "out": Allocation(MemoryKind.DEVICE, array.nbytes, 0x7F22_0000_0000, 0),
    }
    return Launch(of, Call({"a": array, "out": array}, scalars), LaunchShape(4, 128), allocations)


def widths(arguments: tuple[Any, ...]) -> list[tuple[type, Any]]:
    return [(type(a), a) for a in arguments]


@pytest.mark.parametrize(
    ("dtype", "scalar"), [("f4", np.float32), ("f8", np.float64), ("i4", np.int32)]
)
def test_by_default_arrays_then_the_size_then_scalars(dtype: str, scalar: type) -> None:
    assert widths(packed_arguments(launch(kernel(), dtype, scale=3))) == [
        (np.uint64, 0x7F12_3456_7800),
        (np.uint64, 0x7F22_0000_0000),
        (np.int64, SIZE),
        (scalar, 3),
    ]


def test_a_scalar_left_out_takes_its_default() -> None:
    assert widths(packed_arguments(launch(kernel())))[-1] == (np.float32, 2.5)


def test_a_kernel_orders_its_own_arguments() -> None:
    own = kernel(launch_arguments=lambda call: ("out", 7, "scale", "a"))
    assert [t for t, _ in widths(packed_arguments(launch(own)))] == [
        np.uint64,
        np.int64,
        np.float32,
        np.uint64,
    ]


def test_an_argument_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match="'scaled': no argument 'b'"):
        packed_arguments(launch(kernel(launch_arguments=lambda call: ("b",))))
    wanting = kernel(parameters=(Parameter("a", Role.READ), Parameter("scale", Role.SCALAR)))
    with pytest.raises(DeviceError, match="no value for 'scale'"):
        packed_arguments(launch(wanting))


def test_memory_that_the_device_cannot_see_is_refused() -> None:
    pageable = launch(kernel())
    pageable.arrays["a"].address = 0
    with pytest.raises(DeviceError, match="cannot see"):
        packed_arguments(pageable)


class FakeCompiler:
    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []

    def function(self, of: Kernel, dtype: str, shape: LaunchShape) -> Any:
        self.compiled.append((of.name, dtype))
        return SimpleNamespace(ptr=0x1234)


class FakeStream:
    handle = 0x55


ARGUMENTS = [
    a.tobytes()
    for a in (
        np.uint64(0x7F12_3456_7800),
        np.uint64(0x7F22_0000_0000),
        np.int64(SIZE),
        np.float32(2.5),
    )
]


def contents(parameters: int) -> list[bytes]:
    """What a kernel would read as its arguments."""
    pointers = np.frombuffer(ctypes.string_at(parameters, 4 * 8), np.uint64)
    return [
        ctypes.string_at(int(pointer), size)
        for pointer, size in zip(pointers, (8, 8, 8, 4), strict=True)
    ]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plain launches that the driver is asked for: function, grid and block, shared bytes, stream, arguments."""
    seen = list[Any]()

    def launch(function: Any, *rest: Any) -> None:
        *shape, shared, stream, parameters, _ = rest
        seen.append((int(function), shape, shared, int(stream), contents(parameters)))

    monkeypatch.setattr(driver, "launchKernel", launch)
    return seen


def test_a_launch_with_a_window_hands_the_driver_the_same_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window, seen = WindowSpec(0x7F12_3456_7800, 1 << 20, 0.5), list[Any]()

    def launched(config: Any, function: Any, parameters: int, extra: int) -> Any:
        shape = (
            config.gridDimX,
            config.gridDimY,
            config.gridDimZ,
            config.blockDimX,
            config.blockDimY,
            config.blockDimZ,
        )
        (attribute,) = config.attrs
        stream, found = int(config.hStream), unpacked(attribute.value)
        seen.append(
            (
                shape,
                config.sharedMemBytes,
                stream,
                int(function),
                config.numAttrs,
                found,
                contents(parameters),
            )
        )
        return (D.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(D, "cuLaunchKernelEx", launched)
    CudaKernels(0, H100, FakeCompiler()).launch(launch(kernel()), FakeStream(), window=window)  # type: ignore[arg-type]
    assert seen == [((4, 1, 1, 128, 1, 1), 0, 0x55, 0x1234, 1, window, ARGUMENTS)]


@pytest.mark.parametrize(
    ("window", "what"), [(WindowSpec(4096, 4096, 1.0), " with a window"), (None, "")]
)
def test_a_launch_that_the_driver_refuses(
    monkeypatch: pytest.MonkeyPatch, window: WindowSpec | None, what: str
) -> None:
    def refuse(*_: Any) -> None:
        error = driver.CUDADriverError.__new__(
            driver.CUDADriverError, "CUDA_ERROR_INVALID_VALUE: invalid argument"
        )
        error.status = 1
        raise error

    monkeypatch.setattr(driver, "launchKernel", refuse)
    monkeypatch.setattr(D, "cuLaunchKernelEx", lambda *_: (D.CUresult.CUDA_ERROR_INVALID_VALUE,))
    monkeypatch.setattr(D, "cuGetErrorName", lambda error: (None, b"CUDA_ERROR_INVALID_VALUE"))
    monkeypatch.setattr(D, "cuGetErrorString", lambda error: (None, b"invalid argument"))
    with pytest.raises(
        DeviceError,
        match=f"^launching kernel 'scaled'{what}: CUDA_ERROR_INVALID_VALUE: invalid argument",
    ):
        CudaKernels(0, H100, FakeCompiler()).launch(launch(kernel()), FakeStream(), window=window)  # type: ignore[arg-type]


def test_a_launch_is_prepared_once(launched: list[Any]) -> None:
    compiler = FakeCompiler()
    launches = CudaKernels(0, H100, compiler)  # type: ignore[arg-type]
    one = launch(kernel())
    for _ in range(3):
        launches.launch(one, FakeStream())
    assert compiler.compiled == [("scaled", "f4")]
    assert launched == [(0x1234, [4, 1, 1, 128, 1, 1], 0, 0x55, ARGUMENTS)] * 3


def test_freed_memory_is_noticed_at_every_launch(launched: list[Any]) -> None:
    launches = CudaKernels(0, H100, FakeCompiler())  # type: ignore[arg-type]
    one = launch(kernel())
    launches.launch(one, FakeStream())
    one.arrays["out"].freed = True
    with pytest.raises(DeviceError, match="memory of out was freed"):
        launches.launch(one, FakeStream())


def test_a_template_is_instantiated_and_a_function_left_alone() -> None:
    shape = LaunchShape(1, 128, vectors=4)
    assert entry_for(kernel(), "i8", shape) == "scaled<long long>"
    assert entry_for(kernel(entry="scaled<{dtype}, {vectors}>"), "f4", shape) == "scaled<float, 4>"
    assert entry_for(kernel(entry="plain"), "f4", shape) == "plain"
    with pytest.raises(DeviceError, match="no C\\+\\+ type for elements of 'f2'"):
        entry_for(kernel(), "f2", shape)


def test_the_first_error_of_a_log_is_shown() -> None:
    log = '\nkern.cu(1): warning #177-D: unused\nkern.cu(7): error: identifier "x" is undefined\nkern.cu(9): error: more\n'
    assert first_error(log) == 'kern.cu(7): error: identifier "x" is undefined'
    assert first_error("nvrtc: failed") == "nvrtc: failed"
