"""A real GPU through CuPy, cuda-bindings and NVML: the only place that imports them."""
