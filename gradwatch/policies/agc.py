"""`agc`: each row of a gradient at most in proportion to the norm of its row of the parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gradwatch.policies.gradient_rows import MARGIN, row_norms
from gradwatch.policies.policy import ElementwisePolicy, Positive, register_policy
from gradwatch.records.snapshot import BoolArray, Sites

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_NORM = 1e-6
"""The least that a row's gradient norm is taken for, as in timm and optax; it only keeps from dividing by 0."""


@register_policy
@dataclass(frozen=True, slots=True)
class AdaptiveGradientClip(ElementwisePolicy):
    """Clip each output row's gradient to ratio·max(‖w‖, eps), w being the row of the parameter (Brock et al. 2021).

    A row is what one index of the first dimension selects; a parameter of one dimension or none is one row. The
    last layer is left alone, as the paper does, unless `last_layer`: by that is meant the module that registered
    the optimizer's last parameter. The reference is `adaptive_clip_grad` of timm, and that of optax.
    """

    method: ClassVar[str] = "agc"
    rowwise: ClassVar[bool] = True

    ratio: Positive = 0.01
    eps: Positive = 1e-3
    last_layer: bool = False

    def shape(self, grad: Tensor, param: Tensor, scale: float | Tensor, finite: bool) -> Tensor:
        """Row by row; a row whose norm is not finite passes."""
        return by_rows(grad, param, self.ratio, self.eps, scale)

    def covered(self, mask: BoolArray, sites: Sites) -> BoolArray:
        """Mask without the last layer, unless `last_layer`."""
        return mask if self.last_layer else mask & ~_of_last_layer(sites)

    def misfit(self, covered: int, series: int) -> tuple[str, str] | None:
        """Refusal where the model has nothing but the last layer."""
        if covered:
            return None
        return "agc leaves the last layer alone, and nothing else is there", "set `last_layer: true`"

    def idle(self, norm: float) -> bool:
        """No row's norm is larger than the whole, and none is bounded below ratio·eps."""
        return norm * MARGIN <= self.ratio * self.eps


def by_rows(grad: Tensor, param: Tensor, ratio: float, eps: float, scale: float | Tensor = 1.0) -> Tensor:
    """Each row's norm at most ratio·max(‖row of the parameter‖, eps); `adaptive_clip_grad` of timm and optax."""
    most = row_norms(param).clamp(min=eps) * ratio * scale
    norms = row_norms(grad)
    clipped = grad * (most / norms.clamp(min=SMALLEST_NORM))
    return clipped.where((norms > most) & norms.isfinite(), grad)


def _of_last_layer(sites: Sites) -> BoolArray:
    """bool[S]: the parameters of the module that registered the last one."""
    depths = np.where([kind == "param" for kind in sites.kinds], sites.depths, -1)
    modules = [name.rpartition(".")[0] for name in sites.names]
    last = modules[int(np.argmax(depths))] if len(sites) else ""
    return (depths >= 0) & np.array([module == last for module in modules], np.bool_)
