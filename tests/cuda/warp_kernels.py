"""A kernel of Warp, which reads its source from a file."""

import warp as wp


@wp.kernel  # type: ignore[untyped-decorator]
def scale(x: wp.array(dtype=wp.float32), y: wp.array(dtype=wp.float32)) -> None:  # type: ignore[valid-type]
    """y = 2 x."""
    i = wp.tid()
    y[i] = wp.float32(2.0) * x[i]
