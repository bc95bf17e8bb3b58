"""NVIDIA's profilers as child processes: finding them, running them, reading their reports."""
