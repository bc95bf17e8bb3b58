"""Accepted rows of earlier runs."""
