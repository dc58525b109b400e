"""Factor by which each node of a backward multiplies the gradient that passes through it.

The norm of what a node gives on to other nodes, over that of what it was given. A sum gives every element what it was
given, and so a longer vector of the same numbers: of a node's gain in the L2 norm and in the largest element the
smaller one counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradwatch.reading.layouts import dense

MULTIPLIES = 10.0
"""Gain below which a node is not kept."""


STANDS_OUT = 100.0
"""Times the median gain of all rows that the gain of the row is which stands out."""

FEWEST_ROWS = 8


class Passage(NamedTuple):
    """A gradient on its way through a node: its L2 norm as `given` and as `made`, and the `gain`.

    `few_rows`: it multiplies few rows by far more than the others, so that it does not do so at every step.
    """

    given: float
    made: float
    gain: float
    few_rows: bool = False


def passage(node: Node, made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> Passage | None:
    """The passage of a gradient through a node; None where it gives none on, or only multiplies by a number."""
    onward = [
        grad
        for grad, (following, _) in zip(made, node.next_functions, strict=False)
        if grad is not None and following is not None and not hasattr(following, "variable")
    ]
    came = [grad for grad in given if grad is not None]
    if not onward or not came or multiplies_by_a_number(node):
        return None
    (length, largest), (at_first, largest_first) = _sizes(onward), _sizes(came)
    if not (at_first > 0 and largest_first > 0 and math.isfinite(length)):
        return None
    gain = min(length / at_first, largest / largest_first)
    return Passage(at_first, length, gain, gain >= MULTIPLIES and _few_rows_stand_out(came, onward))


@torch.no_grad()
def _few_rows_stand_out(came: Sequence[Tensor], onward: Sequence[Tensor]) -> bool:
    """True where at most an eighth of the rows, but some, have a gain that stands out."""
    sizes = {one.shape[:1] for one in (*came, *onward)}
    rows = next(iter(sizes))
    if len(sizes) > 1 or not rows or rows[0] < FEWEST_ROWS:
        return False
    gains = _row_lengths(onward) / _row_lengths(came)
    known = gains[torch.isfinite(gains)]
    if len(known) < FEWEST_ROWS:
        return False
    large = int((known >= STANDS_OUT * known.median()).sum())
    return 0 < large <= len(known) // FEWEST_ROWS


def _row_lengths(grads: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each row of all of them together."""
    rows = (dense(one).reshape(len(one), -1).double() for one in grads)
    return torch.stack([one.square().sum(1) for one in rows]).sum(0).sqrt()


def multiplies_by_a_number(node: Node) -> bool:
    """True for a product with a number, as a loss scale is or a weight of the loss: it may be one at every step."""
    if not node.name().startswith(("MulBackward", "DivBackward")):
        return False
    if sum(following is not None for following, _ in node.next_functions) != 1:
        return False
    saved = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
    return not any(isinstance(one, Tensor) and one.numel() > 1 for one in saved)


def length_of(grads: Sequence[Tensor]) -> float:
    """The L2 norm of all of them together."""
    return _sizes(grads)[0]


def _sizes(grads: Sequence[Tensor]) -> tuple[float, float]:
    """The L2 norm of all of them together, and their largest element."""
    with torch.no_grad():
        flat = [dense(grad).reshape(-1).double() for grad in grads if grad.numel()]
        if not flat:
            return 0.0, 0.0
        squares = sum(float(torch.dot(one, one)) for one in flat)
        return math.sqrt(squares), max(float(one.abs().max()) for one in flat)
