"""A discrete-event model of a GPU memory system."""
