"""Health of a checkpoint saved now: every optimizer's steps, and checks of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite

from gradwatch.account.session_counts import SessionCounts
from gradwatch.capture.columns.nonfinite_running_statistics import RunningStatistics
from gradwatch.capture.weights.weight_health import Weights
from gradwatch.checkpoint.health_tracker import (
    NO_GROWTH,
    NOT_LOOKED_AT,
    CheckpointHealthTracker,
    joined,
    of_statistics,
    resumed,
)
from gradwatch.records.record import CheckpointHealth
from gradwatch.session.active_or_paused import Activity
from gradwatch.session.binding.optimizer_rules import OptimizerRules
from gradwatch.session.binding.rule_bindings import RuleBindings
from gradwatch.session.optimizer_context import Contexts

UNSEEN = 100
"""Steps since the last look from which on one is made before another optimizer may replace the weights: a look costs
about what one step's read of the gradients does."""
REPLACED = (
    "weights that another optimizer's have replaced were not healthy when they were last seen, so what was saved of "
    "them is not, either: {}"
)


class Checkpoints:
    """The health of checkpoints of one session; see `gradwatch.checkpoint` for what that means."""

    def __init__(
        self,
        contexts: Contexts,
        rule_bindings: RuleBindings,
        weights: Weights,
        statistics: RunningStatistics,
        activity: Activity,
        totals: SessionCounts,
    ) -> None:
        self._contexts = contexts
        self._rule_bindings = rule_bindings
        self._weights = weights
        self._statistics = statistics
        self._activity = activity
        self._totals = totals

    def now(self) -> CheckpointHealth:
        """Health as of the last step and the last look."""
        begun = self._rule_bindings.begun()
        if not begun:
            return resumed(one.get("checkpoint") for one in self._rule_bindings.saved_states.waiting.values())
        return joined(bound_rules.health_tracker.now for bound_rules in begun)

    def check(self) -> CheckpointHealth:
        """The same after a look at the weights as they are now, which waits for a device."""
        try:
            ruin = self._weights.check()
            statistics = self._statistics.nonfinite(suspected=True)
        except Exception as error:
            self._activity.failed("checkpoint", error)
            ruin, statistics = (f"{NOT_LOOKED_AT} ({type(error).__name__})",), ()
        self._statistics_read(statistics)
        self._seen(ruin, self._steps())
        found = self._looked_at_all(self.now())
        if statistics:
            ruin = (*ruin, of_statistics(statistics))
        if not ruin or self._rule_bindings.begun():
            return found
        return replace(found, healthy=False, reasons=(*found.reasons, *ruin))

    def _looked_at_all(self, found: CheckpointHealth) -> CheckpointHealth:
        """The same as of the last step of any optimizer, where the weights of each were just looked at.

        Optimizers count their own steps: the least of these is no earlier moment.
        """
        begun = self._rule_bindings.begun()
        last = [one.captured.step - 1 for one in begun]
        if not begun or [one.health_tracker.looked for one in begun] != last:
            return found
        return replace(found, weights_step=max(last))

    @property
    def unseen(self) -> bool:
        """True if so many steps were taken since the last look that one is worth it."""
        return any(
            one.captured.params and one.health_tracker.steps_unseen(one.captured.step - 1) >= UNSEEN
            for one in self._rule_bindings
        )

    def replaced(self, bound_rules: OptimizerRules, resumed: bool) -> None:
        """Keep, for the account, why weights that others have replaced were not healthy, and forget it of the others.

        `resumed`: the optimizer of the others has a state already, which may be that of the one before.
        """
        tracker = bound_rules.health_tracker
        found = tracker.now
        if found.healthy:
            return
        try:
            self._totals.replaced_unfit_weights("; ".join(found.reasons))
            self._activity.health.notice("checkpoint", REPLACED.format("; ".join(found.reasons)))
            tracker.begin_with_other_weights(resumed)
            self._statistics_read(self._statistics.nonfinite(suspected=True))
            self._weights.look_next()
        except Exception as error:
            self._activity.failed("checkpoint", error)

    def begun_without_state(self, tracker: CheckpointHealthTracker) -> None:
        """Another optimizer of the same weights has no state yet: NaN that reached the one before is in these alone."""
        tracker.discard_poison()
        self._weights.look_next()

    def meet(self) -> None:
        """Look at parameters that an optimizer is about to move for the first time."""
        try:
            self._weights.meet()
        except Exception as error:
            self._activity.failed("checkpoint", error)

    def begin_anew(self) -> None:
        """Compare later weights with these from now on: they were changed on purpose."""
        self._weights.load(None)
        for bound_rules in self._rule_bindings:
            bound_rules.health_tracker.compare_loss_anew()
        self.meet()

    def check_if_due(self, bound_rules: OptimizerRules, total_norm: float = 0.0) -> None:
        """Look at the weights before and after a step that jumped, and where the last look is long ago.

        `total_norm` is that of the step of `bound_rules` which is about to be taken, 0 where that is as usual.
        """
        tracker = bound_rules.health_tracker
        urgent = total_norm >= tracker.surge_from or not (isfinite(total_norm) or tracker.now.reasons)
        for one in self._contexts.bound():
            jumped = one.health_tracker
            urgent = urgent or jumped.suspected is not None or jumped.surged is not None
        try:
            found = self._weights.check_if_due(self._steps, urgent)
        except Exception as error:
            self._activity.failed("checkpoint", error)
            return
        if found is not None:
            if found.statistics:
                self._statistics.found(found.statistics)
                self._statistics_read(found.statistics)
            self._seen(found.ruin, found.steps)

    def _statistics_read(self, nonfinite: tuple[str, ...]) -> None:
        for bound_rules in self._rule_bindings:
            bound_rules.health_tracker.statistics_read(nonfinite)

    def _steps(self) -> dict[int, int]:
        """The last step taken, by optimizer; of those whose weights are still there."""
        return {
            ctx.captured.index: ctx.captured.step - 1
            for ctx in self._contexts
            if ctx.bound_rules is not None and ctx.captured.params
        }

    def _seen(self, ruin: tuple[str, ...], steps: Mapping[int, int]) -> None:
        if self._weights.grown and len(ruin) == 1 and self._learned(self._weights.grown):
            self._weights.renew()
            ruin = ()
        growth, outgrown = self._weights.growth(), self._weights.outgrown()
        for bound_rules in self._rule_bindings:
            if bound_rules.captured.index in steps:
                names = set(bound_rules.sites.names) if outgrown else set()
                mine = next((one for one in outgrown if one.name in names), NO_GROWTH)
                bound_rules.health_tracker.seen(ruin, steps[bound_rules.captured.index], growth, mine)
        if not ruin and self.now().healthy:
            self._weights.renew()
            for bound_rules in self._rule_bindings:
                bound_rules.health_tracker.loss.mark_healthy()

    def _learned(self, grown: frozenset[str]) -> bool:
        """True if each optimizer whose weights have grown so far has a lower loss for it, and has had for long."""
        owners = [
            one.health_tracker.loss for one in self._rule_bindings if grown.intersection(one.sites.names)
        ]
        learned = bool(owners) and all(loss.lower_since_grown for loss in owners)
        for loss in owners:
            if learned:
                loss.mark_healthy()
            else:
                loss.mark_grown()
        return learned
