"""The norms that a decision will leave, for the Record: known before it is carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradwatch.actions.clip_section import Found, carried_scale
from gradwatch.actions.zero_and_clip import left_by_zeroing
from gradwatch.engine.actions.norms_after_actions import factors_of, reshaped, unclipped, with_clip_order
from gradwatch.errors import GradwatchError
from gradwatch.reading.async_copy import host_value, start_copy
from gradwatch.records.decision import Decision
from gradwatch.records.snapshot import Snapshot
from gradwatch.session.active_or_paused import Activity
from gradwatch.session.pipeline.step_context import StepContext


class NormApplied:
    """Snapshots as decisions will leave them; `clips`: the rule file has a `clip:` section."""

    def __init__(self, activity: Activity, clips: bool) -> None:
        self._activity = activity
        self._clips = clips

    def of(self, step: StepContext, decision: Decision, grads_present: bool) -> tuple[Decision, Snapshot]:
        """The Snapshot as the decision will leave it, and the decision with a word for the policies of `clip:`."""
        found = snapshot = step.found
        captured, touches = step.captured, decision.touches
        if touches:
            total = step.shared.window.total_applied()
            left: dict[int, float] = {}
            zeroed: dict[int, float] = {}
            done = decision.skip or decision.stop or step.rejected or not grads_present
            if decision.zero is not None and not (step.ctx.exchanges or done):
                zeroed = left_by_zeroing(captured.grads(), decision.zero[step.shared.own])
                total = captured.total_applied(zeroed)
                found = replace(found, total_norm_applied=total)
            if decision.elementwise and not done:
                decision, left = self._measured_ahead(step, decision, total)
            snapshot = reshaped(found, decision, total, {} if step.ctx.exchanges else left, zeroed)
        inside = step.bound_rules.bound.clipping.at == "backward" and self._clips
        if (touches and decision.touches) or inside:
            decision = with_clip_order(decision, unclipped(found) if inside else found, snapshot)
        return decision, snapshot

    def _measured_ahead(
        self, step: StepContext, decision: Decision, total: float
    ) -> tuple[Decision, dict[int, float]]:
        """The norms that elementwise policies will leave; the decision without them where they are refused."""
        captured, own = step.captured, step.shared.own
        norms: Sequence[float] = step.shared.window.wait()[1][own].tolist()  # sync: numpy
        grads, clip_section = captured.grads(), step.bound_rules.clip_section
        factors = factors_of(decision.at(own), total, len(grads))
        try:
            if clip_section is not None:
                optimizer = None if captured.optimizer is None else captured.optimizer()
                found = Found(grads, captured.params, host_value(start_copy(carried_scale(optimizer))))
                return decision, clip_section.measure(found, factors, norms)
        except GradwatchError as error:  # for a reason that every rank has
            self._activity.failed("action", error)
            return replace(decision, elementwise=False), {}
        except Exception as error:  # they are made when they are applied, as on the other ranks
            self._activity.failed("action", error)
        return decision, {}
