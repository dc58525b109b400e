"""The tensor hooks that rules need: local norms, clips inside the backward, micro-batches that are dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gradwatch.actions.backward.clipper import BackwardClipper
from gradwatch.actions.backward.module_bounds import ModuleBounds
from gradwatch.actions.drop_micro import MicroDrop
from gradwatch.capture.columns.norm_local import LocalNorms
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.distributed.ranks import Ranks
from gradwatch.engine import BoundEngine, Engine
from gradwatch.engine.actions.backward_clips import asks_backward, drops_micro
from gradwatch.engine.columns_needed import EVERY_STEP
from gradwatch.records.columns import COMPARING_RANKS, NOISE_SCALE
from gradwatch.session.active_or_paused import Activity
from gradwatch.session.binding.backward_actions import clipper_of, micro_drop_of, own_sites
from gradwatch.session.binding.optimizer_rules import OptimizerRules
from gradwatch.session.optimizer_context import Contexts
from gradwatch.taps import grad_scaler

LOCAL = frozenset({"norm_local", "rank_norm"})  # columns measured by tensor hooks


class TensorHooks:
    """The hooks for the rules of every optimizer of one session; `in_backward`: some of them clip there."""

    def __init__(self, engine: Engine, ranks: Ranks, activity: Activity, contexts: Contexts) -> None:
        self._engine = engine
        self._ranks = ranks
        self._activity = activity
        self._contexts = contexts
        self._before_captures: LocalNorms | None = None
        self._module_bounds: ModuleBounds | None = None
        self.in_backward = bool(asks_backward(engine.ruleset))
        self.measure_or_act = self.in_backward  # in some backward
        self._drops = drops_micro(engine.ruleset)
        self._remove_scale_listeners: list[Callable[[], None]] = []

    @property
    def acts(self) -> bool:
        """True if hooks may change gradients."""
        return self.in_backward or self._drops

    def listen(self, wanted: Sequence[Tensor | None], module_bounds: ModuleBounds | None) -> None:
        """Measure local norms, if a rule asks for them, until captures take them over: the first backward counts too.

        `module_bounds` are those of the tapped modules, which are sites of the first capture.
        """
        self._module_bounds = module_bounds
        if self.acts:
            self._remove_scale_listeners.append(grad_scaler.listen_scale(self._scaled))
        several = self._ranks.several and bool(COMPARING_RANKS & self._engine.columns)
        if several or "norm_local" in self._engine.columns:
            self._before_captures, self.measure_or_act = LocalNorms(wanted, self._activity.failed), True

    def _scaled(self, scale: Tensor) -> None:
        """Hand on the 0-dim `scale` that a GradScaler has multiplied a loss by."""
        for bound_rules in self._contexts.bound():
            if bound_rules.clipper is not None:
                bound_rules.clipper.scaled(scale)
            if bound_rules.micro is not None:
                bound_rules.micro.scaled()
        if self._module_bounds is not None:
            self._module_bounds.scaled(scale)

    def backward_ended(self) -> None:
        """Keep what tensor hooks measured or did in the backward that ended."""
        for bound_rules in self._contexts.bound() if self.in_backward else ():
            if bound_rules.clipper is not None:
                bound_rules.clipper.backward_ended()
        if self._before_captures is not None:
            for local in [
                self._before_captures,
                *(bound_rules.local for bound_rules in self._contexts.bound()),
            ]:
                if local is not None:
                    local.backward_ended()

    def discard(self, captured: OptimizerCapture) -> None:
        """Discard what tensor hooks measured since the capture's last Snapshot: it belongs to no step."""
        bound_rules = self._contexts.rules_of(captured)
        if bound_rules is not None and bound_rules.local is not None:
            bound_rules.local.discard()
        if bound_rules is not None and bound_rules.clipper is not None:
            bound_rules.clipper.discard()

    def cleared(self, captured: OptimizerCapture) -> None:
        """Discard what tensor hooks measured in backwards whose gradients were cleared."""
        bound_rules = self._contexts.rules_of(captured)
        if bound_rules is not None and bound_rules.local is not None:
            bound_rules.local.cleared()
        if bound_rules is not None and bound_rules.clipper is not None:
            bound_rules.clipper.discard()

    def close(self) -> None:
        """Remove the tensor hooks."""
        for local in [self._before_captures, *(bound_rules.local for bound_rules in self._contexts.bound())]:
            if local is not None:
                local.close()
        for bound_rules in self._contexts.bound():
            for hooks in (bound_rules.clipper, bound_rules.micro):
                if hooks is not None:
                    hooks.close()
        while self._remove_scale_listeners:
            self._remove_scale_listeners.pop()()

    # -- binding -----------------------------------------------------------------------------------------

    def local_norms(
        self, bound: BoundEngine, taps: Sequence[Tensor | None], before: OptimizerRules | None
    ) -> LocalNorms | None:
        """Local norms, where a rule asks for them; the hooks before them hand over what they measured."""
        former = self._before_captures if before is None or before.local is None else before.local
        compared = self._ranks.several and NOISE_SCALE in self._engine.columns
        asked = compared or bool(bound.needs.columns & LOCAL)
        # What clips inside the backward hangs on the same gradients: hooks made anew would come after it.
        cadences = EVERY_STEP if self.in_backward else self._engine.cadences_of(LOCAL | {NOISE_SCALE})
        probing = self._ranks.several and bool(COMPARING_RANKS & self._engine.columns)
        local = LocalNorms(taps, self._activity.failed, former, cadences, probing) if asked else None
        if former is not None and former is not self._before_captures:
            former.close()
        return local

    def act_in_backward(
        self,
        bound_rules: OptimizerRules,
        captured: OptimizerCapture,
        taps: Sequence[Tensor | None],
        before: OptimizerRules | None,
    ) -> None:
        """Put the hooks on the parameters of a capture that clip, and behind them those that drop micro-batches."""
        if self.in_backward:
            self._limit(bound_rules, captured, taps, before)
        if self._drops:
            bound_rules.drop_micro_batches(self._micro(captured, before))

    def _limit(
        self,
        bound_rules: OptimizerRules,
        captured: OptimizerCapture,
        taps: Sequence[Tensor | None],
        before: OptimizerRules | None,
    ) -> None:
        """Hooks that act inside the backward, unless they have switched themselves off."""
        activity, acted = self._activity, None if before is None else before.clipper
        if acted is not None and acted.disabled_reason:
            acted.close()
            acted.discard()
            clipper: BackwardClipper | None = acted  # what it would do is done at the step
        else:
            clipper = clipper_of(
                self._engine.ruleset,
                bound_rules.bound,
                captured,
                taps,
                activity.failed,
                activity.health.report,
                acted,
            )
        bound_rules.clip_in_backward(clipper, own_sites(bound_rules.bound, captured))
        captured.use_hook_norms(None if clipper is None else clipper.reusable_norms)

    def _micro(self, captured: OptimizerCapture, before: OptimizerRules | None) -> MicroDrop | None:
        """The hooks that separate the micro-batches of a capture, kept while they are of this capture."""
        micro, activity = None if before is None else before.micro, self._activity
        if micro is not None and micro.is_of(captured):
            return micro
        if micro is not None:
            micro.close()
        return micro_drop_of(
            self._engine.ruleset, captured, activity.failed, activity.health.report, self.cleared
        )

    def publish_bounds(self, bound_rules: OptimizerRules, step: int) -> None:
        """Set the bounds of the next backward, which is of this step or a later one, as far as hooks can hold them."""
        bound, state = bound_rules.bound, bound_rules.state
        if bound_rules.clipper is not None and bound_rules.own is not None:
            own = bound_rules.own
            bound_rules.clipper.publish(
                tuple(one.at(own) for one in bound.bounds(state, step)), elements=step >= bound.clips_from
            )
        if self._module_bounds is not None and bound_rules.captured.index == 0:
            self._module_bounds.publish(bound.module_bounds(state, step))
