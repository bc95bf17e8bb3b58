"""Judging rows: pure functions."""
