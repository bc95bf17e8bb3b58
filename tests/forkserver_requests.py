"""Imported by the server that forks: a process that ends while it asks for another one does not end the server."""

from __future__ import annotations

import errno
import socket
from multiprocessing import reduction

receive = reduction.recvfds


def recvfds(sock: socket.socket, size: int) -> list[int]:
    try:
        return receive(sock, size)
    except (EOFError, ConnectionError):
        raise OSError(
            errno.ECONNABORTED, "the process that asked is gone"
        ) from None  # which the server passes over


reduction.recvfds = recvfds
