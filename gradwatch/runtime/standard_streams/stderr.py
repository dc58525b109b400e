"""Lines on stderr that change nothing for the script where stderr takes none: closed, a broken pipe, a full disk.

What a text stream could not hand on it keeps, and Python tries again when it exits: the script would end with status
120 where it would have ended with 0. And `print(..., file=sys.stderr)` goes to stdout where stderr is None.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO


def say(line: str) -> None:
    """One line on the `sys.stderr` of the moment; lost where that takes none."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        write(f"{line}\n", sys.stderr)


def say_past_buffers(line: str) -> None:
    """One line on stderr where the process is about to end without flushing: what its buffers hold stays unwritten.

    It goes to the descriptor of `sys.stderr`, or where the script has put a stand-in there, of Python's own.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if sys.stderr is not None:
            stream: TextIO = sys.stderr if _is_plain_file(sys.stderr) else sys.__stderr__  # type: ignore[assignment]
            _write_all(stream.fileno(), _encoded(f"{line}\n", stream))


def write(text: str, stream: TextIO) -> None:
    """Hand `text` on at once and keep none of it, after what the script has written there.

    Characters that the stream's encoding lacks become escapes. Raises OSError or ValueError where it takes nothing.
    """
    data = _encoded(text, stream)
    if not _is_plain_file(stream):
        stream.write(data.decode(_encoding(stream)))
        stream.flush()
        return
    stream.flush()
    _write_all(stream.fileno(), data)


def _encoded(text: str, stream: TextIO) -> bytes:
    return text.encode(_encoding(stream), "backslashreplace")


def _encoding(stream: TextIO) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _is_plain_file(stream: TextIO) -> bool:
    """True if it is what Python makes of a descriptor: no stand-in, and no `write` of the script's."""
    buffer = stream.buffer if type(stream) is io.TextIOWrapper and "write" not in vars(stream) else None
    return type(buffer) is io.BufferedWriter and type(buffer.raw) is io.FileIO
