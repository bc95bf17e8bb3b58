"""Other libraries in the process. None is imported that the user has not imported."""
