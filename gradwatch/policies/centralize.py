"""`centralize`: each row of a gradient less its mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwatch.policies.gradient_rows import accumulator
from gradwatch.policies.policy import ElementwisePolicy, register_policy

if TYPE_CHECKING:
    from torch import Tensor


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


def centralized(grad: Tensor) -> Tensor:
    """Less the mean over all dimensions but the first; as found with one dimension or none, or no finite mean."""
    if grad.dim() < 2:
        return grad
    mean = grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True, dtype=accumulator(grad))
    return grad - mean.where(mean.isfinite(), mean.new_zeros(()))
