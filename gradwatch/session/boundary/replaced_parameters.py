"""Loops that replace parameters instead of writing into them: `layer.weight = nn.Parameter(…)`, or a new model a step.

The one that comes takes the slot, and with it name, series and baselines, of the one that it replaces; only in loops
without an optimizer: where there is one, what it does not hold is not trained. Where the contents of a parameter were
swapped (`swap_tensors`) it is hooked again. Most are replaced as torch registers
them, so that the parameter before them is freed as in the bare script; the rest before the next backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.parameter_names import has_values, named_parameters
from gradwatch.capture.read_after_backward import Capture

Loop = tuple[OptimizerCapture, Callable[[int], None]]
"""The capture of a loop, and what is called before the parameter at a position of it is replaced."""
AT_ONCE = 64
"""Parameters that are looked at before each backward, under 1 µs each, for writes and swaps that no hook sees."""


class ReplacedParameters:
    """Successors of the parameters of these loops; called with `capture.arranging` held."""

    def __init__(self, capture: Capture, loops: Callable[[], Sequence[Loop]]) -> None:
        self._capture = capture
        self._loops = loops
        self._looked = 0  # registrations in the models when the places were last looked at
        self._looks = 0

    def registered(self, module: nn.Module, name: str, value: Any) -> bool:
        """Look at a value that a watched module gets; True if it has taken the slot of the parameter there."""
        held = module._parameters
        before = held.get(name) if isinstance(held, dict) else None  # a scripted module holds another kind
        slot = None if before is None else self._capture.slots.of.get(id(before))
        if slot is None or self._capture.coverage.places.at(slot) != (module, name):
            return False
        return any(self._exchange(loop, slot, value) for loop in self._loops() if slot in loop[0].position)

    def look(self) -> bool:
        """Find, before a backward, what has come in other ways, and watch what was added; True if anything has."""
        slots, places = self._capture.slots, self._capture.coverage.places
        registrations = self._capture.coverage.registrations[0]
        changed, self._looked = self._looked != registrations, registrations
        for loop in self._loops():
            position = loop[0].position
            looked_at = list(self._next(position))
            if any(slots.hooks.swapped(slot, slots.params[slot]) for slot in looked_at):
                for slot in position:
                    slots.hooks.rehook(slot, slots.params[slot])
            if position and places.left(next(iter(position))):
                changed = True
                self._take_over(loop)
            elif not changed:  # no hook sees a write to `_parameters`
                changed = any(places.lost(slot, slots.params[slot]) for slot in looked_at)
        if not changed:
            return False
        for loop in self._loops():
            for slot in loop[0].position:
                place = places.at(slot)
                if place is not None and places.lost(slot, slots.params[slot]):
                    self._exchange(loop, slot, place[0]._parameters.get(place[1]))
        if slots.disturbed:
            self._capture.scan_without_optimizer()
        return True

    def lost(self, slots: Iterable[int]) -> list[int]:
        """Slots of these whose parameter nothing has succeeded, though its place is another's, or gone."""
        lost, params = self._capture.coverage.places.lost, self._capture.slots.params
        return [slot for slot in slots if lost(slot, params[slot])]

    def _next(self, slots: Mapping[int, int]) -> Iterable[int]:
        """Some of these slots, others at each look: all of a small model, of a large one all in some backwards."""
        self._looks += 1
        parts = -(-len(slots) // AT_ONCE)
        start = self._looks % parts * AT_ONCE if parts else 0
        return itertools.islice(slots, start, start + AT_ONCE)

    def _exchange(self, loop: Loop, slot: int, param: Any) -> bool:
        """Put a parameter into a slot of a loop; False where it cannot be the successor of the one there."""
        slots, (captured, before) = self._capture.slots, loop
        unowned, its_own = self._capture.unowned_slots(), slots.of.get(id(param))
        if slot not in unowned or not _alike(param, slots.params[slot]):
            return False
        if its_own is not None and its_own not in unowned.difference(self._reached()):
            return False
        before(captured.position[slot])
        if its_own is None:
            slots.exchange(slot, param)
        else:
            slots.take_over(slot, its_own)
        captured.exchange(captured.position[slot], param)
        return True

    def _take_over(self, loop: Loop) -> None:
        """Continue a loop whose model is gone with one of the same parameters that has come since."""
        slots, (captured, before) = self._capture.slots, loop
        for successors in self._newcomers():
            if len(successors) == len(captured) and all(
                slots.names[slot].endswith(name) and _alike(param, captured.params[k])
                for (slot, k), (name, param) in zip(captured.position.items(), successors, strict=True)
            ):
                for (slot, k), (_, param) in zip(captured.position.items(), successors, strict=True):
                    before(k)
                    slots.take_over(slot, slots.of[id(param)])
                    captured.exchange(k, param)
                return

    def _reached(self) -> set[int]:
        """The slots of all loops."""
        return {slot for captured, _ in self._loops() for slot in captured.position}

    def _newcomers(self) -> Iterator[list[tuple[str, nn.Parameter]]]:
        """(name in its model, parameter) of models that no backward has reached so far."""
        slots = self._capture.slots
        free = self._capture.unowned_slots() - self._reached()
        for model in slots.models():
            wanting = [pair for pair in named_parameters([("", model)]) if pair[1].requires_grad]
            if wanting and all(slots.of.get(id(param)) in free for _, param in wanting):
                yield wanting


def _alike(param: Any, before: Tensor) -> bool:
    """True if a parameter is like the one before it in all that a capture is made for."""
    return (
        isinstance(param, nn.Parameter)
        and param.requires_grad
        and type(param) is type(before)
        and has_values(param)
        and (param.shape, param.dtype, param.device) == (before.shape, before.dtype, before.device)
    )
