"""The context of an optimizer at a step: made at its first one, and anew where it has other parameters than before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.read_after_backward import Capture
from gradwatch.session.binding.bind_optimizer import Binder
from gradwatch.session.boundary.without_optimizer import LoopsWithoutOptimizer
from gradwatch.session.optimizer_context import Contexts, OptimizerContext

_params_of: Callable[[dict[str, Any]], list[Tensor]] = itemgetter("params")


class CurrentContexts:
    """Contexts by optimizer; `judging_failed` takes what judging a step that was put off raises."""

    def __init__(
        self,
        capture: Capture,
        contexts: Contexts,
        binder: Binder,
        without_optimizer: LoopsWithoutOptimizer,
        judging_failed: Callable[[Exception], None],
    ) -> None:
        self._capture = capture
        self._contexts = contexts
        self._binder = binder
        self._without_optimizer = without_optimizer
        self._judging_failed = judging_failed
        self._found: OptimizerContext | None = None  # last; there is but one in almost every training
        self._registrations = capture.coverage.registrations

    def find(self, optimizer: Optimizer) -> OptimizerContext | None:
        """The context of an optimizer; None where nothing was captured of it yet."""
        for captured in self._capture.captures:  # not by `capture_of`: almost every step has but one
            if captured.optimizer is not None and captured.optimizer() is optimizer:
                found = self._found
                if found is None or found.captured is not captured:
                    self._found = found = self._contexts.of(captured)
                return found
        return None

    def renewed(
        self, optimizer: Optimizer, known: OptimizerContext | None, changed: bool = False
    ) -> OptimizerContext:
        """The context to be judged: the one known, its capture made anew if the optimizer trains other parameters."""
        if known is None or changed or self.changed(optimizer, known.captured):
            if known is not None:
                known.deferral.flush(self._judging_failed)  # before rules are bound anew
            former = self._capture.capture_of(optimizer) if known is None else known.captured
            captured = self._capture.adopt(optimizer, former)
            self._without_optimizer.flush()  # its parameters now have an optimizer
            return self._binder.bind(captured)
        return known

    def changed(self, optimizer: Optimizer, captured: OptimizerCapture) -> bool:
        """True if the optimizer trains other parameters than when the capture was built."""
        groups = optimizer.param_groups
        # Of one group, as in almost every optimizer, without what goes through several: caches are cold here.
        given = (
            groups[0]["params"] if len(groups) == 1 else list(chain.from_iterable(map(_params_of, groups)))
        )
        if len(given) != len(captured.watched_ids):
            return True
        if captured.frozen and any(param.requires_grad for param in captured.frozen):
            return True
        disturbed = captured.compared != self._registrations[0]
        pruning = captured.pruning
        if pruning.pruned and not disturbed and pruning.shows_replaced(captured.step):
            return False
        if disturbed:
            captured.compared_at(self._registrations[0])
        return list(map(id, given)) != captured.watched_ids
