"""Loops that train without an optimizer of torch's: weights moved by their own code. Observed, never acted on.

A step is what happened between two moves of the weights. torch announces none of them (`p.data.add_` does not even bump
a version), so a few weights are compared when the next backward begins; a clip by `clip_grad_norm_` and gradients
that were cleared end a step too. What each backward left was read at its end, so it does not matter that
the gradients may be gone by then. Until weights were seen to move without a step of an optimizer nothing is claimed:
what was read of a loop whose optimizer is not known yet is kept aside for one step. Parameters that receive gradients
and never move (a backbone that was neither frozen nor given to the optimizer) are read no more after a while, until
they do. Parameters may also be replaced (`replaced_parameters`).

The parameters are those that no living optimizer has: one side of a GAN may be trained so, or a second model after one
that had an optimizer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradwatch.capture.columns.loss import Root
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.read_after_backward import Capture
from gradwatch.reading.async_copy import Number
from gradwatch.session.binding.bind_optimizer import Binder
from gradwatch.session.boundary.replaced_parameters import ReplacedParameters
from gradwatch.session.boundary.weight_change_probe import PROBED, Probed, other_than, probe, probe_at
from gradwatch.session.logged_once import Notices
from gradwatch.session.pipeline.step_pipeline import StepPipeline
from gradwatch.taps import backward_entry, clip_functions
from gradwatch.taps.clip_functions import Clip
from gradwatch.taps.optimizers.param_groups import in_any_optimizer, params_of

FEW = 16  # backwards after which these weights are said to belong to no optimizer
STILL = 64  # backwards after which weights that have not moved are taken to be trained by nothing


class LoopsWithoutOptimizer:
    """The captures of a Capture whose parameters belong to no living optimizer that stepped: one for each loop.

    Parameters of one model, or reached by one backward when they were first reached, belong to one loop.
    """

    def __init__(
        self,
        capture: Capture,
        binder: Binder,
        pipeline: StepPipeline,
        notices: Notices,
        failed: Callable[[Exception], None],
        may_judge: Callable[[], bool],
    ) -> None:
        self._may_judge = may_judge
        self._notices = notices
        self._capture = capture
        self._binder = binder
        self._pipeline = pipeline
        self._failed = failed
        self._loops: list[_Loop] = []  # one list for good: whether it is empty is looked at from elsewhere
        # When it was last looked whether the loops' captures stand.
        self._unowned: frozenset[int] = frozenset()
        self._ending = False  # a step is being ended, for which everything is asked to be settled
        self._changed = False  # parameters were replaced, or added, since the backward before
        self.windows_replaced = 0  # whose parameters were all replaced by others unlike them
        capture.call_when_unowned(
            lambda touched, root: self._guarded(lambda: self._arrived(touched, root)),
            self.flush,  # a model may be gone before another backward begins
        )
        self._replaced = ReplacedParameters(
            capture, lambda: [(loop.captured, loop.probe_before) for loop in self._loops]
        )
        # torch's global hooks must not hold this object.
        registered, built = weakref.WeakMethod(self._registered), weakref.WeakMethod(self._built)
        capture.coverage.announce(
            lambda *what: (call := registered()) is not None and call(*what),
            lambda: None if (call := built()) is None else call(),
        )
        begins = backward_entry.listen(self._begins, self._loops, capture.slots.held_by_script)
        self._removes = [begins, clip_functions.listen(self._clipped)]

    def close(self) -> None:
        """Judge the last steps, where the weights have moved since their backward, and remove the listeners."""
        for remove in self._removes:
            remove()
        self.flush()

    def flush(self) -> None:
        """Judge the steps whose weights have moved, before their Records are read."""
        if self._loops and not self._ending:
            self._guarded(self._flush)

    def _flush(self) -> None:
        self._ending = True
        try:
            self._replaced.look()
            for loop in self._open():
                if loop.moved():
                    self._end(loop)
        finally:
            self._ending = False

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            with self._capture.arranging.held, torch.no_grad():
                call()
        except Exception as error:
            self._failed(error)

    # -- events ------------------------------------------------------------------------------------------

    def _arrived(self, touched: list[int], root: Root | None) -> None:
        """Take in a backward that has reached parameters of no optimizer."""
        new = set(touched).difference(*(loop.captured.position for loop in self._loops))
        if new:
            self._make_room(new, touched)
        for loop in self._loops:
            mine = [slot for slot in touched if slot in loop.captured.position]
            if not mine:
                continue
            if not loop.arrived(mine, root):
                self._capture.cleared(loop.captured)
            if loop.still == STILL:
                self._capture.mute(loop.captured, keep=mine[-1])
            if loop.still == FEW:
                self._report_unowned()

    def _built(self) -> None:
        """Release the parameters of a loop whose model is gone, once its step is judged."""
        if self._loops and self._may_judge() and self._capture.has_dead():
            self._capture.drop_dead()

    def _report_unowned(self) -> None:
        """Report which parameters receive gradients and are trained by nothing, of those known by now."""
        slots = {
            slot for loop in self._loops if loop.still >= FEW and not loop.claimed for slot in loop.reached
        }
        if slots:
            owned = in_any_optimizer()  # one that has not stepped yet is not known to the capture
            slots = {slot for slot in slots if self._capture.slots.ids[slot] not in owned}
        names = tuple(self._capture.names[slot] for slot in sorted(slots))
        self._capture.trained_by_nothing(len(names))
        if names and any(captured.optimizer is not None for captured in self._capture.captures):
            self._notices.unowned(names)

    def _registered(self, module: nn.Module, name: str, value: Any) -> bool:
        """Look at a value that a watched module is about to get; True if nothing else need look at it."""
        try:
            with self._capture.arranging.held:
                if self._loops and self._replaced.registered(module, name, value):
                    return True
                self._capture.make_way(module, name, value)
                return False
        except Exception as error:
            self._failed(error)
            return False

    def _make_room(self, new: set[int], touched: list[int]) -> None:
        """Parameters that are in no capture yet: those of a loop's model join it, others are a loop of their own.

        Tensors that no module holds join a loop that the same backward has `touched`.
        """
        captured = self._capture.adopt_unowned(None, [*new])
        joins = touched if new <= self._capture.slots.held_by_script else captured.position.keys()
        for loop in self._loops:
            if not loop.captured.position.keys().isdisjoint(joins):
                known = loop.captured if loop.claimed else None
                loop.take(self._capture.adopt_unowned(known, [*new, *loop.captured.position]))
                if known is not None:
                    self._bind(loop.captured)
                return
        self._loops.append(_Loop(self._capture.captures, captured))

    def unscaled(self, optimizer: Optimizer, scale: Number) -> None:
        """A GradScaler divides the gradients of an optimizer whose steps torch does not announce."""
        params = set(map(id, params_of(optimizer)))
        for loop in self._open():
            if not params.isdisjoint(loop.captured.param_ids):
                loop.captured.remove_scale(scale)

    def _begins(self, call: backward_entry.BackwardCall) -> None:
        """Look at loops, or at tensors of the script's own that may start one, before a backward runs."""
        if call.accumulates and not call.nested:
            if self._loops:
                self._guarded(self._look)
            if self._capture.has_dead():
                self._capture.drop_dead()  # their parameters may be updated by the script's own code from now on
            if self._loops:
                self._guarded(self._next_backward)
            if self._changed:
                self._guarded(self._release_replaced)

    def _look(self) -> None:
        self._changed = self._replaced.look()

    def _release_replaced(self) -> None:
        """Parameters that others, unlike them, have taken the place of: they are held no longer than the next backward.

        An open window of theirs is no step's: it is not known whether they would have moved.
        """
        self._changed = False
        for loop in tuple(self._loops):
            position, lost = loop.captured.position, self._replaced.lost(loop.captured.position)
            self.windows_replaced += bool(lost) and loop.captured.backwards > 0
            if len(lost) == len(position):
                self._loops.remove(loop)
        held = {slot for loop in self._loops for slot in loop.captured.position}
        if self._replaced.lost(self._capture.unowned_slots() - held):
            self._capture.drop_dead()

    def _next_backward(self) -> None:
        thread = threading.get_ident()
        for loop in self._open():
            if loop.moved() or (loop.claimed and (loop.clip_seen or loop.cleared())):
                self._end(loop)
            elif loop.claimed and loop.thread == thread and loop.captured.begins():
                self._capture.cleared(loop.captured)

    def _clipped(self, clip: Clip) -> None:
        if self._loops and clip.factor is not None:
            self._guarded(lambda: self._clip_covers({id(grad) for grad in clip.grads}))

    def _clip_covers(self, ids: set[int]) -> None:
        for loop in self._open():
            loop.clip_seen |= (
                loop.may_look() and {id(grad) for grad in loop.captured.grads() if grad is not None} <= ids
            )

    # -- the step ----------------------------------------------------------------------------------------

    def _open(self) -> list[_Loop]:
        """The loops of which a step is open; one is discarded as soon as an optimizer has some parameter of it."""
        unowned = self._capture.unowned_slots()
        if unowned is not self._unowned:
            self._unowned = unowned
            for loop in tuple(self._loops):
                if not self._stands(loop.captured):
                    self._loops.remove(loop)
            if self._capture.in_no_optimizer:
                self._report_unowned()
        return [loop for loop in self._loops if loop.captured.backwards]

    def _stands(self, captured: OptimizerCapture) -> bool:
        pairs = zip(map(int, captured.slots), captured.params, strict=True)
        return bool(captured) and all(
            slot in self._unowned and self._capture.slots.ids[slot] == id(param) for slot, param in pairs
        )

    def _end(self, loop: _Loop) -> None:
        """Judge what the last backward left."""
        captured = loop.captured
        if not loop.claimed:
            loop.still = 0
            self._bind(captured, claim=True)
            if self._capture.in_no_optimizer:
                self._report_unowned()
        loop.ends()
        if captured.unread:  # updated by the script's own code after all: from the next backward on
            self._capture.cleared(captured)
            captured.discard()
            return
        window = captured.observed()
        self._capture.maintain_hooks(captured, window)
        self._pipeline.observe(captured, window, self._failed)
        captured.advance()

    def _bind(self, captured: OptimizerCapture, claim: bool = False) -> None:
        """Bind rules to weights that the script's own code updates; `claim`: they are known to be from now on."""
        before, self._ending = self._ending, True
        try:
            if claim:
                self._capture.claim(captured)
            self._binder.bind(captured)
        finally:
            self._ending = before


