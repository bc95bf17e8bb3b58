"""What one launch consists of, counted in-process without a profiler: kernels with their shapes, copies, memsets."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpumem.records.uses import CopyUse, KernelUse


@dataclass(frozen=True)
class Activity:
    """One untimed pass of a measurement (`--gpumem-explain`): a single launch, watched.

    Watching slows a launch down, so its times say how the parts compare with each other, not what the launch takes.
    """

    kernels: tuple[KernelUse, ...] = ()
    """Kernels of the launch in the order in which each first ran; counters of hardware are None."""
    copies: tuple[CopyUse, ...] = ()
    """Copies of the launch, the longest first."""
    memsets: tuple[CopyUse, ...] = ()
    """Memsets of the launch, the longest first."""
    arguments: tuple[tuple[str, str], ...] = ()
    """Name and kind of memory of each buffer among the arguments that is not plain device memory, such as ("source", "pageable")."""
    set_aside: int | None = None
    """Bytes of L2 that were set aside, whether or not a window used them; None where it was not asked."""
    source: str = ""
    """What counted: "CUPTI" or "the model"."""
    not_counted: str | None = None
    """Why kernels, copies and memsets were not seen; they are empty then."""

    @property
    def kernel_launches(self) -> int:
        """Kernels that the launch consists of."""
        return sum(kernel.launches for kernel in self.kernels)
