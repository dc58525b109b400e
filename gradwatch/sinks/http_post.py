"""One HTTP request to a server named in the rule file: bounded in time."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Mapping
from functools import cache
from http.client import HTTPException
from typing import Any

from gradwatch.errors import AttachError
from gradwatch.runtime.secret_values import from_environment, holds_password, without_password

TIMEOUT_SECONDS = 5.0


def checked_url(text: str) -> str:
    """A base URL without its last slash; ValueError, which shows no password, where it is none, or holds one."""
    if holds_password(text):
        raise ValueError("url: no user or password in a URL, it ends in logs; use a token")
    try:
        parts = urllib.parse.urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # brackets around no address
        valid = False
    if not valid:
        shown = without_password(text)
        raise ValueError(f"url: {shown!r} is not a URL; write for example http://127.0.0.1:9093")
    return text.rstrip("/")


def url_from_environment(text: str, option: str) -> str:
    """The URL that `text` is, or names a variable with; AttachError, which does not show it, where it is none."""
    value = from_environment(text, option)
    try:
        return checked_url(value)
    except ValueError:
        named = f"{option} is" if text == value else f"{option} is {text}, which is"
        raise AttachError(
            f"nothing can be sent: {named} no URL without user and password (https://…)"
        ) from None


def post_json(url: str, document: Any, token_file: str | None = None, bearer: str = "") -> None:
    """POST `document`; OSError (of which HTTPError and URLError are kinds) unless the answer is 2xx.

    `token_file` holds a bearer token and is read every time: tokens are changed while jobs run; `bearer` is one.
    """
    post(url, json.dumps(document).encode("ascii"), "application/json", token_file, bearer)


def post(url: str, body: bytes, content_type: str, token_file: str | None = None, bearer: str = "") -> None:
    """POST `body`, following no redirect; OSError unless the answer is 2xx. Tokens as in `post_json`."""
    headers: dict[str, str] = {"Content-Type": content_type, **_authorization(token_file, bearer)}
    try:
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        with _opener().open(request, timeout=TIMEOUT_SECONDS):
            pass
    except (ValueError, HTTPException) as error:  # which show the address, or the header with the token
        raise OSError(f"no valid request, or no valid answer ({type(error).__name__})") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would send the token to another server, and the message as a GET to none."""

    def redirect_request(self, *_: Any) -> None:
        """No request in its place: the answer is an HTTPError."""


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect)


def _authorization(token_file: str | None, bearer: str) -> Mapping[str, str]:
    if token_file is None:
        return {"Authorization": f"Bearer {bearer}"} if bearer else {}
    with open(token_file, encoding="utf-8") as file:
        return {"Authorization": f"Bearer {file.read(1 << 16).strip()}"}
