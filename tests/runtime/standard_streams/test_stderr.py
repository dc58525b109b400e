"""Lines on stderr: in the order of writing, and nothing left behind where stderr takes none."""

from __future__ import annotations

import io
import os
import sys

import pytest

from gradwatch.runtime.standard_streams import stderr


def test_a_broken_pipe_keeps_nothing_that_would_fail_again_at_exit() -> None:
    """Python flushes its streams when it exits, and ends with status 120 where that fails."""
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    assert type(stream) is io.TextIOWrapper
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        stderr.write("a line\n", stream)
    stream.close()  # raises where anything is left


def test_lines_come_after_what_the_script_wrote() -> None:
    """What the script has written and not flushed is in front; what the encoding lacks becomes an escape."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="ascii") as stream:
        stream.write("theirs, ")
        stderr.write("gradwatch ·\n", stream)
    with os.fdopen(reader) as file:
        assert file.read() == "theirs, gradwatch \\xb7\n"


def test_a_line_never_goes_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`print` takes stdout for a stream that is None; a stand-in of the script's gets the line by its own `write`."""
    monkeypatch.setattr(sys, "stderr", None)
    stderr.say("lost")
    shadow = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shadow)
    stderr.say("kept")
    assert shadow.getvalue() == "kept\n"
    assert capsys.readouterr().out == ""


def test_past_the_buffers_goes_the_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script has not flushed stays in its stream; a stand-in is passed by, and no stream takes nothing."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        stream.write("theirs, ")
        stderr.say_past_buffers("one ·")
        monkeypatch.setattr(sys, "__stderr__", stream)
        monkeypatch.setattr(sys, "stderr", io.StringIO("kept"))
        stderr.say_past_buffers("two")
        monkeypatch.setattr(sys, "stderr", None)
        stderr.say_past_buffers("lost")
    with os.fdopen(reader) as file:
        assert file.read() == "one \\xb7\ntwo\ntheirs, "
