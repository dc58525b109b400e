"""E-mail, through a real SMTP server with TLS and a login."""

from __future__ import annotations

import gc
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from email import message_from_bytes
from email.message import Message
from email.policy import default
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

from gradwatch.runtime.internal_errors import Health
from gradwatch.sinks import http_post
from gradwatch.sinks.notify import smtp
from gradwatch.sinks.notify.alerts import Alerts
from gradwatch.sinks.notify.message import message
from gradwatch.sinks.notify.smtp import EmailSink
from tests.support.ports import free_port
from tests.support.sink_records import make_event, make_record, make_run, make_sites

SITES = make_sites(4)
SENDER, READERS = "gradwatch@example.org", ["ada@example.org", "bob@example.org"]


class Mailbox:
    """Keeps what arrives."""

    def __init__(self) -> None:
        self.letters: list[Message] = []
        self.logins: list[bytes] = []
        self.readers: list[str] = []

    async def handle_DATA(  # noqa: N802, the name that aiosmtpd calls
        self, server: SMTP, session: Session, envelope: Envelope
    ) -> str:
        content = envelope.content
        assert isinstance(content, bytes)
        self.letters.append(message_from_bytes(content, policy=default))
        self.readers += envelope.rcpt_tos
        return "250 taken"

    def login(self, server: Any, session: Any, envelope: Any, mechanism: str, given: Any) -> AuthResult:
        assert isinstance(given, LoginPassword)
        self.logins.append(given.password)
        return AuthResult(success=given.password == b"right")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Path]:
    """A server's context, and the authority that signed its certificate."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trusted = tmp_path_factory.mktemp("authority") / "ca.pem"
    authority.cert_pem.write_to_path(trusted)
    return context, trusted


@pytest.fixture
def mailbox(certificate: tuple[ssl.SSLContext, Path]) -> Iterator[tuple[Mailbox, int]]:
    """A server that wants STARTTLS and a login."""
    kept = Mailbox()
    controller = Controller(
        kept,
        hostname="127.0.0.1",
        port=free_port(),
        tls_context=certificate[0],
        require_starttls=True,
        auth_required=True,
        authenticator=kept.login,
    )
    controller.start()
    try:
        yield kept, controller.port
    finally:
        controller.stop()
        with (
            warnings.catch_warnings()
        ):  # aiosmtpd drops a connection whose handshake failed without closing it
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def send(port: int, folder: Path, health: Health, **options: Any) -> None:
    sink = EmailSink(f"127.0.0.1:{port}", SENDER, READERS, **options)
    sink.open(make_run(folder, script="train\nBcc: all@example.org.py"), health)
    event = make_event(step=3, sites=("layers.3.wéight",), value=float("nan"), summary="Not finite.")
    sink.write(make_record(SITES, step=3, events=(event,)))
    sink.close()


def test_a_letter_arrives(
    mailbox: tuple[Mailbox, int],
    certificate: tuple[ssl.SSLContext, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To every reader, after STARTTLS and a login by the environment; a line break in a name makes no header."""
    kept, port = mailbox
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    monkeypatch.setenv("SMTP_PASSWORD", "right")
    health = Health()
    send(port, tmp_path, health, user="me")
    assert health.errors() == {}
    (letter,) = kept.letters
    assert kept.readers == READERS
    assert letter["Subject"].startswith("[critical] gradwatch: non-finite firing in train")
    assert letter["Bcc"] is None
    assert letter["Auto-Submitted"] == "auto-generated"
    text = letter.get_payload(decode=True)
    assert isinstance(text, bytes)
    assert (
        "non-finite at step 3: layers.3.wéight, value nan, score 0, threshold 0 · Not finite" in text.decode()
    )


@pytest.mark.parametrize("fault", ["password", "certificate", "plain"])
def test_a_letter_that_the_server_or_we_refuse(
    fault: str,
    mailbox: tuple[Mailbox, int],
    certificate: tuple[ssl.SSLContext, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong password, an authority that is not trusted, no TLS: counted, nothing arrives, no login in the clear."""
    kept, port = mailbox
    if fault != "certificate":
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    monkeypatch.setenv("SMTP_PASSWORD", "wrong" if fault == "password" else "right")
    health = Health()
    send(port, tmp_path, health, user="me", tls="none" if fault == "plain" else "starttls")
    assert health.errors()["email"] >= 1
    assert kept.letters == []
    assert kept.logins == ([b"wrong"] * len(kept.logins) if fault == "password" else [])


def test_what_it_took_to_connect_is_part_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five seconds four go by as the server's name is looked up: the session gets the last one."""
    clock, look_up = [100.0], socket.getaddrinfo

    def slowly(*args: Any, **options: Any) -> Any:
        clock[0] = 104.0
        return look_up(*args, **options)

    monkeypatch.setattr(smtp, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 welcome\r\n")

        server = threading.Thread(target=greet)
        server.start()
        with monkeypatch.context() as patched:
            patched.setattr(socket, "getaddrinfo", slowly)
            session = smtp._BoundedSMTP("127.0.0.1", listener.getsockname()[1], False, 105.0)
        assert session._timer.interval == 1.0
        session.close()
        server.join()


def test_a_letter_has_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that greets for ever, a line now and then, holds the thread no longer than the sink's timeout."""
    monkeypatch.setattr(http_post, "TIMEOUT_SECONDS", 0.3)
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # until the other side hangs up
                while not done.wait(0.02):
                    connection.sendall(b"220-welcome\r\n")

        server = threading.Thread(target=greet)
        server.start()
        sink = EmailSink(f"127.0.0.1:{listener.getsockname()[1]}", SENDER, READERS, tls="none")
        alerts = Alerts("warning")
        alerts.observe(make_record(SITES, events=(make_event(),)))
        try:
            with pytest.raises(TimeoutError, match=r"not sent in 0\.3 s"):
                sink.send(message(make_run(tmp_path), alerts.news(), 0))
        finally:
            done.set()
            server.join()
