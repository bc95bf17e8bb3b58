"""From a target to a measurement."""
