"""Packing of arguments, and the names of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")


from pytest_gpumem.devices.cuda.compiler import first_error
from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, DeviceError, Launch
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


def test_by_default_arrays_then_the_size_then_scalars() -> None:
    for dtype, scalar in [("f4", np.float32), ("f8", np.float64), ("i4", np.int32)]:
        assert widths(launch(kernel(), dtype, scale=3).packed_arguments()) == [
            (np.uint64, 0x7F12_3456_7800),
            (np.uint64, 0x7F22_0000_0000),
            (np.int64, SIZE),
            (scalar, 3),
        ], dtype


def test_an_argument_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match="'scaled': no value for 'b'"):
        launch(kernel(launch_arguments=lambda call: ("b",))).packed_arguments()
    wanting = kernel(parameters=(Parameter("a", Role.READ), Parameter("scale", Role.SCALAR)))
    with pytest.raises(DeviceError, match="no value for 'scale'"):
        launch(wanting).packed_arguments()


def test_a_template_is_instantiated_and_a_function_left_alone() -> None:
    shape = LaunchShape(1, 128, vectors=4)
    assert kernel().expression("i4", shape) == "scaled<int>"
    two = kernel(entry="scaled<{dtype}, {vectors}>")
    assert two.expression("f4", shape) == "scaled<float, 4>"
    assert kernel(entry="plain").expression("f4", shape) == "plain"


def test_the_first_error_of_a_log_is_shown() -> None:
    log = '\nkern.cu(1): warning #177-D: unused\nkern.cu(7): error: identifier "x" is undefined\nkern.cu(9): error: more\n'
    assert first_error(log) == 'kern.cu(7): error: identifier "x" is undefined'
    assert first_error("nvrtc: failed") == "nvrtc: failed"
