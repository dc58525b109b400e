"""Detection of writes to a gradient: by its identity and version, and by probes for writes that move no version.

`p.grad.data.clamp_()`, `p.grad.data /= n` and numpy write to a gradient without raising its version, so that
signatures call it untouched. Reading everything twice would cost a step's whole read again; a few small gradients
cost microseconds, and code that writes to gradients rarely spares all of them. They are compared bit by bit, and by
their norms where a factor lies between (a clip that was announced, a loss scale). What changes only others stays
unseen, and so does, where norms are compared, what leaves these as they were (a change of signs).

Axes: K parameters of a capture.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Container, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.reading.batched_norms import sum_of_squares
from gradwatch.reading.cpu_norms import CpuNorms
from gradwatch.reading.foreach_norms import DeviceNorms
from gradwatch.reading.row_sums import UNDERFLOW
from gradwatch.reading.row_sums_by_blas import norms_of_rows, silently

Reading = CpuNorms | DeviceNorms
State = tuple[list[int], list[int], Reading]
"""Of K gradients: identities, versions, norms."""
LOOKS = 64
MOST = 3
SMALL = 4096
"""Elements of a gradient that costs next to nothing to measure again."""
RELATIVE = 1e-5
"""What two reads of the same gradient may differ by: the accuracy of the batched read."""

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


Storage: TypeAlias = "weakref.ref[torch.UntypedStorage]"
_storage: Callable[[Tensor], torch.UntypedStorage] = Tensor.untyped_storage
_ref, _strided = weakref.ref, torch.strided


def storages_of(grads: Sequence[Tensor | None]) -> list[Storage | None]:
    """Weak references to where the numbers of gradients are; None where there is none, or none of its own.

    Unlike a weak reference to the tensor they do not stop `swap_tensors`, and unlike `id()` they tell a gradient from
    a later one at the same address.
    """
    found: list[Storage | None] = []
    for grad in grads:  # a comprehension is a call more, in caches that a backward has left cold
        if type(grad) is Tensor and grad.layout is _strided:
            found.append(_ref(_storage(grad)))
        else:
            found.append(None)
    return found


def lies_in(storage: Storage, grad: Tensor | None) -> bool:
    """True if the numbers of a gradient are where they were when `storage` was taken of it."""
    return type(grad) is Tensor and grad.layout is _strided and _storage(grad) is storage()


def replaced_in(storages: Sequence[Storage | None], grads: Sequence[Tensor | None]) -> list[int]:
    """Positions where another gradient lies than when these were taken, as far as that is known."""
    found = []
    for k, storage in enumerate(storages):
        grad = grads[k]
        if storage is not None and grad is not None:
            plain = type(grad) is Tensor and grad.layout is _strided
            if not (plain and _storage(grad) is storage()):
                found.append(k)
    return found


def replaced(known: Sequence[Tensor | Storage | None], params: Sequence[Tensor]) -> bool:
    """True if other tensors stand in `.grad` than those `known`, as far as a look at some (up to 2 × `LOOKS`) shows.

    A loop that combines the gradients of several backwards (conflicting tasks made to agree) puts new ones there.
    """
    if len(known) != len(params):
        return False
    for k in range(0, len(known), max(1, len(known) // LOOKS)):
        was, grad = known[k], params[k].grad
        there = type(grad) is Tensor and grad.layout is _strided  # of others it may not be known
        same = lies_in(was, grad) if isinstance(was, weakref.ref) else was is grad
        if not same and (there or was is not None):
            return True
    return False


class WriteProbes:
    """A few small gradients of one capture, chosen once: from each part of it the largest by norm, which a
    clamp is most likely to reach. `numels[K]` are the sizes of the parameters.
    """

    def __init__(self, numels: NDArray[np.int64]) -> None:
        self._floor = np.sqrt(numels * UNDERFLOW)
        self._numels = numels
        self._chosen: list[int] = []
        self._floors: list[float] = []  # of those chosen: as floats, which compare without numpy

    def agree(
        self, grads: Sequence[Tensor | None], read: CpuNorms, factor: float, but: Container[int] = ()
    ) -> bool:
        """True if these gradients, `but` for some, have the norms that were read of them, times `factor`.

        Where the read has kept what was in them that is compared: cheaper than norms, and every bit counts.
        """
        if factor == 1.0 and read.scale == 1.0 and self._chosen and not but:
            same = read.rows.same_bits(self._chosen, grads)
            if same is not None:
                return same
        compared = False
        chosen = self._chosen or self._choose(read)
        now = silently(norms_of_rows, [grads[k] for k in chosen])
        for k, norm, floor, found in zip(chosen, read.norms_of(chosen), self._floors, now, strict=True):
            grad, expected = grads[k], norm * factor
            if grad is None or expected < floor:
                continue  # says nothing: zero stays zero whatever it is multiplied by
            compared = True
            if k in but:
                continue
            if found is None:
                found = math.sqrt(sum_of_squares(grad))
            # Not a call for the ordinary case; NaN compares as false, and everything is close to infinity.
            close = abs(found - expected) <= RELATIVE * expected < math.inf
            if not close and (math.isfinite(expected) or math.isfinite(found)):
                return False
        if not compared:
            self._chosen = []
        return True

    def _choose(self, read: CpuNorms) -> list[int]:
        norms = read.norms()
        large_enough = np.flatnonzero(norms > self._floor)
        small = large_enough[self._numels[large_enough] <= SMALL]
        if not len(small):
            small = large_enough[np.argsort(self._numels[large_enough], kind="stable")[:1]]
        parts = small[:, None] if len(small) <= MOST else np.array_split(small, MOST)
        self._chosen = [int(part[np.argmax(norms[part])]) for part in parts]
        self._floors = [float(self._floor[k]) for k in self._chosen]
        read.rows.keep(self._chosen)
        return self._chosen
