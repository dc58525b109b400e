"""The bytes of requests and responses, without a socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.endpoint.http_protocol import (
    MAX_HEAD_BYTES,
    Content,
    Request,
    RequestError,
    is_complete,
    is_hopeless,
    is_local_host,
    parse,
    respond,
)


@pytest.mark.parametrize(
    ("head", "request_"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:29440\r\n\r\n", ("GET", "/metrics", "127.0.0.1:29440")),
        (b"HEAD /?q=1 HTTP/1.1\r\nAccept: */*\r\nhOsT:  localhost \r\n\r\n", ("HEAD", "/", "localhost")),
        (b"GET /healthz HTTP/1.0\r\n\r\n", ("GET", "/healthz", "")),
        (b"GET / HTTP/1.0\n\n", ("GET", "/", "")),
    ],
)
def test_a_request_is_read(head: bytes, request_: tuple[str, str, str]) -> None:
    """What Prometheus, curl and a person with netcat send."""
    assert is_complete(head)
    assert not is_hopeless(head)
    assert parse(head) == Request(*request_)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET http://localhost/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"G\xc3\xa9T / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
    ],
)
def test_a_request_is_refused(head: bytes, status: int) -> None:
    """Whatever is malformed, ambiguous or would change something gets the status that says so."""
    with pytest.raises(RequestError) as refused:
        parse(head)
    assert refused.value.status == status


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(received: bytes) -> None:
    """No input makes the parser fail in another way."""
    status, request = 200, None
    try:
        request = parse(received)
    except RequestError as error:
        status = error.status
    assert status in (200, 400, 405, 431, 505)
    if request is not None:
        assert request.method in ("GET", "HEAD")
        assert request.path.startswith("/")


def test_hopeless_input_is_not_waited_for() -> None:
    """A TLS handshake or an endless head is answered at once."""
    assert is_hopeless(b"\x16\x03\x01\x02\x00")
    assert is_hopeless(b"A" * (MAX_HEAD_BYTES + 1))
    assert not is_hopeless(b"GE")
    assert not is_complete(b"GET / HTTP/1.1\r\nHost: localhost\r\n")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.8.9.1:80", "[::1]:29440", "[::1]"]
)
def test_hosts_of_this_machine(host: str) -> None:
    """Names under which loopback may be asked for."""
    assert is_local_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:29440",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "",
        "localhost@evil",
        "0x7f.1",
    ],
)
def test_foreign_hosts(host: str) -> None:
    """Names that a rebinding web page would send."""
    assert not is_local_host(host)


def test_a_response_shares_its_body_and_names_no_software() -> None:
    """A thousand silent readers of one scrape cost one scrape; the response gives no version to attack."""
    body = b"x" * 1000
    head, sent = respond(200, Content("text/plain", body))
    assert sent.obj is body
    assert b"\r\nContent-Length: 1000\r\n" in bytes(head)
    assert not {b"server", b"python", b"gradwatch"} & set(bytes(head).lower().replace(b":", b" ").split())
    assert respond(200, Content("text/plain", body), head_only=True) == [head]
