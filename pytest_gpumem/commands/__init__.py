"""Commands of `gpumem`, one a file."""
