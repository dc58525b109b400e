"""The exit status of a run that a rule has stopped: 86, so that a scheduler can tell it from a crash.

Nothing is installed while training runs: only once a rule has said stop, and only in a process that was started by
`gradwatch run`, an uncaught `TrainingStopped` then ends the interpreter with 86 instead of 1. Its traceback is printed
as ever, and what is registered with atexit still runs.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from gradwatch.errors import TrainingStopped

STOPPED = 86


def end_with_status() -> None:
    """Let an uncaught `TrainingStopped` exit with 86; only under `gradwatch run`, and once."""
    if os.environ.get("GRADWATCH_LAUNCH") != "1" or getattr(sys.excepthook, "of_gradwatch", False):
        return
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        former(kind, error, trace)
        if issubclass(kind, TrainingStopped):
            raise SystemExit(STOPPED)  # Python honours it from here, atexit functions included

    hook.of_gradwatch = True  # type: ignore[attr-defined]
    sys.excepthook = hook
