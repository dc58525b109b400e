"""Addresses that `gradwatch serve` may list as scrape targets.

Endpoint files lie in folders that others may write to, and a file that names any address in the network would turn
Prometheus into a client of whatever listens there. So only addresses of this machine are handed out, and those of other
machines that the operator has allowed by name or network.
"""

from __future__ import annotations

import ipaddress
import platform
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from gradwatch.serve.process_discovery import EndpointFile

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class AllowedTargets:
    """Addresses allowed beside those of this machine.

    `host` is the operator's own name for processes whose endpoint is open to all (`--reach`); `networks` and `names`
    are what `--allow` named: addresses by network, machines by the name they give themselves.
    """

    host: str = ""
    networks: tuple[_Network, ...] = ()
    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, host: str, allowed: Iterable[str]) -> AllowedTargets:
        """Parse `--reach HOST` and every `--allow NETWORK|NAME`; a word that is no network is a machine's name."""
        networks: list[_Network] = []
        names: set[str] = set()
        for word in allowed:
            try:
                networks.append(ipaddress.ip_network(word, strict=False))
            except ValueError:
                names.add(word)
        return cls(host, tuple(networks), frozenset(names))

    def allows(self, endpoint: EndpointFile) -> bool:
        """True if Prometheus may be sent to this endpoint.

        127.0.0.1 of another machine is another process's port here, so it is never handed out.
        """
        at_home = endpoint.node == platform.node()
        if endpoint.address.is_loopback:
            return at_home
        address = ipaddress.ip_address(endpoint.address.host)
        if address.is_unspecified:  # handed out by the operator's name, else by the name that the file gives
            return bool(self.host) or at_home or endpoint.node in self.names
        return any(address in network for network in self.networks) or _is_of_this_machine(str(address))


@lru_cache(maxsize=256)
def _is_of_this_machine(host: str) -> bool:
    """True if an interface here has this numeric address: only then can a socket be bound to it. Sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:  # not an address of an interface here, or of a family that this machine does not speak
        return False
    return True
