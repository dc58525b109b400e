"""Numbers that autograd keeps: of the nodes of a graph, in the order in which they are made, and of writes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

next_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The sequence number that the next node made in this thread will have."""


def set_version(tensor: Tensor, version: int) -> None:
    """Have `tensor._version` say this, so that a write which was undone is no write."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
