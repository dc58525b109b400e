"""A terminal for tests: a stream to write to, and all that was written to it."""

from __future__ import annotations

import os
import pty
from threading import Thread


class PseudoTerminal:
    """`stream` is a terminal; `read` closes it and returns what it was sent, as text with `\\n` line ends."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115 (closed by `read`)
        self._drawn = b""
        self._reader = Thread(
            target=self._keep, daemon=True
        )  # a terminal nobody reads soon blocks its writer
        self._reader.start()

    def _keep(self) -> None:
        try:
            while part := os.read(self._master, 65536):
                self._drawn += part
        except OSError:  # EIO: no end of it is open for writing any more
            return

    def read(self) -> str:
        """Everything so far; nothing can be written any more. Idempotent."""
        if not self.stream.closed:
            self.stream.close()
            self._reader.join()
            os.close(self._master)
        return self._drawn.decode().replace("\r\n", "\n")
