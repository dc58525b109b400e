"""Limits: what a gradient may be before anybody has seen it. Published before each backward; numpy only.

A threshold detector's score is monotone, so `score(x) > above` is the same as `x > limit`, and the limit depends on
past steps only. A hook that knows it clips a spike in the spike's own backward; the boundary then finds the breach by
the same number and raises the alert.

Axes: S sites, L rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.policies.norm import EPSILON
from gradwatch.snapshot import BoolArray

Array32 = NDArray[np.float32]


class Row(NamedTuple):
    """One rule's limit, float32[S] each: a norm above `trigger` is brought down to `target`; inf = no limit there.

    A plain bound has equal ones. `trigger` may be the higher: a spike is taken back to where it usually is.
    """

    trigger: Array32
    target: Array32


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Standing orders for the gradients of S sites; a join-semilattice under `|`, so rule order can never matter.

    `rows` are distinct and sorted. `scale[S]` is a standing factor for the whole gradient, inf where there is none
    (None = nowhere): of two, the smaller holds. At `zero_nonfinite[S]` NaN and Inf elements become 0. Bounds over a
    group or the total are no Limits: they need all norms, and are a `Decision`'s at the boundary.
    """

    rows: tuple[Row, ...] = ()
    scale: Array32 | None = None
    zero_nonfinite: BoolArray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _canonical(self.rows))

    def __bool__(self) -> bool:
        """Whether anything is ordered at all."""
        return bool(self.rows) or self.scale is not None or self.zero_nonfinite is not None

    def coefficients(self, norm: Any) -> Array32:
        """float32[S], what each gradient of this `norm[S]` is to be multiplied by; 1 = left alone.

        The smallest over all rows of `min(1, target / (norm + 1e-6))` where `norm > trigger`, and of `scale`. A norm
        that is not finite gets 1: one bad element must not spread over its tensor.
        """
        norm = np.asarray(norm, np.float32)
        finite = np.isfinite(norm)
        least = np.full(norm.shape, np.inf, np.float32)
        for row in self.rows:
            with np.errstate(invalid="ignore", over="ignore"):
                bounded = np.minimum(np.float32(1), row.target / (norm + EPSILON))
                least = np.minimum(least, np.where(norm > row.trigger, bounded, np.float32(np.inf)))
        if self.scale is not None:
            least = np.minimum(least, self.scale)
        return np.where(finite & np.isfinite(least), least, np.float32(1)).astype(np.float32)

    def at(self, own: Any) -> Limits:
        """The same orders for the sites that `own` (an index array or slice) picks."""
        return Limits(
            tuple(Row(row.trigger[own], row.target[own]) for row in self.rows),
            None if self.scale is None else self.scale[own],
            None if self.zero_nonfinite is None else self.zero_nonfinite[own],
        )

    def __or__(self, other: Limits) -> Limits:
        return Limits(
            (*self.rows, *other.rows),
            _joined(np.minimum, self.scale, other.scale),
            _joined(np.logical_or, self.zero_nonfinite, other.zero_nonfinite),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Limits):
            return NotImplemented
        return (
            [*map(_key, self.rows)] == [*map(_key, other.rows)]
            and _same(self.scale, other.scale)
            and _same(self.zero_nonfinite, other.zero_nonfinite)
        )

    __hash__ = None  # type: ignore[assignment]  # it holds arrays


def _key(row: Row) -> tuple[bytes, bytes]:
    return row.trigger.tobytes(), row.target.tobytes()


def _canonical(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Each row once, in an order that does not depend on who came first."""
    distinct = {_key(row): row for row in rows}
    return tuple(distinct[key] for key in sorted(distinct))


def _joined(join: Any, one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else join(one, other)


def _same(one: Any, other: Any) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))
