"""Fixtures, measurements and a gate for CUDA memory performance in pytest."""

from __future__ import annotations
