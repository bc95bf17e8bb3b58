"""Buffers, managed memory and persisting L2 of tests, on any device."""
