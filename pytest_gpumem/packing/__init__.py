"""Many tests at once on a GPU, as far as its memory lasts: what they take, who holds how much, and what starts next."""
