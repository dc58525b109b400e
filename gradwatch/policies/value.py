"""`value`: every element of a gradient clamped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gradwatch.policies.gradient_rows import MARGIN
from gradwatch.policies.policy import ElementwisePolicy, Positive, register_policy

if TYPE_CHECKING:
    from torch import Tensor


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


def clamped(grad: Tensor, bound: float | Tensor, finite: bool = False) -> Tensor:
    """Every element within ±bound, but those that are not finite as found; `torch.nn.utils.clip_grad_value_`."""
    inside = grad.clamp(-bound, bound)  # type: ignore[arg-type]  # both numbers, or both tensors
    return inside if finite else inside.where(grad.isfinite(), grad)
