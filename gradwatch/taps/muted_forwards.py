"""Forwards that module hooks leave alone: those that are replayed, and those inside a transform of `torch.func`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_local = threading.local()
# Inside `grad` or `vmap` tensors are stand-ins that mean nothing after it, and no gradient reaches `.grad`.
_transform: Callable[[], int | None] = torch._C._functorch.maybe_current_level


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Mute module hooks in this thread: forwards inside are not the script's."""
    before = getattr(_local, "muted", False)
    _local.muted = True
    try:
        yield
    finally:
        _local.muted = before


batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor
"""True for the stand-in of a batch inside `vmap`: its numbers cannot be read."""


def transforming() -> bool:
    """True if this thread is inside a transform of `torch.func`: no gradient there is one of `.grad`."""
    return _transform() is not None


def is_muted() -> bool:
    """True if module hooks are muted in this thread."""
    return _transform() is not None or getattr(_local, "muted", False)
