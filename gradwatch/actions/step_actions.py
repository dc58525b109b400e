"""Carry out a decision on the gradients of one step at its boundary, and undo it after the step.

Order where several things are asked for: stop over skip over zero over clip; a skipped step is not clipped. All
factors come from the gradients as found at the boundary and are applied once; a bound on the total holds for what
zeroing leaves too, unless the gradients are sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.actions.clip_section import ClipSection, Found, carried_scale, put
from gradwatch.actions.closures import ClosureCalls
from gradwatch.actions.skip.skip import StepSkipper
from gradwatch.capture.gradient_writes import versions_of
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.engine.action_outcome import factors_of, uniform_factor
from gradwatch.policies.norm import clip_coefficient
from gradwatch.reading import device
from gradwatch.reading.device import clip_factor, host_value, start_copy
from gradwatch.reading.foreach import multiply
from gradwatch.reading.layouts import dense
from gradwatch.reading.single import exact_norm
from gradwatch.records.snapshot import CLIP_SECTION, PARTLY, Decision, Order
from gradwatch.taps.grad_scaler import supports_scaling

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

    __slots__ = ("_amp_overrides", "_failed", "_skipper", "held")

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self._skipper: StepSkipper | None = None
        self._amp_overrides: list[AmpOverride] = []
        self.held = False  # something may be set aside for the step under way, or set on its optimizer

    def close(self) -> None:
        """Give back any gradient set aside, and `found_inf` as it was."""
        if self._amp_overrides:
            self.restore_amp()
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
                self.restore_amp()
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
            _reshape(captured, decision, total, clip_section)

    def clip_ahead(self, optimizer: Optimizer, captured: OptimizerCapture, max_norm: float) -> bool:
        """Clip a step whose verdict may wait: no rule has a say in it, and the total is known at once.

        The verdict finds the same total later, and tells the same coefficient. False where it failed, and the host is
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
            evaluations.skipped, evaluations.max_norm = decision.skip, decision.max_norm
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
            _reshape(captured, decision, total, clip_section)

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
            self._divide(optimizer, captured, torch.tensor(1.0 / float(coefficient), device=where(captured)))

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
        total = reading.device_total()  # loss scale included
        if total is None:
            return
        scale = carried_scale(optimizer)
        carried = scale.to(total.device, non_blocking=True) if isinstance(scale, Tensor) else scale
        if clip_section is not None:
            clip_section.apply_on_device(reading, captured.grads(), captured.params, max_norm, carried)
        elif max_norm is not None and divides(optimizer, captured):
            self._divide(optimizer, captured, torch.reciprocal(clip_factor(total / carried, max_norm)))
        elif max_norm is not None:
            device.clip(captured.grads(), total / carried, max_norm)
        if skips:
            self._override_amp(optimizer, captured, total)

    def _override_amp(self, optimizer: Optimizer, captured: OptimizerCapture, total: Tensor) -> None:
        """Tell a fused optimizer on the device to skip if the total norm is not finite; no host sync.

        The total is a float64 sum: it is finite wherever every element is, unless they are float64 themselves.
        """
        bad = (~torch.isfinite(total)).to(torch.float32)
        before = getattr(optimizer, "found_inf", None)
        if before is not None:
            bad = torch.maximum(before, bad.to(before.device, non_blocking=True))
        self._set(optimizer, captured, "found_inf", bad)

    def _divide(self, optimizer: Optimizer, captured: OptimizerCapture, divisor: Tensor) -> None:
        """Have a fused optimizer divide its gradients by a 0-dim factor without a further pass over them."""
        before = getattr(optimizer, "grad_scale", None)
        if isinstance(before, Tensor):
            divisor = before * divisor.to(before.device, non_blocking=True)
        self._set(optimizer, captured, "grad_scale", divisor)

    def _set(self, optimizer: Optimizer, captured: OptimizerCapture, name: str, value: Tensor) -> None:
        override = AmpOverride(optimizer, name, value, getattr(optimizer, name, None))
        self.held = True
        self._amp_overrides.append(override)
        setattr(optimizer, name, value)

    def restore_amp(self) -> None:
        """Restore `found_inf` and `grad_scale` as they were; not where other code has set them since."""
        gates, self._amp_overrides = self._amp_overrides, []
        for override in gates:
            override.restore()

    def release(self, finished: bool) -> None:
        """Restore everything as it was before the step, which has `finished` or raised."""
        self.held = False
        try:
            self.restore(finished)
        finally:
            self.restore_amp()

    def restore(self, finished: bool = True) -> None:
        """Put back what a skip set aside, but no gradient where a newer backward has already made one.

        `finished` False: the step raised, and perhaps a newer backward has begun; its gradients are released.
        """
        skipper, self._skipper = self._skipper, None
        if skipper is not None:
            skipper.restore(finished)
            skipper.release()


class AmpOverride(NamedTuple):
    """AMP attribute set on a fused optimizer for one step: `value` in place of `before` (None = nothing)."""

    optimizer: Optimizer
    name: str
    value: Tensor
    before: Any

    def restore(self) -> None:
        """Put it back, not deleted where a GradScaler will do that; not if the script has replaced it."""
        if getattr(self.optimizer, self.name, None) is not self.value:
            return
        if self.before is None:
            delattr(self.optimizer, self.name)
        else:
            setattr(self.optimizer, self.name, self.before)


