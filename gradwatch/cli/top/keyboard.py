"""Keys of the live view, read with the terminal given back as it was."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from contextlib import suppress
from typing import Any


class Keyboard:
    """Standard input, key by key without an echo while this context lasts; nothing of it where it is no terminal."""

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._descriptor: int | None = None
        self._before: list[Any] = []

    def __enter__(self) -> Keyboard:
        if self._wanted and sys.stdin is not None and sys.stdin.isatty():
            with suppress(termios.error, ValueError):
                descriptor = sys.stdin.fileno()
                self._before = termios.tcgetattr(descriptor)
                tty.setcbreak(descriptor)
                self._descriptor = descriptor
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._descriptor is not None:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
            self._descriptor = None

    def quit_pressed(self, seconds: float) -> bool:
        """True as soon as a key is pressed that leaves (q, Escape, Ctrl-D); False after so many seconds."""
        if self._descriptor is None:
            time.sleep(seconds)
            return False
        deadline = time.monotonic() + seconds
        while (rest := deadline - time.monotonic()) > 0:
            if select.select([self._descriptor], [], [], rest)[0]:
                pressed = os.read(self._descriptor, 64)
                # An arrow key is Escape and more; the end of input is nothing.
                if not pressed or pressed[:1] in (b"q", b"Q", b"\x04") or pressed == b"\x1b":
                    return True
        return False
