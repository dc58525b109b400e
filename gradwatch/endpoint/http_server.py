"""The HTTP server of a process: one daemon thread, one selector, no thread per connection, a bound on everything.

It lives in a training process, so its worst case matters more than its best. A flood waits in the kernel's
queue; slow and silent peers are evicted, the oldest first; and the thread as a whole may use only a small
share of one core (a token bucket of CPU seconds), whatever it is that peers make it do.
"""

from __future__ import annotations

import errno
import os
import resource
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gradwatch.endpoint.address import Address
from gradwatch.endpoint.http_protocol import (
    Content,
    RequestError,
    is_complete,
    is_hopeless,
    is_local_host,
    parse,
    plain,
    respond,
)
from gradwatch.endpoint.own_socket import OwnSocket
from gradwatch.runtime.backoff import Backoff

THREAD_NAME = "gradwatch-endpoint"
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPTS_PER_TURN = 32
_DRAIN_BYTES = 65536
_BACKOFF_SECONDS = (1.0, 300.0)  # after the first failure, and at most
LOOK_SECONDS = 5.0
"""How often an idle endpoint looks whether its sockets are still its own: that they were closed wakes no thread."""
LOST = "other code of this process has closed the sockets of the endpoint: /metrics is served no longer"

Route = Callable[[bool], Content]
"""Makes the answer for a path; called with True when CPU is short and a slightly old answer is preferred."""
RouteBelow = Callable[[str], Content]
"""Makes the answer for a path that begins in some way; called with the whole path, as it was asked for."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the resources that clients can take from training.

    `connections` at once (fewer where the process may open few files); `deadline_seconds` from accept to the
    last byte; `cpu_share` of one core over time, with `cpu_burst_seconds` saved up at most.
    """

    connections: int = 64
    deadline_seconds: float = 5.0
    cpu_share: float = 0.01
    cpu_burst_seconds: float = 0.1


class Allowance:
    """A token bucket of CPU seconds."""

    def __init__(self, share: float, burst: float, now: float) -> None:
        self._share, self._burst = share, burst
        self._left, self._at = burst, now

    def spend(self, seconds: float, now: float) -> None:
        """Take what a turn has cost; may go below zero."""
        self._left = min(self._burst, self._left + (now - self._at) * self._share) - seconds
        self._at = now

    @property
    def is_short(self) -> bool:
        """True if most of the burst is gone."""
        return self._left < self._burst / 2

    @property
    def debt_seconds(self) -> float:
        """Seconds to wait until the CPU budget is balanced again."""
        return max(0.0, -self._left / self._share)


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    own: OwnSocket
    opened_at: float
    received: bytearray = field(default_factory=bytearray)
    unsent: list[memoryview] = field(default_factory=list)
    answered: bool = False
    drained: int = 0
    awaited: int = 0


