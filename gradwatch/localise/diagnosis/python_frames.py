"""Python lines that led to an operation: from the stack as it is, or from what anomaly mode wrote down.

Left out: torch's own lines and gradwatch's. The walk ends at the first line of gradwatch that stands outside
what is recorded: during a replay everything further out is `optimizer.step()`, not the forward.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

from gradwatch.records.finding import Frame

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
NOT_OF_USER = (TORCH, OURS)
MOST = 12  # frames kept
LONGEST_SOURCE = 300  # characters of a line; generated code has long ones
LOOKING_ON = frozenset({"called_torch_function.py", "first_nonfinite_in_forward.py", "python_frames.py"})
"""Files of gradwatch through which an operation runs; any other one is where the recording was begun."""

_LINE = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$')


def of_stack() -> tuple[Frame, ...]:
    """The lines under way in this thread, innermost first."""
    return _chosen(_walked(sys._getframe(1)))


def of_traceback(entries: Iterable[str]) -> tuple[Frame, ...]:
    """The same, out of the entries of `traceback.format_stack()`, which anomaly mode keeps per node."""
    return _chosen(_parsed(list(entries)))


class Callers:
    """Lines from which something is called, known again by their instruction and by how far up the stack they are.

    A walk and a line number cost microseconds in cold caches; a loop calls a model from a few places. Whoever asks at
    every call looks itself whether the frame `depth` above its own is a `known` one, and calls `find` if not.
    """

    MOST = 16

    def __init__(self) -> None:
        self.depth = 1  # not 0: a frame among its own local names is freed by the garbage collector only
        # By id of the code and instruction in it.
        self.known: dict[tuple[int, int], tuple[CodeType, int]] = {}
        # Lines of `torch.func.functional_call`, which puts other parameters into the module as long as it runs.
        self.substituting: set[tuple[CodeType, int]] = set()

    def find(self, asking: int = 1) -> tuple[tuple[CodeType, int] | None, FrameType | None]:
        """(code and line, None = none; the innermost frame) from which the function `asking` frames up was called.

        A module that only passes on to the model (`return self.inner(x)`) is no such line: what is computed of the
        outputs may stand outside it.
        """
        frame = innermost = None
        substitutes = False
        for depth, outer in enumerate(_outwards(sys._getframe(asking))):
            substitutes = substitutes or outer.f_code.co_filename == stateless.__file__
            if is_of_user(outer):
                innermost = innermost or outer
                frame, self.depth = outer, depth
                if not _is_forward(outer):
                    break
        if frame is None or innermost is None:
            self.depth = 1
            return None, None
        if len(self.known) >= self.MOST:
            self.known.clear()
            self.substituting.clear()
        self.known[id(frame.f_code), frame.f_lasti] = found = frame.f_code, frame.f_lineno
        if substitutes:
            self.substituting.add(found)
        return found, innermost


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_forward(frame: FrameType) -> bool:
    """True if torch called it for a call of a module."""
    outer = next(
        (one for one in _outwards(frame.f_back) if not one.f_code.co_filename.startswith(OURS)), None
    )
    return outer is not None and outer.f_code.co_filename == nn.modules.module.__file__


def is_of_user(frame: FrameType) -> bool:
    """True if it is neither torch's nor gradwatch's."""
    return not frame.f_code.co_filename.startswith(NOT_OF_USER)


FRESH_LOCALS = sys.version_info >= (3, 13)
"""Whether `locals()` gives a dict of its own every time (PEP 667)."""
KEEPS_LOCALS = frozenset({"locals", "vars", "f_locals"})


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Values of the local names of a frame.

    Before Python 3.13 a function's frame keeps the dict that `f_locals` gives, and with it every value for as long as
    the function runs: a model that the script deletes would live on. So that dict, a copy (PEP 667), is emptied. It is
    also the very dict that `locals()` gave a function which may have kept it: such a function is not looked at.
    """
    optimized = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if optimized and not FRESH_LOCALS and not KEEPS_LOCALS.isdisjoint(frame.f_code.co_names):
        return {}
    shown = frame.f_locals
    found = dict(shown)
    if type(shown) is dict and optimized:
        shown.clear()
    return found


def frame_of(called: tuple[CodeType, int] | None) -> tuple[Frame, ...]:
    """The Frame of a code object and a line in it, () for None."""
    if called is None:
        return ()
    code, line = called
    return (_frame(code.co_filename, line, code.co_name),)


def _walked(start: FrameType | None) -> Iterator[tuple[str, int, str]]:
    frame = start
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _parsed(entries: list[str]) -> Iterator[tuple[str, int, str]]:
    for entry in reversed(entries):
        match = _LINE.match(entry.splitlines()[0]) if entry else None
        if match is not None:
            yield match["file"], int(match["line"]), match["function"]


def _chosen(lines: Iterator[tuple[str, int, str]]) -> tuple[Frame, ...]:
    found: list[Frame] = []
    for file, line, function in lines:
        if file.startswith(OURS):
            if os.path.basename(file) in LOOKING_ON:
                continue
            break
        if not file.startswith(TORCH) and len(found) < MOST:
            found.append(_frame(file, line, function))
    return tuple(found)


def _frame(file: str, line: int, function: str) -> Frame:
    return Frame(file, line, function, linecache.getline(file, line).strip()[:LONGEST_SOURCE])
