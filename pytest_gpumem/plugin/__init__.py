"""The pytest plugin: the only package that imports pytest.

Functions import what a suite whose tests measure nothing does not need.
"""
