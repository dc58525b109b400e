"""Messages by e-mail, through an SMTP server."""

from __future__ import annotations

import smtplib
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import Any, Literal

from gradwatch.runtime.secret_values import from_environment
from gradwatch.sinks import http_post
from gradwatch.sinks.notify.message import Message
from gradwatch.sinks.notify.notifier import Notifier, Schedule

_NAME = "localhost"  # in the greeting: to look this machine up may take a resolver's timeout
TLS = Literal["starttls", "tls", "none"]


class EmailSink(Notifier):
    """Sends messages from `sender` to the addresses in `to` by the `server` HOST:PORT.

    `tls` is "starttls" (ports 25 and 587), "tls" from the first byte (465), or "none" for a server of this machine.
    With a `user` it logs in; `user` and `password` may be `${NAME}`, the value of an environment variable. A letter is
    sent within 5 s, or fails; `schedule` are the fields of `Schedule`.
    """

    name = "email"

    def __init__(
        self,
        server: str,
        sender: str,
        to: Sequence[str],
        tls: TLS = "starttls",
        user: str | None = None,
        password: str = "${SMTP_PASSWORD}",
        **schedule: Any,
    ) -> None:
        super().__init__(Schedule(**schedule))
        host, _, port = server.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._sender, self._to, self._tls = sender, list(to), tls
        self._user, self._password = user, password
        self._login: tuple[str, str] | None = None

    def prepare(self) -> None:
        """Look up the login."""
        if self._user:
            user = from_environment(self._user, "user")
            self._login = user, from_environment(self._password, "password", words=True)

    def send(self, message: Message) -> None:
        """Hand it to the server; OSError (of which SMTPException is a kind) where that fails, or takes too long."""
        letter = EmailMessage()
        letter["Subject"], letter["From"], letter["To"] = message.subject, self._sender, ", ".join(self._to)
        letter["Date"], letter["Message-ID"] = formatdate(), make_msgid(domain="gradwatch.invalid")
        letter["Auto-Submitted"] = "auto-generated"  # RFC 3834: no answer by a machine
        letter.set_content(f"{message.text}\n")
        refused = self._handed_over(letter)
        if refused:  # some of the readers; where all are, it raises
            self.report(OSError(f"the server refused {len(refused)} of {len(self._to)} addresses in `to`"))

    def _handed_over(self, letter: EmailMessage) -> Mapping[str, object]:
        """Send a letter; the readers that the server refused, where it refused some."""
        until = time.monotonic() + http_post.TIMEOUT_SECONDS
        try:
            server = _BoundedSMTP(self._host, self._port, self._tls == "tls", until)
            try:
                if self._tls == "starttls":
                    server.starttls(context=ssl.create_default_context())
                if self._login is not None:
                    server.login(*self._login)
                refused = server.send_message(letter)
                with suppress(OSError):  # it has the letter: an error now must not send it again
                    server.quit()
            finally:
                server.close()
        except OSError as error:
            if time.monotonic() >= until:  # the connection was shut down, whatever error came of that
                raise TimeoutError(f"the letter was not sent in {http_post.TIMEOUT_SECONDS:g} s") from error
            raise
        return refused


class _BoundedSMTP(smtplib.SMTP):
    """A session with a server that ends when the monotonic clock reaches `until`, whatever the server does.

    smtplib's own timeout is that of each read and write: a server that sends a byte now and then would hold the thread.
    Only looking up its name is not bounded. Raises OSError where no session begins.
    """

    def __init__(self, host: str, port: int, tls: bool, until: float) -> None:
        self._tls, self._until = tls, until
        self._duplicate: socket.socket | None = (
            None  # the session may close its own, of which TLS makes another
        )
        self._timer = threading.Timer(http_post.TIMEOUT_SECONDS, self._shut_down)
        self._timer.daemon = True
        try:
            super().__init__(host, port, _NAME, timeout=http_post.TIMEOUT_SECONDS)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._timer.cancel()
        super().close()
        if self._duplicate is not None:
            self._duplicate.close()

    def _get_socket(
        self, host: str, port: int, timeout: float
    ) -> socket.socket:  # overridden by SMTP_SSL, too
        connected = self._connected(host, port)
        self._duplicate = connected.dup()
        self._timer.interval = max(0.0, self._until - time.monotonic())  # less what connecting has taken
        self._timer.start()
        return (
            ssl.create_default_context().wrap_socket(connected, server_hostname=host)
            if self._tls
            else connected
        )

    def _connected(self, host: str, port: int) -> socket.socket:
        failed = OSError(f"{host} has no address")
        for *_, (address, *_) in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                return socket.create_connection(
                    (str(address), port), max(0.01, self._until - time.monotonic())
                )
            except OSError as error:
                failed = error
        raise failed

    def _shut_down(self) -> None:
        """End every wait for the server, in the timer's thread."""
        if self._duplicate is not None:
            with suppress(OSError):
                self._duplicate.shutdown(socket.SHUT_RDWR)
