"""Loops that train without an optimizer of torch's: weights moved by their own code. Observed, never acted on.

A step is what happened between two moves of the weights. torch announces none of them (`p.data.add_` does not even bump
a version), so a few weights are compared when the next backward begins; a clip by `clip_grad_norm_` and gradients
that were cleared end a step too. What each backward left was read at its end, so it does not matter that
the gradients may be gone by then. Until weights were seen to move without a step of an optimizer nothing is claimed:
what was read of a loop whose optimizer is not known yet is kept aside for one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.hooks import clipping
from gradwatch.hooks.capture import Capture
from gradwatch.hooks.copies import params_of
from gradwatch.hooks.device import Number
from gradwatch.hooks.in_backward import Judge
from gradwatch.hooks.lane import Lane
from gradwatch.hooks.losses import Root
from gradwatch.hooks.multiplied import Announced
from gradwatch.taps import backward_entry

PROBED = 8  # parameters compared, and elements of each
_tracing = torch.compiler.is_dynamo_compiling


class ByHand:
    """The one lane of a Capture none of whose parameters has ever belonged to an optimizer that stepped."""

    def __init__(self, capture: Capture, judge: Judge, failed: Callable[[Exception], None]) -> None:
        self._capture = capture
        self._judge = judge
        self._failed = failed
        self._lane: Lane | None = None
        self._weights: list[Tensor] = []
        self._ending = False  # binding rules to a new lane asks for everything to be settled
        self._factor = 1.0  # of clips before the loop was known to train by hand
        self._deferred: Callable[[], object] | None = None
        self._scale: Number | None = None  # of a GradScaler, that these gradients have just been divided by
        capture.unowned = self._arrived
        capture.unowned_unscaled = self._unscaled
        self._removes = [backward_entry.listen(self._begins), clipping.listen(self._clipped)]

    def close(self) -> None:
        """Judge the last step, if the weights have moved since its backward; listen no more."""
        for remove in self._removes:
            remove()
        self.settle()

    def settle(self) -> None:
        """Judge the step whose weights have moved, before somebody asks what was seen."""
        if not self._ending:
            self._guarded(self._settle)

    def _settle(self) -> None:
        lane = self._open()
        if lane is not None and self._moved():
            self._end(lane)
        self._settle_deferred()

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                call()
        except Exception as error:
            self._failed(error)

    # -- events ------------------------------------------------------------------------------------------

    def _arrived(self, touched: list[int], root: Root | None) -> None:
        """A backward has ended that reached parameters of no optimizer."""
        lane = self._lane
        if lane is None or any(slot not in lane.position for slot in touched):
            known = lane if lane in self._capture.lanes else None
            lane = self._lane = self._capture.adopt_unowned(known, touched)
        if lane not in self._capture.lanes:  # those were told of it, and are read, with all others
            lane.begins()
            lane.hear(touched, root)
            lane.read()
        self._weights = probe(lane.params)

    def _unscaled(self, optimizer: Optimizer, scale: Number) -> None:
        """A GradScaler divides the gradients of an optimizer whose steps torch does not announce."""
        lane = self._open()
        if lane is not None and set(map(id, params_of(optimizer))) & set(lane.param_ids):
            lane.unscaled(scale)
            self._scale = scale

    def _begins(self, call: backward_entry.BackwardCall) -> None:
        if self._lane is not None and call.accumulates and not (call.nested or _tracing()):
            self._guarded(self._next_backward)

    def _next_backward(self) -> None:
        lane = self._open()
        if lane is not None and (self._moved() or (lane in self._capture.lanes and _cleared(lane))):
            self._end(lane)

    def _clipped(self, clip: Announced | None) -> None:
        if self._lane is not None and clip is not None and clip.exact:
            self._guarded(lambda: self._multiplied(clip))

    def _multiplied(self, clip: Announced) -> None:
        lane = self._open()
        if lane is None or not {id(grad) for grad in lane.grads() if grad is not None} <= clip.ids:
            return
        self._factor *= clip.factor
        if lane in self._capture.lanes:
            self._end(lane)

    # -- the step ----------------------------------------------------------------------------------------

    def _open(self) -> Lane | None:
        """The lane, where a step of it is open; forgotten as soon as an optimizer turns up."""
        if self._capture.optimized:
            self._lane = None
        return self._lane if self._lane is not None and self._lane.backwards else None

    def _moved(self) -> bool:
        assert self._lane is not None
        now = probe(self._lane.params)
        return len(now) == len(self._weights) and not all(map(torch.equal, now, self._weights))

    def _end(self, lane: Lane) -> None:
        """Judge what the last backward left."""
        if lane not in self._capture.lanes:
            self._capture.lanes.append(lane)
            self._ending = True
            try:
                self._judge.bound(lane)
            finally:
                self._ending = False
        window = lane.observed(self._factor)
        window.loss_scale = self._scale
        self._factor, self._scale = 1.0, None
        self._capture.look_after(lane, window)
        judged = self._judge.measure(lane, window).judge
        self._settle_deferred()
        if lane.on_cpu:
            judged()
        else:
            self._deferred = judged  # a step later its numbers have arrived
        lane.advance()

    def _settle_deferred(self) -> None:
        judged, self._deferred = self._deferred, None
        if judged is not None:
            judged()


def probe(params: Sequence[Tensor]) -> list[Tensor]:
    """Copies of a few elements of a few parameters, spread over all of them."""
    chosen = params[:: max(1, len(params) // PROBED)]
    found = []
    for param in chosen:
        flat = param.detach()
        flat = getattr(flat, "_local_tensor", flat).reshape(-1)
        found.append(flat[:: max(1, flat.numel() // PROBED)].clone())
    return found


def _cleared(lane: Lane) -> bool:
    return all(grad is None for grad in lane.grads())
