"""A function called before and after every backward of a thread, for as long as a recording lasts.

Unlike the entry that `gradwatch.taps.backward_entry` notices, this puts a frame of gradwatch around the backward, which
the traceback of one that raises does not show, nor its message that anomaly mode is on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwatch.runtime import guard
from gradwatch.taps.graph.anomaly import with_bare_hint
from gradwatch.taps.patch import Layer, Patch

RUN_BACKWARD = "_engine_run_backward"
"""torch's function through which every `backward()` and `grad()` goes."""
Watch = Callable[[Sequence[Tensor]], Callable[[], None] | None]
"""Called with the tensors a backward starts at; what it returns is called once that has ended or raised."""


class _Watcher(NamedTuple):
    thread: int
    process: int
    watch: Watch


def possible() -> bool:
    """True where this torch has the function."""
    return hasattr(torch.autograd, RUN_BACKWARD)


def listen(watch: Watch) -> Callable[[], None]:
    """Have `watch(roots)` called before every backward of this thread; the returned call ends that."""
    return _run_backward.listen(_Watcher(threading.get_ident(), os.getpid(), watch))


def watched(watch: Watch) -> AbstractContextManager[None]:
    """`listen` for the length of a block."""
    return _run_backward.listening(_Watcher(threading.get_ident(), os.getpid(), watch))


def _make(layer: Layer[_Watcher]) -> Callable[..., Any]:
    original = layer.original

    def around(roots: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            ended = _begins(layer.listeners, roots)
        except Exception as error:
            ended = None
            guard.fault("localise", error)
        try:
            return original(roots, *args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception) or guard.came_out_of(original, error):
                guard.without_frames(error)
                with_bare_hint(error)
                raise
            guard.fault("localise", error)
            return original(roots, *args, **kwargs)
        finally:
            try:
                if ended is not None:
                    ended()
            except Exception as error:
                guard.fault("localise", error)

    return around


def _begins(watchers: Sequence[_Watcher], roots: Sequence[Any]) -> Callable[[], None] | None:
    here = threading.get_ident(), os.getpid()
    for one in reversed(watchers):
        if (one.thread, one.process) == here:
            return one.watch([root for root in roots if isinstance(root, Tensor)])
    return None


_run_backward = Patch(torch.autograd, RUN_BACKWARD, _make)
