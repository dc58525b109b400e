"""Sockets that other code of the process may close behind our back, to get their numbers for files of its own.

A daemon closes all descriptors that it can (`os.closerange`), and the next file that it opens has the number of one of
ours. To read from that, write to it or close it would hurt the training: a socket is asked first whether it is ours.
"""

from __future__ import annotations

import os
import socket


class OwnSocket:
    """A socket and the file that its descriptor stood for when it was handed over."""

    __slots__ = ("_file", "socket")

    def __init__(self, own: socket.socket) -> None:
        self.socket = own
        self._file = _file(own.fileno())

    @property
    def is_own(self) -> bool:
        """True if the descriptor still stands for the same file, and may be used."""
        try:
            return _file(self.socket.fileno()) == self._file
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """Close it where it is ours, else forget it. Idempotent."""
        if self.is_own:
            self.socket.close()
        else:
            self.socket.detach()


def _file(descriptor: int) -> tuple[int, int]:
    """Device and inode: of a socket, a number that no other one has while it is open."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
