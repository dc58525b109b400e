"""The running backward and its end: torch numbers every call of the autograd engine (a graph task)."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable

import torch
from torch.autograd.function import BackwardCFunction

from gradwatch.runtime import guard
from gradwatch.runtime.interruption import not_ours
from gradwatch.taps import dispatch_modes
from gradwatch.taps.dynamo import untraced

NONE = -1
"""What torch says outside backward."""
IDLE = -2
"""No graph task has this number."""
ENDING = -1
"""No thread has this number."""
_FUNCTION = BackwardCFunction.apply.__code__
# By name: to walk torch's module from cold caches costs microseconds.
queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Have the engine call a function at the end of the running backward; for use inside one only."""


current: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the running graph task, `NONE` outside backward (and in compiled autograd)."""


def nested() -> bool:
    """True if the running backward was started by a `Function.backward`, as reentrant checkpointing does.

    Read off the Python stack: torch gives the innermost task only. Microseconds, so not for every gradient.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTION:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def reaches(leaf: torch.Tensor) -> bool:
    """True if the running backward leaves this gradient in `.grad`, and does not hand it to `autograd.grad`."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:  # "currently running autograd.grad()"
        if not_ours(error):
            raise
        return False


class Ends:
    """Calls `ended` at the end of every backward it was armed in, after DDP and FSDP have finished theirs.

    `ready` has a list for each of them, by graph task: slots whose gradients are ready. `ended` gets that list. One
    within another (reentrant checkpointing) is a part of that one, and shares its list. A callback queued by a
    callback runs after those of all other libraries. A backward that raises never runs its callbacks: the next one
    of the same thread to be armed finds that out and calls `abandoned` first. Both may raise nothing. Backwards of
    different threads that run at the same time are told apart; on a device, where autograd's own threads run them, not.
    """

    def __init__(self, ended: Callable[[list[int]], None], abandoned: Callable[[], None]) -> None:
        self.task = [IDLE]  # the last one armed; a list, so that a hook can look without an attribute walk
        self.begun = 0  # backwards that it was armed in
        self.ready: dict[int, list[int]] = {}
        self._threads: dict[int, int] = {}  # of those armed and not ended
        self._ended = ended
        self._abandoned = abandoned
        # Weak: autograd keeps what it will never call after a backward that raised.
        self._itself = weakref.ref(self)

    def arm(self, thread: int = 0) -> None:
        """Queue the call of `ended` in the running backward, which this thread began (0 = not known which).

        Outside one (compiled autograd) `ready` gets a list and nothing is queued.
        """
        self.task[0] = task = current()
        if task in self.ready:
            return
        others: list[int] = []
        if self._threads:
            others = [one for one, began in list(self._threads.items()) if began == thread]
        within = nested() if others else False
        if others and not within:
            for one in others:
                self._discard(one)
            self._abandoned()
        self.begun += 1
        # A part of a backward adds to the list of the whole, which is passed on when that ends.
        self.ready[task] = self.ready[others[-1]] if within else []
        if task != NONE:
            self._threads[task] = thread
            queue_callback(functools.partial(queue_callback, functools.partial(_end, self._itself, task)))

    def left_over(self, thread: int) -> list[int]:
        """The slots of backwards of this thread for which `ended` will not be called; to be asked outside one.

        They have raised, or ran in compiled autograd, which has no callbacks.
        """
        if not self.ready or current() != NONE:
            return []
        own = (
            thread,
            0,
        )  # what another thread is just ending is in `ready`, perhaps, and of no thread any more
        over = [one for one in list(self.ready) if one == NONE or self._threads.get(one, ENDING) in own]
        lists = {id(ready): ready for ready in map(self._discard, over)}  # parts of a backward share one
        return [slot for ready in lists.values() for slot in ready]

    def close(self) -> None:
        """Discard every backward that was noted."""
        self.ready.clear()
        self._threads.clear()

    def _discard(self, task: int) -> list[int]:
        self._threads.pop(task, None)
        return self.ready.pop(task, [])


@untraced
def _end(owner: weakref.ref[Ends], task: int) -> None:
    try:
        ends = owner()
        if ends is not None:
            ends._threads.pop(task, None)
            ready = ends.ready.pop(task, [])
            if ends.task[0] == task:
                ends.task[0] = IDLE
            if ends.ready and any(one is ready for one in list(ends.ready.values())):
                return
            if dispatch_modes.dispatching() or dispatch_modes.functions():
                dispatch_modes.unseen(ends._ended, ready)
            else:  # its frame less: caches are cold here
                ends._ended(ready)
    except Exception as error:
        guard.fault("capture", error)
