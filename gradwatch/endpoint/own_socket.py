"""Descriptors that other code of the process may close behind our back, to get their numbers for files of its own.

A daemon closes all descriptors that it can (`os.closerange`), and the next file that it opens has the number of one of
ours. To read from that, write to it or close it would hurt the training: a socket, or a lock, is asked first whether it
is ours.
"""

from __future__ import annotations

import os
import socket


class OwnSocket:
    """A socket and the file that its descriptor stood for when it was handed over."""

    __slots__ = ("_file", "socket")

    def __init__(self, own: socket.socket) -> None:
        self.socket = own
        self._file = file_of(own.fileno())

    @property
    def is_own(self) -> bool:
        """True if the descriptor still stands for the same file, and may be used."""
        try:
            return is_file(self.socket.fileno(), self._file)
        except ValueError:
            return False

    def close(self) -> None:
        """Close it where it is ours, else forget it. Idempotent."""
        if self.is_own:
            self.socket.close()
        else:
            self.socket.detach()


def file_of(descriptor: int) -> tuple[int, int]:
    """Device and inode: of a socket, a number that no other one has while it is open. Raises OSError."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def is_file(descriptor: int, file: tuple[int, int]) -> bool:
    """True if the descriptor stands for this file (`file_of`); False where it is closed."""
    try:
        return file_of(descriptor) == file
    except OSError:
        return False
