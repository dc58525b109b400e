"""Clip policies that treat the elements or the rows of a gradient apart, carried out.

What happens to a parameter that several policies of `clip:` cover, these and those that make one factor of a norm:

1. Those that transform and do not bound (`centralize`) come first: the rest works on their result.
2. Every other policy makes its candidate from that one gradient, none from another's result. The factors come from
   norms as found at the boundary, before that; `centralize` can only lower them, so bounds still hold.
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
from gradwatch.policies import ElementwisePolicy
from gradwatch.reading import foreach_functions
from gradwatch.reading.layouts import local
from gradwatch.records.snapshot import BoolArray

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
        """Apply all policies to each covered gradient that is there; returns new tensors.

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
            clamp = policies[0].clamps_at() if len(policies) == 1 else None
            whole = isinstance(factor, float) and factor >= 1.0 and isinstance(scale, float)
            if finite and whole and clamp is not None:
                plain.setdefault(clamp, []).append(k)
            else:
                found[k] = shaped(grad, local(params[k].detach()), policies, factor, scale, finite)
        for bound, members in plain.items():
            chosen = [grad for k in members if (grad := grads[k]) is not None]
            found.update(zip(members, foreach_functions.clamped(chosen, bound * float(scale)), strict=True))
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
    """Apply these policies and a factor to one dense gradient, as described at the head of this file.

    `finite`: every element is known to be.
    """
    base = grad
    for policy in policies:
        if policy.transforms:
            base = policy.shape(base, param, scale, finite)
    candidates = [policy.shape(base, param, scale, finite) for policy in policies if not policy.transforms]
    if not candidates or isinstance(factor, Tensor) or factor < 1.0:  # else every candidate is smaller
        candidates.append(base if isinstance(factor, float) and factor == 1.0 else base * factor)
    smallest = candidates[0]
    for candidate in candidates[1:]:
        smallest = torch.where(candidate.abs() < smallest.abs(), candidate, smallest)
    return smallest
