"""Other libraries in the process. One module each: nothing is imported that the user has not
imported."""
