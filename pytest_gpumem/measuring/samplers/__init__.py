"""Ways to take samples, one strategy a module."""
