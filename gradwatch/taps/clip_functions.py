"""torch's own gradient clipping, noticed: the last moment at which a gradient is what backward left.

`clip_grad_norm_`, `clip_grads_with_norm_` and `clip_grad_value_` all sort their gradients with one function that
they look up in their module at every call: that one is patched, so it does not matter how, or how early, a
script imported them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from gradwatch.reading.device import on_host
from gradwatch.runtime import guard
from gradwatch.taps import dispatch_modes
from gradwatch.taps.dynamo import untraced_itself
from gradwatch.taps.patch import Layer, Patch
from gradwatch.taps.process_totals import TOTALS

SORTER = "_group_tensors_by_device_and_dtype"
MULTIPLIER = "_clip_grads_with_norm_"
BY_VALUE = "clip_grad_value_"


class Clip(NamedTuple):
    """`grads` are being clipped; with a `factor` they are about to be multiplied in place by it, each once."""

    grads: list[Tensor]
    factor: float | None


Listener = Callable[[Clip], object]


def listen(about_to_clip: Listener) -> Callable[[], None]:
    """Call `about_to_clip` before torch clips any gradient; the returned call ends that.

    It is given the factor that torch is about to multiply by, where torch's own code says so on the host. It must not
    raise. Silent under a torch without that function, and in code compiled by `torch.compile`.
    """
    return _sorter.listen(about_to_clip) if hasattr(clip_grad, SORTER) else _nothing


def _nothing() -> None:
    """No call is noticed that could be ended."""


def _make(layer: Layer[Listener]) -> Callable[..., Any]:
    original = layer.original
    multiplies = inspect.unwrap(getattr(clip_grad, MULTIPLIER, _nothing)).__code__
    # `clip_grad_norm_` sorts twice, for the norm and to multiply: a clip is counted where gradients change.
    by_value = inspect.unwrap(getattr(clip_grad, BY_VALUE, _nothing)).__code__

    @functools.wraps(original)
    @untraced_itself
    def noticed(*args: Any, **kwargs: Any) -> Any:
        try:
            if layer.listeners and not torch.compiler.is_compiling():
                frame = sys._getframe(1)
                TOTALS.clips += frame.f_code is multiplies or frame.f_code is by_value
                factor = frame if frame.f_code is multiplies else None
                dispatch_modes.unseen(_notify, layer, args[0][0] if args else [], factor)
        except Exception as error:
            guard.fault("capture", error)
        return original(*args, **kwargs)

    return noticed


_sorter = Patch(clip_grad, SORTER, _make)


def _notify(layer: Layer[Listener], grads: list[Tensor], multiplying: FrameType | None) -> None:
    clip = Clip(grads, None if multiplying is None else _factor(multiplying))
    for listener in layer.listeners:
        listener(clip)


def _factor(clip: FrameType) -> float | None:
    """Factor that torch's `clip_grads_with_norm_` is about to apply, from its own arguments; None where they differ."""
    found = clip.f_locals
    max_norm, total = found.get("max_norm"), found.get("total_norm")
    if not (isinstance(max_norm, float) and isinstance(total, torch.Tensor)):
        return None
    if not on_host(total) or total.numel() != 1:
        return None
    with torch.no_grad():
        return float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
