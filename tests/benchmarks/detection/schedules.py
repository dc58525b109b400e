"""Learning-rate schedules, as factors by step."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def warm_cosine(steps: int, warm: int = 50, least: float = 0.05) -> Schedule:
    """A linear warm-up, then half a cosine down to `least`."""

    def at(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / (steps - warm))
        return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))

    return at


def warm_restarts(period: int, least: float = 0.01) -> Schedule:
    """SGDR: half a cosine, again and again."""
    return lambda step: least + (1 - least) * 0.5 * (1 + math.cos(math.pi * (step % period) / period))


def cyclic(period: int, least: float = 0.1) -> Schedule:
    """A triangle between `least` and 1."""
    return lambda step: least + (1 - least) * (1 - abs(2 * (step % period) / period - 1))


def stepped(every: int, factor: float) -> Schedule:
    """Times `factor` every so many steps."""
    return lambda step: factor ** (step // every)
