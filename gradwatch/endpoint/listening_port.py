"""The port of the endpoint: the one asked for, a free one where that is taken, and the file that publishes it."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from gradwatch.endpoint.address import Address
from gradwatch.errors import GradwatchError
from gradwatch.runtime.atomic_files import make_directory, read_regular, write_whole
from gradwatch.runtime.process_identity import start_ticks

if TYPE_CHECKING:  # numpy, which `gradwatch run` does without
    from gradwatch.records.run_info import RunInfo

_BACKLOG = 128
"""Peers whose turn has not come. In a longer queue an honest scrape waits behind a flood: 7 s at 1,024."""
_SEND_BUFFER_BYTES = 1 << 15
_PORT_TROUBLE = (errno.EADDRINUSE, errno.EACCES, errno.EPERM)


class AddressError(GradwatchError, OSError):
    """The host is no address of this machine."""


def listening_socket(address: Address) -> socket.socket:
    """A non-blocking listener on `address`, or on a free port of the same host where that port cannot be had.

    Raises AddressError, an OSError, when the host is not an address of this machine; OSError when there are no file
    descriptors left.
    """
    try:
        return _bound(address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise AddressError(
                f"listen: {address.host} is no address of this machine, so /metrics is not served: 0.0.0.0 is all of "
                "its addresses, 127.0.0.1 this machine alone"
            ) from None
        if error.errno not in _PORT_TROUBLE or not address.port:
            raise
    return _bound(address._replace(port=0))


def write_endpoint(run: RunInfo, address: Address, url: str) -> str:
    """Say in `endpoint-rank{rank}.json` where this process listens, and return that file's path.

    Of several processes of a rank (see `RunInfo.place`) the others write `endpoint-rank{rank}-{place}.json`.

    Written whole or not at all (temp + rename), mode 0600, in the run's own directory, which is made with
    mode 0700 if need be. Raises OSError.
    """
    make_directory(Path(run.directory))
    path = os.path.join(run.directory, f"endpoint-rank{run.rank_and_place}.json")
    says = {
        "url": url,
        "host": address.host,
        "port": address.port,
        "node": run.host,
        "pid": os.getpid(),
        "started": start_ticks(os.getpid()),
        "run_id": run.run_id,
        "rank": run.rank,
        "place": run.place,
        "local_rank": run.local_rank,
        "attempt": run.attempt,
    }
    write_whole(path, json.dumps(says) + "\n")
    return path


def remove_endpoint(path: str, address: Address) -> None:
    """Take away the file of what listened on `address`, unless another process or watch has written its own."""
    try:
        says = json.loads(read_regular(path, 1 << 16))
        if (says.get("pid"), says.get("port")) == (os.getpid(), address.port):
            os.unlink(path)
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # gone, unreadable or not ours: nothing to take away


def _bound(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Without it a restart would find the port in TIME_WAIT; two listeners on one port stay impossible.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by every connection: a peer that does not read ties up this much kernel memory, no more.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind((address.host, address.port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
