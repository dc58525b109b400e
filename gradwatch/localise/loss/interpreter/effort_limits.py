"""Bounds on loss code run again: expressions and bytes of tensors in each try, seconds in all of them together."""

from __future__ import annotations

import time
from collections.abc import Callable

from gradwatch.localise.held_calls.module_attributes import Refused

EXPRESSIONS = 20_000
SECONDS = 30.0
BYTES = 1 << 30
"""Of the tensors that it makes outside the models: all are kept until the end, those too which the script let go."""


class TooMuchError(Refused):
    """Loss code that takes too much, wherever it is begun."""


class Effort:
    """Counts what is taken; raises `TooMuchError` beyond the bounds, before the next expression is evaluated."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + SECONDS
        self.begin_try()

    def begin_try(self) -> None:
        """Count from 0 again, but for the seconds: the tensors of an earlier try are gone."""
        self._expressions, self._bytes = EXPRESSIONS, BYTES

    def expression(self) -> None:
        """One more is about to be evaluated."""
        self._expressions -= 1
        if self._expressions < 0:
            raise TooMuchError(f"the loss code takes more than {EXPRESSIONS} operations")
        if self._clock() > self._end:
            raise TooMuchError(f"the loss code takes longer than {SECONDS:.0f} s")

    def memory(self, size: int) -> None:
        """Count bytes that are kept in addition."""
        self._bytes -= size
        if self._bytes < 0:
            raise TooMuchError(f"the tensors of the loss code take more than {BYTES >> 20} MiB")
