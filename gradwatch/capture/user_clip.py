"""torch's own gradient clipping, noticed: the last moment at which a gradient is what backward left.

A loop that accumulates is read once, at the end of the backward it has learned to be the last; the shorter
window at the end of an epoch would then be seen only at the step boundary, after `clip_grad_norm_`. So the
clip itself asks for the read, and says by which factor it multiplies (`gradwatch.capture.known_scaling`).
`clip_grad_norm_`, `clip_grads_with_norm_` and `clip_grad_value_` all sort their gradients with one function that
they look up in their module at every call: that one is wrapped, so it does not matter how, or how early, a
script imported them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from gradwatch.capture.known_scaling import Announced, announced
from gradwatch.capture.optimizer import Lane
from gradwatch.capture.parameters import Capture
from gradwatch.reading.device import capturing, on_host
from gradwatch.runtime import guard
from gradwatch.taps import modes
from gradwatch.taps.dynamo import untraced_itself
from gradwatch.taps.process_totals import TOTALS

SORTER = "_group_tensors_by_device_and_dtype"
MULTIPLIER = "_clip_grads_with_norm_"
BY_VALUE = "clip_grad_value_"

Listener = Callable[[Announced | None], None]

_listeners: list[Listener] = []
_wrapped: list[tuple[Any, Any]] = []  # (original, wrapper) while anybody listens


def listen(about_to_clip: Listener) -> Callable[[], None]:
    """Call `about_to_clip` before torch clips any gradient; the returned call ends that.

    It is given what torch is about to multiply by, where torch's own code says so, else None. It must not raise.
    Silent under a torch without that function, and in code compiled by `torch.compile`. The last listener out
    puts the module back as found.
    """
    _listeners.append(about_to_clip)
    if not _wrapped and hasattr(clip_grad, SORTER):
        _wrap(getattr(clip_grad, SORTER))

    def remove() -> None:
        if about_to_clip in _listeners:
            _listeners.remove(about_to_clip)
        if not _listeners:
            _put_back()

    return remove


class BeforeClip:
    """Reads, when clipping begins, the gradients of a Capture that the end of no backward was there to read.

    `waiting` names optimizers that have no lane yet (attached after their backward); `bound` is told of the
    lane each gets. `resting` says that nothing may be read at present.
    """

    def __init__(
        self,
        capture: Capture,
        waiting: Callable[[], list[Optimizer]],
        bound: Callable[[Lane], None],
        resting: Callable[[], bool],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._capture = capture
        self._waiting = waiting
        self._bound = bound
        self._resting = resting
        self._failed = failed
        self.close = listen(self.read)

    def read(self, clip: Announced | None = None) -> None:
        """Read what is unread, and tell every lane of the clip; raises only if `failed` does."""
        try:
            if not self._resting() and not capturing():
                self._read()
                if clip is not None:
                    for lane in self._capture.lanes:
                        lane.announced.append(clip)
        except Exception as error:
            self._failed("capture", error)

    @torch.no_grad()
    def _read(self) -> None:
        late = [self._capture.adopt(optimizer) for optimizer in self._waiting()]
        for lane in late:
            self._bound(lane)
        for lane in [*late, *(lane for lane in self._capture.lanes if lane.overdue)]:
            lane.read()


def _wrap(original: Callable[..., Any]) -> None:
    multiplies = inspect.unwrap(getattr(clip_grad, MULTIPLIER, _wrap)).__code__
    # `clip_grad_norm_` sorts twice, for the norm and to multiply: a clip is counted where gradients change.
    by_value = inspect.unwrap(getattr(clip_grad, BY_VALUE, _wrap)).__code__

    @functools.wraps(original)
    @untraced_itself
    def noticed(*args: Any, **kwargs: Any) -> Any:
        try:
            if not torch.compiler.is_compiling():
                frame = sys._getframe(1)
                TOTALS.clips += frame.f_code is multiplies or frame.f_code is by_value
                modes.unseen(_tell, frame if frame.f_code is multiplies else None)
        except Exception as error:
            guard.fault("capture", error)
        return original(*args, **kwargs)

    _wrapped.append((original, noticed))
    setattr(clip_grad, SORTER, noticed)


def _tell(multiplying: FrameType | None) -> None:
    clip = None if multiplying is None else _announced(multiplying)
    for listener in tuple(_listeners):
        listener(clip)


def _put_back() -> None:
    while _wrapped:
        original, noticed = _wrapped.pop()
        if getattr(clip_grad, SORTER) is noticed:  # else somebody wrapped it again since
            setattr(clip_grad, SORTER, original)


def _announced(clip: FrameType) -> Announced | None:
    """What torch's `clip_grads_with_norm_` is about to do, by its own arguments; None where they differ."""
    found = clip.f_locals
    grads, max_norm, total = found.get("grads"), found.get("max_norm"), found.get("total_norm")
    if not (isinstance(grads, list) and isinstance(max_norm, float) and isinstance(total, torch.Tensor)):
        return None
    if not on_host(total) or total.numel() != 1:
        return None
    with torch.no_grad():
        return announced(grads, float(torch.clamp(max_norm / (total + 1e-6), max=1.0)))