def only_total(decision: Decision) -> bool:
    """True if all that is to be done to the gradients is to bound their total norm."""
    return decision.coef is None and decision.zero is None and not decision.elementwise


def divides(optimizer: Optimizer, captured: OptimizerCapture) -> bool:
    """True if the optimizer divides its gradients by `grad_scale` itself, as torch's fused ones do.

    Not asked of sharded parameters, whose kernels want the divisor on a mesh.
    """
    return supports_scaling(optimizer) and not captured.distributed


def where(captured: OptimizerCapture) -> torch.device:
    """Device for the divisor of a capture's gradients."""
    return captured.params[0].device


def _reshape(
    captured: OptimizerCapture, decision: Decision, total: float, clip_section: ClipSection | None
) -> None:
    """Zero and multiply gradients in place, as decided: each parameter once; `total` is the norm of all of them."""
    grads = captured.grads()
    zero = np.zeros(len(grads), np.bool_) if decision.zero is None else decision.zero
    if decision.max_norm is not None and zero.any():
        total = captured.total_applied(left_by_zeroing(grads, zero))
    coef = np.where(zero, uniform_factor(decision, total), factors_of(decision, total, len(grads)))
    for k in map(int, np.flatnonzero(zero)):
        if (grad := grads[k]) is not None:
            _zero_nonfinite(grad)
    ahead: dict[int, Tensor] = {}
    if decision.elementwise and clip_section is not None:
        optimizer = None if captured.optimizer is None else captured.optimizer()
        scale = host_value(start_copy(carried_scale(optimizer)))
        ahead = clip_section.take(Found(grads, captured.params, scale), coef)
        put({k: made for k, made in ahead.items() if not zero[k]}, grads)
    factors = torch.from_numpy(coef.copy()).unbind()
    clipped = [
        (grad, factors[k])
        for k, (grad, c) in enumerate(zip(grads, coef, strict=True))
        if grad is not None and c != 1 and (zero[k] or k not in ahead)
    ]
    if clipped:
        grads_, factors_ = map(list, zip(*clipped, strict=True))
        if captured.on_cpu:
            multiply(grads_, factors_)  # as torch multiplies: bit-equal to clip_grad_norm_, in bfloat16 too
        else:
            multiply(grads_, [float(factor) for factor in factors_])  # one launch


def _zero_nonfinite(grad: Tensor) -> None:
    """NaN and Inf elements become 0, in place."""
    values = grad._values() if grad.is_sparse else grad
    values.copy_(torch.where(torch.isfinite(values), values, torch.zeros_like(values)))


def left_by_zeroing(grads: Sequence[Tensor | None], zero: NDArray[np.bool_]) -> dict[int, float]:
    """The L2 norms of the finite elements of those gradients that are to lose the others, by position."""
    left = {}
    for k in map(int, np.flatnonzero(zero)):
        if (grad := grads[k]) is not None:
            values = dense(grad).detach()
            finite = torch.where(torch.isfinite(values), values, torch.zeros_like(values))
            left[k] = exact_norm(finite)[0]
    return left


def by_rule(decision: Decision) -> bool:
    """True if a rule has a part in this, and not only the file's own clip."""
    return any(not order.shadow and order.rule != CLIP_SECTION for order in decision.orders)


def put_aside(captured: OptimizerCapture) -> dict[int, Tensor]:
    """Copies of the gradients, by position, for `put_back`; none where there is no memory for them.

    To divide again would not give back the same bits. Only on the CPU, where what touches many gradients may stop
    halfway: a device is handed all of them in one launch.
    """
    try:
        return {k: grad.detach().clone() for k, grad in enumerate(captured.grads()) if grad is not None}
    except Exception:
        return {}


def put_back(captured: OptimizerCapture, aside: dict[int, Tensor]) -> bool:
    """Give the gradients their bits again; whether all of them have."""
    grads = captured.grads()
    if len(aside) != sum(grad is not None for grad in grads):
        return False
    try:
        for k, before in aside.items():
            grads[k].copy_(before)  # type: ignore[union-attr]  # there are no fewer than before
    except Exception:
        return False
    return True


def in_place_of(decision: Decision, max_norm: float | None) -> Decision:
    """Fallback for a Decision that was not carried out: nothing, a skip or a stop, as its rules ask.

    The file's own bound on the total, `max_norm`, holds all the same, unless it was that which failed.
    """
    instead = decision.on_error
    if instead == "pass":
        return Decision(max_norm=max_norm if by_rule(decision) else None)
    rules = {order.rule for order in decision.orders if not order.shadow}
    orders = frozenset(Order(rule, instead) for rule in rules)
    return Decision(skip=instead == "skip_step", stop=instead == "stop", orders=orders)


def why_stopped(decision: Decision, captured: OptimizerCapture) -> str:
    """Message of `TrainingStopped` for a Decision to stop."""
    rules = sorted({order.rule for order in decision.orders if order.action == "stop" and not order.shadow})
    said = f"rule {', '.join(rules)} says stop" if rules else "too many steps in a row were skipped"
    return f"gradwatch stopped training at step {captured.step}: {said}"
