"""`HOST:PORT` of an endpoint, as users write it: read without a socket, by `gradwatch run` too.

Addresses are numbers: looking a name up took 8 s under a DNS black hole, at the start of the training.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

DEFAULT_LISTEN = "127.0.0.1:29440"


class Address(NamedTuple):
    """A numeric IP address and a port; port 0 is any free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect."""
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str) -> Address:
    """An Address from `HOST:PORT`: HOST is numeric (v6 in brackets) or localhost; raises ValueError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if host == "localhost":
        host = "127.0.0.1"
    advice = f"listen: {text!r} is not HOST:PORT; write for example {DEFAULT_LISTEN}"
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{advice} (a port is a number up to 65535)")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{advice}, or 0.0.0.0:PORT to be reached from other machines") from None
    return Address(host, int(port))


def rank_address(address: Address, local_rank: int) -> Address:
    """Every process of a machine has its own port: base port plus LOCAL_RANK; any free one beyond 65535."""
    port = address.port + local_rank if address.port else 0
    return address._replace(port=port if port <= 65535 else 0)
