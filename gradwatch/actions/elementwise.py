"""Clip policies that treat the elements or the rows of a gradient apart: `value`, `agc`, `centralize`.

What happens to a parameter that several policies of `clip:` cover, these and those that make one factor of a norm:

1. `centralize` comes first, being a transformation and no bound: the rest works on its result.
2. Every other policy makes its candidate from that one gradient, none from another's result. The factors come from
   norms as found at the boundary, before `centralize`, which can only lower them: bounds still hold.
3. Of the candidates each element takes the one of smallest magnitude. So the strictest wins, once, and the order in
   the file never matters.

What is not finite passes as found: an element for `value`, a row for `agc` (its norm) and `centralize` (its mean).
So one bad element spreads to no other, and the verdict on it is a rule's. Sparse gradients are refused.

No operation here waits for a device. Where the host waits for the norms anyway, what these policies leave is measured
before it is applied, for the Record; on a device, and where ranks hold shards, `coef` and `norm_applied` are without
their share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gradwatch.errors import GradwatchError
from gradwatch.policies import AdaptiveGradientClip, Centralize, ClipByValue, ElementwisePolicy
from gradwatch.reading import foreach
from gradwatch.reading.layouts import REDUCED, local
from gradwatch.records.snapshot import BoolArray

LEAST = 1e-6
"""The least that a row's gradient norm is taken for, as in timm and optax; it only keeps from dividing by 0."""

Scale = float | Tensor


class Elementwise:
    """The elementwise policies over the K parameters of one capture; `at[k]` those that cover parameter k."""

    def __init__(self, policies: Sequence[tuple[ElementwisePolicy, BoolArray]], names: Sequence[str]) -> None:
        self._names = names
        self.at: dict[int, tuple[ElementwisePolicy, ...]] = {}
        for policy, mask in policies:
            for k in np.flatnonzero(mask).tolist():  # sync: numpy
                self.at[k] = (*self.at.get(k, ()), policy)

    def shaped(
        self,
        grads: Sequence[Tensor | None],
        params: Sequence[Tensor],
        factors: Mapping[int, Scale],
        scale: Scale = 1.0,
        norms: Sequence[float] | None = None,
    ) -> dict[int, Tensor]:
        """What all policies together leave of each covered gradient that is there, in new tensors.

        `factors[k]` is what the policies that make factors say of parameter k (absent = 1); `scale` the loss scale
        that gradients still carry. `norms[K]`, where the host knows them (without that scale), spare a look at
        gradients that surely pass: those are left out. Raises `GradwatchError` for a sparse gradient.
        """
        found: dict[int, Tensor] = {}
        plain: dict[float, list[int]] = {}  # only clamped, and finite: many in one call
        for k, policies in self.at.items():
            grad = grads[k]
            if grad is None or not grad.numel():
                continue
            if norms is not None and all(policy.idle(norms[k]) for policy in policies):
                continue
            self._check_dense(k, grad)
            finite, factor = norms is not None and math.isfinite(norms[k]), factors.get(k, 1.0)
            only = policies[0]
            whole = isinstance(factor, float) and factor >= 1.0 and isinstance(scale, float)
            if finite and whole and len(policies) == 1 and isinstance(only, ClipByValue):
                plain.setdefault(only.clip_value, []).append(k)
            else:
                found[k] = shaped(grad, local(params[k].detach()), policies, factor, scale, finite)
        for bound, members in plain.items():
            chosen = [grad for k in members if (grad := grads[k]) is not None]
            found.update(zip(members, foreach.clamped(chosen, bound * float(scale)), strict=True))
        return found

    def _check_dense(self, k: int, grad: Tensor) -> None:
        if grad.layout is not torch.strided:
            raise GradwatchError(
                f"clip method {self.at[k][0].method!r} needs a dense gradient, and that of {self._names[k]!r} is "
                "sparse; take the parameter out of its group, or use a method that multiplies"
            )


def shaped(
    grad: Tensor,
    param: Tensor,
    policies: Sequence[ElementwisePolicy],
    factor: Scale = 1.0,
    scale: Scale = 1.0,
    finite: bool = False,
) -> Tensor:
    """What these policies and a factor leave of one dense gradient, as told at the head of this file.

    `finite`: every element is known to be.
    """
    base = grad
    if any(isinstance(policy, Centralize) for policy in policies):
        base = centralized(grad)
    made = (_candidate(policy, base, param, scale, finite) for policy in policies)
    candidates = [candidate for candidate in made if candidate is not None]
    if not candidates or isinstance(factor, Tensor) or factor < 1.0:  # else every candidate is smaller
        candidates.append(base if isinstance(factor, float) and factor == 1.0 else base * factor)
    smallest = candidates[0]
    for candidate in candidates[1:]:
        smallest = torch.where(candidate.abs() < smallest.abs(), candidate, smallest)
    return smallest


def _candidate(
    policy: ElementwisePolicy, grad: Tensor, param: Tensor, scale: Scale, finite: bool
) -> Tensor | None:
    if isinstance(policy, ClipByValue):
        return clamped(grad, policy.clip_value * scale, finite)
    if isinstance(policy, AdaptiveGradientClip):
        return by_rows(grad, param, policy.ratio, policy.eps, scale)
    return None


def clamped(grad: Tensor, bound: Scale, finite: bool = False) -> Tensor:
    """Every element within ±bound, but those that are not finite as found; `torch.nn.utils.clip_grad_value_`."""
    inside = torch.clamp(grad, -bound, bound)  # type: ignore[arg-type]  # both numbers, or both tensors
    return inside if finite else torch.where(torch.isfinite(grad), inside, grad)


def by_rows(grad: Tensor, param: Tensor, ratio: float, eps: float, scale: Scale = 1.0) -> Tensor:
    """Each row's norm at most ratio·max(‖row of the parameter‖, eps); `adaptive_clip_grad` of timm and optax."""
    most = row_norms(param).clamp(min=eps) * ratio * scale
    norms = row_norms(grad)
    clipped = grad * (most / norms.clamp(min=LEAST))
    return torch.where((norms > most) & torch.isfinite(norms), clipped, grad)


def row_norms(tensor: Tensor) -> Tensor:
    """The L2 norm of what each index of the first dimension selects, broadcastable; of all for a vector or scalar."""
    dtype = torch.float32 if tensor.dtype in REDUCED else None
    dims = tuple(range(1, tensor.dim())) if tensor.dim() > 1 else None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=dims is not None, dtype=dtype)
    return norms


def centralized(grad: Tensor) -> Tensor:
    """Less the mean over all dimensions but the first; as found with one dimension or none, or no finite mean."""
    if grad.dim() < 2:
        return grad
    dtype = torch.float32 if grad.dtype in REDUCED else None
    mean = grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True, dtype=dtype)
    return grad - torch.where(torch.isfinite(mean), mean, torch.zeros_like(mean))
