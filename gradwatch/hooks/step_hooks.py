"""torch's global optimizer-step hooks, registered once and shared by everything here that listens.

torch iterates over its hook dict while the hooks run, so a hook that registers or removes another one (a
launcher that attaches at the first step, a rule that closes the watch) would break the user's step. Listeners
may come and go at any time; torch's own dict is touched only outside a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class StepListener(Protocol):
    """Called around every `optimizer.step()` of the process."""

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """None, or (args, kwargs) that replace those of the call. What it raises reaches the user's step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """The step has returned normally."""


_listeners: list[StepListener] = []
_handles: list[RemovableHandle] = []
_depth = 0
_begun = 0


def listen(listener: StepListener) -> Callable[[], None]:
    """Add a listener; the returned call removes it (and the last one out removes torch's hooks)."""
    _listeners.append(listener)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_untraced(_before)))
        _handles.append(register_optimizer_step_post_hook(_untraced(_after)))

    def remove() -> None:
        if listener in _listeners:
            _listeners.remove(listener)
        _tidy()

    return remove


def _untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, run and not traced under a compiled `optimizer.step`; called directly where nothing compiles.

    torch's own wrapper costs more than a cold hook can afford, so it is used only while dynamo is listening.
    """
    disable = getattr(torch, "_disable_dynamo", None)
    try:
        from torch._C._dynamo.eval_frame import get_eval_frame_callback as listening
    except ImportError:
        return hook if disable is None else disable(hook)
    shielded = hook if disable is None else disable(hook)

    def run(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or listening() is not None:
            return shielded(optimizer, args, kwargs)
        return hook(optimizer, args, kwargs)

    return run


def installed() -> int:
    """How many of torch's global step hooks are ours at present."""
    return len(_handles)


def begun() -> int:
    """How many steps of any optimizer have begun since the first listener came."""
    return _begun


def _tidy() -> None:
    if not _listeners and not _depth:
        for handle in _handles:
            handle.remove()
        _handles.clear()


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    global _begun, _depth
    _begun += 1
    _depth += 1
    changed = None
    try:
        position = 0
        # By index: a launcher's listener may add the watch that must see this very step.
        while position < len(_listeners):
            result = _listeners[position].before_step(optimizer, args, kwargs)
            if result is not None:
                args, kwargs = changed = result
            position += 1
    finally:
        _depth -= 1
    return changed


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _depth
    _depth += 1
    try:
        for listener in tuple(_listeners):
            listener.after_step(optimizer)
    finally:
        _depth -= 1
