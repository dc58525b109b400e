"""The step boundary: global optimizer hooks that close the window, ask for a decision and carry it out.

Global hooks are the only tap that exists in every parallel mode and for optimizers made later. They never
patch `optimizer.step` (that breaks LR schedulers). A closure is wrapped instead, because its backward runs
inside `step`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwatch.errors import TrainingStopped
from gradwatch.hooks import precision, step_hooks
from gradwatch.hooks.capture import Capture
from gradwatch.hooks.device import capturing
from gradwatch.hooks.lane import Lane, Window
from gradwatch.policies.norm import clip_coefficient
from gradwatch.snapshot import Decision

RECHECK = 16  # steps between full comparisons of the optimizer's parameters while the marks are thinned


class Judge(Protocol):
    """What the boundary asks of the composition root."""

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer is watched."""

    def bound(self, lane: Lane) -> None:
        """A lane was made or its parameters changed."""

    def needs_host(self, lane: Lane) -> bool:
        """Whether a rule may act on this very step, so that the numbers must be waited for."""

    def skips_nonfinite(self, lane: Lane) -> bool:
        """Whether a rule skips non-finite steps (then a fused optimizer is told on the device)."""

    def arrive(self, optimizer: Optimizer) -> None:
        """A step boundary begins, at which other ranks may wait for this one."""

    def depart(self, optimizer: Optimizer) -> None:
        """It has been left, by a fault of ours or not: see to it that nobody waits any longer."""

    def measure(self, lane: Lane, window: Window) -> Callable[[], Decision]:
        """Note everything about a window that must be read now; the result judges it, now or a step later."""

    def failed(self, component: str, error: BaseException) -> None:
        """Count a fault of ours."""


