"""Deviation of a step from its usual levels: of its gradients, and of its loss."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gradwatch.records.finding import AS_USUAL

TWICE = (
    "a gradient is differentiated again in this step (`create_graph=True`): what comes to the layers so does not come "
    "by way of the model's outputs, and norms do not show where it began"
)


@dataclass(frozen=True, slots=True)
class Deviation:
    """Factors by which a step is off its usual levels, as far as they are known.

    `norms`: of the gradients, by the name of their parameter. `loss`: None where its usual level is not known. `names`
    are those of the parameters in the order of the forward, `few` those of one or two elements.
    """

    norms: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None
    names: Sequence[str] = ()
    few: Collection[str] = ()

    @property
    def furthest(self) -> float:
        """The largest factor of a gradient; NaN where none is known."""
        return max((one for one in self.norms.values() if 0 < one < math.inf), default=math.nan)

    @property
    def loss_is_as_usual(self) -> bool:
        """True if the loss is known to be at its usual level."""
        return self.loss is not None and 1 / AS_USUAL <= self.loss <= AS_USUAL
