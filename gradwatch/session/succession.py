"""A session that takes the place of another one in its process, by other rules: what it goes on with.

Nothing is guessed, as it has to be of a state that another process saved: optimizers are the same objects, and what has
none is known by the names of its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.read_after_backward import Capture
from gradwatch.runtime.weak_references import Distinct
from gradwatch.session.process_place import ProcessPlace
from gradwatch.taps import module_tree

if TYPE_CHECKING:
    from gradwatch.session.watched_optimizers import Ownership


@dataclass(frozen=True, slots=True)
class LearnedState:
    """The `state` of one capture: of an optimizer, or, where it has none, of parameters of these `names`."""

    optimizer: weakref.ref[Optimizer] | None
    names: frozenset[str]
    state: Mapping[str, Any]

    @property
    def abandoned(self) -> bool:
        """True if its optimizer is gone."""
        return self.optimizer is not None and self.optimizer() is None

    def is_of(self, captured: OptimizerCapture) -> bool:
        """True if this capture goes on with it; of an optimizer that is gone, one of the same parameters does."""
        if self.optimizer is not None and not self.abandoned:
            return captured.optimizer is not None and captured.optimizer() is self.optimizer()
        same_kind = (captured.optimizer is None) is (self.optimizer is None)
        return same_kind and not self.names.isdisjoint(captured.sites.names)


@dataclass(frozen=True, slots=True)
class Watching:
    """The models and optimizers that a session watches: held strongly, so only until the next one has them.

    `prefixes` are by the `id()` of a model; `loose` are parameters of optimizers that no model has, `held_by_script`
    those that no optimizer has either.
    """

    models: list[nn.Module]
    prefixes: Mapping[int, str]
    optimizers: list[Optimizer]
    loose: list[tuple[str, nn.Parameter]]
    held_by_script: list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class Handover:
    """Everything that a session goes on with from the one whose place it takes.

    `counted` are the optimizers, and `parameters` the number of these, that it had counted; `unrecorded` the steps that
    it has watched and that no journal has. `place` is held on: its series go on.
    """

    watching: Watching
    states: tuple[LearnedState, ...]
    weights: Mapping[str, Any]
    counted: Distinct
    parameters: int
    unrecorded: int
    place: ProcessPlace


def watching_of(capture: Capture, ownership: Ownership) -> Watching:
    """Everything that is watched now, optimizers in the order of their captures, so that they keep their numbers."""
    slots = capture.slots
    prefixed = slots.watched.prefixed()
    models = [model for _, model in prefixed]
    in_models = set(map(id, _parameters(models)))
    by_script = {slots.ids[slot] for slot in slots.held_by_script}
    outside = [(name, param) for name, param in capture.named() if id(param) not in in_models]
    return Watching(
        models,
        {id(model): prefix for prefix, model in prefixed},
        ownership.everyone(capture.captures),
        [pair for pair in outside if id(pair[1]) not in by_script],
        [pair for pair in outside if id(pair[1]) in by_script],
    )


def _parameters(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [param for model in models for param in module_tree.parameters(model)]
