"""Which backward is running, and when it ends: torch numbers every call of the autograd engine (a graph task)."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable

import torch
from torch.autograd.function import BackwardCFunction

from gradwatch.taps import guard, modes
from gradwatch.taps.dynamo import untraced

NONE = -1
"""What torch says outside backward."""
IDLE = -2
"""No graph task has this number."""
_FUNCTION = BackwardCFunction.apply.__code__
# By name: to walk torch's module from cold caches costs microseconds.
_queue = torch.autograd.Variable._execution_engine.queue_callback


current: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the running graph task, `NONE` outside backward (and in compiled autograd)."""


def nested() -> bool:
    """Whether the running backward was started by a `Function.backward`, as reentrant checkpointing does.

    Read off the Python stack: torch tells the innermost task only. Microseconds, so not for every mark.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTION:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def reaches(leaf: torch.Tensor) -> bool:
    """Whether the running backward leaves this gradient in `.grad`, and does not hand it to `autograd.grad`."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # "currently running autograd.grad()"
        return False


class Ends:
    """Calls `ended` at the end of every backward it was armed in, after DDP and FSDP have finished theirs.

    A callback queued by a callback runs when everybody else's has. A backward that raises never runs its
    callbacks: the next one to be armed finds that out and calls `abandoned` first. Both may raise nothing.
    """

    def __init__(self, ended: Callable[[], None], abandoned: Callable[[], None]) -> None:
        self.task = [IDLE]  # the last one armed; a list, so that a mark can look without an attribute walk
        self.begun = 0  # backwards that it was armed in
        self._open: set[int] = set()  # armed, and not ended yet
        self._ended = ended
        self._abandoned = abandoned
        # Weak: autograd keeps what it will never call after a backward that raised.
        self._itself = weakref.ref(self)

    def arm(self) -> None:
        """Have the end of the running backward heard; outside one this does nothing."""
        task = current()
        if self._open and self._open != {task} and not nested():
            self._open.clear()
            self._abandoned()
        self.task[0] = task
        if task == NONE:
            return
        self.begun += task not in self._open
        self._open.add(task)
        _queue(functools.partial(_queue, functools.partial(_end, self._itself, task)))


@untraced
def _end(owner: weakref.ref[Ends], task: int) -> None:
    try:
        ends = owner()
        if ends is not None:
            ends._open.discard(task)
            ends.task[0] = IDLE
            modes.unseen(ends._ended)
    except Exception as error:
        guard.fault("capture", error)
