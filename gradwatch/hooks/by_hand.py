"""Loops that train without an optimizer of torch's: weights moved by their own code. Observed, never acted on.

A step is what happened between two moves of the weights. torch announces none of them (`p.data.add_` does not even bump
a version), so a few weights are compared when the next backward begins; a clip by `clip_grad_norm_` and gradients
that were cleared end a step too. What each backward left was read at its end, so it does not matter that
the gradients may be gone by then. Until weights were seen to move without a step of an optimizer nothing is claimed:
what was read of a loop whose optimizer is not known yet is kept aside for one step. Parameters that receive gradients
and never move (a backbone that was neither frozen nor given to the optimizer) are read no more after a while, until
they do.

The parameters are those that no living optimizer has: one side of a GAN may be trained so, or a second model after one
that had an optimizer.
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
STILL = 64  # backwards after which weights that have not moved are taken to be trained by nothing
_tracing = torch.compiler.is_dynamo_compiling


class ByHand:
    """The lanes of a Capture whose parameters belong to no living optimizer that stepped: one for each loop.

    Parameters of one model, or reached by one backward when they were first reached, belong to one loop.
    """

    def __init__(self, capture: Capture, judge: Judge, failed: Callable[[Exception], None]) -> None:
        self._capture = capture
        self._judge = judge
        self._failed = failed
        self._loops: list[_Loop] = []
        self._unowned: frozenset[int] = frozenset()  # when it was last looked whether the loops' lanes stand
        self._ending = False  # binding rules to a new lane asks for everything to be settled
        capture.unowned = self._arrived
        capture.unowned_unscaled = self._unscaled
        self._removes = [backward_entry.listen(self._begins), clipping.listen(self._clipped)]

    def close(self) -> None:
        """Judge the last steps, where the weights have moved since their backward; listen no more."""
        for remove in self._removes:
            remove()
        self.settle()

    def settle(self) -> None:
        """Judge the steps whose weights have moved, before somebody asks what was seen."""
        if not self._ending:
            self._guarded(self._settle)

    def _settle(self) -> None:
        for loop in self._open():
            if loop.moved():
                self._end(loop)
        for loop in self._loops:
            loop.settle_deferred()

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                call()
        except Exception as error:
            self._failed(error)

    # -- events ------------------------------------------------------------------------------------------

    def _arrived(self, touched: list[int], root: Root | None) -> None:
        """A backward has ended that reached parameters of no optimizer."""
        new = set(touched).difference(*(loop.lane.position for loop in self._loops))
        if new:
            self._make_room(new)
        for loop in self._loops:
            mine = [slot for slot in touched if slot in loop.lane.position]
            if mine:
                loop.arrived(mine, root)
                if loop.still == STILL:
                    self._capture.mute(loop.lane)

    def _make_room(self, new: set[int]) -> None:
        """Parameters that are in no lane yet: those of a loop's model join it, others are a loop of their own."""
        lane = self._capture.adopt_unowned(None, [*new])
        for loop in self._loops:
            if not lane.position.keys().isdisjoint(loop.lane.position):
                known = loop.lane if loop.claimed else None
                loop.take(self._capture.adopt_unowned(known, [*new, *loop.lane.position]))
                return
        self._loops.append(_Loop(self._capture.lanes, lane))

    def _unscaled(self, optimizer: Optimizer, scale: Number) -> None:
        """A GradScaler divides the gradients of an optimizer whose steps torch does not announce."""
        params = set(map(id, params_of(optimizer)))
        for loop in self._open():
            if not params.isdisjoint(loop.lane.param_ids):
                loop.lane.unscaled(scale)
                loop.scale = scale

    def _begins(self, call: backward_entry.BackwardCall) -> None:
        if call.accumulates and not (call.nested or _tracing()):
            self._capture.let_go_of_dead()  # what they had trained may be trained by hand from now on
            if self._loops:
                self._guarded(self._next_backward)

    def _next_backward(self) -> None:
        for loop in self._open():
            if loop.moved() or (loop.claimed and (loop.clip_seen or loop.cleared())):
                self._end(loop)

    def _clipped(self, clip: Announced | None) -> None:
        if self._loops and clip is not None:
            self._guarded(lambda: self._multiplied(clip))

    def _multiplied(self, clip: Announced) -> None:
        for loop in self._open():
            loop.clip_seen |= {id(grad) for grad in loop.lane.grads() if grad is not None} <= clip.ids

    # -- the step ----------------------------------------------------------------------------------------

    def _open(self) -> list[_Loop]:
        """The loops of which a step is open; one is forgotten as soon as an optimizer has some parameter of it."""
        unowned = self._capture.unowned_slots()
        if unowned is not self._unowned:
            self._unowned = unowned
            self._loops = [loop for loop in self._loops if self._stands(loop.lane)]
        return [loop for loop in self._loops if loop.lane.backwards]

    def _stands(self, lane: Lane) -> bool:
        pairs = zip(map(int, lane.slots), lane.params, strict=True)
        return bool(lane) and all(
            slot in self._unowned and self._capture.params[slot] is param for slot, param in pairs
        )

    def _end(self, loop: _Loop) -> None:
        """Judge what the last backward left."""
        lane = loop.lane
        if not loop.claimed:
            loop.still = 0
            self._claim(lane)
        loop.clip_seen = False
        if lane.unread:  # trained by hand after all: from the next backward on
            self._capture.cleared(lane)
            lane.discard()
            return
        window = lane.observed()
        window.loss_scale, loop.scale = loop.scale, None
        self._capture.look_after(lane, window)
        judged = self._judge.measure(lane, window).judge
        loop.settle_deferred()
        if lane.on_cpu:
            judged()
        else:
            loop.deferred = judged  # a step later its numbers have arrived
        lane.advance()

    def _claim(self, lane: Lane) -> None:
        """The weights are trained by hand: rules are bound to them."""
        lane.index = len(self._capture.lanes)
        self._capture.lanes.append(lane)
        self._capture.restore(lane)
        self._ending = True
        try:
            self._judge.bound(lane)
        finally:
            self._ending = False


