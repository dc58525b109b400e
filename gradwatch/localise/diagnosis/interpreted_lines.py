"""Lines of interpreted code: which one is under way now, and which one was when an autograd node was made."""

from __future__ import annotations

import linecache
from bisect import bisect_right

from gradwatch.localise.diagnosis.module_attribution import LEAF
from gradwatch.localise.diagnosis.python_frames import LONGEST_SOURCE
from gradwatch.records.finding import Frame
from gradwatch.taps.graph.node_numbers import next_number


class InterpretedLines:
    """The stack of lines under way, innermost first, and its history by the sequence numbers of autograd's nodes."""

    def __init__(self) -> None:
        self.now: tuple[Frame, ...] = ()
        self._numbers: list[int] = []
        self._frames: list[tuple[Frame, ...]] = []

    def enter(self, file: str, line: int, function: str, outer: tuple[Frame, ...]) -> None:
        """An expression on that line is evaluated next, called from `outer`."""
        if self.now and self.now[0].line == line and self.now[1:] == outer and self.now[0].file == file:
            return
        self.put(
            (Frame(file, line, function, linecache.getline(file, line).strip()[:LONGEST_SOURCE]), *outer)
        )

    def put(self, frames: tuple[Frame, ...]) -> None:
        """Have all that is computed from now on belong to these lines."""
        self.now = frames
        number = next_number()
        if not self._numbers or number >= self._numbers[-1]:
            self._numbers.append(number)
            self._frames.append(frames)

    def at(self, number: int) -> tuple[Frame, ...]:
        """The lines under way when the node of that sequence number was made."""
        position = bisect_right(self._numbers, number) - 1
        return self._frames[position] if position >= 0 and number < LEAF else ()
