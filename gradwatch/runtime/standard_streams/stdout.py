"""Standard output that cannot take everything: a closed pipe (`gradwatch rules list | head`), a full disk, Latin-1."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from io import TextIOWrapper

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Error numbers of a file, or a device, that takes no more."""


def status_of(command: Callable[[], int], runs_script: bool, complain: Callable[[str], None]) -> int:
    """The exit status of a command, 1 where its output could not be written; a script's own errors are left alone."""
    try:
        with nullcontext() if runs_script else _every_character():
            status = command()
        if sys.stdout is not None:
            sys.stdout.flush()  # what is still buffered meets a closed pipe here, not when Python exits
        return status
    except BrokenPipeError:
        _write_no_more()
        return 1
    except OSError as error:
        if error.errno not in FULL or error.filename is not None or runs_script:
            raise  # of a script that runs in this process, or a defect
        _write_no_more()
        complain(f"gradwatch: standard output cannot be written: {error.strerror}")
        return 1


@contextmanager
def _every_character() -> Iterator[None]:
    """Print what the encoding of the locale lacks (`…` in Latin-1) as `\\u2026`, as Python does on standard error."""
    stream = sys.stdout
    if not isinstance(stream, TextIOWrapper) or stream.errors != "strict":
        yield
        return
    with suppress(OSError):  # of a stream whose descriptor leads elsewhere by now
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        if stream.errors != "strict" and not stream.closed:
            stream.reconfigure(errors="strict")


def _write_no_more() -> None:
    """Keep Python from flushing at exit what standard output did not take."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
