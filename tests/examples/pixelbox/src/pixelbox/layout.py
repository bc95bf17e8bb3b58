"""How an image of four channels lies in memory."""

CHANNELS = 4


def place(index: int, pixels: int) -> tuple[int, int]:
    """Where a channel begins, and how far apart its pixels lie, in floats."""
    return index * pixels, 1
