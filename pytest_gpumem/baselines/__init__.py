"""Saved rows of earlier runs."""
