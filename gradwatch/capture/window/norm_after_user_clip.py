"""The norm after a clip of the user's, without a second read: torch's `clip_grad_norm_` says its factor.

`clip_grad_norm_` multiplies every gradient in place by one float32 factor. Where that is all that happened to a
gradient since it was read (each announced clip moves its version by one, and nothing else moved it), its norm
now is its norm then times the factor, to within the rounding of one float32 multiplication, 6e-8 relative.
Reading it again costs as much as the first read and says no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST = 1e-6
"""Factors below this may flush elements to zero or to subnormals: then the gradients are read again."""
WIDE = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
"""Where one multiplication rounds by 6e-8 at most; bfloat16 rounds by 4e-3, and is read again."""


MOST = 4
"""Announcements between a read and the step; of more (a clip of each parameter) nothing is made."""


class KnownScaling(NamedTuple):
    """These gradients, by `id`, are about to be multiplied in place, each once. `exact`: by `factor`, to 6e-8."""

    ids: frozenset[int]
    factor: float
    exact: bool


def known_scaling(grads: Sequence[Tensor], factor: float) -> KnownScaling:
    """The state of gradients that are about to be multiplied by `factor`."""
    ids = frozenset(map(id, grads))
    exact = factor == 1.0 or (SMALLEST <= factor < math.inf and all(grad.dtype in WIDE for grad in grads))
    return KnownScaling(ids, factor, exact and len(ids) == len(grads))


def known_factor(
    scalings: Sequence[KnownScaling], ids: list[int], versions: list[int], count: int
) -> float | None:
    """The factor of all `count` clips of these gradients (-1 in `versions`: none); None where it is not known."""
    clips = _of_all(scalings, ids, versions)
    return None if clips is None or len(clips) != count else math.prod(clip.factor for clip in clips)


def _of_all(
    scalings: Sequence[KnownScaling], ids: list[int], versions: list[int]
) -> list[KnownScaling] | None:
    """Scalings of any of these gradients; None where one is not of all of them, or its factor is not known."""
    mine = frozenset(k for k, version in zip(ids, versions, strict=True) if version >= 0)
    clips = [clip for clip in scalings if not mine.isdisjoint(clip.ids)]
    return clips if all(clip.exact and clip.ids >= mine for clip in clips) else None


def factor_since(
    scalings: Sequence[KnownScaling],
    now: tuple[list[int], list[int]],
    read: tuple[list[int], list[int]],
) -> float | None:
    """Factor applied to every gradient since the read; None where that is not all that happened.

    `now` and `read` are signatures (ids[K], versions[K], -1 without a gradient), now and as they were read.
    """
    ids, versions = now
    if not scalings or len(scalings) > MOST or ids != read[0]:
        return None
    clips = _of_all(scalings, ids, versions)
    if clips is None:
        return None
    if versions != [version + len(clips) if version >= 0 else version for version in read[1]]:
        return None
    return math.prod(clip.factor for clip in clips)