class _Loop:
    """One lane, and what tells whether its weights have moved; `lanes` are those that are told of each backward."""

    def __init__(self, lanes: list[Lane], lane: Lane) -> None:
        self._lanes = lanes
        self.clip_seen = False  # in the window that is open
        self.scale: Number | None = None  # of a GradScaler, that these gradients have just been divided by
        self.deferred: Callable[[], object] | None = None
        self.take(lane)

    def take(self, lane: Lane) -> None:
        """This is its lane from now on."""
        self.lane = lane
        self._weights: list[Tensor] = []
        self.still = 0  # backwards since the weights were first looked at, while they have not moved

    @property
    def claimed(self) -> bool:
        """Whether the weights were seen to move without an optimizer."""
        return any(lane is self.lane for lane in self._lanes)

    def arrived(self, touched: list[int], root: Root | None) -> None:
        """A backward has ended that reached these slots of the lane."""
        lane = self.lane
        if not self.claimed:  # a lane that is claimed was told of it, and is read, with all others
            lane.begins()
            lane.hear(touched, root)
            self.still += 1
            if self.still > STILL:
                return  # the weights are compared with those of then
            lane.read()
        self._weights = probe(lane.params)

    def moved(self) -> bool:
        """Whether the weights are others than at the end of the backward."""
        now, before = probe(self.lane.params), self._weights
        if len(now) != len(before) or all(map(torch.equal, now, before)):
            return False
        # NaN is other than itself: where nothing was seen to move so far, that is not enough.
        return self.claimed or not all(map(_alike, now, before))

    def cleared(self) -> bool:
        """Whether every gradient was taken away."""
        return all(grad is None for grad in self.lane.grads())

    def settle_deferred(self) -> None:
        """Judge the step before, whose numbers had to arrive from a device."""
        judged, self.deferred = self.deferred, None
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


def _alike(now: Tensor, before: Tensor) -> bool:
    return torch.allclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
