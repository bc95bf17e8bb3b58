"""Compile kernels for an architecture without a GPU: CUDA sources through NVRTC, kernels of Triton through its ahead-of-time target."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_gpumem.devices.cuda.nvrtc import CompilerMissing, DoesNotCompile, compiled
from pytest_gpumem.kernels.cubin import Cubin
from pytest_gpumem.records.what_ran import CompiledKernel


def from_source(
    source: str,
    name: str,
    architecture: str,
    *,
    entries: Sequence[str] = (),
    options: Sequence[str] = (),
    folder: Path | None = None,
) -> tuple[CompiledKernel, ...]:
    """The kernels of a CUDA source.
    `name`: its file, as messages and records name it.
    `architecture`: such as "sm_90".
    `entries`: C++ name expressions of kernels; empty: all that are no templates.
    `options`: of NVRTC.
    `folder`: where files that it includes in quotes are; None: it includes none.
    Raises `CompilerMissing`: NVRTC is not installed.
    Raises `DoesNotCompile`: with the compiler's first error.
    """
    includes = [f"--include-path={one}" for one in _headers(folder)]
    made = compiled(source, name, architecture, entries=entries, options=[*includes, *options])
    cubin = Cubin(made.cubin)
    plain = [_plain(one) for one in cubin.names]
    # Overloads have one plain name: each goes by its mangled one.
    mangled = made.symbols or {
        one if plain.count(one) == 1 else name: name
        for one, name in zip(plain, cubin.names, strict=True)
    }
    if not mangled:
        raise DoesNotCompile(
            f"{name} holds no kernel that is no template; name its instances in `entries`"
        )
    return tuple(
        _compiled(name, entry, architecture, cubin, kernel) for entry, kernel in mangled.items()
    )


def from_triton(
    kernel: str, signature: str, architecture: str, options: Mapping[str, int], folder: Path
) -> CompiledKernel:
    """A kernel of Triton.
    `kernel`: "module:function"; the module is imported, from `folder` or its `src` first.
    `signature`: types and constants of its parameters in order, as `triton.tools.compile` takes them: "*fp32:16, i32, 1024".
    `architecture`: such as "sm_90".
    `options`: of Triton, such as `num_warps`.
    `folder`: of the project.
    Raises `CompilerMissing`: Triton is not installed.
    Raises `DoesNotCompile`: there is no such kernel, the signature does not fit, or the compiler's error.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import triton
            from triton.backends.compiler import GPUTarget
            from triton.compiler import ASTSource
        except ImportError as missing:
            raise CompilerMissing(
                f"Triton cannot be imported ({missing}): pip install triton"
            ) from None
        function = _function(kernel, folder)
        types, constants, hints = _signature(kernel, signature, getattr(function, "arg_names", ()))
        try:
            source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=hints)
            found = triton.compile(
                source,
                target=GPUTarget("cuda", int(re.sub(r"\D", "", architecture)), 32),
                options=dict(options),
            )
        except Exception as error:  # Triton's errors have no common base
            reason = next(
                (line.strip() for line in reversed(str(error).splitlines()) if line.strip()),
                type(error).__name__,
            )
            raise DoesNotCompile(
                f"{kernel} does not compile for {architecture}: {reason}"
            ) from None
    cubin = Cubin(found.asm["cubin"])
    name = found.metadata.name
    return _compiled(kernel, signature, architecture, cubin, name, int(found.metadata.shared))


def _compiled(
    source: str, name: str, architecture: str, cubin: Cubin, mangled: str, dynamic: int = 0
) -> CompiledKernel:
    code = cubin.kernel(mangled)
    return CompiledKernel(
        source=source,
        name=name,
        architecture=architecture,
        digest=code.digest,
        registers=code.registers,
        spill=code.local_bytes,
        shared=code.shared_bytes + dynamic,
        code=code.code_bytes,
    )


def _headers(folder: Path | None) -> Iterator[Path]:
    """Folders of headers: beside the source, and CUDA's own, if they are installed."""
    if folder is None:
        return
    yield folder
    try:
        from cuda import pathfinder

        found = pathfinder.find_nvidia_header_directory("cudart")
    except Exception:  # not installed, or a version of the package without this call: the source may need no header
        return
    if found is not None:
        yield Path(found)
        if (libraries := Path(found, "cccl")).is_dir():  # CUB, Thrust and libcu++, from CUDA 13 on
            yield libraries


def _plain(mangled: str) -> str:
    """The name of a function that is no template and in no namespace, from its mangled name; others as they are."""
    match = re.match(r"_Z(\d+)(\w+)", mangled)
    return match[2][: int(match[1])] if match else mangled


def _function(kernel: str, folder: Path) -> Any:
    module, _, name = kernel.partition(":")
    sys.path[:0] = [str(folder / "src"), str(folder)]
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # whatever the module raises
        raise DoesNotCompile(
            f"{module} cannot be imported: {type(error).__name__}: {error}"
        ) from None
    finally:
        del sys.path[:2]
    if not hasattr(found, "arg_names"):
        raise DoesNotCompile(f"{kernel} is no kernel of Triton")
    return found


def _signature(
    kernel: str, text: str, names: Sequence[str]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """Types, constants and hints of divisibility, as Triton's compiler takes them."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != len(names):
        raise DoesNotCompile(
            f"{kernel} has {len(names)} parameters ({', '.join(names)}); the signature {text!r} has {len(parts)}"
        )
    types, constants, hints = dict[str, str](), dict[str, Any](), dict[tuple[int], Any]()
    for index, (name, part) in enumerate(zip(names, parts, strict=True)):
        kind, _, hint = part.partition(":")
        if (constant := _constant(part)) is not None or hint == "1":
            types[name], constants[name] = "constexpr", 1 if constant is None else constant
            continue
        types[name] = kind
        if hint == "16":
            hints[index,] = [["tt.divisibility", 16]]
        elif hint:
            raise DoesNotCompile(
                f"{kernel}: the hint of {part!r} is not understood; accepted are :1 and :16"
            )
    return types, constants, hints


def _constant(text: str) -> bool | int | float | None:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
