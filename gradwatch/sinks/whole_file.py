"""Small files in shared folders: written whole or not at all, and read only where they are regular files."""

from __future__ import annotations

import json
import os
import secrets
import stat
from typing import Any


def write_whole(path: str, document: Any, mode: int) -> None:
    """Write beside `path` with these permissions and rename; OSError where that fails, and then nothing is left.

    The temporary ends in `.tmp`: Prometheus reads every `*.json` of a folder of targets.
    """
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Up to `most_bytes` of a regular file. Raises OSError for anything else.

    Others may write to the folder: a FIFO would wait for a writer for ever, and a link may lead anywhere.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file")
        return file.read(most_bytes)
