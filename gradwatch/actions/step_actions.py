"""Carry out a decision on the gradients of one step at its boundary, and undo it after the step.

Order where several things are asked for: stop over skip over zero over clip; a skipped step is not clipped. All
factors come from the gradients as found at the boundary and are applied once; a bound on the total holds for what
zeroing leaves too, unless the gradients are sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.actions.amp_overrides import AmpOverrides, divides
from gradwatch.actions.clip_section import ClipSection, carried_scale
from gradwatch.actions.lbfgs_and_sam import ClosureCalls
from gradwatch.actions.on_error import by_rule, in_place_of, put_aside, put_back
from gradwatch.actions.skip.skip import StepSkipper
from gradwatch.actions.zero_and_clip import zero_and_clip
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.policies.norm import clip_coefficient
from gradwatch.reading.foreach_norms import DeviceNorms, clip, clip_factor
from gradwatch.reading.gradient_writes import versions_of
from gradwatch.records.decision import PARTLY, Decision

SMALLEST = float(np.finfo(np.float32).tiny)
"""Factors below this have no reciprocal in float32, or not all their digits."""


class Outcome(NamedTuple):
    """The part of a Decision that was really carried out.

    `error` is what kept it from being as decided, `passing` one that a second try overcame; None where there was none.
    """

    done: Decision
    error: Exception | None = None
    passing: Exception | None = None


class StepActions:
    """Carries out Decisions on the gradients of one optimizer, and undoes what lasts for the length of a step.

    `failed(component, error)` counts an internal error.
    """

    __slots__ = ("_amp", "_failed", "_skipper", "held")

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self._skipper: StepSkipper | None = None
        self._amp = AmpOverrides()
        self.held = False  # something may be set aside for the step under way, or set on its optimizer

    def close(self) -> None:
        """Restore any gradient set aside, and `found_inf` as it was."""
        self._amp.restore()
        if self.held:
            self.release(finished=True)

    def apply(
        self,
        optimizer: Optimizer,
        captured: OptimizerCapture,
        decision: Decision,
        evaluations: ClosureCalls | None,
        max_norm: float | None = None,
        clip_section: ClipSection | None = None,
    ) -> Outcome:
        """Do what was decided of a step on the host, but for a stop; `evaluations` is its closure's, None without one.

        `max_norm` is the file's own bound on the total, which holds where the action of a rule fails; `clip_section`
        what the file clips beside the total. Where an action fails, the gradient passes unchanged, or what the
        rule's `on_error` says is done instead.

        What fails is tried once more, if nothing was changed or all of it could be restored: a passing error on one
        rank must not make it diverge from the others, who have none and act.
        """
        if decision.stop:
            return Outcome(decision)
        found = versions_of(captured.grads()) if decision.touches and not decision.skip else None
        aside = put_aside(captured) if found is not None and captured.on_cpu and by_rule(decision) else {}
        passing: Exception | None = None
        for last in (False, True):
            try:
                self._carry_out(optimizer, captured, decision, evaluations, clip_section)
            except Exception as error:
                self.restore()  # the gradient passes unchanged
                self._amp.restore()
                changed = found is not None and versions_of(captured.grads()) != found
                if changed and put_back(captured, aside):
                    changed, found = False, versions_of(captured.grads())
                if changed or last:
                    instead = in_place_of(decision, max_norm)
                    return Outcome(
                        self._instead(optimizer, captured, instead, evaluations, error, changed), error
                    )
                passing = error
            else:
                break
        return Outcome(decision, passing=passing)

    def _instead(
        self,
        optimizer: Optimizer,
        captured: OptimizerCapture,
        instead: Decision,
        evaluations: ClosureCalls | None,
        error: Exception,
        changed: bool,
    ) -> Decision:
        """Do what is to be done where a Decision failed; `changed`: after it had changed some gradients."""
        if changed:
            error.__dict__.setdefault("__notes__", []).append(PARTLY)
        try:
            self._carry_out(
                optimizer, captured, instead, evaluations, None
            )  # it asks for nothing per element
        except Exception:  # not even that can be done: it is told as a failure all the same
            self.restore()
            instead = replace(instead, skip=False, max_norm=None)
        return instead

    def clip_again(
        self, captured: OptimizerCapture, decision: Decision, total: float, clip_section: ClipSection | None
    ) -> None:
        """Clip a later gradient of a step that evaluates its closure several times; `total` is its norm."""
        if decision.max_norm is not None and only_total(decision):
            captured.multiply(clip_coefficient(total, decision.max_norm))
        elif decision.touches:
            zero_and_clip(captured, decision, total, clip_section)

    def clip_ahead(self, optimizer: Optimizer, captured: OptimizerCapture, max_norm: float) -> bool:
        """Clip a step whose verdict may wait: no rule has a say in it, and the total is known at once.

        The verdict finds the same total later, and has the same coefficient. False where it failed, and the host is
        to decide; not where some gradients were multiplied before that, for they must not be multiplied twice.
        """
        try:
            if not captured.surely_within(max_norm):
                self._multiply(optimizer, captured, clip_coefficient(captured.total_applied(), max_norm))
        except Exception as error:
            self._failed("action", error)
            return captured.written()
        return True

    def _carry_out(
        self,
        optimizer: Optimizer,
        captured: OptimizerCapture,
        decision: Decision,
        evaluations: ClosureCalls | None,
        clip_section: ClipSection | None,
    ) -> None:
        if evaluations is not None:
            evaluations.note_decision(decision.skip, decision.max_norm)
        if decision.skip:
            if evaluations is None or not evaluations.must_finish:
                self.held = True
                self._skipper = StepSkipper(optimizer)
                self._skipper.begin(at_once=evaluations is not None)
        elif decision.max_norm is not None and only_total(decision):
            coefficient = clip_coefficient(captured.total_applied(), decision.max_norm)
            self._multiply(optimizer if evaluations is None else None, captured, coefficient)
        elif decision.touches:
            total = captured.total_applied() if decision.max_norm is not None else 0.0
            zero_and_clip(captured, decision, total, clip_section)

    def _multiply(
        self, optimizer: Optimizer | None, captured: OptimizerCapture, coefficient: np.float32
    ) -> None:
        """Multiply every gradient; a fused optimizer does it on its way, within its own rounding."""
        # The divisor of a fused optimizer is a float32 too.
        if (
            coefficient == 1
            or coefficient < SMALLEST
            or optimizer is None
            or not divides(optimizer, captured)
        ):
            captured.multiply(coefficient)
        else:
            self.held = True
            device = captured.params[0].device
            self._amp.divide(optimizer, torch.tensor(1.0 / float(coefficient), device=device))

    def on_device(
        self,
        optimizer: Optimizer,
        captured: OptimizerCapture,
        max_norm: float | None,
        clip_section: ClipSection | None,
        skips: bool,
    ) -> None:
        """Act as the host would if it knew the numbers, with a verdict that never leaves the device.

        `max_norm` bounds the total norm, `clip_section` is what is clipped beside it; `skips`: a step whose
        gradients are not finite is skipped.
        """
        reading = captured.on_device
        if reading is None or not (skips or max_norm is not None or clip_section is not None):
            return
        # Norms are float64 sums: finite wherever every element is, unless these are float64 themselves.
        nonfinite = reading.nonfinite() if skips else None
        if max_norm is not None or clip_section is not None:
            self._clip_on_device(optimizer, captured, reading, max_norm, clip_section)
        if nonfinite is not None:
            self.held = True
            self._amp.skip_if(optimizer, nonfinite)

    def _clip_on_device(
        self,
        optimizer: Optimizer,
        captured: OptimizerCapture,
        reading: DeviceNorms,
        max_norm: float | None,
        clip_section: ClipSection | None,
    ) -> None:
        total = reading.device_total()  # loss scale included
        if total is None:
            return
        scale = carried_scale(optimizer)
        carried = scale.to(total.device, non_blocking=True) if isinstance(scale, Tensor) else scale
        if clip_section is not None:
            clip_section.apply_on_device(reading, captured.grads(), captured.params, max_norm, carried)
        elif max_norm is not None and divides(optimizer, captured):
            self.held = True
            self._amp.divide(optimizer, torch.reciprocal(clip_factor(total / carried, max_norm)))
        elif max_norm is not None:
            clip(captured.grads(), total / carried, max_norm)

    def release(self, finished: bool) -> None:
        """Restore everything as it was before the step, which has `finished` or raised."""
        self.held = False
        try:
            self.restore(finished)
        finally:
            self._amp.restore()

    def restore(self, finished: bool = True) -> None:
        """Put back what a skip set aside, but no gradient where a newer backward has already made one.

        `finished` False: the step raised, and perhaps a newer backward has begun; its gradients are released.
        """
        skipper, self._skipper = self._skipper, None
        if skipper is not None:
            skipper.restore(finished)
            skipper.release()


def only_total(decision: Decision) -> bool:
    """True if all that is to be done to the gradients is to bound their total norm."""
    return decision.coef is None and decision.zero is None and not decision.elementwise
