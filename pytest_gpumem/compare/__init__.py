"""Two sets of result files against each other, without a GPU."""