class Endpoint:
    """Serves `routes` (path to Route) on a listening socket until `close`; GET and HEAD only.

    `below` are routes by the beginning of a path, for those that are none of `routes`.

    Faults of a route become a 500 and go to `on_error`, as does anything else that goes wrong in the thread.
    After a fork the child owns neither the thread nor a socket of it; the parent's connections live on.
    """

    def __init__(
        self,
        listener: socket.socket,
        routes: Mapping[str, Route],
        on_error: Callable[[BaseException], None],
        limits: Limits | None = None,
        below: Mapping[str, RouteBelow] = MappingProxyType({}),
    ) -> None:
        self.limits = limits or Limits()
        host, port = listener.getsockname()[:2]
        self.address = Address(host, port)
        self._routes, self._below, self._on_error = dict(routes), dict(below), on_error
        self._most = max(8, min(self.limits.connections, _file_limit() // 8))
        self._listener = listener
        self._released = False
        self._accepting, self._resume_at = True, 0.0
        self._connections: dict[socket.socket, _Connection] = {}
        self._allowance = Allowance(self.limits.cpu_share, self.limits.cpu_burst_seconds, time.monotonic())
        # Without a descriptor of its own, unlike epoll.
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._own = [OwnSocket(one) for one in (listener, self._wake_read, self._wake_write)]
        self._stop = threading.Event()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=THREAD_NAME, daemon=True)
        _ENDPOINTS.add(self)

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def close(self, timeout: float = 1.0) -> bool:
        """Stop serving and give everything back; False if the thread is not gone after `timeout` seconds."""
        if self._released:
            return True
        self._stop.set()
        if self._thread.ident is None:
            self._release()
            return True
        if not self._is_own():
            # The thread cannot be woken. It ends by itself within seconds, and nothing is left to it: at exit a socket
            # that is still an object of ours would close what has its number by then.
            with self._turn:
                self._end()
            return True
        try:
            self._wake_write.send(b"\0")
        except OSError:
            return not self._thread.is_alive()  # released already
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        backoff = Backoff(*_BACKOFF_SECONDS)
        while not self._stop.is_set():
            started = time.thread_time()
            try:
                ready = self._selector.select(self._wait_seconds())
                with self._turn:
                    if self._released or not self._is_own():
                        break
                    self._take_turn(ready)
            except Exception as error:
                # Out of memory, or other code closed our descriptors: report, and try again ever more rarely.
                self._on_error(error)
                self._stop.wait(backoff.failed())
            self._allowance.spend(time.thread_time() - started, time.monotonic())
            # Peers wait in the kernel meanwhile, and what they send piles up into fewer, larger reads.
            self._stop.wait(min(self._allowance.debt_seconds, 1.0))
        with self._turn:
            self._end()

    def _is_own(self) -> bool:
        return all(each.is_own for each in self._own)

    def _take_turn(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        now = time.monotonic()
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept(now)
            elif isinstance(key.data, _Connection) and key.data.socket in self._connections:
                self._advance(key.data)  # else: dropped earlier in this turn
        late = now - self.limits.deadline_seconds
        for connection in [each for each in self._connections.values() if each.opened_at <= late]:
            self._drop(connection)
        if not self._accepting and now >= self._resume_at:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accepting = True

    def _wait_seconds(self) -> float:
        now = time.monotonic()
        moments = [each.opened_at + self.limits.deadline_seconds for each in self._connections.values()]
        if not self._accepting:
            moments.append(self._resume_at)
        return max(0.0, min([*moments, now + LOOK_SECONDS]) - now)

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._make_room(now)
                    return
                continue  # this peer has gone already
            if len(self._connections) >= self._most:
                self._drop(self._oldest())
            accepted.setblocking(False)
            self._connections[accepted] = connection = _Connection(accepted, OwnSocket(accepted), now)
            # Most requests are there already, and most answers fit the kernel's buffer: then there is nothing
            # to wait for, and no peer can evict an honest one before it is served.
            self._advance(connection)

    def _oldest(self) -> _Connection:
        """The connection to evict: those without a complete request before those being answered."""
        waiting = (each for each in self._connections.values() if not each.unsent)
        return next(waiting, None) or next(iter(self._connections.values()))

    def _make_room(self, now: float) -> None:
        """Leave file descriptors to training: close half of the connections, and accept none for a moment."""
        for connection in list(self._connections.values())[: (len(self._connections) + 1) // 2]:
            self._drop(connection)
        self._selector.unregister(self._listener)
        self._accepting, self._resume_at = False, now + 0.1

    def _advance(self, connection: _Connection) -> None:
        if not connection.own.is_own:
            self._drop(connection)
            return
        try:
            if connection.unsent:
                self._send(connection)
            else:
                self._receive(connection)
        except OSError:
            self._drop(connection)  # the peer has gone
        except Exception as error:
            self._on_error(error)
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(4096)
        except BlockingIOError:
            self._await(connection, selectors.EVENT_READ)
            return
        if not data:
            self._drop(connection)
        elif connection.answered:
            connection.drained += len(data)
            if connection.drained > _DRAIN_BYTES:
                self._drop(connection)
        else:
            connection.received += data
            if is_complete(connection.received) or is_hopeless(connection.received):
                connection.unsent, connection.answered = self._answer(bytes(connection.received)), True
                self._send(connection)
            else:
                self._await(connection, selectors.EVENT_READ)

    def _send(self, connection: _Connection) -> None:
        while connection.unsent:
            try:
                sent = connection.socket.sendmsg(connection.unsent)
            except BlockingIOError:
                self._await(connection, selectors.EVENT_WRITE)
                return
            while connection.unsent and sent >= len(connection.unsent[0]):
                sent -= len(connection.unsent.pop(0))
            if sent:
                connection.unsent[0] = connection.unsent[0][sent:]
        if connection.received.endswith((b"\r\n\r\n", b"\n\n")):
            self._drop(connection)
            return
        # Closing with unread input would reset the connection and may destroy the answer on its way.
        connection.socket.shutdown(socket.SHUT_WR)
        self._await(connection, selectors.EVENT_READ)

    def _answer(self, received: bytes) -> list[memoryview]:
        try:
            request = parse(received)
            if self.address.is_loopback and request.host and not is_local_host(request.host):
                raise RequestError(
                    403, f"This server accepts requests for its local address only: http://{self.address}/"
                )
            content = self._content(request.path)
        except RequestError as error:
            return respond(error.status, plain(str(error)), head_only=received.startswith(b"HEAD "))
        except Exception as error:
            self._on_error(error)
            return respond(500, plain("gradwatch failed to answer; training is not affected."))
        return respond(200, content, head_only=request.method == "HEAD")

    def _content(self, path: str) -> Content:
        route = self._routes.get(path)
        if route is not None:
            return route(self._allowance.is_short)
        below = next((self._below[start] for start in self._below if path.startswith(start)), None)
        if below is None:
            paths = sorted([*self._routes, *(f"{start}NAME" for start in self._below)])
            raise RequestError(404, f"Not found; the paths are {', '.join(paths)}.")
        return below(path)

    def _await(self, connection: _Connection, events: int) -> None:
        if not connection.awaited:
            self._selector.register(connection.socket, events, connection)
        elif connection.awaited != events:
            self._selector.modify(connection.socket, events, connection)
        connection.awaited = events

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket, None) is not None:
            if connection.awaited:
                self._selector.unregister(connection.socket)
            connection.own.close()

    def _end(self) -> None:
        """Give everything back, and report it if there is nothing left to serve on."""
        if self._released:
            return
        if not self._is_own():
            self._on_error(OSError(errno.EBADF, LOST))
        self._release()

    def _release(self) -> None:
        """Close every descriptor without a word on the wire; in a forked child these are copies."""
        self._released = True
        for each in (*(one.own for one in self._connections.values()), *self._own):
            each.close()
        self._connections.clear()
        self._selector.close()


_ENDPOINTS: weakref.WeakSet[Endpoint] = weakref.WeakSet()
_HELD: list[threading.Lock] = []


def _before_fork() -> None:
    """Let every endpoint finish its turn, so that no accepted socket is unaccounted for at the fork."""
    for endpoint in list(_ENDPOINTS):
        if endpoint._turn.acquire(timeout=1.0):
            _HELD.append(endpoint._turn)


def _after_fork_in_parent() -> None:
    while _HELD:
        _HELD.pop().release()


def _after_fork_in_child() -> None:
    _after_fork_in_parent()
    for endpoint in list(_ENDPOINTS):
        endpoint._release()
        _ENDPOINTS.discard(endpoint)


def _file_limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
