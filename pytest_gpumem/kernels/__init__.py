"""Kernels as data, and where their sources are."""
