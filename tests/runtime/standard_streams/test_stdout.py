"""Standard output of a host whose encoding lacks some characters."""

from __future__ import annotations

import io
import sys

import pytest

from gradwatch.runtime.standard_streams import stdout


def printed(command_fails: bool, runs_script: bool, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What a command that prints `é … σ` leaves on a Latin-1 stream, which is as before afterwards."""
    stream = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", stream)

    def command() -> int:
        print("é … σ")
        if command_fails:
            raise KeyError
        return 0

    try:
        assert stdout.status_of(command, runs_script, print) == 0
    finally:
        assert stream.errors == "strict"
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue()


def test_what_the_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gradwatch doctor` on a Latin-1 host tells what it has found; it ended in a UnicodeEncodeError."""
    assert printed(False, False, monkeypatch) == "é \\u2026 \\u03c3\n".encode("latin-1")


def test_a_stream_is_given_back_by_a_command_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception of the command passes, and the stream is strict again."""
    with pytest.raises(KeyError):
        printed(True, False, monkeypatch)


def test_a_script_prints_as_without_gradwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `gradwatch run` the script meets the error that it has by itself."""
    with pytest.raises(UnicodeEncodeError):
        printed(False, True, monkeypatch)
