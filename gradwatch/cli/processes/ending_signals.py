"""The signals that end a command, as an exception: so that it leaves nothing behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, once, so that what is under way is tidied up; ignored ones stay ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]  # else: nohup

    def leave(number: int, frame: FrameType | None) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)  # a second one would end the tidying up
        raise SystemExit(128 + number)

    try:
        for number in heeded:
            signal.signal(number, leave)
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
