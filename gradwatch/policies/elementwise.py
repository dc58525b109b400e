"""The policies that treat elements or rows of a gradient apart: `value`, `agc`, `centralize`.

`gradwatch.actions.elementwise` says what happens where several policies cover one parameter. torch is imported when a
gradient is there: rule files are read without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gradwatch.policies.policy import ElementwisePolicy, Positive, register_policy
from gradwatch.records.snapshot import BoolArray, Sites

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MARGIN = 1.0 + 1e-5
"""More than a norm as it was read can be too small by."""
SMALLEST_NORM = 1e-6
"""The least that a row's gradient norm is taken for, as in timm and optax; it only keeps from dividing by 0."""


@register_policy
@dataclass(frozen=True, slots=True)
class ClipByValue(ElementwisePolicy):
    """Clamp every element to ±clip_value.

    Changes the direction of the gradient, unlike `norm`. The reference is `torch.nn.utils.clip_grad_value_`, which
    also turns Inf into clip_value; here an element that is not finite passes as found.
    """

    method: ClassVar[str] = "value"

    clip_value: Positive

    def shape(self, grad: Tensor, param: Tensor, scale: float | Tensor, finite: bool) -> Tensor:
        """Every element within ±clip_value, but those that are not finite."""
        return clamped(grad, self.clip_value * scale, finite)

    def clamps_at(self) -> float:
        """`clip_value`."""
        return self.clip_value

    def idle(self, norm: float) -> bool:
        """No element is larger than the norm."""
        return norm * MARGIN <= self.clip_value


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
        """Without the last layer, unless `last_layer`."""
        return mask if self.last_layer else mask & ~_of_last_layer(sites)

    def misfit(self, covered: int, series: int) -> tuple[str, str] | None:
        """Refusal where the model has nothing but the last layer."""
        if covered:
            return None
        return "agc leaves the last layer alone, and nothing else is there", "set `last_layer: true`"

    def idle(self, norm: float) -> bool:
        """No row's norm is larger than the whole, and none is bounded below ratio·eps."""
        return norm * MARGIN <= self.ratio * self.eps


@register_policy
@dataclass(frozen=True, slots=True)
class Centralize(ElementwisePolicy):
    """Subtract from each row of a gradient its mean, over all dimensions but the first (Yong et al. 2020).

    A parameter of one dimension or none is left alone. A transformation rather than a bound, so it comes before
    every other policy that covers the parameter. The reference is `centralize_gradient` of
    https://github.com/kozistr/pytorch_optimizer.
    """

    method: ClassVar[str] = "centralize"
    rowwise: ClassVar[bool] = True
    transforms: ClassVar[bool] = True

    def shape(self, grad: Tensor, param: Tensor, scale: float | Tensor, finite: bool) -> Tensor:
        """Less the mean of each row; a row without a finite mean passes."""
        return centralized(grad)


def clamped(grad: Tensor, bound: float | Tensor, finite: bool = False) -> Tensor:
    """Every element within ±bound, but those that are not finite as found; `torch.nn.utils.clip_grad_value_`."""
    inside = grad.clamp(-bound, bound)  # type: ignore[arg-type]  # both numbers, or both tensors
    return inside if finite else inside.where(grad.isfinite(), grad)


def by_rows(grad: Tensor, param: Tensor, ratio: float, eps: float, scale: float | Tensor = 1.0) -> Tensor:
    """Each row's norm at most ratio·max(‖row of the parameter‖, eps); `adaptive_clip_grad` of timm and optax."""
    most = row_norms(param).clamp(min=eps) * ratio * scale
    norms = row_norms(grad)
    clipped = grad * (most / norms.clamp(min=SMALLEST_NORM))
    return clipped.where((norms > most) & norms.isfinite(), grad)


def row_norms(tensor: Tensor) -> Tensor:
    """The L2 norm of what each index of the first dimension selects, broadcastable; of all for a vector or scalar."""
    import torch

    dims = tuple(range(1, tensor.dim())) if tensor.dim() > 1 else None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=dims is not None, dtype=_wide(tensor))
    return norms


def centralized(grad: Tensor) -> Tensor:
    """Less the mean over all dimensions but the first; as found with one dimension or none, or no finite mean."""
    if grad.dim() < 2:
        return grad
    mean = grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True, dtype=_wide(grad))
    return grad - mean.where(mean.isfinite(), mean.new_zeros(()))


def _wide(tensor: Tensor) -> torch.dtype | None:
    """The dtype to add up in: float32 for half precision, else the tensor's own."""
    import torch

    return torch.float32 if tensor.dtype.itemsize < torch.float32.itemsize else None


def _of_last_layer(sites: Sites) -> BoolArray:
    """bool[S]: the parameters of the module that registered the last one."""
    depths = np.where([kind == "param" for kind in sites.kinds], sites.depths, -1)
    modules = [name.rpartition(".")[0] for name in sites.names]
    last = modules[int(np.argmax(depths))] if len(sites) else ""
    return (depths >= 0) & np.array([module == last for module in modules], np.bool_)
