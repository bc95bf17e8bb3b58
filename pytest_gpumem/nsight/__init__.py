"""NVIDIA's profilers as child processes: finding them, running them, reading what they wrote."""