class Boundary:
    """Global step hooks acting on the lanes of one Capture; `close` removes them."""

    def __init__(self, capture: Capture, judge: Judge) -> None:
        self._capture = capture
        self._judge = judge
        self._inside: dict[int, int] = {}  # nested calls of one optimizer's step, by lane
        self._set_aside: dict[int, list[tuple[Tensor, Tensor | None]]] = {}
        self._emptied: dict[int, list[tuple[dict[str, Any], list[Any]]]] = {}
        self._gates: dict[int, tuple[Optimizer, Any]] = {}
        self._deferred: dict[int, Callable[[], Decision]] = {}
        self.spent_seconds = 0.0
        self._remove = step_hooks.listen(self)

    def close(self) -> None:
        """Remove the hooks; judge what still waits; give back any gradient set aside."""
        self._remove()
        self.settle_deferred()
        for index in [*self._set_aside, *self._emptied]:
            self._give_back(index)

    def settle_deferred(self) -> None:
        """Judge the windows whose numbers were still on their way from a device."""
        for index in list(self._deferred):
            self._guarded("boundary", self._deferred.pop(index))

    # -- before ------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Judge and act now, or, where a closure will run the backward, right after it."""
        closure = kwargs.get("closure") if "closure" in kwargs else (args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._guarded("boundary", lambda: self._at_step(optimizer))
            return None
        judged = [False]

        @functools.wraps(closure)
        def watched() -> Any:
            result = closure()
            if not judged[0]:  # LBFGS calls it many times; the first gradient is the step's
                judged[0] = True
                self._guarded("boundary", lambda: self._at_step(optimizer))
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _guarded(self, component: str, call: Callable[[], Any]) -> None:
        try:
            started = time.perf_counter()
            with torch.no_grad():
                call()
            self.spent_seconds += time.perf_counter() - started
        except TrainingStopped:
            raise
        except Exception as error:
            self._judge.failed(component, error)

    def _at_step(self, optimizer: Optimizer) -> None:
        if not self._judge.owns(optimizer):
            self._judge.arrive(optimizer)
            self._judge.depart(optimizer)
            return
        known = self._capture.lane_of(optimizer)
        if known is not None and self._emptied.get(known.index):
            self._give_back(known.index)  # the step that was skipped raised all the same
        self._capture.drain()
        if not (known is None or known.on_cpu) and capturing():
            return
        if known is not None and self._inside.get(known.index) and known.settled == known.backwards:
            self._inside[known.index] += 1  # a subclass whose step calls super().step() fires the hooks twice
            return
        self._among_ranks(optimizer)

    def _among_ranks(self, optimizer: Optimizer) -> None:
        """Close the window; whatever fails, no rank is left waiting for this one."""
        self._judge.arrive(optimizer)
        try:
            self._close_window(optimizer)
        except Exception:
            self._judge.depart(optimizer)
            raise
        self._judge.depart(optimizer)

    def _close_window(self, optimizer: Optimizer) -> None:
        lane = self._lane(optimizer)
        if not lane.on_cpu and capturing():
            return
        if self._inside.get(lane.index):
            lane.tainted = True  # the step before this one raised: this window holds two
        self._inside[lane.index] = 1
        self._give_back(lane.index, into_params=False)
        window = lane.settle(precision.at_step(optimizer))
        if lane.thinned and not window.trusted:
            self._capture.restore(lane)
        waiting = self._deferred.pop(lane.index, None)
        if waiting is not None:
            waiting()  # the step before this one; its numbers have arrived by now
        judged = self._judge.measure(lane, window)
        if lane.on_cpu or self._must_wait(lane, optimizer):
            self._carry_out(optimizer, lane, judged())
            return
        self._deferred[lane.index] = judged
        if self._judge.skips_nonfinite(lane):
            self._gate(optimizer, lane)

    def _lane(self, optimizer: Optimizer) -> Lane:
        lane = self._capture.lane_of(optimizer)
        if lane is None or self._changed(optimizer, lane):
            lane = self._capture.adopt(optimizer, lane)
            self._judge.bound(lane)
        return lane

    @staticmethod
    def _changed(optimizer: Optimizer, lane: Lane) -> bool:
        """Whether the optimizer has other parameters than when the lane was built."""
        groups = [group["params"] for group in optimizer.param_groups]
        if sum(map(len, groups)) != len(lane.watched_ids) or any(
            param.requires_grad for param in lane.frozen
        ):
            return True
        if lane.thinned and lane.step % RECHECK:
            return False  # a parameter replaced in place leaves a gap that untrusted marks report at once
        return [id(param) for params in groups for param in params] != lane.watched_ids

    def _must_wait(self, lane: Lane, optimizer: Optimizer) -> bool:
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        return self._judge.needs_host(lane) or (self._judge.skips_nonfinite(lane) and not fused)

    # -- acting ------------------------------------------------------------------------------------------

    def _carry_out(self, optimizer: Optimizer, lane: Lane, decision: Decision) -> None:
        if decision.stop:
            raise TrainingStopped(_why(decision, lane))
        try:
            if decision.skip:
                self._skip(lane, optimizer)
            elif decision.max_norm is not None:
                lane.multiply(clip_coefficient(lane.total_applied(), decision.max_norm))
        except Exception as error:
            self._give_back(lane.index)  # the gradient passes unchanged
            self._judge.failed("action", error)

    def _skip(self, lane: Lane, optimizer: Optimizer) -> None:
        """Let the step find nothing to do: parameters and optimizer state stay bit-identical.

        torch's own optimizers pass over a parameter whose gradient is None. Others may not check for that,
        so theirs find empty parameter lists instead.
        """
        if not type(optimizer).step.__module__.startswith("torch.optim"):
            groups = optimizer.param_groups
            self._emptied[lane.index] = [(group, group["params"]) for group in groups]
            for group in groups:
                group["params"] = []
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._set_aside[lane.index] = [(param, param.grad) for param in params]
        for param in params:
            param.grad = None

    def _gate(self, optimizer: Optimizer, lane: Lane) -> None:
        """Tell a fused optimizer on the device to skip if the total norm is not finite; no host sync.

        An overflow of the float32 norm counts as non-finite here: the device cannot tell them apart cheaply.
        """
        total = lane.device_total()
        if total is None:
            return
        bad = (~torch.isfinite(total)).to(torch.float32)
        before = getattr(optimizer, "found_inf", None)
        self._gates[lane.index] = (optimizer, before)
        optimizer.found_inf = bad if before is None else torch.maximum(before, bad)  # type: ignore[attr-defined]

    # -- after -------------------------------------------------------------------------------------------

    def after_step(self, optimizer: Optimizer) -> None:
        """Give back what was set aside and open the next window."""
        try:
            started = time.perf_counter()
            self._after_step(optimizer)
            self.spent_seconds += time.perf_counter() - started
        except Exception as error:
            self._judge.failed("boundary", error)

    def _after_step(self, optimizer: Optimizer) -> None:
        lane = self._capture.lane_of(optimizer)
        if lane is None or not self._inside.get(lane.index):
            return
        self._inside[lane.index] -= 1
        if self._inside[lane.index]:
            return
        self._give_back(lane.index)
        if lane.index in self._gates:
            gated, before = self._gates.pop(lane.index)
            # Restored, not deleted: GradScaler deletes its own.
            if before is None:
                with contextlib.suppress(AttributeError):
                    del gated.found_inf  # type: ignore[attr-defined]
            else:
                gated.found_inf = before  # type: ignore[attr-defined]
        lane.advance()
        if lane.thinnable():
            self._capture.thin(lane)

    def _give_back(self, index: int, into_params: bool = True) -> None:
        """Restore what a skip set aside, but no gradient where a newer backward already made one."""
        for group, emptied in self._emptied.pop(index, ()):
            group["params"] = emptied
        for param, grad in self._set_aside.pop(index, ()):
            if into_params and param.grad is None:
                param.grad = grad


def _why(decision: Decision, lane: Lane) -> str:
    rules = sorted({order.rule for order in decision.orders if order.action == "stop" and not order.shadow})
    said = f"rule {', '.join(rules)} says stop" if rules else "too many steps in a row were skipped"
    return f"gradwatch stopped training at step {lane.step}: {said}"
