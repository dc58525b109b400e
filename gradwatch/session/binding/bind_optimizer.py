"""Rules bound to an optimizer as its parameters and its ranks become known."""

from __future__ import annotations

from collections.abc import Callable

from gradwatch.capture.columns.module_taps import ModuleTaps
from gradwatch.capture.optimizer_capture import OptimizerCapture
from gradwatch.capture.parameter_shards import local_taps
from gradwatch.capture.read_after_backward import Capture
from gradwatch.distributed.ranks import Ranks
from gradwatch.session.active_or_paused import Activity
from gradwatch.session.binding.optimizer_rules import OptimizerRules
from gradwatch.session.binding.rule_bindings import RuleBindings
from gradwatch.session.checkpoint_health import Checkpoints
from gradwatch.session.logged_once import Notices
from gradwatch.session.optimizer_context import Contexts, OptimizerContext
from gradwatch.taps.pipeline_stages import PipelineStages


class Binder:
    """Brings capture, ranks and rules together for one optimizer, at its first step and whenever it changes.

    `note_inactive` is called after each binding: what rules judge may have changed.
    """

    def __init__(
        self,
        capture: Capture,
        ranks: Ranks,
        contexts: Contexts,
        rule_bindings: RuleBindings,
        checkpoints: Checkpoints,
        taps: ModuleTaps | None,
        stages: PipelineStages,
        activity: Activity,
        notices: Notices,
        note_inactive: Callable[[], None],
    ) -> None:
        self._capture = capture
        self._ranks = ranks
        self._contexts = contexts
        self._rule_bindings = rule_bindings
        self._checkpoints = checkpoints
        self._taps = taps
        self._stages = stages
        self._activity = activity
        self._notices = notices
        self._note_inactive = note_inactive

    def bind(self, captured: OptimizerCapture) -> OptimizerContext:
        """Bind the rules to a capture that was made or whose parameters changed; baselines go on by name."""
        with self._capture.arranging.held:
            return self._bind(captured)

    def _bind(self, captured: OptimizerCapture) -> OptimizerContext:
        if captured.without_optimizer:
            self._notices.without_optimizer(captured.sites.names)
        self.flush()  # what waits was measured on the parameters as they were
        known = self._contexts.find(captured)
        self._note_replaced(captured, None if known is None else known.bound_rules)
        if self._capture.replaced:
            self._capture.drop_dead()
        modules = () if self._taps is None or captured.index else self._taps.names
        ctx = self._rule_bindings.bind(
            captured, modules, local_taps(captured.params, self._capture.slots.models())
        )
        captured.stands()
        self._note_inactive()
        self._checkpoints.meet()
        return ctx

    def flush(self) -> None:
        """Judge what was put off; not in a forked child, nor in a thread that may race the one that trains."""
        if self._activity.serving and self._activity.is_step_thread():
            for ctx in self._contexts:
                ctx.deferral.flush(lambda error: self._activity.failed("boundary", error))

    def enter(self, ctx: OptimizerContext) -> None:
        """Have the ranks meet at an optimizer's first step boundary, and bind the rules to what they know together."""
        membership, met = self._ranks.enter(ctx.captured, ctx.membership)
        if membership is not ctx.membership:
            ctx.meet(membership)
        if membership.alone:
            self._activity.health.mark("ranks", False)
        if met:
            self._stages.install()
            self.bind(ctx.captured)
        elif ctx.captured.succeeds or ctx.rules.captured is not ctx.captured:
            self.go_on(ctx)
        waits = not membership.waits_for_none or ctx.rules.micro is not None
        if waits is ctx.needs_no_ranks:
            ctx.wait_for_ranks(waits)

    def go_on(self, ctx: OptimizerContext) -> None:
        """Go on with another optimizer of the same sites: what is bound to them holds, but what hangs on parameters."""
        with self._capture.arranging.held:
            if not ctx.captured.on_cpu:  # steps under way compare weights with those of the optimizer before
                self.flush()
            if self._capture.replaced:
                self._capture.drop_dead()
            self._note_replaced(ctx.captured, ctx.rules)
            if self._rule_bindings.go_on(ctx):
                ctx.captured.stands()
            else:
                self._bind(ctx.captured)

    def _note_replaced(self, captured: OptimizerCapture, before: OptimizerRules | None) -> None:
        """Keep what is known of weights that another optimizer's have just replaced."""
        if before is None:
            return
        tracker = before.health_tracker
        if not captured.other_weights:
            if tracker.poisoned_at is not None and not _has_state(captured):
                self._checkpoints.begun_without_state(tracker)
            return
        captured.takes_over(False)
        # Steps that wait on the host were as usual: they go on waiting, for those of the optimizer that comes.
        if not tracker.now.healthy:
            self.flush()
            self._checkpoints.replaced(before, _has_state(captured))

    def bind_missing(self) -> None:
        """Bind the rules to every capture that has none yet."""
        for captured in self._capture.captures:
            ctx = self._contexts.find(captured)
            if ctx is None or ctx.bound_rules is None:
                break
        else:
            return
        with self._capture.arranging.held:
            for captured in self._capture.captures:
                ctx = self._contexts.find(captured)
                if ctx is None or ctx.bound_rules is None:
                    self._bind(captured)


def _has_state(captured: OptimizerCapture) -> bool:
    optimizer = None if captured.optimizer is None else captured.optimizer()
    return optimizer is not None and bool(optimizer.state)
