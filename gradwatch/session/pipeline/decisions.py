"""The decision on a step: asked of the engine, given to the user's callback, and of it what is permitted."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from gradwatch.capture.snapshot_assembly import as_float32
from gradwatch.engine.actions.permissions import permitted
from gradwatch.engine.actions.rule_actions import without_overridden
from gradwatch.errors import TrainingStopped
from gradwatch.records.decision import Decision, Order
from gradwatch.records.event import Event
from gradwatch.records.snapshot import Snapshot
from gradwatch.records.verdict import UNJUDGED, Verdict
from gradwatch.session.active_or_paused import Activity
from gradwatch.session.binding.optimizer_rules import OptimizerRules
from gradwatch.session.optimizer_context import OptimizerContext
from gradwatch.session.pipeline.step_context import StepContext


class Decisions:
    """Verdicts and decisions of one session; an error in a rule, a policy or the callback costs that alone."""

    def __init__(self, activity: Activity, on_escalate: Callable[[Event], object] | None) -> None:
        self._activity = activity
        self._on_escalate = on_escalate

    def ask(self, bound_rules: OptimizerRules, snapshot: Snapshot) -> tuple[Verdict, Decision]:
        """The engine's verdict; an error in it costs this step's verdict, not its metrics."""
        try:
            verdict, decision = bound_rules.judge(snapshot, self._policy_failed)
        except Exception as error:
            self._activity.failed("engine", error)
            # As the other ranks are about to, which have the same numbers and no error.
            return UNJUDGED, bound_rules.decide_without_verdict(snapshot, self._policy_failed)
        self._activity.judged()
        return verdict, decision

    def _policy_failed(self, error: Exception) -> None:
        """A policy of `clip:` has failed; the verdict, the skip and the other policies are not its to cost."""
        self._activity.failed("action", error)

    def _escalated(self, verdict: Verdict, decision: Decision) -> Decision:
        """The decision after the user's callback was given the rungs reached on this step: it may want a stop."""
        for event in verdict.events:
            if event.kind == "escalated" and event.actions and self._user_stops(event):
                stop = Decision(stop=True, orders=frozenset({Order(event.rule, "stop")}))
                decision = without_overridden(decision | stop)
        return decision

    def _user_stops(self, event: Event) -> bool:
        """Call the user's `on_escalate`; its errors are counted, but for `TrainingStopped`, which stops training."""
        call = self._on_escalate
        if call is None:
            return False
        try:
            with torch.enable_grad():
                call(event)
        except TrainingStopped:
            return True
        except Exception as error:
            self._activity.failed("on_escalate", error)
        return False

    def clips_again(self, ctx: OptimizerContext, norms: NDArray[np.float64]) -> Decision:
        """Clipping by `clip:` of gradients with these `norms[K]`, made after those that this step was judged by."""
        bound_rules, captured = ctx.rules, ctx.captured
        own = len(norms)
        norm, calls = np.zeros(len(bound_rules.sites), np.float32), np.zeros(len(bound_rules.sites), np.int32)
        norm[:own], calls[:own] = as_float32(norms), norms > 0
        total = math.sqrt(np.dot(norms, norms))
        found = Snapshot(
            captured.index, captured.step, bound_rules.sites, norm, calls, np.ones_like(norm), total, total
        )
        return bound_rules.bound.again(bound_rules.state, found, self._policy_failed).at(slice(0, own))

    def permitted(self, step: StepContext, verdict: Verdict, decision: Decision) -> Decision:
        """The decision as permitted: the user's callback may add a stop, and parts may be refused here."""
        if verdict.events:
            decision = self._escalated(verdict, decision)
        return permitted(
            decision,
            agreed=step.shared.may_act,
            empty=step.window.empty,
            inside_backward=step.captured.inside_backward,
            without_optimizer=step.captured.without_optimizer,
            scaled=step.found.loss_scale is not None,
            report=self._activity.health.report,
        )
