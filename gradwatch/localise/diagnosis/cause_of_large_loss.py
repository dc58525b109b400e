"""The norms of a step whose loss is too large: a cause only where they show activations that are, which come first.

Gradients come of the loss: where they are off, or not, that is told, and no cause is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from gradwatch.localise.diagnosis.explosion_by_norms import PLACED, of_norms
from gradwatch.records.finding import Finding

NO_LEVELS = "what is usual of its gradients is not known"
AS_USUAL = "its gradients are at their usual levels"


def of_loss(names: Sequence[str], moved: Mapping[str, float], few: Collection[str]) -> Finding:
    """The activations that are off, as `of_norms` finds them; else that no cause is known, and where gradients are."""
    known = {name: factor for name, factor in moved.items() if 0 < factor < math.inf}
    found = of_norms(names, known, True, few) if known else None
    if found is not None and found.phase == "activations":
        return found
    return Finding("unknown", "norms", note=_of_gradients(known))


def _of_gradients(known: Mapping[str, float]) -> str:
    if not known:
        return NO_LEVELS
    low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    furthest = max((low, high), key=lambda name: abs(math.log(known[name])))
    if abs(math.log(known[furthest])) < math.log(PLACED):
        return f"{AS_USUAL}: {furthest}, the furthest from it, is at ×{known[furthest]:.3g}"
    return (
        f"its gradients are at ×{known[low]:.3g} ({low}) to ×{known[high]:.3g} ({high}) of their usual levels"
    )
