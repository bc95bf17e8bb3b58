"""What pytest sees: the only place that imports it."""
