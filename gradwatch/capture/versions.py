"""Detection of writes to a gradient: its identity and the count that every in-place operation raises."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from gradwatch.reading.cpu import CpuNorms
from gradwatch.reading.device import DeviceNorms

Reading = CpuNorms | DeviceNorms
State = tuple[list[int], list[int], Reading]
"""Of K gradients: identities, versions, norms."""
LOOKS = 64
_version: Callable[[Tensor | None], int] = operator.attrgetter("_version")


def versions_of(grads: Sequence[Tensor | None]) -> list[int]:
    """Version counter of each gradient, -1 where there is none.

    Equal identities and versions are a hint that they were not written to, and no proof: writes through `.data` or
    numpy do not bump the version.
    """
    try:
        return list(map(_version, grads))
    except AttributeError:
        return [-1 if grad is None else grad._version for grad in grads]


def grown_alike(pattern: list[int], versions: list[int], since: bool) -> bool:
    """True if these are the versions of the pattern; with `since`, or those after equally many writes to each.

    A clip writes to every gradient; a gradient that came less often, or not at all, differs from the others.
    """
    if versions == pattern:
        return True
    if not since or [v < 0 for v in versions] != [p < 0 for p in pattern]:
        return False
    grown = {v - p for v, p in zip(versions, pattern, strict=True) if p >= 0}
    return len(grown) == 1 and min(grown) > 0


def replaced(known: Sequence[Tensor | weakref.ref[Tensor] | None], params: Sequence[Tensor]) -> bool:
    """True if other tensors stand in `.grad` than those `known`, as far as a look at some (up to 2 × `LOOKS`) tells.

    A loop that combines the gradients of several backwards (conflicting tasks made to agree) puts new ones there.
    """
    if len(known) != len(params):
        return False
    for k in range(0, len(known), max(1, len(known) // LOOKS)):
        held = known[k]
        was = held() if isinstance(held, weakref.ref) else held
        if was is not params[k].grad:
            return True
    return False
