"""Messages by e-mail, through an SMTP server."""

from __future__ import annotations

import smtplib
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import Literal

from gradwatch.records.event import Severity
from gradwatch.sinks.http_post import TIMEOUT_SECONDS
from gradwatch.sinks.notify.message import Message
from gradwatch.sinks.notify.notifier import EVERY_SECONDS, GROUP_SECONDS, Notifier, from_environment

_NAME = "localhost"  # in the greeting: to look this machine up may take a resolver's timeout
TLS = Literal["starttls", "tls", "none"]


class EmailSink(Notifier):
    """Sends messages from `sender` to the addresses in `to` by the `server` HOST:PORT.

    `tls` is "starttls" (ports 25 and 587), "tls" from the first byte (465), or "none" for a server of this machine.
    With a `user` it logs in; `user` and `password` may be `${NAME}`, the value of an environment variable.
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
        group_seconds: float = GROUP_SECONDS,
        every_seconds: float = EVERY_SECONDS,
        severity: Severity = "warning",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(group_seconds, every_seconds, severity, clock)
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
        """Hand it to the server; OSError (of which SMTPException is a kind) where that fails."""
        letter = EmailMessage()
        letter["Subject"], letter["From"], letter["To"] = message.subject, self._sender, ", ".join(self._to)
        letter["Date"], letter["Message-ID"] = formatdate(), make_msgid(domain="gradwatch.invalid")
        letter["Auto-Submitted"] = "auto-generated"  # RFC 3834: no answer by a machine
        letter.set_content(f"{message.text}\n")
        server = self._connection()
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
        if refused:  # some of the readers; where all are, it raises
            self.report(OSError(f"the server refused {len(refused)} of {len(self._to)} addresses in `to`"))

    def _connection(self) -> smtplib.SMTP:
        if self._tls == "tls":
            context = ssl.create_default_context()
            return smtplib.SMTP_SSL(self._host, self._port, _NAME, timeout=TIMEOUT_SECONDS, context=context)
        return smtplib.SMTP(self._host, self._port, _NAME, timeout=TIMEOUT_SECONDS)
