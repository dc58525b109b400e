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
from torch.optim import Optimizer


class LossScale:
    """Notices the GradScaler of a training loop by wrapping `GradScaler.scale` and `.update` on the class.

    `stepped` is called before every `update` with the ids of the optimizers that went through `scaler.step`:
    one whose window is still open then was rejected (overflow), and its `step` was never called. `close` puts
    the class back as found.
    """

    def __init__(
        self, stepped: Callable[[frozenset[int]], None], failed: Callable[[str, BaseException], None]
    ) -> None:
        self._scaler: Callable[[], GradScaler | None] = lambda: None
        self._stepped = stepped
        self._failed = failed
        self._found: dict[str, Any] = {}
        for name in ("scale", "update"):
            self._wrap(name)

    def _wrap(self, name: str) -> None:
        original = getattr(GradScaler, name)
        owner = weakref.ref(self)

        @functools.wraps(original)
        def wrapped(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            scale = owner()
            if scale is not None:
                scale._notice(scaler, name)
            return original(scaler, *args, **kwargs)

        self._found[name] = (original, wrapped)
        setattr(GradScaler, name, wrapped)

    def _notice(self, scaler: GradScaler, name: str) -> None:
        try:
            if scaler.is_enabled():
                self._scaler = weakref.ref(scaler)
                if name == "update":
                    self._stepped(frozenset(scaler._per_optimizer_states))
        except Exception as error:
            self._failed("precision", error)

    def in_backward(self) -> float:
        """The factor in gradients as backward leaves them; 1 without an active scaler."""
        scaler = self._scaler()
        scale = None if scaler is None else scaler._scale
        return 1.0 if scale is None else float(scale)  # sync: one read a step, only under a GradScaler

    def current(self) -> float | None:
        """The scaler's present scale, or None without one."""
        return None if self._scaler() is None else self.in_backward()

    def close(self) -> None:
        """Put `GradScaler` back as found, unless somebody wrapped it again since."""
        for name, (original, wrapped) in self._found.items():
            if getattr(GradScaler, name) is wrapped:
                setattr(GradScaler, name, original)
        self._found.clear()


def at_step(optimizer: Optimizer) -> float:
    """The factor still in the gradients when a fused optimizer under a GradScaler steps; 1 otherwise."""
    scale = getattr(optimizer, "grad_scale", None)
    if isinstance(scale, torch.Tensor):
        return float(scale)  # sync: only for fused optimizers under a GradScaler
    return 1.0
