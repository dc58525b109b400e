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
from gradwatch.taps import modes

STAGE_MODULE = "torch.distributed.pipelining.stage"
_listeners: list[PipelineStages] = []
_wrapped: list[tuple[type, Any, Any]] = []


class PipelineStages:
    """Calls `scaled` with the module of a stage whose gradients are final now.

    The method is wrapped on torch's class once for all listeners, and only where a pipeline is in use; the
    last `close` puts it back as found.
    """

    def __init__(self, scaled: Callable[[nn.Module], None]) -> None:
        self._scaled = scaled
        self._taken: set[int] = set()
        _listeners.append(self)
        self.look()

    def look(self) -> None:
        """Wrap the stages' method, once a pipeline has been imported; a dictionary look-up until then."""
        module = sys.modules.get(STAGE_MODULE)
        base = getattr(module, "_PipelineStageBase", None)
        if not _wrapped and hasattr(base, "scale_grads"):
            _wrap(base)

    def notice(self, stage: Any) -> None:
        """A stage has scaled its gradients."""
        self._taken.add(int(stage.stage_index))
        self._scaled(stage.submod)

    def taken(self) -> tuple[int, ...]:
        """The stages that this process has scaled the gradients of, in order."""
        return tuple(sorted(self._taken))

    def close(self) -> None:
        """Stop listening; the last one out puts torch's class back, unless somebody wrapped it again since."""
        if self in _listeners:
            _listeners.remove(self)
        if not _listeners and _wrapped:
            base, original, wrapped = _wrapped.pop()
            if base.__dict__.get("scale_grads") is wrapped:
                base.scale_grads = original  # type: ignore[attr-defined]


def _wrap(base: Any) -> None:
    original = base.scale_grads

    @functools.wraps(original)
    def wrapped(stage: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(stage, *args, **kwargs)
        _tell(stage)
        return result

    base.scale_grads = wrapped
    _wrapped.append((base, original, wrapped))


def _tell(stage: Any) -> None:
    try:
        for listener in tuple(_listeners):
            modes.unseen(listener.notice, stage)
    except Exception as error:
        guard.fault("capture", error)
