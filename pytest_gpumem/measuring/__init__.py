"""The way from a target to a measurement."""