class _Loop:
    """One capture, and the values by which its weights are seen to move; `captures` are those given each backward."""

    def __init__(self, captures: list[OptimizerCapture], captured: OptimizerCapture) -> None:
        self._captures = captures
        self.clip_seen = False  # in the window that is open
        self.thread = 0  # that its last backward has run on
        self.take(captured)

    def take(self, captured: OptimizerCapture) -> None:
        """Take this for its capture from now on."""
        self.captured = captured
        self._weights: list[Probed] = []
        self.still = 0  # backwards since the weights were first looked at, while they have not moved
        self.reached: set[int] = set()  # slots that received a gradient in these

    @property
    def claimed(self) -> bool:
        """True if the weights were seen to move without an optimizer."""
        return any(captured is self.captured for captured in self._captures)

    def arrived(self, touched: list[int], root: Root | None) -> bool:
        """Take in a backward that has reached these slots; False where it left no gradient there, used up inside it."""
        captured, self.thread = self.captured, threading.get_ident()
        # A capture that is claimed got it, and is read, with all others; not one claimed by another thread since.
        if not (self.claimed and captured.backwards):
            captured.begins()
            captured.add_arrivals(touched, root, self.thread)
            self.reached.update(touched)
            self.still += 1
            if self.still > STILL:
                return True  # the weights are compared with those of then
            captured.read()
        self._weights = probe(captured.params)
        return bool(self._weights)

    def probe_before(self, k: int) -> None:
        """Compare also the values of the parameter at this position, which is about to be replaced."""
        # Not where the step is over already, which another thread may have found in the midst of a replacement.
        known = {each.position for each in self._weights}
        if known and k not in known and len(known) < 2 * PROBED:
            self._weights += probe_at(self.captured.params, k)

    def moved(self) -> bool:
        """True if the weights are others than at the end of the backward."""
        # NaN is other than itself: where nothing was seen to move so far, that is not enough.
        return any(other_than(each, self.captured.params, self.claimed) for each in self._weights)

    def ends(self) -> None:
        """End its step: weights are compared again from the end of the next backward on."""
        self.clip_seen, self._weights = False, []

    def cleared(self) -> bool:
        """True if every gradient was taken away, as far as this thread may look."""
        return self.may_look() and all(grad is None for grad in self.captured.grads())

    def may_look(self) -> bool:
        """True if no other thread can be changing its gradients."""
        return self.captured.threads.may_look(self.thread)
