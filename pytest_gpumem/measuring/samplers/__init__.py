"""Ways to take samples."""
