"""Keeps the faults of one sink out of training: counted, switched off after three in a row, tried again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from gradwatch.account import Account
from gradwatch.errors import TrainingStopped
from gradwatch.records.record import CheckpointHealth, Record
from gradwatch.records.run_info import RunInfo
from gradwatch.records.saved_optimizer_state import TakenState
from gradwatch.runtime.internal_errors import Health
from gradwatch.runtime.interruption import not_ours
from gradwatch.sinks.registry import Sink

P = ParamSpec("P")
R = TypeVar("R")


def _contained(
    otherwise: R,
) -> Callable[[Callable[Concatenate[Breaker, P], R]], Callable[Concatenate[Breaker, P], R]]:
    """Make a method of Breaker count what it raises, and return `otherwise` instead."""

    def decorate(method: Callable[Concatenate[Breaker, P], R]) -> Callable[Concatenate[Breaker, P], R]:
        @functools.wraps(method)
        def call(self: Breaker, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except TrainingStopped:
                raise
            except Exception as error:
                passes = self._strict
                try:
                    passes = self._passes(error)
                except Exception:
                    # Not even a frame is left to count in (RecursionError): the next call counts it.
                    self._uncounted = error
                if passes:
                    raise
                return otherwise

        return call

    return decorate


class Breaker:
    """A Sink around another Sink that never raises.

    Closed: every call goes through; a failure is counted in `health` under the sink's name. After
    `max_failures` consecutive ones the circuit is open: calls are dropped for `pause_seconds` of the
    monotonic clock. Then one call is let through (half-open): success closes the circuit, failure opens it
    again. A sink whose `open` failed is opened again on that occasion, so a disk that was full comes back.

    KeyboardInterrupt, SystemExit, TrainingStopped and what a signal handler of the script raises always pass; with
    `strict=True` all does, counted.
    Source of the pattern: M. Nygard, *Release It!*, "Circuit Breaker".
    """

    def __init__(
        self,
        sink: Sink,
        health: Health,
        *,
        max_failures: int = 3,
        pause_seconds: float = 60.0,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sink = sink
        self.name = sink.name
        self._health = health
        self._max_failures = max_failures
        self._pause_seconds = pause_seconds
        self._strict = strict
        self._clock = clock
        self._failures = 0
        self._disabled_until: float | None = None
        self._uncounted: Exception | None = None
        self._run: RunInfo | None = None
        self._opened = False
        self._closed = False

    @property
    def is_disabled(self) -> bool:
        """True if calls are dropped at present."""
        return self._disabled_until is not None and self._clock() < self._disabled_until

    @property
    def stop_seconds(self) -> float:
        """Seconds that a stop of training may wait for this sink, where that is more than for any; 0 = it is not."""
        return float(getattr(self.sink, "stop_seconds", 0.0))

    @_contained(None)
    def open(self, run: RunInfo, health: Health | None = None) -> None:
        """Open the sink; one that cannot be opened is switched off at once and tried again later."""
        self._run, self._closed = run, False
        self._failures = self._max_failures - 1
        self.sink.open(run, health or self._health)
        self._opened = True
        self._recover()

    def write(self, record: Record) -> None:
        """Hand one step on, or drop it while the sink is switched off."""
        try:  # as `_contained`, without its Python call at every step
            if self._closed or (self._disabled_until is not None and self.is_disabled):
                return
            if not self._opened:
                self._reopen()
            self.sink.write(record)
            if self._failures or self._uncounted is not None:
                self._recover()
        except TrainingStopped:
            raise
        except Exception as error:
            passes = self._strict
            try:
                passes = self._passes(error)
            except Exception:
                self._uncounted = error
            if passes:
                raise

    @_contained(None)
    def write_all(self, records: Sequence[Record]) -> None:
        """Hand several steps on, on which no rule changed: in one call where the sink has `write_all`."""
        write_all = _write_all_of(self.sink)
        if write_all is None or not self._opened:
            for record in records:
                self.write(record)
        elif not self._closed and not self.is_disabled:
            write_all(records)
            self._recover()

    @_contained(False)
    def flush(self, timeout: float) -> bool:
        """Flush the sink; False when it is switched off, fails, or is not done in time."""
        if self._closed or not self._opened or self.is_disabled:
            return False
        return self.sink.flush(timeout)

    @_contained(None)
    def take_state(self, taken: TakenState) -> None:
        """Give the sink a state that the script has taken of its optimizers, if it takes it."""
        take_state = getattr(self.sink, "take_state", None)
        if take_state is not None and not self._closed and self._opened:
            take_state(taken)

    @_contained(None)
    def judge_weights(self, health: CheckpointHealth) -> None:
        """Give the sink the health of the weights by a last look at them, if it takes it."""
        judge_weights = getattr(self.sink, "judge_weights", None)
        if judge_weights is not None and not self._closed and self._opened:
            judge_weights(health)

    @_contained(None)
    def conclude(self, account: Account) -> None:
        """Give the sink the totals of the run, just before it is closed, if it takes them."""
        conclude = getattr(self.sink, "conclude", None)
        if conclude is not None and not self._closed and self._opened:
            conclude(account)

    @_contained(None)
    def close(self) -> None:
        """Close the sink, switched off or not; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.sink.close()

    def _passes(self, error: Exception) -> bool:
        """Count what a call has raised; whether it goes on."""
        if not_ours(error):
            return True  # the script's own, and no fault of this sink
        self._fail(error)
        return self._strict

    def _reopen(self) -> None:
        if self._run is None:
            raise RuntimeError(f"sink {self.name!r} was written to before it was opened")
        self.sink.open(self._run, self._health)
        self._opened = True

    def _recover(self) -> None:
        self._count_forgotten()
        self._failures, self._disabled_until = 0, None
        self._health.mark(self.name, True)

    def _fail(self, error: Exception) -> None:
        self._count_forgotten()
        self._health.report(self.name, error)
        self._failures += 1
        if self._failures >= self._max_failures:
            self._disabled_until = self._clock() + self._pause_seconds
            self._health.mark(self.name, False)

    def _count_forgotten(self) -> None:
        if self._uncounted is not None:
            error, self._uncounted = self._uncounted, None
            self._health.report(self.name, error)


def _write_all_of(sink: Sink) -> Callable[[Sequence[Record]], None] | None:
    """`write_all` of a sink; None without one, or where it belongs with another `write` than the sink has.

    Whoever derives from a sink, wraps one or replaces its `write` may not know of `write_all`: steps would pass by.
    """
    for place in (getattr(sink, "__dict__", {}), *map(vars, type(sink).__mro__)):
        if "write_all" in place:
            found: Callable[[Sequence[Record]], None] | None = getattr(sink, "write_all", None)
            return found
        if "write" in place:
            return None
    return None
