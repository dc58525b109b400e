"""Every backward of a thread handed to a function that runs it, for as long as a recording lasts.

Unlike the entry that `gradwatch.taps.backward_entry` notices, this puts a frame of gradwatch around the backward.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwatch.taps.patch import Layer, Patch

RUN_BACKWARD = "_engine_run_backward"
"""torch's function through which every `backward()` and `grad()` goes."""
Watch = Callable[[Sequence[Tensor], Callable[[], Any]], Any]


class _Watcher(NamedTuple):
    thread: int
    process: int
    watch: Watch


def possible() -> bool:
    """True where this torch has the function."""
    return hasattr(torch.autograd, RUN_BACKWARD)


def watched(watch: Watch) -> AbstractContextManager[None]:
    """Have `watch(roots, run)` called in place of every backward of this thread, in this block; it calls `run()`."""
    return _run_backward.listening(_Watcher(threading.get_ident(), os.getpid(), watch))


def _make(layer: Layer[_Watcher]) -> Callable[..., Any]:
    original = layer.original

    def around(roots: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return original(roots, *args, **kwargs)

        here = threading.get_ident(), os.getpid()
        for one in reversed(layer.listeners):
            if (one.thread, one.process) == here:
                return one.watch([root for root in roots if isinstance(root, Tensor)], run)
        return run()

    return around


_run_backward = Patch(torch.autograd, RUN_BACKWARD, _make)
