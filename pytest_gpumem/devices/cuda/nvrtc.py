"""NVRTC: a CUDA source in, machine code out. It needs neither a context nor CuPy, and compiles without the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pytest_gpumem.outcomes import NoAnswer

_NEEDS = "pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime, or pytest-gpumem[cuda13]"


class CompilerMissing(NoAnswer):
    """A compiler is not installed, or cannot be loaded. The message is one line with the remedy."""


class DoesNotCompile(Exception):
    """The source does not compile, or holds no such kernel. The message is one line."""


class Compilation(NamedTuple):
    """What NVRTC made of a source."""

    cubin: bytes  # empty for a virtual architecture, such as "compute_90"
    ptx: str
    symbols: dict[str, str]  # by entry, the name of the kernel in both


def compiled(
    source: str,
    name: str,
    architecture: str,
    *,
    entries: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Compilation:
    """Compile a CUDA source.
    `name`: its file, as messages name it.
    `architecture`: such as "sm_90".
    `entries`: C++ name expressions of the kernels that are templates.
    `options`: of NVRTC, besides the architecture.
    Raises `CompilerMissing`: NVRTC is not installed.
    Raises `DoesNotCompile`: with the compiler's first error.
    """
    nvrtc = _loaded()
    program = _value(_library(nvrtc.nvrtcCreateProgram, source.encode(), name.encode(), 0, [], []))
    try:
        for entry in entries:
            _value(nvrtc.nvrtcAddNameExpression(program, entry.encode()))
        given = [f"--gpu-architecture={architecture}", *options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), [one.encode() for one in given])
        if int(status) != 0:
            log = _text(nvrtc, program, "ProgramLog")
            raise DoesNotCompile(
                f"{name} does not compile for {architecture}: {first_error(log) if log.strip() else status.name}"
            )
        cubin = b"" if architecture.startswith("compute_") else _bytes(nvrtc, program, "CUBIN")
        symbols = {
            entry: _value(nvrtc.nvrtcGetLoweredName(program, entry.encode())).decode()
            for entry in entries
        }
        return Compilation(cubin, _text(nvrtc, program, "PTX"), symbols)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def supported() -> list[int]:
    """The architectures that NVRTC compiles for, such as 90 for "sm_90". Raises `CompilerMissing`: NVRTC is not installed."""
    return [int(one) for one in _value(_library(_loaded().nvrtcGetSupportedArchs))]


def architecture_of(capability: tuple[int, int]) -> str:
    """The architecture to compile for, so that the code runs on GPUs of a compute capability: a virtual one, which the driver translates,
    where NVRTC is older than the GPU.
    Raises `CompilerMissing`: NVRTC is not installed, or no longer compiles for such GPUs.
    """
    wanted = 10 * capability[0] + capability[1]
    known = supported()
    if wanted in known:
        return f"sm_{wanted}"
    if not (older := [one for one in known if one < wanted]):
        raise CompilerMissing(
            f"the installed NVRTC compiles for compute capability {min(known) / 10:.1f} and newer, this GPU has {wanted / 10:.1f}: "
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
        raise CompilerMissing(f"cuda-bindings cannot be imported ({missing}): {_NEEDS}") from None
    return nvrtc


def _library(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of NVRTC, which loads the library. Raises `CompilerMissing`: it is not found."""
    try:
        return function(*arguments)
    except RuntimeError as missing:
        raise CompilerMissing(
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
