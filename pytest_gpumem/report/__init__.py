"""The command `gpumem report`: results that were written before, as a page."""
