"""Comparison of the recent losses of one optimizer with that of its first step, and with those of healthy weights.

By shares of steps, not by means: one loss of a diverging step outweighs a thousand ordinary ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Any

STEPS = 50
"""The steps of which a share or a mean is known, weighted exponentially."""
FEWEST = 20
"""Steps before anything is said of them."""
STEPS_TO_SHOW = 100
"""Losses after weights were found too large by which they are judged."""
LOWER = 0.9
"""The share of these that has to be lower."""


class LossComparison:
    """The loss at the first step, before anything moved, and how those since compare with it.

    `mark_healthy()` when weights are found fit, `mark_grown()` when they are found too large for that.
    """

    __slots__ = ("_bound", "_first", "_healthy", "_lower", "_lower_steps", "_mean", "_share", "_steps")

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        """Afresh, or as `to_dict()` left it."""
        known = {"first": None, "bound": None, **(saved or {})}
        self._first, self._bound = (
            None if known[key] is None else float(known[key]) for key in ("first", "bound")
        )
        self._share, self._mean = float(known.get("share", 0.0)), float(known.get("mean", 0.0))
        self._lower = float(known.get("lower", 0.0))
        self._steps, self._lower_steps = int(known.get("steps", 0)), int(known.get("lower_steps", 0))
        # When weights are looked at goes by the clock, what is saved by the steps: of a look before it nothing is kept.
        self._healthy = self._mean if self._steps else None

    def add(self, losses: Iterable[float | None]) -> None:
        """The losses of further steps, in their order; None = not known."""
        first, bound, share, mean = self._first, self._bound, self._share, self._mean
        for loss in losses:
            if loss is None:
                continue
            if first is None:
                if isfinite(loss):
                    first = mean = loss
                continue
            self._steps += 1
            weight = min(self._steps, STEPS)
            # A loss that is NaN is not below either.
            share += ((not loss < first) - share) / weight
            if isfinite(loss):
                mean += loss / weight - mean / weight
            if bound is not None:
                self._lower_steps += 1
                self._lower += ((loss < bound) - self._lower) / min(self._lower_steps, STEPS_TO_SHOW)
        self._first, self._share, self._mean = first, share, mean

    @property
    def no_better(self) -> bool:
        """True if most of the recent losses are not below the first; False where that is not known."""
        return self._steps >= FEWEST and self._share > 0.5

    @property
    def lower_since_grown(self) -> bool:
        """True if nearly all of the losses since `mark_grown()` are below the first and the mean of healthy weights."""
        return self._lower_steps >= STEPS_TO_SHOW and self._lower > LOWER

    def mark_healthy(self) -> None:
        """Take the loss as it is by now for that of healthy weights: they are found fit."""
        self._healthy = self._mean if self._steps else None
        self._bound, self._lower, self._lower_steps = None, 0.0, 0

    def mark_grown(self) -> None:
        """Compare losses from the first look on at which the weights were found too large."""
        if self._bound is None and self._first is not None:
            self._bound = min(self._first, inf if self._healthy is None else self._healthy)

    def to_dict(self) -> dict[str, Any]:
        """The state saved in a checkpoint, JSON-safe."""
        return {
            "first": self._first,
            "share": self._share,
            "steps": self._steps,
            "mean": self._mean,
            "bound": self._bound,
            "lower": self._lower,
            "lower_steps": self._lower_steps,
        }
