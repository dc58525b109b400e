"""Steps that are judged later, in order: their numbers are still on their way, or nothing about them is urgent.

After a backward the caches are cold, and judging a step in Python costs three to four times what it costs right
after another. So steps on which a quick look saw nothing unusual, and on which no rule could act, are judged some at a
time, many of them in one call (`many_deferred_steps`): the same numbers in the same order, a little later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

DEPTH = 4
"""Steps of one optimizer that may be under way from a device; the next one waits for the oldest."""
MOST = 32
"""Calm steps that may wait to be judged together."""
LONGEST = 1.0
"""Seconds that an ordinary step may wait while steps are taken."""


class Measured(Protocol):
    """A step that has been measured; `exchange` is its part in what ranks exchange, None where it has none."""

    exchange: Any

    def ready(self) -> bool:
        """True if judging it would wait for no device."""


Step = TypeVar("Step", bound=Measured)


class Deferral(Generic[Step]):
    """The steps of one optimizer that wait to be judged; `judge(waiting)` takes one or more off the left to do so.

    `is_usual(step)` is asked when the numbers of a step are here, and waits for them where they are not: True if
    nothing about it is urgent. Both are given to `judge_with` before the first step is submitted.

    When each of them is judged depends on the device and on the clock, and so differs between ranks. A step whose
    judgement holds a collective (`OptimizerContext.exchanges`) must therefore never come here; one whose collective has
    begun may, and `awaits_ranks` until it is judged.
    """

    __slots__ = ("_coming", "_since", "_waiting", "awaits_ranks", "is_usual", "judge")

    def __init__(self) -> None:
        # Most optimizers of a loop that makes many never need these.
        self._waiting: deque[Step] | None = None
        self._coming: deque[Step] | None = None  # under way from a device, and later than any that waits
        self.judge: Callable[[deque[Step]], object] | None = None
        self.is_usual: Callable[[Step], bool] | None = None
        self._since = 0.0
        self.awaits_ranks = False

    def __len__(self) -> int:
        return len(self._waiting or ()) + len(self._coming or ())

    def judge_with(self, judge: Callable[[deque[Step]], object], is_usual: Callable[[Step], bool]) -> None:
        """Set what judges the steps that wait, and what says of a step that nothing about it is urgent."""
        self.judge, self.is_usual = judge, is_usual

    def submit(self, step: Step) -> bool:
        """Put a step at the end of the queue; whether enough wait, or the oldest has waited long enough."""
        now = time.monotonic()
        if self._waiting is None:
            self._waiting = deque()
        if not self._waiting:
            self._since = now
        self._waiting.append(step)
        self.awaits_ranks = self.awaits_ranks or step.exchange is not None
        return len(self._waiting) >= MOST or now - self._since >= LONGEST

    def submit_coming(self, step: Step) -> None:
        """Put a step whose numbers are on their way from a device behind all others."""
        if self._coming is None:
            self._coming = deque()
        self._coming.append(step)
        self.awaits_ranks = self.awaits_ranks or step.exchange is not None

    def take_arrived(self, failed: Callable[[Exception], None], depth: int = DEPTH) -> None:
        """Judge what has arrived and is not as usual, with all before it; what is as usual waits for others.

        Waits for a device only where `depth` steps or more are under way.
        """
        coming = self._coming
        while coming and self.is_usual and (len(coming) >= depth or coming[0].ready()):
            enough = self.submit(step := coming.popleft())
            if not self._usual(step, failed) or enough:
                self._judge_waiting(failed)

    def flush(self, failed: Callable[[Exception], None]) -> None:
        """Judge everything, waiting for it; a failure in one step does not cost the others."""
        while self._coming and self.is_usual:
            self.submit(step := self._coming.popleft())
            self._usual(step, failed)
        self._judge_waiting(failed)

    def _usual(self, step: Step, failed: Callable[[Exception], None]) -> bool:
        """True if nothing about a step is urgent; what fails is asked again when it is judged by itself."""
        try:
            return self.is_usual is not None and self.is_usual(step)
        except Exception as error:
            failed(error)
            return False

    def _judge_waiting(self, failed: Callable[[Exception], None]) -> None:
        self.awaits_ranks = any(step.exchange is not None for step in self._coming or ())
        while self._waiting and self.judge:
            try:
                self.judge(self._waiting)
            except Exception as error:
                failed(error)
