"""`optimizer.step(closure)`: the closure runs the backward inside the step, so the step is judged after it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch.optim import Optimizer

from gradwatch.actions.lbfgs_and_sam import (
    ClosureCalls,
    evaluates_often,
    may_climb_first,
)
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.read_after_backward import Capture
from gradwatch.reading.gradient_writes import versions_of
from gradwatch.records.decision import Decision
from gradwatch.session.optimizer_context import OptimizerContext
from gradwatch.session.pipeline.step_pipeline import StepPipeline
from gradwatch.taps import closure_calls, dispatch_modes, step_hooks


class Closures:
    """Listens to the closures of steps; the first gradient of each is the step's, a later one must be finite.

    `of` gives the context of an optimizer, `at_step` judges and acts, `guarded` calls and keeps faults of gradwatch's
    own out of the closure; `reset`: nothing that tensor hooks measured since the last Snapshot belongs to a step.
    """

    def __init__(
        self,
        capture: Capture,
        pipeline: StepPipeline,
        of: Callable[[Optimizer], OptimizerContext | None],
        at_step: Callable[[Optimizer, OptimizerContext | None], None],
        guarded: Callable[..., None],
        reset: Callable[[OptimizerCapture], None],
    ) -> None:
        self._capture = capture
        self._pipeline = pipeline
        self._of = of
        self._at_step = at_step
        self._guarded = guarded
        self._reset = reset
        self._move_first: list[
            weakref.ref[Optimizer]
        ] = []  # these move the weights before they call the closure

    # -- a step ------------------------------------------------------------------------------------------

    def wrapped(
        self, optimizer: Optimizer, ctx: OptimizerContext, closure: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The closure that an optimizer is to call in place of its own, in the step that begins."""
        calls = ctx.closure_calls  # there in a `super().step()` with a closure of its own
        depth = step_hooks.steps_under_way(optimizer) if calls is not None and calls.running else 1
        if calls is None or depth > calls.depth:
            calls = ctx.closure_step_begins(depth)
            self._guarded(self._back_up, optimizer, ctx, calls)
            if depth == 1 and may_climb_first(optimizer):
                self._guarded(self._given, optimizer, ctx, calls)
        about = optimizer, calls, object()
        return closure_calls.notice(closure, partial(self._begins, *about), partial(self._ended, *about))

    def _back_up(self, optimizer: Optimizer, ctx: OptimizerContext, calls: ClosureCalls) -> None:
        """Keep what a skip must bring back, where a step may move the weights before its last evaluation."""
        if not evaluates_often(optimizer):
            return
        if ctx.membership is None or self._pipeline.skips_nonfinite or self._pipeline.needs_host(ctx):
            calls.back_up(optimizer)

    def _given(self, optimizer: Optimizer, ctx: OptimizerContext, calls: ClosureCalls) -> None:
        """Judge gradients that are there before the closure runs, if they are the first of the step.

        They are where the optimizer climbs by them; one that does not adds the closure's to them (micro-batches). Which
        of the two it is shows when the closure of its first such step begins: the weights have moved, or have not.
        """
        self._capture.drain()
        if not ctx.captured.backwards:
            return
        if self._moves_first(optimizer):
            calls.count_gradients_before()
            self._at_step(optimizer, ctx)
        else:
            calls.keep_versions(versions_of(ctx.captured.params))

    def _moves_first(self, optimizer: Optimizer) -> bool:
        return any(known() is optimizer for known in self._move_first)

    def discard_raised(self, optimizer: Optimizer, ctx: OptimizerContext) -> None:
        """Discard the calls of a step that raised, before another one begins."""
        if step_hooks.steps_under_way(optimizer) < 2:
            ctx.discard_closures()

    def step_ended(
        self, optimizer: Optimizer, ctx: OptimizerContext, calls: ClosureCalls
    ) -> ClosureCalls | None:
        """Discard the calls of the step that returned, and return them; None if only its `super().step()` returned."""
        depth = step_hooks.steps_under_way(optimizer)
        while calls.outer is not None and calls.depth > depth:  # it raised
            calls = calls.outer
        if depth > calls.depth:
            ctx.nested_step_ends()
            return None
        ctx.closure_step_ends(calls)
        if calls.count > 1 and ctx.nested:
            self._reset(ctx.captured)
        return calls

    # -- an evaluation -----------------------------------------------------------------------------------

    def _begins(self, optimizer: Optimizer, calls: ClosureCalls, closure: object) -> None:
        if calls.begins(closure) and (calls.count or calls.versions):
            dispatch_modes.unseen(self._guarded, self._next_evaluation, optimizer, calls)

    def _ended(self, optimizer: Optimizer, calls: ClosureCalls, closure: object) -> None:
        if calls.ends(closure):
            dispatch_modes.unseen(self._guarded, self._evaluated, optimizer, calls)

    def _next_evaluation(self, optimizer: Optimizer, calls: ClosureCalls) -> None:
        """Discard what was captured before this evaluation; not the micro-batches that its gradient is added to."""
        captured = self._capture.capture_of(optimizer)
        if captured is None:
            return
        if not calls.count:
            if calls.take_versions() == versions_of(captured.params):
                return
            self._move_first = [known for known in self._move_first if known() is not None]
            self._move_first.append(weakref.ref(optimizer))
        captured.discard()
        self._reset(captured)

    def _evaluated(self, optimizer: Optimizer, calls: ClosureCalls) -> None:
        """Judge what an evaluation left: the first gradient is the step's, a later one must be finite."""
        ctx = self._of(optimizer)
        if calls.count == 1 or ctx is None:
            self._at_step(optimizer, ctx)
            return
        if calls.skipped or calls.later_nonfinite:
            return
        captured = ctx.captured
        if ctx.pooled:
            return  # a rank knows only its own part of a later evaluation, and must not act on it alone
        self._capture.drain()
        norms = captured.norms_read()
        total = math.sqrt(np.dot(norms, norms))
        if not math.isfinite(total):
            calls.note_nonfinite()
            ctx.no_step_is_under_way()
            captured.resume_at(captured.step + 1)  # a Snapshot of its own
            self._at_step(optimizer, ctx)
            return
        decision = self._pipeline.clips_again(ctx, norms)
        if calls.max_norm is not None:  # a rule's bound on the first gradient holds for the whole step
            decision |= Decision(max_norm=calls.max_norm)
        ctx.acting.clip_again(captured, decision, total, ctx.rules.clip_section)
