"""The standing policies of `clip:` on the gradients of one capture: on the host as decided, on a device without it.

On a device a clip by norm, of each parameter, of groups and of the total, is a few 0-dim tensors that never leave it:
the norms are there already, their factors are made of them, and `_foreach_mul_` takes them as they are. A group's
factor multiplies its members in one launch; factors by parameter take a launch each.

Axes: K parameters of a capture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.actions.elementwise_clip import Elementwise, Scale
from gradwatch.reading import foreach_functions
from gradwatch.reading.async_copy import on_host
from gradwatch.reading.batched_norms import CpuReader
from gradwatch.reading.foreach_norms import DeviceNorms, clip_factor


@dataclass(frozen=True, slots=True)
class NormBound:
    """A bound on the norm of each of `series`, which are positions of the parameters that make them up."""

    max_norm: float
    series: tuple[tuple[int, ...], ...]


class Found(NamedTuple):
    """The gradients of K parameters as found at the boundary; `scale`, a loss scale that they still carry."""

    grads: Sequence[Tensor | None]
    params: Sequence[Tensor]
    scale: float


@dataclass(slots=True, eq=False)
class ClipSection:
    """The `clip:` section for one capture beside a bound on the total norm.

    `bounds` are what a device can keep to by itself; `ahead` holds what `elementwise` makes of the gradients of the
    step at hand, from when it was measured until it is applied.
    """

    elementwise: Elementwise | None = None
    bounds: tuple[NormBound, ...] = ()
    ahead: dict[int, Tensor] | None = None
    _reader: CpuReader = field(default_factory=CpuReader)

    # -- on the host -------------------------------------------------------------------------------------

    def measure(self, found: Found, factors: NDArray[np.float32], norms: Sequence[float]) -> dict[int, float]:
        """The norms that the elementwise policies will leave, by position; what they leave is kept for `take`.

        `norms[K]` are those of the gradients as found. Positions that surely pass are left out.
        """
        self.ahead = None
        self.ahead = self._made(found, factors, norms)
        return self._norms(self.ahead, found.scale)

    def take(self, found: Found, factors: NDArray[np.float32]) -> dict[int, Tensor]:
        """Return once what `measure` prepared; prepare it now where it could not."""
        ahead, self.ahead = self.ahead, None
        return self._made(found, factors, None) if ahead is None else ahead

    def _made(
        self, found: Found, factors: NDArray[np.float32], norms: Sequence[float] | None
    ) -> dict[int, Tensor]:
        if self.elementwise is None:
            return {}
        by_position = {k: float(factors[k]) for k in self.elementwise.at}
        return self.elementwise.shaped(found.grads, found.params, by_position, found.scale, norms)

    def _norms(self, made: Mapping[int, Tensor], scale: float) -> dict[int, float]:
        """The L2 norm of each of these tensors, without the loss scale they carry; waits for a device."""
        tensors = list(made.values())
        if all(map(on_host, tensors)):
            norms = np.sqrt(self._reader.read(tensors).squares())
        else:  # the host decides this step, so it has waited for the norms already
            norms = np.array([float(torch.linalg.vector_norm(each, dtype=torch.float32)) for each in tensors])
        return {k: float(norm) / (scale or math.nan) for k, norm in zip(made, norms, strict=True)}

    # -- on a device -------------------------------------------------------------------------------------

    def apply_on_device(
        self,
        reading: DeviceNorms,
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
        put(after, grads)
        multiply({k: factor for k, factor in factors.items() if k not in after}, grads)

    def _factors(self, reading: DeviceNorms, max_norm: float | None, carried: Scale) -> dict[int, Tensor]:
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
            foreach_functions.multiply(members, factor)
    if alone:
        foreach_functions.multiply([grad for grad, _ in alone], [factor for _, factor in alone])


def put(made: Mapping[int, Tensor], grads: Sequence[Tensor | None]) -> None:
    """Write these values into the gradients they were made of."""
    pairs = [(grad, tensor) for k, tensor in made.items() if (grad := grads[k]) is not None]
    if pairs:
        foreach_functions.overwrite([grad for grad, _ in pairs], [tensor for _, tensor in pairs])


def carried_scale(optimizer: Optimizer | None) -> Scale:
    """Divisor that a fused optimizer will apply to its gradients: a loss scale, a clip of the user's own, or both."""
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, Tensor) else 1.0
