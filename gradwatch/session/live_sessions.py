"""Live sessions, the end of those whose models are gone, and the end of the process.

torch's hooks hold a Watch that the script does not keep (`gradwatch.watch(model)` alone is enough), so something has to
end it. Nothing runs when a model goes: its death is noted (`gradwatch.runtime.weak_references`), and its parameters are
freed with it. Its Watch is closed before the next backward of the process, or when another is made.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from gradwatch.account import Ending
from gradwatch.account.exit_reason import how_it_ends
from gradwatch.records.run_info import RunInfo
from gradwatch.runtime.process_identity import here
from gradwatch.runtime.weak_references import died
from gradwatch.taps import backward_entry
from gradwatch.taps.backward_entry import BackwardCall
from gradwatch.taps.process_totals import ended_by_exceptions


class Lives(Protocol):
    """A session, as far as its end is concerned."""

    run: RunInfo

    def orphaned(self) -> bool:
        """True if it ends with its models and all of them are gone."""

    def drop_dead(self) -> None:
        """Hold, before a backward, no parameter of an optimizer or a model that is gone."""

    def close(self) -> None:
        """End the session."""

    def ends(self, ending: Ending) -> None:
        """Keep how it ends, for its account."""

    def catch_up(self) -> None:
        """Judge what was put off."""

    def conclude(self) -> None:
        """Give its account to its sinks, once."""

    def close_sinks(self) -> None:
        """Close what it writes to, once."""


W = TypeVar("W", bound=Lives)


class LiveSessions(Generic[W]):
    """The live sessions, in the order in which they were made."""

    def __init__(self) -> None:
        self._live: list[W] = []
        self._removes: list[Callable[[], None]] = []

    def add(self, watch: W) -> None:
        """Add a session that is live from now on."""
        self._live.append(watch)
        _at_exit()
        if not self._removes:
            self._removes.append(backward_entry.listen(self._died, died))

    def discard(self, watch: W) -> None:
        """Discard a session that was closed. The last one takes the taps with it."""
        if watch in self._live:
            self._live.remove(watch)
        while self._removes and not self._live:
            self._removes.pop()()

    def all(self) -> tuple[W, ...]:
        """Every live watch, those included that will be closed at the next event."""
        return tuple(self._live)

    def _died(self, before: BackwardCall) -> None:
        """Release what is gone before a backward, the first since some model or optimizer has died."""
        if before.nested:
            return
        died.clear()
        fault: Exception | None = None
        for watch in tuple(self._live):
            try:
                watch.drop_dead()
            except Exception as error:  # the other watches drop theirs all the same
                fault = error
        self.close_orphans()
        if fault is not None:
            raise fault

    def close_orphans(self) -> None:
        """Close the watches whose models are gone."""
        for watch in tuple(self._live):
            if watch.orphaned() and watch in self._live:
                self._live.remove(watch)  # first: closing asks for those that live
                watch.close()


LIVE: LiveSessions[Any] = LiveSessions()
"""The sessions of this process."""


@functools.cache
def _at_exit() -> None:
    atexit.register(_process_ends)


def _process_ends() -> None:
    """Judge what was put off, give the account, close the sinks; models and optimizers are left as they are."""
    conclude_all()
    close_all_sinks()


def conclude_all() -> None:
    """Have every live session judge what it put off, and give its account: the process ends."""
    ended_by_exceptions()
    LIVE.close_orphans()
    for one in LIVE.all():
        if one.run.pid == here[0]:
            one.ends(how_it_ends())
            one.catch_up()
            one.conclude()


def close_all_sinks() -> None:
    """Give journals their end, and send or give up what waits for the network: the process ends."""
    for one in LIVE.all():
        one.close_sinks()
