"""The standing policies of `clip:` on the gradients of one lane: on the host as decided, on a device without it.

On a device a clip by norm, of each parameter, of groups and of the total, is a few 0-dim tensors that never leave it:
the norms are there already, their factors are made of them, and `_foreach_mul_` takes them as they are. A group's
factor multiplies its members in one launch; factors by parameter take a launch each.

Axes: K parameters of a lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.hooks.device import DeviceReading, clip_factor
from gradwatch.hooks.elementwise import Elementwise, Scale, norms_of
from gradwatch.policies import clip_coefficient
from gradwatch.snapshot import Decision


@dataclass(frozen=True, slots=True)
class NormBound:
    """A bound on the norm of each of `series`, which are positions of the parameters that make them up."""

    max_norm: float
    series: tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class StandingClips:
    """What `clip:` asks of one lane beside a bound on the total norm.

    `bounds` are what a device can keep to by itself; `ahead` holds what `elementwise` makes of the gradients of the
    step at hand, from when it was measured until it is applied.
    """

    elementwise: Elementwise | None = None
    bounds: tuple[NormBound, ...] = ()
    ahead: dict[int, Tensor] | None = field(default=None)

    # -- on the host -------------------------------------------------------------------------------------

    def measure(
        self,
        grads: Sequence[Tensor | None],
        params: Sequence[Tensor],
        factors: NDArray[np.float32],
        scale: float,
    ) -> dict[int, float]:
        """The norms that the elementwise policies will leave, by position; what they leave is kept for `take`."""
        if self.elementwise is None:
            return {}
        by_position = {k: float(factors[k]) for k in self.elementwise.at}
        self.ahead = self.elementwise.shaped(grads, params, by_position, scale)
        return norms_of(self.ahead, scale)

    def take(self) -> dict[int, Tensor]:
        """What was made ahead, once."""
        ahead, self.ahead = self.ahead, None
        return ahead or {}

    # -- on a device -------------------------------------------------------------------------------------

    def apply_on_device(
        self,
        reading: DeviceReading,
        grads: Sequence[Tensor | None],
        params: Sequence[Tensor],
        max_norm: float | None,
        carried: Scale,
    ) -> None:
        """Clip by every policy without the host knowing a number; `carried` is the loss scale in the norms."""
        factors = self._factors(reading, max_norm, carried)
        after: dict[int, Tensor] = {}
        if self.elementwise is not None:
            after = self.elementwise.shaped(grads, params, factors, carried)
        for k, tensor in after.items():
            _put(grads[k], tensor)
        multiply({k: factor for k, factor in factors.items() if k not in after}, grads)

    def _factors(self, reading: DeviceReading, max_norm: float | None, carried: Scale) -> dict[int, Tensor]:
        """The smallest factor for each parameter that some bound covers, 0-dim, on its device."""
        norms = reading.each()
        found: dict[int, Tensor] = {}
        everything = () if max_norm is None else (NormBound(max_norm, (tuple(norms),)),)
        for bound in (*everything, *self.bounds):
            for members, norm in _series(bound, norms):
                scale = carried.to(norm.device, non_blocking=True) if isinstance(carried, Tensor) else carried
                made = clip_factor(norm / scale, bound.max_norm)
                factors = [made] * len(members) if made.dim() == 0 else made.unbind()
                for k, factor in zip(members, factors, strict=True):
                    here = factor.to(norms[k].device, non_blocking=True)
                    found[k] = torch.minimum(found[k], here) if k in found else here
        return found


def _series(bound: NormBound, norms: Mapping[int, Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """(positions, their common 0-dim norm) of each group, and once for each device (positions, one norm each)."""
    alone: dict[torch.device, list[int]] = {}
    for series in bound.series:
        members = [k for k in series if k in norms]
        if len(members) == 1:
            alone.setdefault(norms[members[0]].device, []).append(members[0])
        elif members:
            first = norms[members[0]].device
            together = torch.stack([norms[k].to(first, non_blocking=True) for k in members])
            yield members, torch.linalg.vector_norm(together)
    for members in alone.values():
        yield members, torch.stack([norms[k] for k in members])


def multiply(factors: Mapping[int, Tensor], grads: Sequence[Tensor | None]) -> None:
    """Multiply gradients in place by 0-dim tensors; those that share one factor in one call."""
    shared: dict[int, tuple[Tensor, list[Tensor]]] = {}
    for k, factor in factors.items():
        grad = grads[k]
        if grad is not None:
            shared.setdefault(id(factor), (factor, []))[1].append(grad)
    alone = [(members[0], factor) for factor, members in shared.values() if len(members) == 1]
    for factor, members in shared.values():
        if len(members) > 1:
            torch._foreach_mul_(members, factor)
    if alone:
        torch._foreach_mul_([grad for grad, _ in alone], [factor for _, factor in alone])


def _put(grad: Tensor | None, values: Tensor) -> None:
    if grad is not None:
        grad.copy_(values)


def carried_scale(optimizer: Optimizer | None) -> Scale:
    """What a fused optimizer will divide its gradients by: a loss scale, a clip of the user's own, or both."""
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, Tensor) else 1.0


def factors_of(decision: Decision, total: float, count: int) -> NDArray[np.float32]:
    """float32[K]: the factor that a decision comes to for each parameter, `total` being the norm of all of them."""
    uniform = np.float32(1) if decision.max_norm is None else clip_coefficient(total, decision.max_norm)
    if decision.coef is None:
        return np.full(count, uniform, np.float32)
    # A bound on the total, reached or not, allows no factor above 1: else what it bounds could grow beyond it.
    return decision.coef if decision.max_norm is None else np.minimum(decision.coef, uniform)
