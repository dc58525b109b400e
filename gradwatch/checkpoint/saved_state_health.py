"""Health of the states that a script takes while it trains: joined to them from Records, and corrected by later looks.

A state is taken after a step that may not be judged yet, so its health is that of the first Record of that step or a
later one. A look at the weights comes later still: if it finds nothing, the states since the look before are known to
be healthy; if not, those after the last healthy step are not, whatever their gradients were like.

Not every one of very many is kept: the first KEPT are, then one of two until there are twice as many, one of four, and
so on; besides always the last healthy one before those that are not, and the last of all. All are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice

from gradwatch.checkpoint.health_tracker import NOT_LOOKED_AT, joined
from gradwatch.records.record import CheckpointHealth, Record
from gradwatch.records.saved_optimizer_state import SavedState, TakenState

KEPT = 1000
MOST_CHANGES = 1000
"""So many are kept for being the last healthy one, or the first that is not, beyond those kept by their number."""
MOST_WAITING = 4096
"""States whose steps have no Record yet: beyond, far more than are judged at once, that of the first will not come."""
MOST_UNSURE = 4096
"""Healthy states that no look has confirmed, so that one may still correct them; beyond, the first stay as they are."""
MOST_REASONS = 3
LONGEST_REASON = 200
NOT_JUDGED = "its last step was not judged"


class SavedStateTracker:
    """The saved states of one watch, in their order. Memory and what is kept of them are bounded."""

    def __init__(self) -> None:
        self.taken = 0  # all of them, by their numbers
        self.healthy = 0  # of those that are judged, as far as is known by now
        self._waiting: deque[TakenState] = deque()
        self._found: dict[int, tuple[int, CheckpointHealth]] = {}  # by optimizer, with the step
        self._unsure: deque[SavedState] = deque()  # healthy ones that no look has confirmed
        self._confirmed: SavedState | None = None  # the last one that a look has confirmed
        self._last: SavedState | None = None
        self._changes = 0
        self._kept: dict[int, SavedState] = {}  # by number, since `take_kept` was called last
        self._numbers: set[int] = set()  # those of `_unsure` that were kept

    def take(self, taken: TakenState) -> None:
        """Take in a state, before any Record of a later step."""
        self.taken = max(self.taken, taken.number + 1)
        self._waiting.append(taken)
        self._judge_waiting()

    def add(self, records: Iterable[Record]) -> None:
        """Take in Records, in their order."""
        for record in records:
            health, optimizer = record.checkpoint, record.snapshot.optimizer
            if health is None:
                continue
            before = self._found.get(optimizer)
            self._found[optimizer] = record.snapshot.step, health
            if self._waiting:
                self._judge_waiting()
            if self._unsure:
                if not health.healthy:  # first: a look may find weights fit, and a leap that was before it
                    self._correct(health, optimizer)
                if before is None or before[1].weights_step != health.weights_step:
                    self._confirm(self._looked())

    def end(self, health: CheckpointHealth | None) -> None:
        """Take in the health by a look at the weights after the last Record; None: there was no such look."""
        while self._waiting:
            self._judge(self._waiting.popleft())
        if health is not None and not health.healthy:
            self._correct(health, None)
        if health is not None and health.weights_step is not None:
            self._confirm(dict.fromkeys(self._found, health.weights_step))

    def take_kept(self, last: bool = False) -> tuple[SavedState, ...]:
        """Those to keep that are new, or of which more is known, since the last call; `last`: it is the last call."""
        if last:
            self._keep(self._last)
            self._keep(self._newest_healthy())
        kept, self._kept = self._kept, {}
        return tuple(kept[number] for number in sorted(kept))

    def _judge_waiting(self) -> None:
        while self._waiting and (
            len(self._waiting) > MOST_WAITING
            or all(self._reached(optimizer, step) for optimizer, step in self._waiting[0].steps)
        ):
            self._judge(self._waiting.popleft())

    def _reached(self, optimizer: int, step: int) -> bool:
        found = self._found.get(optimizer)
        return found is not None and found[0] >= step

    def _looked(self) -> dict[int, int]:
        """By optimizer, the last step after which a look found nothing."""
        return {
            optimizer: -1 if health.weights_step is None else health.weights_step
            for optimizer, (_, health) in self._found.items()
        }

    def _judge(self, taken: TakenState) -> None:
        """Give a state the health of now: its steps are judged."""
        own = [health for _, health in self._found.values()]
        health = joined(own) if own else CheckpointHealth(False, reasons=(NOT_JUDGED,))
        reasons = _shortened(health.reasons)
        # Where steps are judged late, a look may have come before the Record.
        looked = health.healthy and _seen(taken.steps, self._looked())
        state = SavedState(*taken, health.healthy, looked, health.weights_step, reasons)
        before, self._last = self._last, state
        self.healthy += state.healthy
        if looked:
            self._confirmed = state
        elif state.healthy:
            if len(self._unsure) >= MOST_UNSURE:
                self._numbers.discard(self._unsure.popleft().number)
            self._unsure.append(state)
        if state.number % _every(state.number) == 0:
            self._keep(state)
        if before is not None and before.healthy != state.healthy and self._changes < MOST_CHANGES:
            self._changes += 1
            self._keep(before)
            self._keep(state)

    def _correct(self, health: CheckpointHealth, optimizer: int | None) -> None:
        """Take back that states were healthy which came after the last healthy step, of one optimizer or of all."""
        if any(reason.startswith(NOT_LOOKED_AT) for reason in health.reasons):
            return  # as at the end of a script whose weights are gone: nothing was found
        last = -1 if health.last_healthy_step is None else health.last_healthy_step
        reasons = _shortened(f"found later: {reason}" for reason in health.reasons)
        corrected = False
        while self._unsure and _step_of(self._unsure[-1], optimizer) > last:
            self._renew(replace(self._unsure.pop(), healthy=False, reasons=reasons))
            self.healthy -= 1
            corrected = True
        if corrected and self._changes < MOST_CHANGES:
            self._changes += 1
            self._keep(self._newest_healthy())

    def _confirm(self, looked: Mapping[int, int]) -> None:
        """Note a look at the weights after these steps, by optimizer, which found nothing."""
        unsure, self._unsure = self._unsure, deque()
        for state in unsure:
            if _seen(state.steps, looked):
                self._confirmed = replace(state, looked=True, weights_step=state.step)
                self._renew(self._confirmed)
            else:
                self._unsure.append(state)

    def _renew(self, state: SavedState) -> None:
        """Have a state that is unsure no more be kept as it is now, where it was kept before."""
        if state.number in self._numbers:
            self._numbers.discard(state.number)
            self._kept[state.number] = state
        if self._last is not None and self._last.number == state.number:
            self._last = state

    def _newest_healthy(self) -> SavedState | None:
        known = [
            state for state in (self._confirmed, *islice(reversed(self._unsure), 1)) if state is not None
        ]
        return max(known, key=lambda state: state.number, default=None)

    def _keep(self, state: SavedState | None) -> None:
        if state is not None:
            self._kept[state.number] = state
            if state.healthy and not state.looked:
                self._numbers.add(state.number)


def _seen(steps: Iterable[tuple[int, int]], looked: Mapping[int, int]) -> bool:
    """True if a look at the weights, after the steps `looked` by optimizer, was after these."""
    return all(looked.get(optimizer, -1) >= step for optimizer, step in steps)


def _step_of(state: SavedState, optimizer: int | None) -> int:
    return state.step if optimizer is None else dict(state.steps).get(optimizer, -1)


def _every(number: int) -> int:
    """One of so many states is kept for its number."""
    every = 1
    while number >= KEPT * every:
        every *= 2
    return every


def _shortened(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(reason[:LONGEST_REASON] for reason in islice(reasons, MOST_REASONS))
