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


def write(text: str, stream: TextIO) -> None:
    """Hand `text` on at once and keep none of it, after what the script has written there.

    Characters that the stream's encoding lacks become escapes. Raises OSError or ValueError where it takes nothing.
    """
    data = text.encode(getattr(stream, "encoding", None) or "utf-8", "backslashreplace")
    if not _is_plain_file(stream):
        stream.write(data.decode(getattr(stream, "encoding", None) or "utf-8"))
        stream.flush()
        return
    stream.flush()
    descriptor = stream.fileno()
    while data:
        data = data[os.write(descriptor, data) :]


def _is_plain_file(stream: TextIO) -> bool:
    """True if it is what Python makes of a descriptor: no stand-in, and no `write` of the script's."""
    buffer = stream.buffer if type(stream) is io.TextIOWrapper and "write" not in vars(stream) else None
    return type(buffer) is io.BufferedWriter and type(buffer.raw) is io.FileIO
