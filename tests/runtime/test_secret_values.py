"""What counts as secret, and how it is masked."""

from __future__ import annotations

import pytest

from gradwatch.runtime.secret_values import (
    holds_password,
    masked_line,
    without_password,
    without_passwords,
)

WITH_PASSWORD = (
    "http://me:secret@host:9093/x",
    "ftp://me:secret@host",
    "http://secret@host",
    "me:secret@host:9093",
    "http://me:sec/secret@host",
    "http://me:@secret@host",
    "http://me:secret@[host",
    "http://me:secret@h\u2100st",  # of which urlsplit's error shows all
)


@pytest.mark.parametrize("url", WITH_PASSWORD)
def test_a_password_is_seen_and_masked(url: str) -> None:
    """Whatever else is wrong with the URL; the host can still be read, in its place."""
    assert holds_password(url)
    masked = without_password(url)
    assert "sec" not in masked
    assert len(masked) == len(url)
    assert masked[url.rindex("@") :] == url[url.rindex("@") :]
    assert without_passwords(f"POST {url}: refused") == f"POST {masked}: refused"
    assert without_passwords(f"at {url}, 'x': {url}") == f"at {masked}, 'x': {masked}"


@pytest.mark.parametrize(
    "text",
    ["http://127.0.0.1:9093", "http://h/@room", "me@example.org", "git@example.org:me/x", "a: b@c", ""],
)
def test_what_holds_none_is_left_as_it_is(text: str) -> None:
    """An address of e-mail, and an @ in a path, which is no user."""
    assert not text.startswith("http") or not holds_password(text)
    if "://" not in text:
        assert without_passwords(text) == text


def test_the_rest_of_a_line_can_be_read() -> None:
    """What follows another value or a comment is no part of a URL."""
    line = 'sinks: [{otlp: {url: "http://h:1"}}, {email: {sender: me@example.org}}]  # http://h, for a@b'
    assert masked_line(line) == line


@pytest.mark.parametrize("value", ["secret", '"secret"', "'secret'"])
def test_values_of_keys_that_say_so_are_masked(value: str) -> None:
    """And a variable is not."""
    assert masked_line(f"- x: {{token: {value}, every: 3}}").replace("*" * 6, "secret").count("secret") == 1
    assert "secret" not in masked_line(f"password: {value}")
    assert "secret" not in masked_line(f'{{"password": {value}}}')
    assert masked_line("token: ${NAME}") == "token: ${NAME}"
    assert masked_line("token_file: /run/secret") == "token_file: /run/secret"


def test_long_texts_take_no_long_time() -> None:
    """Work grows as the text does."""
    for text in ("://" * 100_000, "a:" * 100_000, "@" * 100_000, "token: " * 50_000, "://@" * 100_000):
        assert len(masked_line(text)) == len(text)
