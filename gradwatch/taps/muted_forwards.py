"""Forwards that module hooks leave alone: those that are replayed, and those inside a transform of `torch.func`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class _Here(threading.local):
    muted = False


here = _Here()
"""Whether module hooks are `muted` in this thread."""
transform: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""None outside the transforms of `torch.func`.

Inside `grad` or `vmap` tensors are stand-ins that mean nothing after it, and no gradient reaches `.grad`.
"""


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Mute module hooks in this thread: forwards inside are not the script's."""
    before = here.muted
    here.muted = True
    try:
        yield
    finally:
        here.muted = before


batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor
"""True for the stand-in of a batch inside `vmap`: its numbers cannot be read."""


def transforming() -> bool:
    """True if this thread is inside a transform of `torch.func`: no gradient there is one of `.grad`."""
    return transform() is not None


def is_muted() -> bool:
    """True if module hooks are muted in this thread."""
    return here.muted or transform() is not None
