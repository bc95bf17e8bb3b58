"""NVRTC: a CUDA source in, machine code out. It needs neither a context nor CuPy, and compiles
without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pytest_gpumem.kernels.sources import COMPILE_OPTIONS

OPTIONS = (*COMPILE_OPTIONS, "-ftz=true")
"""As CuPy compiles a user's kernels: denormal numbers are flushed to zero."""
_NEEDS = "pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime, or pytest-gpumem[cuda13]"


class DoesNotCompile(Exception):
    """The source does not compile, or the compiler cannot be loaded. The message is one line."""


class KernelCode(NamedTuple):
    """A compiled kernel."""

    code: bytes  # machine code; PTX for a virtual architecture, which the driver translates
    symbol: str  # name of the kernel in `code`


class KernelCompiler:
    """Compiles kernels for GPUs of one compute capability, each once in a process."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability
        self._compiled: dict[tuple[str, str], KernelCode] = {}

    def get(self, source: str, entry: str) -> KernelCode:
        """The code of a kernel. Raises `DoesNotCompile`.
        `entry`: its C++ name expression.
        """
        key = source, entry
        if key not in self._compiled:
            self._compiled[key] = compiled(source, entry, architecture_of(self._capability))
        return self._compiled[key]


def compiled(source: str, entry: str, architecture: str) -> KernelCode:
    """Compile a kernel of a CUDA source.
    `entry`: its C++ name expression.
    `architecture`: such as "sm_90".
    Raises `DoesNotCompile`: with the compiler's first error, or NVRTC is not installed.
    """
    nvrtc = _loaded()
    program = _value(_library(nvrtc.nvrtcCreateProgram, source.encode(), entry.encode(), 0, [], []))
    try:
        _value(nvrtc.nvrtcAddNameExpression(program, entry.encode()))
        options = [f"--gpu-architecture={architecture}", *OPTIONS]
        (status,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        if int(status) != 0:
            log = _text(nvrtc, program, "ProgramLog")
            raise DoesNotCompile(
                f"{entry} does not compile for {architecture}: "
                f"{first_error(log) if log.strip() else status.name}"
            )
        code = _bytes(nvrtc, program, "PTX" if architecture.startswith("compute_") else "CUBIN")
        return KernelCode(code, _value(nvrtc.nvrtcGetLoweredName(program, entry.encode())).decode())
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def architecture_of(capability: tuple[int, int]) -> str:
    """The architecture to compile for, so that the code runs on GPUs of a compute capability: a
    virtual one, which the driver translates, where NVRTC is older than the GPU.
    Raises `DoesNotCompile`: NVRTC is not installed, or no longer compiles for such GPUs.
    """
    wanted = 10 * capability[0] + capability[1]
    known = [int(number) for number in _value(_library(_loaded().nvrtcGetSupportedArchs))]
    if wanted in known:
        return f"sm_{wanted}"
    older = [architecture for architecture in known if architecture < wanted]
    if not older:
        raise DoesNotCompile(
            f"the installed NVRTC compiles for compute capability {min(known) / 10:.1f} and newer, "
            f"this GPU has {wanted / 10:.1f}: "
            "pip install 'pytest-gpumem[cuda12]' in place of the newer CUDA"
        )
    return f"compute_{max(older)}"


def first_error(log: str) -> str:
    """The first line of an NVRTC log that names an error, or the first line at all."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next(
        (line for line in lines if "error" in line.lower()),
        lines[0] if lines else "the compiler gave no message",
    )


def _loaded() -> Any:
    try:
        from cuda.bindings import nvrtc  # here: few processes compile
    except ImportError as missing:
        raise DoesNotCompile(f"cuda-bindings cannot be imported ({missing}): {_NEEDS}") from None
    return nvrtc


def _library(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of NVRTC, which loads the library. Raises `DoesNotCompile`: it is not
    found."""
    try:
        return function(*arguments)
    except RuntimeError as missing:
        raise DoesNotCompile(
            f"NVRTC cannot be loaded ({str(missing).splitlines()[0]}): {_NEEDS}"
        ) from None


def _bytes(nvrtc: Any, program: Any, what: str) -> bytes:
    # Never a bytes object: NVRTC writes into it, and Python shares those of length 1.
    content = bytearray(_value(getattr(nvrtc, f"nvrtcGet{what}Size")(program)))
    _value(getattr(nvrtc, f"nvrtcGet{what}")(program, content))
    return bytes(content)


def _text(nvrtc: Any, program: Any, what: str) -> str:
    return _bytes(nvrtc, program, what).decode(errors="replace").rstrip("\0")


def _value(result: Any) -> Any:
    status, *values = result
    if int(status) != 0:
        raise DoesNotCompile(f"NVRTC: {status.name}")
    return values[0] if values else None
