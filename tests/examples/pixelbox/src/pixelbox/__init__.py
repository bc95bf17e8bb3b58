"""Image operations on the GPU, in CuPy."""

from pixelbox.operations import blend, brighten, channel

__all__ = ["blend", "brighten", "channel"]
