"""The loss scale: the one place where a GradScaler's factor is found, so that norms are free of it.

A GradScaler multiplies the loss before backward and divides the gradients inside `scaler.step` (or
`unscale_`), without bumping their version. A norm read at the end of backward therefore still carries the
scale, one read at the step boundary does not, unless the optimizer is fused and divides by itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

_listeners: list[LossScale] = []
_originals: dict[str, Any] = {}


class LossScale:
    """The scaler of a training loop, noticed through `GradScaler.scale` and `.update`, wrapped on the class once.

    `stepped` is called before every `update` with the ids of the optimizers that went through `scaler.step`:
    one whose window is still open then was rejected (overflow), and its `step` was never called. Several live
    listeners share the wrappers; the last `close` puts the class back as found.
    """

    def __init__(
        self, stepped: Callable[[frozenset[int]], None], failed: Callable[[str, BaseException], None]
    ) -> None:
        self._scaler: Callable[[], GradScaler | None] = lambda: None
        self._scaled = False
        self._stepped = stepped
        self._failed = failed
        _listeners.append(self)
        if not _originals:
            for name in ("scale", "update"):
                _wrap(name)

    def notice(self, scaler: GradScaler, name: str) -> None:
        """`scale` or `update` is about to be called on some scaler."""
        try:
            if scaler.is_enabled():
                self._scaler = weakref.ref(scaler)
                self._scaled = name == "scale"  # a loop that stops scaling has unscaled gradients again
                if name == "update":
                    self._stepped(frozenset(scaler._per_optimizer_states))
        except Exception as error:
            self._failed("precision", error)

    def in_backward(self) -> float:
        """The factor in gradients as backward leaves them; 1 unless a loss was scaled since the last update."""
        return (self.current() or 1.0) if self._scaled else 1.0

    def remaining(self, optimizer: Optimizer | None) -> float:
        """The factor in an optimizer's gradients between backward and step: none once `unscale_` took it out."""
        scaler = self._scaler()
        # Through `get`: looking an optimizer up would make an entry for it in the scaler.
        state = {} if scaler is None else scaler._per_optimizer_states.get(id(optimizer), {})
        return 1.0 if state.get("stage") is OptState.UNSCALED else self.in_backward()

    def current(self) -> float | None:
        """The scaler's present scale, or None without one."""
        scaler = self._scaler()
        scale = None if scaler is None else scaler._scale
        return None if scale is None else float(scale)  # sync: one read a step, only under a GradScaler

    def close(self) -> None:
        """Stop listening; the last one out puts `GradScaler` back, unless somebody wrapped it again since."""
        if self in _listeners:
            _listeners.remove(self)
        if not _listeners:
            for name, (original, wrapped) in _originals.items():
                if getattr(GradScaler, name) is wrapped:
                    setattr(GradScaler, name, original)
            _originals.clear()


def _wrap(name: str) -> None:
    original = getattr(GradScaler, name)

    @functools.wraps(original)
    def wrapped(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        for listener in tuple(_listeners):
            listener.notice(scaler, name)
        return original(scaler, *args, **kwargs)

    _originals[name] = (original, wrapped)
    setattr(GradScaler, name, wrapped)


def at_step(optimizer: Optimizer) -> float:
    """The factor still in the gradients when a fused optimizer under a GradScaler steps; 1 otherwise."""
    scale = getattr(optimizer, "grad_scale", None)
    if isinstance(scale, torch.Tensor):
        return float(scale)  # sync: only for fused optimizers under a GradScaler
    return 1.0


def rejected(optimizer: Optimizer) -> bool:
    """Whether the scaler has already found an overflow that a fused optimizer will skip by itself."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(
        found
    )  # sync: only for fused optimizers under a GradScaler
