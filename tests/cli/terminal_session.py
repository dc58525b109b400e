"""A command on a terminal of its own: what it writes there, and keys for it."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any


class TerminalSession:
    """Runs `command` in a session that has a terminal of `size` (columns, rows) of its own. A context manager.

    `streams` are those of the command; by default all three are the terminal.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        size: tuple[int, int] = (90, 30),
        **streams: Any,
    ) -> None:
        self.terminal, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.settings = termios.tcgetattr(slave)

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        streams = {"stdin": slave, "stdout": slave, "stderr": slave, **streams}
        self.process = subprocess.Popen(
            command, cwd=cwd, env={**env, "TERM": "xterm"}, preexec_fn=own_terminal, **streams
        )
        self._slave = slave  # open, so that what is written last can be read
        self._written = b""
        self._reader = Thread(target=self._keep, daemon=True)
        self._reader.start()

    def __enter__(self) -> TerminalSession:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._slave)
        self._reader.join(5)
        os.close(self.terminal)

    def _keep(self) -> None:
        try:
            while part := os.read(self.terminal, 65536):
                self._written += part
        except OSError:  # EIO: no end of it is open for writing any more
            return

    @property
    def text(self) -> str:
        """Everything written so far."""
        return self._written.decode("utf-8", "replace").replace("\r\n", "\n")

    def wait_for(self, text: str, seconds: float = 30.0) -> str:
        """Everything written, once `text` is in it; AssertionError where it does not come."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)
        return self.text

    def press(self, keys: str) -> None:
        """Type `keys`."""
        os.write(self.terminal, keys.encode())

    def echoes(self) -> bool:
        """True if the terminal shows what is typed, line by line: as a shell leaves it."""
        flags = termios.tcgetattr(self._slave)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)
