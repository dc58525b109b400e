"""States that the script took of its optimizers (`state_dict()`): which of them are healthy, and in which words.

That a file was made of one is not known, nor whether it still exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gradwatch.journal import SavedStatesEntry
from gradwatch.records.saved_optimizer_state import SavedState
from gradwatch.runtime.printable import plural

Condition = Literal["healthy", "not looked at", "not healthy"]
"""Of the weights in a saved state: a look at them, or at later ones, found nothing; no rule and no gradient spoke
against them, and no look has confirmed that; or something speaks against them."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One saved state, of the process `process` of its rank; `state` has the steps and the reasons."""

    process: int
    state: SavedState

    @property
    def condition(self) -> Condition:
        """The condition of the weights in it."""
        if not self.state.healthy:
            return "not healthy"
        return "healthy" if self.state.looked else "not looked at"


@dataclass(frozen=True, slots=True)
class SavedStates:
    """The saved states of a run, in their order: `taken` in all, `shown` those that the journals hold.

    `healthy` counts those against which nothing speaks. `rank` is that whose journals they are from.
    """

    taken: int = 0
    healthy: int = 0
    shown: tuple[Saved, ...] = ()
    rank: int = 0

    @property
    def last_healthy(self) -> Saved | None:
        """The last one against which nothing speaks."""
        return next((one for one in reversed(self.shown) if one.state.healthy), None)

    def of(self, process: int, optimizer: int) -> list[tuple[int, Condition]]:
        """Step and condition of those of one optimizer."""
        return [
            (step, one.condition)
            for one in self.shown
            if one.process == process
            for index, step in one.state.steps
            if index == optimizer
        ]


NO_SAVED_STATES = SavedStates()


class SavedStateCollector:
    """Takes in the entries of the journals of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._states: dict[tuple[int, int], SavedState] = {}  # by process and number
        self._totals: dict[int, tuple[int, int]] = {}

    def take(self, process: int, entry: SavedStatesEntry) -> None:
        """Add the entry of a journal."""
        self._totals[process] = entry.taken, entry.healthy
        for state in entry.states:
            self._states[process, state.number] = state

    def states(self) -> SavedStates:
        """The saved states so far, in their order."""
        taken, healthy = (sum(totals[at] for totals in self._totals.values()) for at in (0, 1))
        shown = tuple(Saved(process, state) for (process, _), state in sorted(self._states.items(), key=_key))
        return SavedStates(taken, healthy, shown, self.rank)


def _key(item: tuple[tuple[int, int], SavedState]) -> tuple[int, int]:
    return item[0]


def of_ranks(own: SavedStateCollector, others: Iterable[SavedStateCollector]) -> SavedStates:
    """The saved states of a rank, or of the first that has any; one is as healthy as on the rank that is worst."""
    found = [each for each in (one.states() for one in (own, *others)) if each.taken]
    if not found:
        return replace(NO_SAVED_STATES, rank=own.rank)
    first, *rest = found
    worse: dict[tuple[int, tuple[tuple[int, int], ...]], SavedState] = {}
    for each in rest:
        for one in each.shown:
            if not one.state.healthy:
                worse.setdefault((one.process, one.state.steps), one.state)
    shown = tuple(_joined(one, worse.get((one.process, one.state.steps)), first.rank) for one in first.shown)
    fewer = sum(one.state.healthy for one in first.shown) - sum(one.state.healthy for one in shown)
    return replace(first, shown=shown, healthy=first.healthy - fewer)


def _joined(one: Saved, worse: SavedState | None, rank: int) -> Saved:
    if worse is None or not one.state.healthy:
        return one
    reasons = tuple(f"on another rank than {rank}: {reason}" for reason in worse.reasons)
    return replace(one, state=replace(one.state, healthy=False, reasons=reasons))


def sentence(states: SavedStates) -> str:
    """Part of a sentence on the saved states; "" where there is none."""
    if not states.taken:
        return ""
    said, last = f"state saved {plural(states.taken, 'time')}", states.last_healthy
    if last is None:
        return f"{said}, and none of these states is healthy"
    after = f"after step {place(states, last)}{_unlooked(last)}"
    if states.healthy >= states.taken:
        return f"{said}, the last one {after}" if states.taken > 1 else f"{said}, {after}"
    return f"{said}, the last healthy one {after}"


def _unlooked(one: Saved) -> str:
    if one.state.looked:
        return ""
    looked = one.state.weights_step
    since = "" if looked is None or looked < 0 else f" since step {looked:,}"
    return f" (no look at its weights{since})"


def _several(shown: Sequence[Saved]) -> bool:
    return len({one.process for one in shown}) > 1


def last_of_each(states: SavedStates, most: int) -> list[Saved]:
    """The last ones that are known to be healthy, the last ones of any condition: at most `most` of each, in order."""
    healthy = [one for one in states.shown if one.condition == "healthy"]
    chosen = {id(one) for one in (*healthy[-most:], *states.shown[-most:])}
    return [one for one in states.shown if id(one) in chosen]


def place(states: SavedStates, one: Saved) -> str:
    """The step after which one was taken, with its process where there are several."""
    return f"{one.state.step:,}" + (f", process {one.process}" if _several(states.shown) else "")


def document(states: SavedStates) -> Mapping[str, object]:
    """The saved states, JSON-safe."""
    last = states.last_healthy
    return {
        "taken": states.taken,
        "healthy": states.healthy,
        "last_healthy_step": None if last is None else last.state.step,
        "rank": states.rank,
        "states": [
            {
                "process": one.process,
                "step": one.state.step,
                "steps": {str(optimizer): step for optimizer, step in one.state.steps},
                "wall_time": one.state.wall_time,
                "condition": one.condition,
                "weights_step": one.state.weights_step,
                "reasons": list(one.state.reasons),
            }
            for one in states.shown
        ],
    }
