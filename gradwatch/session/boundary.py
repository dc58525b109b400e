"""The step boundary: global optimizer hooks that close the window, ask for a decision and carry it out.

Global hooks are the only tap that exists in every parallel mode and for optimizers made later. They never
patch `optimizer.step` (that breaks LR schedulers). A closure is wrapped instead, because its backward runs
inside `step`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.actions.apply import Acting, why_stopped
from gradwatch.actions.closures import Evaluations, Memory, evaluates_often
from gradwatch.capture.optimizer import Lane
from gradwatch.capture.parameters import Capture
from gradwatch.capture.window import Window
from gradwatch.errors import TrainingStopped
from gradwatch.reading.device import Number, arrived, capturing, kept, on_host
from gradwatch.records.snapshot import Decision
from gradwatch.runtime import guard
from gradwatch.runtime.distinct import Distinct
from gradwatch.session.by_hand import ByHand
from gradwatch.session.deferred import Deferred
from gradwatch.session.in_backward import InBackward
from gradwatch.session.protocol import Judge
from gradwatch.taps import backward, closure_calls, grad_scaler, modes, process_totals, step_hooks

# By name: to walk torch's module from cold caches costs microseconds.
_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, modes.set_grad_enabled
_params_of: Callable[[dict[str, Any]], list[Tensor]] = itemgetter("params")
RECHECK = 16  # steps between full comparisons of the optimizer's parameters while the marks are thinned


class Boundary:
    """Global step hooks acting on the lanes of one Capture; `close` removes them."""

    def __init__(self, capture: Capture, judge: Judge) -> None:
        self._capture = capture
        self._judge = judge
        self._inside: dict[int, int] = {}  # nested calls of one optimizer's step, by lane
        self._acting = Acting(judge.failed, judge.acted)
        self._deferred: dict[int, Deferred] = {}
        self._evaluations: dict[int, Evaluations] = {}  # by id of the optimizer whose step is running
        self._scales: dict[int, Number] = {}  # by optimizer: what its gradients have just been divided by
        self._in_backward = InBackward(capture, judge)
        self._by_hand = ByHand(capture, judge, self._judging_failed)
        self._registrations = capture.coverage.registrations
        self._spent = capture.spent
        self.steps = 0  # measured; an optimizer that wraps another one takes a step together with it
        self.optimizers = Distinct()  # of which a step was measured
        self._counted = 0  # number of the step counted last
        self._thread: int | None = None  # that took the last step
        self._removes = [step_hooks.listen(self), grad_scaler.listen(self), guard.listen(judge.failed)]

    def close(self) -> None:
        """Remove the hooks; judge what still waits; give back any gradient set aside."""
        for remove in self._removes:
            remove()
        self._guarded(self._in_backward.finish)
        self._by_hand.close()
        self.settle_deferred()
        self._acting.close()

    def is_here(self) -> bool:
        """Whether this is the thread that takes the steps, as far as one has been seen, or that thread has ended."""
        if self._thread in (None, threading.get_ident()):
            return True
        return all(thread.ident != self._thread for thread in threading.enumerate())

    def settle_deferred(self) -> None:
        """Judge every window that waits: its numbers were on their way from a device, or nothing hurried."""
        for waiting in self._deferred.values():
            self._guarded(waiting.judge_all, self._judging_failed)
        self._guarded(self._in_backward.settle_deferred)
        self._by_hand.settle()

    def _count(self, optimizer: Optimizer) -> None:
        """One more step was measured, unless it is the one counted last."""
        self.optimizers.add(optimizer)
        number = process_totals.present_step(optimizer)
        if number != self._counted:
            self._counted = number
            self.steps += 1

    def _judging_failed(self, error: Exception) -> None:
        self._judge.failed("boundary", error)

    # -- before ------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Judge and act now, or, where a closure will run the backward, right after it."""
        self._thread = threading.get_ident()
        if backward.current() != backward.NONE:
            self._guarded(self._step_in_backward, optimizer)
            return None
        closure = kwargs.get("closure") if "closure" in kwargs else (args[1] if len(args) > 1 else None)
        if closure is not None and closure_calls.noticed(closure):
            return None  # a subclass whose step calls super().step(closure): wrapped already
        lane = self._capture.lane_of(optimizer)
        nested = lane is not None and self._inside.get(lane.index, 0) > 0 and self._is_nested(optimizer, lane)
        if not nested and id(optimizer) in self._evaluations and step_hooks.steps_under_way(optimizer) < 2:
            del self._evaluations[id(optimizer)]  # of a step that raised
        if not callable(closure):
            self._guarded(self._at_step, optimizer, lane, nested)
            return None
        if lane is None and not self._judge.owns(optimizer):
            return None  # another watch may own it: what is wrapped once is not wrapped again
        turn = self._evaluations.get(id(optimizer))  # there in a `super().step()` with a closure of its own
        depth = step_hooks.steps_under_way(optimizer) if turn is not None and turn.running else 1
        if turn is None or depth > turn.depth:
            self._evaluations[id(optimizer)] = turn = Evaluations(None, turn, depth)
            self._guarded(self._remember, optimizer, turn)
        about = optimizer, turn, object()
        instead = closure_calls.notice(
            closure, partial(self._before_evaluation, *about), partial(self._after_evaluation, *about)
        )
        if "closure" in kwargs:
            return args, {**kwargs, "closure": instead}
        return (args[0], instead, *args[2:]), kwargs

    def _guarded(self, call: Callable[..., Any], *args: Any) -> None:
        graded = _grad_enabled()
        try:
            try:
                mark = self._spent.begin()
                _set_grad_enabled(False)  # a tenth of `with torch.no_grad()` in cold caches
                call(*args)
                self._spent.end(mark)
            finally:
                _set_grad_enabled(graded)
        except TrainingStopped:
            raise
        except Exception as error:
            self._judge.failed("boundary", error)
        finally:
            _set_grad_enabled(
                graded
            )  # once more: what arrived at the first must not leave training without a graph

    def _step_in_backward(self, optimizer: Optimizer) -> None:
        if self._judge.owns(optimizer):
            self._in_backward.step(optimizer)
            self._count(optimizer)

    # -- closures ----------------------------------------------------------------------------------------

    def _remember(self, optimizer: Optimizer, turn: Evaluations) -> None:
        """Keep what a skip must bring back, where a step may move the weights before its last evaluation."""
        if evaluates_often(optimizer) and self._judge.owns(optimizer):
            lane = self._capture.lane_of(optimizer)
            if lane is None or self._judge.skips_nonfinite(lane) or self._judge.needs_host(lane):
                turn.memory = Memory(optimizer)

    def _before_evaluation(self, optimizer: Optimizer, turn: Evaluations, closure: object) -> None:
        if turn.begins(closure) and turn.count:
            modes.unseen(self._guarded, self._next_evaluation, optimizer)

    def _after_evaluation(self, optimizer: Optimizer, turn: Evaluations, closure: object) -> None:
        if turn.ends(closure):
            modes.unseen(self._guarded, self._evaluated, optimizer, turn)

    def _next_evaluation(self, optimizer: Optimizer) -> None:
        lane = self._capture.lane_of(optimizer)
        if lane is not None:
            lane.discard()
            self._judge.forget(lane)

    def _evaluated(self, optimizer: Optimizer, turn: Evaluations) -> None:
        """The closure has run once more: the first gradient is the step's, a later one must be finite."""
        lane = self._capture.lane_of(optimizer)
        if turn.count == 1 or lane is None:
            self._at_step(optimizer, lane)
            return
        if turn.skipped or turn.spoilt:
            return
        if self._judge.pooled(lane):
            return  # a rank knows only its own part of a later evaluation, and must not act on it alone
        self._capture.drain()
        norms = lane.norms_read()
        total = math.sqrt(np.dot(norms, norms))
        if not math.isfinite(total):
            turn.spoilt = True
            self._inside[lane.index] = 0
            lane.step += 1  # a Snapshot of its own
            self._at_step(optimizer, lane)
            return
        decision = self._judge.clips_again(lane, norms)
        if turn.max_norm is not None:  # a rule's bound on the first gradient holds for the whole step
            decision |= Decision(max_norm=turn.max_norm)
        self._acting.clip_again(lane, decision, total)

    def _is_nested(self, optimizer: Optimizer, lane: Lane) -> bool:
        """Whether this is the `super().step()` of a step that has begun: the hooks fire twice for it.

        Told by the stack, and asked only where a step seems to be open: one that raised leaves that behind too.
        """
        under_way = step_hooks.steps_under_way(optimizer)
        if under_way:
            return under_way > 1
        return lane.backwards > 0 and lane.settled == lane.backwards  # compiled: nothing better is known

    def _at_step(self, optimizer: Optimizer, known: Lane | None, nested: bool = False) -> None:
        """Judge and act; `known` is the optimizer's lane, None where it has none yet.

        After a backward the caches are cold, and every Python call costs microseconds: hence what is passed along
        here and below, and what is asked before it is called.
        """
        if self._judge.resting() if known is not None else not self._judge.owns(optimizer):
            self._among_ranks(known, optimizer, _nothing)
            return
        if known is not None and nested:
            if id(optimizer) in self._evaluations or known.settled == known.backwards:
                self._inside[known.index] += 1  # the outer call has judged these gradients, or will
                return
        elif known is not None and known.index in self._acting.held and self._acting.emptied(known.index):
            # The step that was skipped raised all the same.
            self._acting.give_back(known.index, finished=False)
        if self._capture.ready:
            self._capture.drain()
        if known is None:
            known = self._capture.lane_of(optimizer)  # the drain may have made it
        elif not known.on_cpu and capturing():
            known.discard()
            self._judge.captured()
            return
        outer = self._inside.get(known.index, 0) if known is not None and nested else 0
        changed = known is not None and known.solitary and self._changed(optimizer, known)
        if known is not None and known.solitary and not changed:
            self._close(optimizer, known, outer)
        else:
            self._among_ranks(known, optimizer, self._close_window, known, outer, changed)

    def _among_ranks(
        self, known: Lane | None, optimizer: Optimizer, close: Callable[..., None], *args: Any
    ) -> None:
        """Close a window of a lane (None = it has none yet); whatever fails, no rank is left waiting for this one."""
        self._judge.arrive(known)
        try:
            close(optimizer, *args)
        except Exception:
            self._judge.depart(self._capture.lane_of(optimizer))
            raise
        self._judge.depart(self._capture.lane_of(optimizer) if known is None else known)

    def _close_window(self, optimizer: Optimizer, known: Lane | None, outer: int, changed: bool) -> None:
        """As `_close`, of a lane that may have to be made (or made anew: `changed`), and that may meet other ranks."""
        lane = self._lane(optimizer, known, changed)
        if not lane.on_cpu and capturing():
            lane.discard()
            self._judge.captured()
            return
        self._judge.enter(lane)
        self._close(optimizer, lane, outer)

    def _close(self, optimizer: Optimizer, lane: Lane, outer: int) -> None:
        """Judge what arrived since the last step; `outer` calls of the same step are open around this one."""
        if self._inside.get(lane.index) and not outer:
            lane.resume()  # the step before this one raised
        self._inside[lane.index] = outer + 1
        if lane.index in self._acting.held:  # left behind by a step that raised
            self._acting.let_go(lane.index, finished=False)
        window = self._settle(optimizer, lane)
        waiting = self._deferred.get(lane.index) or self._waiting(lane)
        if not lane.on_cpu and not self._must_wait(lane, optimizer):
            waiting.judge_arrived()
            waiting.add(self._judge.measure(lane, window))
            self._count(optimizer)
            self._acting.on_device(
                optimizer, lane, self._judge.max_norm(lane), self._judge.skips_nonfinite(lane)
            )
            return
        measured = self._judge.measure(lane, window)
        self._count(optimizer)
        max_norm, turn = self._judge.max_norm(lane), self._evaluations.get(id(optimizer))
        if max_norm is not None and turn is not None:
            window.calm = False  # what is decided of a closure's first gradients clips the later ones too
        if window.calm and max_norm is not None:
            window.calm = self._acting.clip_ahead(optimizer, lane, max_norm)
        if not window.calm or waiting.add(measured):
            waiting.judge_all(self._judging_failed)
        if not window.calm:
            window.at_hand = True
            self._acting.carry_out(optimizer, lane, measured.judge(), turn, max_norm)

    def _settle(self, optimizer: Optimizer, lane: Lane, rejected: bool = False) -> Window:
        """Close the window; `rejected`: a scaler has found an overflow, and does not call the optimizer."""
        told = grad_scaler.divisors(optimizer) if rejected else grad_scaler.at_step(optimizer)
        left, divisor, skipped = told.left, told.divisor, 1.0 if rejected else told.found_inf
        window = lane.settle(left)
        if divisor is not None:
            lane.divide_applied(window, divisor)
        if self._scales:
            window.loss_scale = self._scales.pop(id(optimizer), None)
        if skipped is not None:
            window.loss_scale = left if window.loss_scale is None else window.loss_scale
        elif window.loss_scale is not None:
            skipped = 0.0
        window.skipped = skipped
        distrusted = lane.thinned and not window.trusted
        if (distrusted or lane.silent) and not lane.backwards:
            self._capture.unmarked_backwards += 1
        if distrusted:
            self._capture.restore(lane)
        if self._capture.look_after(lane, window):
            self._judge.bound(lane)  # tensor hooks on its parameters were silenced with the marks
        return window

    def _waiting(self, lane: Lane) -> Deferred:
        """The windows of a lane that wait to be judged."""
        waiting = self._deferred.get(lane.index)
        if waiting is None:
            waiting = self._deferred[lane.index] = Deferred()
        return waiting

    def _lane(self, optimizer: Optimizer, lane: Lane | None, changed: bool = False) -> Lane:
        """The lane to be judged: the one known, or made (anew) where the optimizer has other parameters."""
        if lane is None or changed or self._changed(optimizer, lane):
            if lane is not None and lane.index in self._deferred:
                self._deferred[lane.index].judge_all(self._judging_failed)  # before rules are bound anew
            lane = self._capture.adopt(optimizer, lane)
            self._judge.bound(lane)
        return lane

    def _changed(self, optimizer: Optimizer, lane: Lane) -> bool:
        """Whether the optimizer has other parameters than when the lane was built."""
        if sum(map(len, map(_params_of, optimizer.param_groups))) != len(lane.watched_ids):
            return True
        if lane.frozen and any(param.requires_grad for param in lane.frozen):
            return True
        disturbed = lane.compared != self._registrations[0]
        if lane.thinned and lane.step % RECHECK and not disturbed:
            return False  # a parameter replaced in place leaves a gap that untrusted marks report at once
        lane.compared = self._registrations[0]
        return list(map(id, chain.from_iterable(map(_params_of, optimizer.param_groups)))) != lane.watched_ids

    def _must_wait(self, lane: Lane, optimizer: Optimizer) -> bool:
        fused = grad_scaler.supports_scaling(optimizer)
        return self._judge.needs_host(lane) or (self._judge.skips_nonfinite(lane) and not fused)

    # -- under a GradScaler ------------------------------------------------------------------------------

    def unscaled(self, optimizer: Optimizer, scale: Tensor) -> None:
        """The gradients are about to lose the loss scale; what was read of them loses it too."""
        lane = self._capture.lane_of(optimizer)
        if (lane is None or not lane.on_cpu) and capturing():
            return
        if lane is None and not self._judge.owns(optimizer):
            return
        self._scales[id(optimizer)] = number = kept(scale)
        if lane is not None:
            self._capture.drain()
            lane.unscaled(number)
        else:
            self._capture.unowned_unscaled(optimizer, number)

    def rejected(self, optimizer: Optimizer) -> None:
        """The scaler found an overflow and did not call the optimizer: a step all the same, judged as such."""
        self._guarded(self._at_rejected, optimizer)

    def _at_rejected(self, optimizer: Optimizer) -> None:
        if self._judge.owns(optimizer) and not capturing():
            self._capture.drain()
            self._among_ranks(self._capture.lane_of(optimizer), optimizer, self._close_rejected)

    def _close_rejected(self, optimizer: Optimizer) -> None:
        lane = self._lane(optimizer, self._capture.lane_of(optimizer))
        self._judge.enter(lane)
        if self._inside.pop(lane.index, None):
            lane.resume()
        self._acting.give_back(lane.index, finished=False)
        window = self._settle(optimizer, lane, rejected=True)
        waiting = self._waiting(lane)
        measured = self._judge.measure(lane, window)
        self.optimizers.add(optimizer)
        if lane.on_cpu or self._must_wait(lane, optimizer):
            waiting.judge_all(self._judging_failed)
            decision = measured.judge()
        else:
            waiting.judge_arrived()
            waiting.add(measured)
            decision = Decision()
        stop = why_stopped(decision, lane) if decision.stop else ""  # nothing to skip and nothing to clip
        lane.advance()
        if stop:
            raise TrainingStopped(stop)

    def abandoned(self, found: Mapping[int, Tensor | None]) -> None:
        """A loop that unscaled its gradients and then did not step: an overflow, or its own affair."""
        for lane in self._capture.lanes if found else ():
            optimizer = None if lane.optimizer is None else lane.optimizer()
            if optimizer is None or id(optimizer) not in found:
                continue
            overflow = found[id(optimizer)]
            if overflow is not None and on_host(overflow) and arrived(kept(overflow)):
                self.rejected(optimizer)
            else:
                self._scales.pop(id(optimizer), None)
                lane.discard()
                self._judge.forget(lane)

    # -- after -------------------------------------------------------------------------------------------

    def after_step(self, optimizer: Optimizer) -> None:
        """Give back what was set aside and open the next window."""
        try:
            mark = self._spent.begin()
            self._after_step(optimizer)
            self._spent.end(mark)
        except Exception as error:
            self._judge.failed("boundary", error)

    def _after_step(self, optimizer: Optimizer) -> None:
        lane, turn = self._capture.lane_of(optimizer), self._evaluations.get(id(optimizer))
        inside = 0 if lane is None else self._inside.get(lane.index, 0)
        depth = 1 if turn is None else step_hooks.steps_under_way(optimizer)
        while turn is not None and turn.outer is not None and turn.depth > depth:  # it raised
            turn = turn.outer
        if turn is not None and depth > turn.depth:
            if lane is not None and inside:
                self._inside[lane.index] = max(
                    1, inside - 1
                )  # its `super().step()` has returned, and no more
            return
        if turn is not None:
            del self._evaluations[id(optimizer)]
            if turn.outer is not None:
                self._evaluations[id(optimizer)] = turn.outer
            if turn.count > 1 and lane is not None and inside:
                self._judge.forget(lane)
        if lane is not None and inside:
            self._inside[lane.index] = inside - 1
            if inside == 1:
                self._leave(lane)
        # What a skip took from copies made in the midst of the step is put back before what was at its beginning.
        if turn is not None and turn.skipped and turn.memory is not None:
            turn.memory.restore()

    def _leave(self, lane: Lane) -> None:
        """The outermost call of a lane's step has returned."""
        if lane.index in self._acting.held:
            self._acting.let_go(lane.index, finished=True)
        lane.advance()
        if not lane.thinned and lane.thinnable():
            self._capture.thin(lane)


def _nothing(_: Optimizer) -> None:
    """Of an optimizer that is not watched there is no window to close."""
