"""Orders for one step, and the rules that ask for them; the orders of several rules joined.

Axes: S sites.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradwatch.records.snapshot import BoolArray

PARTLY = "some gradients had been changed when it failed"
"""Noted on the exception of an action that failed halfway."""
OnError = Literal["pass", "skip_step", "stop"]
ON_ERROR: tuple[OnError, ...] = ("pass", "skip_step", "stop")
"""What a rule may ask for where an action fails, mildest first."""
CLIP_SECTION = "clip:"
"""What the policies of a file's `clip:` section are called where a rule is named; no rule can have such an id."""


@dataclass(frozen=True, slots=True)
class Order:
    """One action a rule asked for: `action` as spelled in `do:`; `shadow` = say so but do nothing.

    `site` is the worst site it is about ("" = the total), `count` how many. `before` and `after` are the norm there
    without and with this action, the user's own clip included in both, and `coefficient` the multiplier; None where
    there is no such number: a norm that is not finite, a step that was skipped. A rule in shadow mode reports what it
    would have done.
    """

    rule: str
    action: str
    shadow: bool = False
    site: str = ""
    count: int = 0
    before: float | None = None
    after: float | None = None
    coefficient: float | None = None

    @property
    def changed_gradients(self) -> bool:
        """True if the optimizer has got other gradients by it; not of a step that was skipped."""
        return not self.shadow and (self.coefficient is not None or self.action == "zero_nonfinite")


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One-off orders at one step boundary; a join-semilattice under `|`, so rule order can never matter.

    `skip` leaves parameters and optimizer state bit-identical; `stop` raises `TrainingStopped`; `max_norm` is
    the strictest bound on the total norm (None = none). `coef[S]` float32 multiplies each site's gradient (None =
    1 everywhere); joined, the smallest holds. `zero[S]`: the non-finite elements of these sites' gradients become
    0, and they are not multiplied. `elementwise`: the standing policies that treat elements or rows apart are
    carried out too (`gradwatch.actions.elementwise_clip`). `orders` says which rules asked for what. Where several are
    asked for: stop over skip over zero over `coef` and `max_norm`, of which the smaller factor is applied, once.
    `on_error`: what is done should carrying it out fail, the strictest of what those rules ask for.
    """

    skip: bool = False
    stop: bool = False
    max_norm: float | None = None
    orders: frozenset[Order] = frozenset()
    coef: NDArray[np.float32] | None = None
    zero: BoolArray | None = None
    elementwise: bool = False
    on_error: OnError = "pass"

    @property
    def touches(self) -> bool:
        """True if gradients are to be changed, not only kept from the optimizer."""
        factors = self.max_norm is not None or self.coef is not None
        return factors or self.zero is not None or self.elementwise

    @property
    def acts(self) -> bool:
        """True if anything is to be done at all."""
        return self.skip or self.stop or self.touches

    def at(self, own: Any) -> Decision:
        """The same orders for the sites that `own` (an index array or slice) picks."""
        if self.coef is None and self.zero is None:
            return self
        coef = None if self.coef is None else self.coef[own]
        return replace(self, coef=coef, zero=None if self.zero is None else self.zero[own])

    def without_zero(self) -> Decision:
        """The same orders but for the zeroing, which is reported as in shadow mode."""
        orders = frozenset(
            replace(order, shadow=True) if order.action == "zero_nonfinite" else order
            for order in self.orders
        )
        return replace(self, zero=None, orders=orders)

    def shadowed(self) -> Decision:
        """The same orders, none of them carried out: what would have been done, as in `mode: shadow`."""
        return Decision(orders=frozenset(replace(order, shadow=True) for order in self.orders))

    def __or__(self, other: Decision) -> Decision:
        bounds = [bound for bound in (self.max_norm, other.max_norm) if bound is not None]
        return Decision(
            skip=self.skip or other.skip,
            stop=self.stop or other.stop,
            max_norm=min(bounds) if bounds else None,
            orders=self.orders | other.orders,
            coef=_joined(np.minimum, self.coef, other.coef),
            zero=_joined(np.logical_or, self.zero, other.zero),
            elementwise=self.elementwise or other.elementwise,
            on_error=max(self.on_error, other.on_error, key=ON_ERROR.index),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decision):
            return NotImplemented
        plain = (self.skip, self.stop, self.max_norm, self.orders, self.elementwise, self.on_error)
        its = (other.skip, other.stop, other.max_norm, other.orders, other.elementwise, other.on_error)
        return plain == its and _same(self.coef, other.coef) and _same(self.zero, other.zero)

    __hash__ = None  # type: ignore[assignment]  # it holds arrays


def _joined(join: Any, one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else join(one, other)


def _same(one: Any, other: Any) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))
