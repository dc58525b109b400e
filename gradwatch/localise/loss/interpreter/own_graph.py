"""A backward of loss code run again stays in the graph that this run made.

Through one of the script's it would free what the script still needs, and run its hooks and custom functions once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradwatch.localise.held_calls.module_attributes import Refused

PARENT = "parent_"  # anomaly mode's key for the node whose backward made another one


def newest_node() -> int:
    """Number of a node made now: those made later in this thread have greater ones."""
    with torch.enable_grad():
        node = torch.zeros((), device="cpu", requires_grad=True).clone().grad_fn
    assert node is not None
    return int(node._sequence_nr())


def check_graph(roots: Iterable[Tensor], begun: int) -> None:
    """Raise `Refused` where the graph below `roots` has a node that was made before `begun`.

    What a backward on a device made was made in a thread that numbers on its own: it is known by its parent.
    """
    left: list[Any] = [one.grad_fn for one in roots if one.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if hasattr(node, "variable"):  # AccumulateGrad: of a leaf, frees nothing
            continue
        if node._sequence_nr() < begun and PARENT not in node.metadata:
            raise Refused("the loss depends on a graph that was made before the model was called")
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                left.append(below)
