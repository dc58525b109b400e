"""A small JSON document that others read while it changes: there whole, or not at all."""

from __future__ import annotations

import json
import os
import secrets
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
