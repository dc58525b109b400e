"""The state of a watch as a checkpoint holds it: baselines, streaks and step of every optimizer, norms of the weights.

`state_dict` and `load_state_dict` of a watch end here. The keys are those of every version so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.errors import AttachError
from gradwatch.session.binding.optimizer_rules import OptimizerRules
from gradwatch.session.optimizer_context import Contexts
from gradwatch.session.succession import LearnedState

if TYPE_CHECKING:
    from gradwatch.session.attachments import Attached

VERSION = 1
NOTHING_SAVED: Mapping[str, Any] = {"version": VERSION, "lanes": {}}


def saved(attached: Attached) -> dict[str, Any]:
    """The state of everything that is attached, JSON-safe."""
    optimizers = attached.rule_bindings.saved_states.of(attached.capture.captures)
    return {"version": VERSION, "lanes": optimizers, "weights": attached.weights.to_dict()}


def check_version(state: Mapping[str, Any]) -> None:
    """Raise AttachError for a state of another version, and for what is none."""
    found = state.get("version") if isinstance(state, Mapping) else state
    if found != VERSION:
        raise AttachError(f"this state was saved by another version: {found!r}, expected {VERSION}")


def load(attached: Attached, state: Mapping[str, Any]) -> None:
    """Go on from what `saved` gave; parameters that are new start afresh, by name."""
    attached.rule_bindings.load(state["lanes"], attached.capture.captures)
    attached.weights.load(state.get("weights"))


class OptimizerStates:
    """The states of the optimizers of one session, by the index of their captures."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self.waiting: Mapping[str, Any] = {}  # loaded, and not taken up by a step yet
        self.handed_over: tuple[LearnedState, ...] = ()  # by the session before, and not taken up yet

    def keep(self, states: Mapping[str, Any]) -> None:
        """Keep loaded states until the optimizers that they are of take them up."""
        self.waiting = dict(states)

    def go_on_from(self, learned: tuple[LearnedState, ...]) -> None:
        """Keep what another session has learned until the captures that it is of take it up."""
        self.handed_over = learned

    def learned(self, captures: Iterable[OptimizerCapture]) -> tuple[LearnedState, ...]:
        """The states of all captures, and those that none has taken up yet, for the session that comes next."""
        captures = list(captures)
        states = self.of(captures)
        return (
            *self.handed_over,
            *(
                LearnedState(one.optimizer, frozenset(one.sites.names), states[str(one.index)])
                for one in captures
                if str(one.index) in states
            ),
        )

    def of(self, captures: Iterable[OptimizerCapture]) -> dict[str, Any]:
        """The state of every capture, JSON-safe."""
        found = dict(self.waiting)
        for captured in captures:
            ctx = self._contexts.find(captured)
            if ctx is not None and ctx.bound_rules is not None:
                found[str(captured.index)] = {
                    "step": captured.step,
                    "engine": ctx.bound_rules.state.to_dict(),
                    "checkpoint": ctx.bound_rules.health_tracker.to_dict(),
                }
        return found

    def take_up(self, captured: OptimizerCapture, bound_rules: OptimizerRules) -> None:
        """Go on from what was loaded for this capture, or learned by the session before, if anything was."""
        learned = next((one for one in self.handed_over if one.is_of(captured)), None)
        if learned is not None:
            self.handed_over = tuple(one for one in self.handed_over if one is not learned)
            self._go_on(captured, bound_rules, learned.state)
            if learned.abandoned:
                bound_rules.discard_rate()
        index = str(captured.index)
        found = self.waiting.get(index)
        if found is None:
            return
        self._go_on(captured, bound_rules, found)
        self.waiting = {key: value for key, value in self.waiting.items() if key != index}

    @staticmethod
    def _go_on(captured: OptimizerCapture, bound_rules: OptimizerRules, state: Mapping[str, Any]) -> None:
        bound_rules.load(state)
        captured.resume_at(int(state["step"]))
