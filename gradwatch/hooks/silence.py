"""Module hooks of ours that must not hear a forward which is not the job's: one that is replayed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_local = threading.local()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """What this thread runs inside is none of the job's forwards."""
    before = is_silent()
    _local.silent = True
    try:
        yield
    finally:
        _local.silent = before


def is_silent() -> bool:
    """Whether module hooks are to keep quiet in this thread."""
    return getattr(_local, "silent", False)
