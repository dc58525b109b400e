"""Pipeline schedules of torch.distributed: gradients are final after the last micro-batch, not after a backward.

A schedule runs a backward (or, with a split one, none that autograd announces) per micro-batch and divides the
gradients by their number at the end, in `scale_grads` of every stage. What is read there is the gradient
itself; what is read before is n times too large, and what is read at the step may be clipped already.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from gradwatch.runtime import guard
from gradwatch.taps import dispatch_modes
from gradwatch.taps.patch import Layer, Patch

STAGE_MODULE = "torch.distributed.pipelining.stage"
_METHOD = "scale_grads"
_patches: dict[type, Patch[Callable[[Any], None]]] = {}


class PipelineStages:
    """Calls `scaled` with the module of a stage whose gradients are final now.

    The method is wrapped on torch's class once for all listeners, and only where a pipeline is in use.
    """

    def __init__(self, scaled: Callable[[nn.Module], None]) -> None:
        self._scaled = scaled
        self._taken: set[int] = set()
        self._remove: Callable[[], None] | None = None
        self.install()

    def install(self) -> None:
        """Wrap the stages' method, once a pipeline has been imported; a dictionary look-up until then."""
        base = getattr(sys.modules.get(STAGE_MODULE), "_PipelineStageBase", None)
        if self._remove is None and isinstance(base, type) and hasattr(base, _METHOD):
            self._remove = _patches.setdefault(base, Patch(base, _METHOD, _make)).listen(self.notice)

    def notice(self, stage: Any) -> None:
        """Note that a stage has scaled its gradients."""
        self._taken.add(int(stage.stage_index))
        self._scaled(stage.submod)

    def taken(self) -> tuple[int, ...]:
        """The stages that this process has scaled the gradients of, in order."""
        return tuple(sorted(self._taken))

    def close(self) -> None:
        """Stop listening."""
        if self._remove is not None:
            self._remove()


def _make(layer: Layer[Callable[[Any], None]]) -> Callable[..., Any]:
    original = layer.original

    @functools.wraps(original)
    def wrapped(stage: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(stage, *args, **kwargs)
        _notify(layer.listeners, stage)
        return result

    return wrapped


def _notify(listeners: tuple[Callable[[Any], None], ...], stage: Any) -> None:
    try:
        for listener in listeners:
            dispatch_modes.unseen(listener, stage)
    except Exception as error:
        guard.fault("capture", error)
