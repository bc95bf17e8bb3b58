"""The access patterns of the operations, by kernels of pytest-gpumem's catalogue: these run on the simulated device too.

They are no test of the CuPy code. They show what the layout of an image costs, on a machine without a GPU as well.
"""

from pixelbox.layout import place

PIXELS = 1 << 26


def test_channel_pattern(gpu_benchmark, device_buffer, gpu_kernels):
    _, step = place(2, PIXELS)
    out, image = device_buffer((PIXELS * step,), "f4"), device_buffer((PIXELS * step,), "f4")
    gpu_benchmark(gpu_kernels.stride_copy, out, image, step)


def test_brighten_pattern(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(
        gpu_kernels.mul, device_buffer((PIXELS,), "f4"), device_buffer((PIXELS,), "f4"), 1.5
    )
