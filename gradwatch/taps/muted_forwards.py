"""Forwards that module hooks leave alone: those that are replayed, and those inside a transform of `torch.func`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

muted_threads: list[int] = []
"""The threads in which module hooks are `muted`, each as often as it has entered that."""
transform: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""None outside the transforms of `torch.func`.

Inside `grad` or `vmap` tensors are stand-ins that mean nothing after it, and no gradient reaches `.grad`.
"""


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Mute module hooks in this thread: forwards inside are not the script's."""
    thread = threading.get_ident()
    muted_threads.append(thread)
    try:
        yield
    finally:
        muted_threads.remove(thread)


def _forked() -> None:
    """Keep, in a forked child, only the thread that forked: others may get the numbers of those gone."""
    thread = threading.get_ident()
    muted_threads[:] = [one for one in muted_threads if one == thread]


os.register_at_fork(after_in_child=_forked)

batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor
"""True for the stand-in of a batch inside `vmap`: its numbers cannot be read."""


def transforming() -> bool:
    """True if this thread is inside a transform of `torch.func`: no gradient there is one of `.grad`."""
    return transform() is not None


def is_muted() -> bool:
    """True if module hooks are muted in this thread."""
    return threading.get_ident() in muted_threads or transform() is not None
