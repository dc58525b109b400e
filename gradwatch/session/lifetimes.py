"""Which watches are live, and the end of those whose models are gone.

torch's hooks hold a Watch that the script does not keep (`gradwatch.watch(model)` alone is enough), so something has to
end it. A weak reference with a callback, or `__del__`, would run gradwatch in the midst of any code of the script, the
garbage collector's included, where what a signal handler raises goes nowhere. So nothing runs when a model goes. Its
Watch is closed before the next backward of the process, or when another one is made, and gives up the memory of the
parameters as soon as a parameter is put into another model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from gradwatch.taps import backward_entry, building
from gradwatch.taps.backward_entry import BackwardCall


class Lives(Protocol):
    """A Watch, as far as its end is concerned."""

    def orphaned(self) -> bool:
        """Whether it ends with its models and all of them are gone."""

    def let_go_of_dead(self) -> None:
        """Hold no parameter that no optimizer and no model holds."""

    def close(self) -> None:
        """End it."""


W = TypeVar("W", bound=Lives)


class Lifetimes(Generic[W]):
    """The live watches, in the order in which they were made."""

    def __init__(self) -> None:
        self._live: list[W] = []
        self._removes: list[Callable[[], None]] = []

    def add(self, watch: W) -> None:
        """It lives from now on."""
        self._live.append(watch)
        if not self._removes:
            self._removes += backward_entry.listen(self._about_to_run), building.listen(self._built)

    def discard(self, watch: W) -> None:
        """It has been closed. The last one takes the taps with it."""
        if watch in self._live:
            self._live.remove(watch)
        while self._removes and not self._live:
            self._removes.pop()()

    def all(self) -> tuple[W, ...]:
        """Every live watch, those included that will be closed at the next event."""
        return tuple(self._live)

    def close_orphans(self) -> None:
        """Close the watches whose models are gone."""
        for watch in tuple(self._live):
            if watch.orphaned() and watch in self._live:
                self._live.remove(watch)  # first: closing asks for those that live
                watch.close()

    # -- told by taps ------------------------------------------------------------------------------------

    def _about_to_run(self, call: BackwardCall) -> None:
        self.close_orphans()

    def _built(self) -> None:
        for watch in tuple(self._live):
            watch.let_go_of_dead()
