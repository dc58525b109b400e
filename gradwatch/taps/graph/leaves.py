"""The leaves of an autograd graph: the tensors whose `.grad` a backward from its roots would fill."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MOST = 200_000
"""Nodes looked at; what lies behind others is not found."""
_ACCUMULATE = "torch::autograd::AccumulateGrad"


def leaves(roots: Iterable[Any]) -> list[Tensor]:
    """The leaves that want a gradient, each once, of the graphs behind `roots`: tensors, or gradient edges.

    About a microsecond a node. What a custom Function holds inside (reentrant checkpointing) is no part of the graph.
    """
    with torch._C.DisableTorchFunctionSubclass():
        found = {id(root): root for root in roots if isinstance(root, Tensor) and root.is_leaf}
        # Kept until the end: the Python object of a node that nothing holds is made anew, at another address.
        seen = {node: None for node in map(_node, roots) if node is not None}
        waiting = list(seen)
        while waiting and len(seen) < MOST:
            node = waiting.pop()
            if node.name() == _ACCUMULATE:
                found[id(node.variable)] = node.variable
                continue
            for inner, _ in node.next_functions:
                if inner is not None and inner not in seen:
                    seen[inner] = None
                    waiting.append(inner)
        return [leaf for leaf in found.values() if leaf.requires_grad]


def _node(root: Any) -> Any:
    return root.grad_fn if isinstance(root, Tensor) else getattr(root, "node", None)
