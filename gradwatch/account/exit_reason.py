"""The reason why this process ends, read when it exits; no hook is installed for it."""

from __future__ import annotations

import sys

from gradwatch.account.account import Ending

printed_at_exit = [False]
"""In one place: whether a launcher prints the account when this process ends, so that no log does as well."""


def how_it_ends() -> Ending:
    """ "stopped" by Ctrl-C, "failed" by an exception that nothing caught, else "finished".

    Python notes what it has printed a traceback for in `sys.last_type` (`sys.last_exc`), whichever excepthook printed
    it; at an interactive prompt that is no end, so nothing is read from it there, nor where Python code caught it and
    noted it itself (`code.InteractiveInterpreter`): then its traceback does not begin at the outermost frame. Not to be
    told apart from "finished": `sys.exit(n)`, and a Ctrl-C that the script caught.
    """
    traceback = getattr(sys, "last_traceback", None)
    caught = traceback is not None and traceback.tb_frame.f_back is not None
    kind = None if caught or hasattr(sys, "ps1") else getattr(sys, "last_type", None)
    return ended_by(kind)


def ended_by(kind: object) -> Ending:
    """The ending of a block or process that an exception of this class leaves; None = no exception."""
    if kind is None or not isinstance(kind, type):
        return "finished"
    if issubclass(kind, KeyboardInterrupt) or kind.__name__ == "TrainingStopped":
        return "stopped"
    return "finished" if issubclass(kind, (SystemExit, GeneratorExit)) else "failed"
