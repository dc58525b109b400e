"""Zeroing, clipping and rescaling of gradients in place, on the host, as a Decision says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.actions.clip_section import ClipSection, Found, carried_scale, put
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.engine.actions.norms_after_actions import factors_of, uniform_factor
from gradwatch.reading.async_copy import host_value, start_copy
from gradwatch.reading.foreach_functions import multiply
from gradwatch.reading.layouts import dense
from gradwatch.reading.single_norm import exact_norm
from gradwatch.records.decision import Decision


def zero_and_clip(
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
            zero_nonfinite(grad)
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


def zero_nonfinite(grad: Tensor) -> None:
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
