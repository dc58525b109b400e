"""The step boundary: global optimizer hooks that close the window, ask for a decision and carry it out.

Global hooks are the only tap that exists in every parallel mode and for optimizers made later. They never
patch `optimizer.step` (that breaks LR schedulers). A closure is wrapped instead, because its backward runs
inside `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.actions.lbfgs_and_sam import ClosureCalls
from gradwatch.actions.step_actions import Outcome
from gradwatch.actions.stop_training import stop_training
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.read_after_backward import Capture
from gradwatch.capture.window.window_norms import WindowNorms
from gradwatch.distributed.ranks import Ranks
from gradwatch.errors import TrainingStopped
from gradwatch.reading.async_copy import capturing, host_value, on_host, start_copy
from gradwatch.records.decision import Decision
from gradwatch.runtime import guard
from gradwatch.runtime.process_identity import here
from gradwatch.runtime.weak_references import Distinct
from gradwatch.session.active_or_paused import Activity
from gradwatch.session.binding.bind_optimizer import Binder
from gradwatch.session.boundary.changed_param_groups import CurrentContexts
from gradwatch.session.boundary.step_in_backward import InBackward
from gradwatch.session.boundary.step_with_closure import Closures
from gradwatch.session.boundary.without_optimizer import LoopsWithoutOptimizer
from gradwatch.session.logged_once import Notices
from gradwatch.session.optimizer_context import Contexts, OptimizerContext
from gradwatch.session.pipeline.record_publishing import Judged
from gradwatch.session.pipeline.step_pipeline import StepPipeline
from gradwatch.session.watched_optimizers import Ownership
from gradwatch.taps import (
    backward_end,
    closure_calls,
    dispatch_modes,
    grad_scaler,
    process_totals,
    step_hooks,
)
from gradwatch.taps.grad_scaler import announces_steps

# By name: to walk torch's module from cold caches costs microseconds.
_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, dispatch_modes.set_grad_enabled


class Boundary:
    """Global step hooks: what happens at a step, in its order. Everything else is called from here.

    `close` removes the hooks.
    """

    def __init__(
        self,
        capture: Capture,
        ownership: Ownership,
        contexts: Contexts,
        binder: Binder,
        pipeline: StepPipeline,
        ranks: Ranks,
        activity: Activity,
        notices: Notices,
        reset: Callable[[OptimizerCapture], None],
    ) -> None:
        """`reset`: nothing that tensor hooks measured since the last Snapshot of a capture belongs to a step."""
        self._capture = capture
        self._ownership = ownership
        self._contexts = contexts
        self._binder = binder
        self._pipeline = pipeline
        self._ranks = ranks
        self._activity = activity
        self._notices = notices
        self._reset = reset
        self._in_backward = InBackward(capture, binder, pipeline, self._judging_failed)
        self._without_optimizer = LoopsWithoutOptimizer(
            capture, binder, pipeline, notices, self._judging_failed, activity.is_step_thread
        )
        self._current = CurrentContexts(
            capture, contexts, binder, self._without_optimizer, self._judging_failed
        )
        self._closures = Closures(capture, pipeline, self._current.find, self._at_step, self._guarded, reset)
        self._spent = capture.spent
        self.steps = 0  # measured; an optimizer that wraps another one takes a step together with it
        self.uncalled = 0  # rejected by a GradScaler that has not called the optimizer: none of these steps
        self.optimizers = Distinct()  # of which a step was measured
        self.optimizers_before = 0  # of these, counted by the session before
        self._counted = 0  # number of the step counted last
        self._removes = [
            step_hooks.listen(self.before_step, self.after_step),
            grad_scaler.listen(self),
            guard.listen(activity.failed),
        ]

    def close(self) -> None:
        """Remove the hooks; judge what still waits; restore any gradient set aside."""
        for remove in self._removes:
            remove()
        self._guarded(self._in_backward.finish)
        self._without_optimizer.close()
        self.flush()
        for ctx in self._contexts:
            ctx.acting.close()

    def count_on(self, optimizers: Distinct) -> None:
        """Count on from the optimizers that the session before has counted."""
        self.optimizers, self.optimizers_before = optimizers, optimizers.count

    def owns(self, optimizer: Optimizer) -> bool:
        """True if this optimizer is watched now."""
        return not self._activity.idle() and self._ownership.includes(optimizer, self._capture)

    @property
    def windows_replaced(self) -> int:
        """Windows of loops without an optimizer whose parameters made way for others unlike them."""
        return self._without_optimizer.windows_replaced

    @property
    def waiting(self) -> int:
        """Number of steps that were measured and are not judged yet, those under way in other threads included."""
        return self.deferred + process_totals.steps_under_way()

    @property
    def deferred(self) -> int:
        """Number of steps that were measured and wait to be judged."""
        return sum(len(ctx.deferral) for ctx in self._contexts)

    def flush(self) -> None:
        """Judge every step that waits: its numbers were on their way from a device, or nothing was urgent."""
        if (
            not self._activity.serving
        ):  # forked: they are the parent's, and so are the threads that bring them
            return
        for ctx in self._contexts:
            self._guarded(ctx.deferral.flush, self._judging_failed)
        self._without_optimizer.flush()

    def _count(self, optimizer: Optimizer) -> None:
        """One more step was measured, unless it is the one counted last."""
        if self.optimizers.last() is not optimizer:
            self.optimizers.add(optimizer)
        calls = process_totals.open_steps.get(get_ident(), [])
        own = calls and calls[-1][1] == id(optimizer)  # almost always
        number = calls[-1][0] if own else process_totals.present_step(optimizer)
        if number != self._counted:
            self._counted = number
            self.steps += 1

    def _judging_failed(self, error: Exception) -> None:
        self._activity.failed("boundary", error)

    # -- before ------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Judge and act now, or, where a closure will run the backward, right after it."""
        if self._activity.thread != get_ident():  # almost never
            self._activity.steps_here()
        if backward_end.current() != backward_end.NONE:
            self._guarded(self._step_in_backward, optimizer)
            return None
        closure = kwargs.get("closure") if "closure" in kwargs else (args[1] if len(args) > 1 else None)
        if closure is not None and closure_calls.noticed(closure):
            return None  # a subclass whose step calls super().step(closure): wrapped already
        ctx = self._current.find(optimizer)
        nested = ctx is not None and ctx.nested > 0 and self._is_nested(optimizer, ctx.captured)
        if ctx is not None and ctx.closure_calls is not None and not nested:
            self._closures.discard_raised(optimizer, ctx)
        if not callable(closure):
            self._guarded(self._at_step, optimizer, ctx, nested)
            return None
        if ctx is None and self.owns(optimizer):
            self._guarded(self._current.renewed, optimizer, None)
            ctx = self._current.find(optimizer)
        if ctx is None:
            return None  # another watch may own it: what is wrapped once is not wrapped again
        instead = self._closures.wrapped(optimizer, ctx, closure)
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
            self._activity.failed("boundary", error)
        finally:
            # Once more: what arrived at the first must not leave training without a graph.
            _set_grad_enabled(graded)

    def _step_in_backward(self, optimizer: Optimizer) -> None:
        if self.owns(optimizer):
            self._in_backward.step(optimizer)
            self._count(optimizer)

    def _is_nested(self, optimizer: Optimizer, captured: OptimizerCapture) -> bool:
        """True if this is the `super().step()` of a step that has begun: the hooks fire twice for it.

        Told by the stack, and asked only where a step seems to be open: one that raised leaves that behind too.
        """
        under_way = step_hooks.steps_under_way(optimizer)
        if under_way:
            return under_way > 1
        # Compiled: nothing better is known.
        return captured.backwards > 0 and captured.closed_at == captured.backwards

    def _at_step(self, optimizer: Optimizer, known: OptimizerContext | None, nested: bool = False) -> None:
        """Judge and act; `known` is the optimizer's context, None where it has none yet.

        After a backward the caches are cold, and every Python call costs microseconds: hence what is passed along
        here and below, and what is asked before it is called.
        """
        if known is None:
            idle = not self.owns(optimizer)
        else:
            activity = self._activity
            idle = (here[0] != activity.pid or activity.paused_until > 0) and activity.idle()
        if idle:
            self._among_ranks(known, optimizer, _nothing)
            return
        if (
            known is not None
            and nested
            and (known.closure_calls is not None or known.captured.closed_at == known.captured.backwards)
        ):
            known.nested_step_begins()  # the outer call has judged these gradients, or will
            return
        if self._capture.ready:
            self._capture.drain()
        if known is None:
            known = self._current.find(optimizer)  # the drain may have made it
        elif not known.captured.on_cpu and capturing():
            known.captured.discard()
            self._notices.captured()
            return
        outer = known.nested if known is not None and nested else 0
        changed = (
            known is not None and known.needs_no_ranks and self._current.changed(optimizer, known.captured)
        )
        if known is not None and known.needs_no_ranks and not changed:
            self._close(optimizer, known, outer)
        else:
            self._among_ranks(known, optimizer, self._close_window, known, outer, changed)

    def _among_ranks(
        self, known: OptimizerContext | None, optimizer: Optimizer, close: Callable[..., None], *args: Any
    ) -> None:
        """Close a window (`known` None: its optimizer has no context yet), and leave the boundary whatever fails.

        Other ranks would block otherwise.
        """
        if known is not None and self._activity.serving:
            if known.bound_rules is not None and known.bound_rules.micro is not None:
                known.bound_rules.micro.at_boundary()
            self._ranks.arrive(known.captured, known.membership)
        try:
            close(optimizer, *args)
        finally:
            ctx = known or self._current.find(optimizer)
            if ctx is not None and self._activity.serving:
                self._ranks.depart(ctx.captured, ctx.membership)

    def _close_window(
        self, optimizer: Optimizer, known: OptimizerContext | None, outer: int, changed: bool
    ) -> None:
        """Close the window where the capture may have to be made (anew: `changed`), and other ranks may be met."""
        ctx = self._current.renewed(optimizer, known, changed)
        if not ctx.captured.on_cpu and capturing():
            ctx.captured.discard()
            self._notices.captured()
            return
        self._binder.enter(ctx)
        self._close(optimizer, ctx, outer)

    def _close(self, optimizer: Optimizer, ctx: OptimizerContext, outer: int) -> None:
        """Judge what arrived since the last step; `outer` calls of the same step are open around this one."""
        captured, pipeline = ctx.captured, self._pipeline
        if captured.succeeds:
            self._binder.go_on(ctx)
        if ctx.nested and not outer:
            captured.resume()  # the step before this one raised
        ctx.step_begins(outer)
        if ctx.acting.held:  # left behind by a step that raised
            ctx.acting.release(finished=False)
        if ctx.deferral.awaits_ranks:  # what was sent before this step's forward has come by now
            ctx.deferral.flush(self._judging_failed)
        window = self._closed_window(optimizer, ctx)
        if not captured.on_cpu and not self._must_wait(ctx, optimizer):
            ctx.deferral.take_arrived(self._judging_failed)
            pipeline.defer(ctx, pipeline.measure(ctx, window))
            self._count(optimizer)
            rules = ctx.rules
            clips = captured.step >= rules.bound.clips_from
            ctx.acting.on_device(
                optimizer,
                captured,
                rules.bound.max_norm if clips else None,
                rules.clip_section if clips else None,
                pipeline.skips_nonfinite_at(captured.step),
            )
            return
        measurement = pipeline.measure(ctx, window)
        self._count(optimizer)
        bound = measurement.bound_rules.bound
        max_norm = bound.max_norm if captured.step >= bound.clips_from else None
        deferrable = window.deferrable and measurement.deferrable
        if deferrable and max_norm is not None:
            # What is decided of a closure's first gradients clips the later ones too.
            deferrable = ctx.closure_calls is None and ctx.acting.clip_ahead(optimizer, captured, max_norm)
        if not captured.on_cpu and max_norm is None:
            # The optimizer cannot skip on the device: its numbers are awaited.
            deferrable = measurement.as_usual()
        if not deferrable or pipeline.defer(ctx, measurement):
            ctx.deferral.flush(self._judging_failed)
        elif not captured.on_cpu:
            ctx.deferral.take_arrived(self._judging_failed)
        if not deferrable:
            self._act(optimizer, ctx, pipeline.judge(ctx, measurement, grads_present=True), max_norm)

    def _act(
        self,
        optimizer: Optimizer,
        ctx: OptimizerContext,
        judged: Judged,
        max_norm: float | None,
    ) -> None:
        """Carry out what was decided of a step, and publish what was really done. Raises `TrainingStopped`."""
        outcome: Outcome | None = None
        evaluations = ctx.closure_calls
        try:
            outcome = ctx.acting.apply(
                optimizer, ctx.captured, judged.decision, evaluations, max_norm, ctx.rules.clip_section
            )
        finally:
            self._publish(ctx, judged, outcome)
        if (failure := outcome.error or outcome.passing) is not None:
            self._activity.failed("action", failure)
        if outcome.done.stop and evaluations is not None and evaluations.backup is not None:
            evaluations.backup.restore()
        stop_training(outcome.done, ctx.captured.step, ctx.rules_in_force)

    def _publish(self, ctx: OptimizerContext, judged: Judged, outcome: Outcome | None) -> None:
        try:
            self._pipeline.publish(ctx, judged, outcome)
        except Exception as error:  # a stop must not be lost for it
            self._judging_failed(error)

    def _closed_window(
        self, optimizer: Optimizer, ctx: OptimizerContext, rejected: bool = False
    ) -> WindowNorms:
        """Close the window; `rejected`: a scaler has found an overflow, and does not call the optimizer."""
        captured = ctx.captured
        amp = grad_scaler.divisors(optimizer) if rejected else grad_scaler.at_step(optimizer)
        left, divisor, skipped = amp.left, amp.divisor, 1.0 if rejected else amp.found_inf
        window = captured.close_window(left)
        if divisor is not None:
            captured.divide_applied(window, divisor)
        if window.loss_scale is not None or skipped is not None:
            window.scaled_by(left, skipped)
        if self._capture.maintain_hooks(captured, window):
            self._binder.bind(captured)  # tensor hooks on its parameters were disabled with gradwatch's
        return window

    def _must_wait(self, ctx: OptimizerContext, optimizer: Optimizer) -> bool:
        fused = grad_scaler.supports_scaling(optimizer)
        return self._pipeline.needs_host(ctx) or (self._pipeline.skips_nonfinite and not fused)

    # -- under a GradScaler ------------------------------------------------------------------------------

    def unscaled(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Remove the loss scale, which the gradients are about to lose, from what was read of them."""
        ctx = self._current.find(optimizer)
        if (ctx is None or not ctx.captured.on_cpu) and capturing():
            return
        if ctx is None and not self.owns(optimizer):
            return
        number = start_copy(scale)
        if ctx is None and not announces_steps(optimizer):
            self._without_optimizer.unscaled(optimizer, number)
            return
        if ctx is None:
            ctx = self._current.renewed(optimizer, None)
        else:
            self._capture.drain()
        ctx.captured.remove_scale(number)

    def rejected(self, optimizer: Optimizer) -> None:
        """Judge a step whose optimizer was not called, because the scaler found an overflow."""
        self._guarded(self._at_rejected, optimizer)

    def _at_rejected(self, optimizer: Optimizer) -> None:
        if self.owns(optimizer) and not capturing():
            self._capture.drain()
            self._among_ranks(self._current.find(optimizer), optimizer, self._close_rejected)

    def _close_rejected(self, optimizer: Optimizer) -> None:
        ctx = self._current.renewed(optimizer, self._current.find(optimizer))
        self._binder.enter(ctx)
        captured = ctx.captured
        if ctx.nested:
            captured.resume()
        ctx.no_step_is_under_way()
        ctx.acting.restore(finished=False)
        window = self._closed_window(optimizer, ctx, rejected=True)
        measurement = self._pipeline.measure(ctx, window)
        self.uncalled += 1
        self.optimizers.add(optimizer)
        if captured.on_cpu or self._must_wait(ctx, optimizer):
            ctx.deferral.flush(self._judging_failed)
            decision = self._pipeline.conclude(ctx, measurement)
        else:
            ctx.deferral.take_arrived(self._judging_failed)
            self._pipeline.defer(ctx, measurement)
            decision = Decision()
        step = captured.step
        captured.advance()
        stop_training(decision, step, ctx.rules_in_force)  # nothing to skip and nothing to clip

    def abandoned(self, found: Mapping[int, Tensor | None]) -> None:
        """Handle a loop that unscaled its gradients and then did not step: an overflow, or its own affair."""
        for captured in self._capture.captures if found else ():
            optimizer = None if captured.optimizer is None else captured.optimizer()
            if optimizer is None or id(optimizer) not in found:
                continue
            overflow = found[id(optimizer)]
            if overflow is not None and on_host(overflow) and host_value(start_copy(overflow)):
                process_totals.step_rejected(
                    optimizer
                )  # the scaler was not asked, so that no tap has counted it
                self.rejected(optimizer)
            else:
                captured.discard()
                self._reset(captured)

    # -- after -------------------------------------------------------------------------------------------

    def after_step(self, optimizer: Optimizer) -> None:
        """Restore what was set aside and open the next window."""
        try:
            mark = self._spent.begin()
            ctx = self._current.find(optimizer)
            if ctx is not None and ctx.closure_calls is not None:
                self._after_closure(optimizer, ctx, ctx.closure_calls)
            elif ctx is not None and ctx.step_ends() and ctx.captured.pruning.possible:
                self._prune_if_due(ctx.captured)
            self._spent.end(mark)
        except Exception as error:
            self._activity.failed("boundary", error)

    def _after_closure(self, optimizer: Optimizer, ctx: OptimizerContext, calls: ClosureCalls) -> None:
        evaluations = self._closures.step_ended(optimizer, ctx, calls)
        if evaluations is None:
            return
        if ctx.step_ends():
            self._prune_if_due(ctx.captured)
        # What a skip took from copies made in the midst of the step is restored before what was at its beginning.
        if evaluations.skipped and evaluations.backup is not None:
            evaluations.backup.restore()

    def _prune_if_due(self, captured: OptimizerCapture) -> None:
        """Remove most hooks of a loop that is learned."""
        if captured.pruning.possible and captured.pruning.due(captured.step):
            self._capture.prune(captured)


def _nothing(_: Optimizer) -> None:
    """No-op: the optimizer is not watched."""
