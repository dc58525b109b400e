"""Comparison of the loss of one optimizer with what it was at its first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

STEPS = 50
"""The steps of which a share is known, weighted exponentially."""
FEWEST = 20
"""Steps before anything is said of them."""


class LossSinceStart:
    """The loss at the first step, before anything moved, and the share of recent steps with a loss that is not below.

    A share, not a mean: one loss of a diverging step outweighs a thousand ordinary ones.
    """

    __slots__ = ("_first", "_share", "_steps")

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        """Afresh, or as `to_dict()` left it."""
        saved = saved or {}
        first = saved.get("first")
        self._first = None if first is None else float(first)
        self._share = float(saved.get("share", 0.0))
        self._steps = int(saved.get("steps", 0))

    def add(self, losses: Iterable[float | None]) -> None:
        """The losses of further steps, in their order; None = not known."""
        first, share, steps = self._first, self._share, self._steps
        for loss in losses:
            if loss is None:
                continue
            if first is None:
                first = loss if isfinite(loss) else None
                continue
            steps += 1
            # A loss that is NaN is not below either.
            share += ((not loss < first) - share) / (steps if steps < STEPS else STEPS)
        self._first, self._share, self._steps = first, share, steps

    @property
    def no_better(self) -> bool:
        """True if most of the recent losses are not below the first; False where that is not known."""
        return self._steps >= FEWEST and self._share > 0.5

    def to_dict(self) -> dict[str, Any]:
        """The state saved in a checkpoint, JSON-safe."""
        return {"first": self._first, "share": self._share, "steps": self._steps}
