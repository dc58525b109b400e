"""The seconds that gradwatch's own code has taken, each counted once where one measured call is inside another."""

from __future__ import annotations

from time import perf_counter


class OwnTime:
    """A stopwatch of many parts; a measured call is `mark = spent.begin()`, the call, `spent.end(mark)`.

    What a call that raised has taken is not counted.
    """

    __slots__ = ("_reported", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._reported = 0.0

    def begin(self) -> float:
        """Start a measurement; returns the argument of `end`."""
        return perf_counter() - self.seconds

    def end(self, mark: float) -> None:
        """Count the time since `begin`, whatever was counted inside included."""
        self.seconds = perf_counter() - mark

    def news(self) -> float:
        """Seconds counted since this was last asked."""
        news, self._reported = self.seconds - self._reported, self.seconds
        return news
