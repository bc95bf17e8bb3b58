"""A GPU whose times are those of a roofline, on virtual time."""
