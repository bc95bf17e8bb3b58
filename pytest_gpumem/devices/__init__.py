"""Devices behind one small protocol; `opening` is the only door."""
