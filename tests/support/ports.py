"""A port of this machine that nothing takes by chance between the moment it is chosen and the moment it is used."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """One that nobody listens on, below those that the kernel gives to connections and to those who ask for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
