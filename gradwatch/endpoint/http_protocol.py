"""HTTP/1.1, as much as a scrape needs, in pure functions over bytes: parse a request, write a response.

Deliberately absent: keep-alive, bodies of requests, percent-decoding, a Server header, and anything that
changes state.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

MAX_HEAD_BYTES = 8192
METHODS = ("GET", "HEAD")

_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VERSION = re.compile(rb"HTTP/(\d)\.(\d)")


class RequestError(Exception):
    """A request that gets an error: the status, and a sentence for whoever debugs a scrape."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy of a page without scripts."""


class Content(NamedTuple):
    """The body of a response, its type, and the content security policy that a browser is to keep to."""

    media_type: str
    body: bytes
    policy: str = POLICY


class Request(NamedTuple):
    """A request head: method, path without its query, and the Host header ("" in HTTP/1.0 without one)."""

    method: str
    path: str
    host: str


def is_complete(received: bytes | bytearray) -> bool:
    """True if the blank line that ends a request head has arrived."""
    return b"\r\n\r\n" in received or b"\n\n" in received


def is_hopeless(received: bytes | bytearray) -> bool:
    """True if no more bytes can make this a request: too long, or no method to begin with (TLS, say)."""
    return len(received) > MAX_HEAD_BYTES or not received[:1].isalpha()


def parse(received: bytes) -> Request:
    """The request in a complete head; raises RequestError for a malformed, unsafe or unsupported one."""
    if len(received) > MAX_HEAD_BYTES:
        raise RequestError(431, f"The request head may have {MAX_HEAD_BYTES} bytes.")
    lines = re.split(rb"\r?\n", received)
    words = lines[0].split(b" ")
    if len(words) != 3 or not _TOKEN.fullmatch(words[0]) or b"\0" in received:
        raise RequestError(400, "This is not an HTTP request.")
    method, target, version = words
    numbered = _VERSION.fullmatch(version)
    if numbered is None:
        raise RequestError(400, "This is not an HTTP request.")
    if numbered[1] != b"1":
        raise RequestError(505, "Only HTTP/1.0 and HTTP/1.1 are supported.")
    if method.decode("ascii") not in METHODS:
        raise RequestError(405, "Only GET and HEAD are allowed; this server is read-only.")
    if not target.startswith(b"/"):
        raise RequestError(400, "The request target must be a path.")
    host = _host(lines[1:], required=numbered[2] != b"0")
    return Request(method.decode("ascii"), target.partition(b"?")[0].decode("latin-1"), host)


def respond(status: int, content: Content, *, head_only: bool = False) -> list[memoryview]:
    """The response as buffers to send in order; the body is shared, never copied."""
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {content.media_type}",
        f"Content-Length: {len(content.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        f"Content-Security-Policy: {content.policy}; frame-ancestors 'none'",
        "Connection: close",
    ]
    if status == 405:
        lines.append("Allow: GET, HEAD")
    head = memoryview("\r\n".join([*lines, "", ""]).encode("ascii"))
    return [head] if head_only or not content.body else [head, memoryview(content.body)]


def plain(text: str) -> Content:
    """A line of plain text."""
    return Content("text/plain; charset=utf-8", f"{text}\n".encode())


def is_local_host(host: str) -> bool:
    """True if a Host header names this machine's loopback.

    A page of a foreign web site can point its own DNS name at 127.0.0.1 and have the browser read what
    answers there (DNS rebinding); the browser still sends the foreign name as Host: that gives it away.
    """
    name = re.sub(r":\d*$", "", host).lower().rstrip(".")
    if name in ("127.0.0.1", "localhost") or name.endswith(".localhost"):
        return True  # nearly every scrape: parsing an address takes as long as all the rest
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _host(lines: list[bytes], *, required: bool) -> str:
    hosts: list[bytes] = []
    for line in lines:
        if not line:
            break
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name):
            raise RequestError(400, "A header line is malformed.")
        if name.lower() == b"host":
            hosts.append(value.strip())
    if len(hosts) > 1 or (required and not hosts):
        raise RequestError(400, "HTTP/1.1 needs exactly one Host header.")
    return hosts[0].decode("latin-1") if hosts else ""
