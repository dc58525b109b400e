"""Calls of torch's `clip_grad_*`, noticed: before they multiply, and by which factor they do.

`clip_grad_norm_`, `clip_grads_with_norm_` and `clip_grad_value_` all sort their gradients with one function that
they look up in their module at every call: that one is patched, so it does not matter how, or how early, a
script imported them.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from gradwatch.reading.async_copy import on_host
from gradwatch.runtime import guard
from gradwatch.taps import dispatch_modes
from gradwatch.taps.dynamo import untraced_itself
from gradwatch.taps.patch import Layer, Patch
from gradwatch.taps.process_totals import TOTALS

SORTER = "_group_tensors_by_device_and_dtype"
MULTIPLIER = "_clip_grads_with_norm_"
BY_VALUE = "clip_grad_value_"


class Clip(NamedTuple):
    """`grads` are being clipped; with a `factor` they are about to be multiplied in place by it, each once.

    `changes`: not only their norm is taken. `bound` is `max_norm` or `clip_value`, NaN where it is not known; `total`
    the norm that `max_norm` is for. `params` are those whose gradients are clipped, None where it is not known.
    """

    grads: list[Tensor]
    factor: float | None
    changes: bool = False
    bound: float = math.nan
    total: Tensor | None = None
    params: Sequence[Tensor] | None = None


Listener = Callable[[Clip], object]
ListenerWithout = Callable[[Sequence[Tensor], float], object]


def listen(about_to_clip: Listener) -> Callable[[], None]:
    """Call `about_to_clip` before torch clips any gradient; the returned call ends that.

    It is given the factor that torch is about to multiply by, where torch's own code says so on the host. It must not
    raise. Silent under a torch without that function, and in code compiled by `torch.compile`.
    """
    return _sorter.listen(about_to_clip) if hasattr(clip_grad, SORTER) else _nothing


def listen_without_gradients(clipped: ListenerWithout) -> Callable[[], None]:
    """Call `clipped` with parameters of which none has a gradient, and `max_norm`, where torch is asked to clip them.

    The returned call ends that. Not noticed: `clip_grad_value_`, `clip_grads_with_norm_`, compiled code.
    """
    return _multiplier.listen(clipped) if hasattr(clip_grad, MULTIPLIER) else _nothing


def _nothing() -> None:
    """No-op: no call was noticed that could be ended."""


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
                changing = frame if frame.f_code is multiplies or frame.f_code is by_value else None
                if changing is not None:
                    TOTALS.count_clip()
                dispatch_modes.unseen(_notify, layer, args[0][0] if args else [], changing)
        except Exception as error:
            guard.fault("capture", error)
        return original(*args, **kwargs)

    return noticed


_sorter = Patch(clip_grad, SORTER, _make)


def _notify(layer: Layer[Listener], grads: list[Tensor], changing: FrameType | None) -> None:
    clip = Clip(grads, None) if changing is None else _described(grads, changing.f_locals)
    for listener in layer.listeners:
        listener(clip)


def _described(grads: list[Tensor], found: Mapping[str, Any]) -> Clip:
    """The clip of these gradients by a function of torch's with these local variables."""
    total, bound = found.get("total_norm"), found.get("max_norm", found.get("clip_value"))
    params = found.get("parameters")
    if not isinstance(params, Sequence):  # an iterator, which is used up
        params = None
    if not isinstance(bound, float):
        return Clip(grads, None, changes=True, params=params)
    if not isinstance(total, Tensor) or total.numel() != 1:
        return Clip(grads, None, changes=True, bound=bound, params=params)
    return Clip(grads, _factor(bound, total), True, bound, total, params)


def _factor(max_norm: float, total: Tensor) -> float | None:
    """Factor that torch's `clip_grads_with_norm_` is about to apply; None where a device has it."""
    if not on_host(total):
        return None
    with torch.no_grad():
        return float(torch.clamp(max_norm / (total + 1e-6), max=1.0))


def _make_multiplier(layer: Layer[ListenerWithout]) -> Callable[..., Any]:
    original = layer.original

    @functools.wraps(original)
    @untraced_itself
    def noticed(*args: Any, **kwargs: Any) -> Any:
        try:
            if layer.listeners and not torch.compiler.is_compiling():
                dispatch_modes.unseen(_notify_without, layer, *args[:2])
        except Exception as error:
            guard.fault("capture", error)
        return original(*args, **kwargs)

    return noticed


def _notify_without(
    layer: Layer[ListenerWithout], params: Any = (), max_norm: Any = math.nan, *_: Any
) -> None:
    # `clip_grad_norm_` gives a list; a generator must not be used up.
    if isinstance(params, list) and all(param.grad is None for param in params):
        for listener in layer.listeners:
            listener(params, float(max_norm))


_multiplier = Patch(clip_grad, MULTIPLIER, _make_multiplier)
