"""The policies that treat elements or rows of a gradient apart: their hyper-parameters.

A norm does not tell what they do, so they have no `coefficients`; `gradwatch.actions.elementwise` holds the torch that
carries them out, and says what happens where several policies cover one parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwatch.policies.policy import AnyPolicy, Positive, register_policy

MARGIN = 1.0 + 1e-5
"""More than a norm as it was read can be too small by."""


class ElementwisePolicy(AnyPolicy):
    """A method that works on the elements of one parameter's gradient and remembers nothing."""

    __slots__ = ()

    rowwise: ClassVar[bool] = False
    """Whether it looks at whole rows, which a sharded parameter may not have."""

    def idle(self, norm: float) -> bool:
        """Whether a gradient of this L2 norm surely passes as found, and need not be looked at."""
        return False


@register_policy
@dataclass(frozen=True, slots=True)
class ClipByValue(ElementwisePolicy):
    """Clamp every element to ±clip_value.

    Changes the direction of the gradient, unlike `norm`. The reference is `torch.nn.utils.clip_grad_value_`, which
    also turns Inf into clip_value; here an element that is not finite passes as found.
    """

    method: ClassVar[str] = "value"

    clip_value: Positive

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
