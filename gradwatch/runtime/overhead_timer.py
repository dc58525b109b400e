"""The seconds that gradwatch's own code has taken, each counted once where one measured call is inside another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


class OverheadTimer:
    """A stopwatch of many parts; a measured call is `mark = spent.begin()`, the call, `spent.end(mark)`.

    What a call that raised has taken is not counted.
    """

    __slots__ = ("_before", "_ended", "_reported", "_since", "_until", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ended = 0.0  # when the last measured call ended
        self._reported = self._until = 0.0  # `seconds` and `_ended` when `news` was asked last
        self._since: tuple[float, float] | None = None
        self._before = 0.0

    def begin(self) -> float:
        """Start a measurement; returns the argument of `end`."""
        return perf_counter() - self.seconds

    def end(self, mark: float) -> None:
        """Count the time since `begin`, whatever was counted inside included."""
        self._ended = now = perf_counter()
        self.seconds = now - mark

    def news(self) -> float:
        """Seconds counted since this was last asked."""
        news, self._reported = self.seconds - self._reported, self.seconds
        self._until = self._ended
        return news

    @property
    def before(self) -> float:
        """Seconds counted before `restart`; all of them where it was not called."""
        return self.seconds if self._since is None else self._before

    def restart(self) -> None:
        """Have `share` begin where the last measured call had ended when `news` was asked last."""
        self._since = self._until, self._until - self._reported
        self._before = self._reported

    def share(self) -> tuple[float, float]:
        """(seconds counted, seconds passed) from there to the last call that had ended when `news` was asked again.

        What is not counted is the time between calls. It never runs backwards: a call around another one, or in another
        thread, that ends after `restart` has shown that there was less of it before than it seemed.
        """
        if self._since is None:
            return 0.0, 0.0
        began, between = self._since
        passed = self._until - began
        return passed - max(0.0, self._until - self._reported - between), passed


@contextmanager
def labelled(begins: Callable[[str], None], ends: Callable[[], None]) -> Iterator[None]:
    """Call `begins` with the measuring function's name, and `ends`, around every measured call while this is entered.

    The methods themselves are exchanged for so long: a step that is not profiled pays nothing.
    """
    begin, end = OverheadTimer.begin, OverheadTimer.end

    def begin_labelled(self: OverheadTimer) -> float:
        begins(sys._getframe(1).f_code.co_name)
        return begin(self)

    def end_labelled(self: OverheadTimer, mark: float) -> None:
        end(self, mark)
        ends()

    OverheadTimer.begin, OverheadTimer.end = begin_labelled, end_labelled  # type: ignore[method-assign]
    try:
        yield
    finally:
        OverheadTimer.begin, OverheadTimer.end = begin, end  # type: ignore[method-assign]
