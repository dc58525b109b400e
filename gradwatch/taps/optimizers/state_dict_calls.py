"""Calls of `Optimizer.state_dict()` that have returned: the script has taken the state, as for a checkpoint.

torch has hooks for it on each optimizer. These are not used: a class with a `__getstate__` of its own would pickle them
with the optimizer, one that wraps another copies or shares them, and torch iterates over them while another thread may
attach or close. The method of the class is replaced instead, so that nothing is left on any optimizer, and a call that
reaches an optimizer by its wrapper is noticed, too. A class that overrides `state_dict` without calling torch's is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from gradwatch.runtime import guard
from gradwatch.taps.dynamo import untraced_itself
from gradwatch.taps.patch import Layer, Patch

Listener = Callable[[Optimizer], object]


def listen(taken: Listener) -> Callable[[], None]:
    """Call `taken(optimizer)` after each call of its `state_dict()` that returned; the returned call ends that.

    On the thread that took it. What the listener raises is counted and goes no further.
    """
    return _state_dict.listen(taken)


def _make(layer: Layer[Listener]) -> Callable[..., Any]:
    original = layer.original

    @functools.wraps(original)
    @untraced_itself
    def state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            state = original(self, *args, **kwargs)
        except BaseException as error:
            guard.without_frames(error)
            raise
        try:
            for listener in layer.listeners:
                listener(self)
        except Exception as error:
            guard.fault("checkpoint", error)
        return state

    return state_dict


_state_dict: Patch[Listener] = Patch(Optimizer, "state_dict", _make)
